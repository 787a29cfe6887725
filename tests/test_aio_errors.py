"""What goes wrong in the I/O engine is said once, to whoever waits, with path and place; and what goes wrong on demand does."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path

import pytest
from io_rig import BLOCK, DEPTH, NATIVE, PAGE, Memory, make, runs, wait_all

from zinf.aio import open_engine
from zinf.aio.faults import FaultyEngine, Rule, RuleSet, storm
from zinf.aio.probe import explain, probe

pytest_plugins = ["io_rig"]


# ---- what goes wrong


@pytest.mark.parametrize("kind, code", [("r", errno.EIO), ("w", errno.EIO), ("w", errno.ENOSPC)])
def test_an_error_surfaces_once_where_it_happened(engine, tmp_path, kind, code):
    """The third piece of `bad` fails: that op alone fails, its remaining pieces are cancelled, everything else is done, the engine goes on."""
    size = BLOCK * 40
    memory = Memory(size, random.Random(5).randbytes(size))
    for name in ("good", "bad"):
        (tmp_path / name).write_bytes(bytes(size))
    good, bad = engine.open(tmp_path / "good", write=True), engine.open(tmp_path / "bad", write=True)
    weather = engine.rules
    engine.arm([Rule(kind, path="bad", nth=3, error=code), *weather])
    other = Memory(size)
    tickets = engine.submit([(kind, bad, 0, other.address, size), ("w", good, 0, memory.address, size)])
    verb = {"r": "read", "w": "write"}[kind]
    for _ in range(2):  # the ticket remembers
        with pytest.raises(OSError) as caught:
            tickets[0].wait(60)
        assert caught.value.errno == code
        assert caught.value.filename == str(tmp_path / "bad")
        assert caught.value.strerror.startswith(f"{verb} {size} bytes at 0: {os.strerror(code)} (in the {BLOCK} bytes at ")
    assert tickets[0].done()
    tickets[1].wait(60)
    assert engine.fired()[0] == 1
    stats = engine.stats()
    assert stats["errors"] == 1 and stats["in_flight"] == 0
    assert stats["pieces"] < 40 + 40  # cancelled: not all of them were handed out
    engine.arm(weather)
    wait_all(engine.submit([("w", bad, 0, memory.address, size)]))
    for name in ("good", "bad"):
        assert (tmp_path / name).read_bytes() == memory.bytes()


def test_an_error_of_an_op_in_one_piece(engine, tmp_path):
    memory = Memory(PAGE)
    file = engine.open(tmp_path / "f", write=True, create=True)
    engine.arm([Rule("w", nth=1, error=errno.EIO)])
    with pytest.raises(OSError) as caught:
        engine.submit([("w", file, 2 * PAGE, memory.address, PAGE)])[0].wait(60)
    assert caught.value.args == (errno.EIO, f"write 4096 bytes at 8192: {os.strerror(errno.EIO)}")


def test_datasync_fails(engine, tmp_path):
    file = engine.open(tmp_path / "f", write=True, create=True)
    engine.arm([Rule("d", nth=1, error=errno.EIO)])
    with pytest.raises(OSError) as caught:
        engine.datasync(file).wait(60)
    assert (caught.value.errno, caught.value.strerror) == (errno.EIO, f"datasync: {os.strerror(errno.EIO)}")
    engine.datasync(file).wait(60)


def test_end_of_file_is_an_error(engine, tmp_path):
    path = tmp_path / "f"
    path.write_bytes(bytes(3 * PAGE))
    memory = Memory(BLOCK * 3)
    file = engine.open(path, write=False)
    for offset, length, got in ((PAGE, 4 * PAGE, 2 * PAGE), (3 * PAGE, PAGE, 0), (64 * PAGE, PAGE, 0), (0, BLOCK * 3, 3 * PAGE)):
        with pytest.raises(OSError, match=f"read {length} bytes at {offset}: end of file, expected {length} bytes, got {got}") as caught:
            engine.submit([("r", file, offset, memory.address, length)])[0].wait(60)
        assert caught.value.errno == errno.ENODATA


def test_a_ragged_end_of_file_with_direct_io(engine, tmp_path):
    """Not a multiple of the page: the kernel gives the rest once; going on from there must end, in an error."""
    path = tmp_path / "f"
    path.write_bytes(bytes(2 * PAGE + 100))
    memory = Memory(4 * PAGE)
    with pytest.raises(OSError, match="end of file, expected 16384 bytes, got 8292"):
        engine.submit([("r", engine.open(path, write=False), 0, memory.address, 4 * PAGE)])[0].wait(60)


def test_many_retries_are_survived_and_paced(calm, tmp_path):
    calm.arm([Rule("w", probability=1, times=30, error=errno.EAGAIN)])
    memory = Memory(PAGE, b"x" * PAGE)
    file = calm.open(tmp_path / "f", write=True, create=True)
    calm.submit([("w", file, 0, memory.address, PAGE)])[0].wait(60)
    assert Path(file.path).read_bytes() == memory.bytes()
    assert calm.stats()["retries"] == 30


def test_wrong_arguments_are_refused_before_anything_moves(calm, tmp_path):
    memory = Memory(4 * PAGE)
    (tmp_path / "f").write_bytes(bytes(4 * PAGE))
    file = calm.open(tmp_path / "f", write=True)
    readonly = calm.open(tmp_path / "f", write=False)
    good = ("w", file, 0, memory.address, PAGE)
    a = memory.address
    wrong = [
        (("w", file, 1, a, PAGE), "misaligned: offset$"),
        (("w", file, 0, a + 8, PAGE), "misaligned: address$"),
        (("w", file, 0, a, 100), "misaligned: length$"),
        (("w", file, 512, a + 512, 512), "misaligned: offset address length$"),
        (("w", readonly, 0, a, PAGE), "opened for reading"),
        (("x", file, 0, a, PAGE), "starts with"),
        (("w", file, 0, 0, PAGE), "address"),
        (("w", file, 0, a, 0), "length|range"),
        (("w", file, (1 << 63) - PAGE, a, PAGE), "beyond|range"),
    ]
    for op, message in wrong:
        with pytest.raises(ValueError, match=message):
            calm.submit([good, op])
    for op in (("w", "file", 0, a, PAGE), 7):
        with pytest.raises((TypeError, RuntimeError, ValueError)):
            calm.submit([good, op])
    assert calm.stats()["pieces"] == 0
    file.close()
    file.close()
    for use in (lambda: calm.submit([good]), lambda: calm.datasync(file)):
        with pytest.raises(ValueError, match="the file is closed"):
            use()


@pytest.mark.parametrize("wrong", [{"block_size": 1000}, {"block_size": 2 << 30}, {"queue_depth": 0}, {"threads": 0}])
def test_wrong_options(backend, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        open_engine(backend, **wrong)


# ---- faults and probe


def test_a_seed_is_the_same_storm_everywhere(tmp_path):
    """C++ and Python decide alike, piece by piece."""
    rules = [*storm(21, delay=0), Rule("w", nth=5, error=errno.EINTR), Rule("d", probability=0.5, seed=1, times=2, error=errno.EAGAIN)]
    fired = []
    for name in ("uring", "threads", "python"):
        if not runs(name):
            continue
        engine = FaultyEngine(open_engine(name, block_size=PAGE), rules)
        memory = Memory(4 * PAGE)
        file = engine.open(tmp_path / "f", write=True, create=True)
        for kind in "wr" * 20:
            engine.submit([(kind, file, 0, memory.address, PAGE)])[0].wait()
            engine.datasync(file).wait()
        fired.append(engine.fired())
        engine.close()
    assert all(counts == fired[0] for counts in fired) and fired[0][4] == 2


def test_first_rule_that_fires_wins():
    rules = RuleSet([Rule("r", nth=2, error=errno.EIO), Rule("r", path="x", nth=2, short=1), Rule("rw", nth=3, delay_ms=1)])
    fates = [rules.decide("r", "ax") for _ in range(3)]
    assert [(f.error, f.short, f.delay_ms) for f in fates] == [(0, 0, 0), (errno.EIO, 0, 0), (0, 0, 1)]
    assert rules.fired() == [1, 0, 1]


@pytest.mark.parametrize("wrong", [{"kinds": "q", "nth": 1, "error": 5}, {"nth": 1, "probability": 0.5, "error": 5}, {"error": 5}, {"nth": 1}])
def test_rules_are_checked(wrong):
    with pytest.raises(ValueError):
        Rule(**wrong)


def test_probe():
    found = probe()
    json.dumps(found)
    assert found["kernel"] and isinstance(found["io_uring"], bool)
    if found["io_uring"]:
        assert {"READ_FIXED", "WRITE_FIXED", "FSYNC"} <= set(found["opcodes"]) and found["why"] == ""
    else:
        assert found["why"]
    assert "kernel.io_uring_disabled is 2" in explain(errno.EPERM, sysctl=2, seccomp=0)
    assert "seccomp" in explain(errno.EPERM, sysctl=0, seccomp=2)
    assert "memlock" in explain(errno.ENOMEM, sysctl=None, seccomp=None).lower()


@pytest.mark.parametrize("name", NATIVE[:1])
def test_report(name):
    engine = make(name)
    report = engine.report()
    assert report["backend"] == "uring" and report["setup_flags"] and report["block_size"] == BLOCK and report["sq_entries"] >= DEPTH
    engine.close()
