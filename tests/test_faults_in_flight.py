"""A fault in each phase of a step: the right exception with path, offset and shard, nothing hangs, nothing stays, and the last commit opens with its bits.

tests/test_recovery.py is about going on in the same process after each of them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from crash.rig import MODES, begin, end, one_step, same_end, threads, train
from fake_io import FakeIo

from zinf import memory
from zinf.aio.faults import Rule
from zinf.errors import CommitError, IntegrityError, StoreError
from zinf.tiers import manifest
from zinf.tiers.nvme import Store

STEPS = 4


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch):
    monkeypatch.setenv("ZINF_IO_BACKEND", "faults:threads")
    before = threads(), len(os.listdir("/proc/self/fd"))
    yield
    assert (threads(), len(os.listdir("/proc/self/fd"))) == before


def quiet(folder, **options):
    engine = begin(folder, **options)
    engine.memory.io.disarm()
    return engine


@functools.cache
def straight(mode: str, steps: int = STEPS):
    """(checksums of every chunk at each step, the end) of a run without faults."""
    sums = {}
    with tempfile.TemporaryDirectory() as folder:
        for step in range(steps + 1):
            with quiet(folder, resume=step > 0, **MODES[mode]) as engine:
                engine.restore_rng()
                train(engine, step)
                last = end(engine)
            sums[step] = opened(folder)[1]
    return sums, last


def opened(folder):
    """(step, checksums) of the store, every byte of which was compared with them."""
    with Store.open([os.path.join(folder, "run")], FakeIo(), writable=False) as store:
        return store.step, store._committed.sums


# phase -> (armed before which part of a step, what fails, what the error says of the place)
PHASES = {
    "fetch in forward": ("forward", Rule("r", "weights", nth=1, error=1), "weights of shard 'blocks"),
    "fetch of a frozen shard": ("forward", Rule("r", "frozen", nth=1, error=1), "weights of shard 'blocks.0'"),
    "fetch in backward": ("backward", Rule("r", "weights", nth=1, error=1), "weights of shard 'blocks"),
    "state read": ("backward", Rule("r", "state", nth=2, error=1), "state of shard 'blocks"),
    "flush": ("backward", Rule("w", "weights", nth=2, error=1), "weights of shard 'blocks"),
    "flush of state": ("backward", Rule("w", "state", nth=3, error=1), "state of shard 'blocks"),
    "datasync": ("forward", Rule("d", nth=1, error=1), "datasync"),
    "manifest": ("forward", None, "is made and not committed"),
}
KINDS = {"r": (errno.EIO, errno.ENODEV), "w": (errno.EIO, errno.ENOSPC, errno.EDQUOT), "d": (errno.EIO, errno.EROFS), "m": (errno.EIO, errno.EROFS)}
TABLE = [(phase, KINDS[rule.kinds if rule else "m"][0], mode, "cpu") for phase, (_, rule, _) in PHASES.items() for mode in MODES]
TABLE += [(phase, code, "deferred", "cpu") for phase, (_, rule, _) in PHASES.items() for code in KINDS[rule.kinds if rule else "m"][1:]]
TABLE += [(phase, errno.EIO, mode, "sim") for phase in ("fetch in backward", "flush of state") for mode in MODES]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("phase", "code", "mode", "device"), TABLE)
def test_a_fault_ends_the_run_and_nothing_else(tmp_path, phase, code, mode, device, monkeypatch):
    before, rule, place = PHASES[phase]
    sums, last = straight(mode)
    engine = quiet(tmp_path, **MODES[mode], device=device)
    train(engine, 2)
    engine.synchronize()

    def fault(part: str) -> None:
        if part != before:
            return
        if rule is not None:
            engine.memory.io.arm([Rule(rule.kinds, rule.path, nth=rule.nth, error=code)])
        else:
            monkeypatch.setattr(manifest, "write_file", lambda path, data: (_ for _ in ()).throw(OSError(code, os.strerror(code), path)))

    with pytest.raises(OSError) as raised:
        for _ in range(3):  # a fault in the step of one forward may be told in the next
            one_step(engine, between=fault)
        engine.synchronize()
    e = raised.value
    assert e.errno == code and place in str(e) and str(tmp_path / "run") in str(e.filename)
    assert "shard" not in place or re.search(r" \d+ bytes at \d+", str(e))
    assert isinstance(e, CommitError) == (phase == "manifest")
    started = time.monotonic()
    with contextlib.suppress(CommitError):  # it tries to commit once more, and stays open if that fails too
        engine.close()
    engine.close(commit=False)
    assert time.monotonic() - started < 10
    monkeypatch.undo()
    monkeypatch.setenv("ZINF_IO_BACKEND", "faults:threads")
    step, found = opened(tmp_path)
    assert step >= 2 and found == sums[step]
    with quiet(tmp_path, resume=True, **MODES[mode], device=device) as engine:
        engine.restore_rng()
        train(engine, STEPS)
        same_end(end(engine), last)


@pytest.mark.parametrize("mode", MODES)
def test_a_timer_every_millisecond_changes_nothing(tmp_path, mode):
    """EINTR in every system call that can be interrupted, in every thread that the signal may hit."""
    count = [0]

    def tick(number, frame):
        count[0] += 1

    previous = signal.signal(signal.SIGALRM, tick)
    try:
        with quiet(tmp_path, **MODES[mode]) as engine:
            signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
            train(engine, STEPS)
            found = end(engine)
            engine.save_pretrained(tmp_path / "out")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert count[0] > 10
    same_end(found, straight(mode)[1])


@pytest.mark.parametrize("mode", MODES)
def test_a_path_that_goes_away_and_comes_back(tmp_path, mode):
    engine = quiet(tmp_path, **MODES[mode])
    train(engine, 2)
    engine.synchronize()
    os.rename(tmp_path / "run", tmp_path / "away")
    with pytest.raises(CommitError) as raised:
        for _ in range(3):
            one_step(engine)
    assert raised.value.errno == errno.ENOENT
    with pytest.raises(CommitError):
        engine.recover()
    os.rename(tmp_path / "away", tmp_path / "run")
    engine.recover()
    train(engine, STEPS)
    engine.synchronize()  # what may stand beyond STEPS in deferred mode is the same run
    if engine.global_step == STEPS:
        same_end(end(engine), straight(mode)[1])
    engine.close()


@pytest.fixture
def small(tmp_path):
    """A filesystem of 4 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "zinf-test", str(mount)], capture_output=True).returncode:
        pytest.skip("mounting a small filesystem is not allowed here")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def fill(path: Path) -> None:
    with open(path, "ab", buffering=0) as f, pytest.raises(OSError, match="No space left"):
        while True:
            f.write(bytes(4096))


@pytest.mark.parametrize("mode", MODES)
def test_a_disk_that_others_fill(small, tmp_path, mode, monkeypatch):
    monkeypatch.setattr("zinf.tiers.directory._SLACK", 1 << 20)  # room that creation asks for beyond the data
    engine = quiet(small, **MODES[mode])
    filler = small / "filler"
    fill(filler)
    train(engine, 2)  # chunks have their blocks, manifests their reserve
    engine.synchronize()
    assert engine.memory.parts.records.store.step == 2
    fill(filler)  # the reserve was made anew, smaller
    with pytest.raises(OSError, match=r"No space left|are free") as raised:
        engine.save_pretrained(small / "out")
    assert raised.value.errno == errno.ENOSPC
    assert manifest.release_reserve(str(small / "run"))
    fill(filler)  # the others are faster
    with pytest.raises(CommitError) as raised:
        for _ in range(2):
            one_step(engine)
        engine.synchronize()
    assert raised.value.errno == errno.ENOSPC
    filler.unlink()
    engine.recover()
    train(engine, STEPS)
    same_end(end(engine), straight(mode)[1])
    engine.save_pretrained(small / "out")
    engine.close()


def flip(path: Path, at: int) -> None:
    """One bit, on the disk, past the cache of whoever reads with O_DIRECT."""
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes([byte[0] ^ 4]))
        f.flush()
        os.fsync(f.fileno())


def committed_byte(store: Store, name: str) -> tuple[int, str]:
    """(a place in the file `name` that the last commit holds, the shard it belongs to)."""
    entry = next(e for e in store._entries.values() if e.file.path.endswith("/" + name) and store._committed.versions[e.index] < 2)
    return entry.offsets[store._committed.versions[entry.index]] + 100, store.model.shards[entry.key[1]].name


@pytest.mark.parametrize("name", ["weights", "state", "frozen"])
def test_a_bit_flipped_on_disk_is_found_when_a_run_is_resumed(tmp_path, name):
    with quiet(tmp_path, **MODES["deferred"]) as engine:
        train(engine, 2)
    with quiet(tmp_path, resume=True, **MODES["deferred"]) as engine:  # close commits anew, but writes nothing
        at, shard = committed_byte(engine.memory.parts.records.store, name)
    flip(tmp_path / "run" / name, at)
    with pytest.raises(IntegrityError) as raised:
        begin(tmp_path, resume=True, **MODES["deferred"])
    for part in (str(tmp_path / "run" / name), f"at offset {at - 100} ", repr(shard), "parameters"):
        assert part in str(raised.value)
    begin(tmp_path, resume=True, verify="off", **MODES["deferred"])._release()  # asked not to look, it does not


@pytest.mark.parametrize("name", ["weights", "state", "frozen"])
def test_a_bit_flipped_under_a_run_is_found_by_verify_always(tmp_path, name):
    engine = quiet(tmp_path, verify="always", **MODES["deferred"])
    train(engine, 2)
    engine.synchronize()
    store = engine.memory.parts.records.store
    at, shard = committed_byte(store, name)
    flip(tmp_path / "run" / name, at)
    with pytest.raises(IntegrityError, match=f"{name}.*{re.escape(shard)}.*parameters"):
        for _ in range(3):
            one_step(engine)
    engine.close()


@pytest.mark.parametrize("name", ["manifest.json", "member.json"])
def test_a_bit_flipped_in_what_describes_the_store(tmp_path, name):
    with quiet(tmp_path, **MODES["deferred"]) as engine:
        train(engine, 1)
    size = os.path.getsize(tmp_path / "run" / name)
    for at in range(2, size, max(size // 7, 1)):
        flip(tmp_path / "run" / name, at)
        with pytest.raises(StoreError):
            begin(tmp_path, resume=True, **MODES["deferred"])
        flip(tmp_path / "run" / name, at)
    begin(tmp_path, resume=True, **MODES["deferred"]).close()


def test_a_fault_in_a_save_leaves_no_file_and_a_whole_engine(tmp_path):
    engine = quiet(tmp_path, **MODES["deferred"])
    train(engine, 2)
    engine.synchronize()
    engine.memory.io.arm([Rule("r", "weights", nth=3, error=errno.EIO)])
    with pytest.raises(OSError, match="weights of shard 'blocks"):
        engine.save_pretrained(tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []
    engine.memory.io.disarm()
    engine.save_pretrained(tmp_path / "out")
    train(engine, STEPS)
    same_end(end(engine), straight("deferred")[1])
    engine.close()


@pytest.mark.parametrize(("kind", "path", "code"), [("w", "weights", errno.ENOSPC), ("w", "frozen", errno.EIO), ("d", "", errno.EIO)])
def test_a_fault_in_an_import_leaves_nothing_in_the_way(tmp_path, kind, path, code, monkeypatch):
    real = memory.open_engine

    def armed(*args, **options):
        engine = real(*args, **options)
        engine.arm([Rule(kind, path, nth=1, error=code)])
        return engine

    monkeypatch.setattr(memory, "open_engine", armed)
    with pytest.raises(OSError) as raised:
        begin(tmp_path, **MODES["deferred"])
    assert raised.value.errno == code and str(tmp_path / "run") in str(raised.value.filename)
    with pytest.raises(StoreError, match=r"never committed|no store"):
        opened(tmp_path)
    monkeypatch.setattr(memory, "open_engine", real)
    with quiet(tmp_path, **MODES["deferred"]) as engine:
        train(engine, STEPS)
        same_end(end(engine), straight("deferred")[1])
