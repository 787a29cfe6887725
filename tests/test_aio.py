"""The I/O engine moves exactly the bytes asked for, in any weather, on every backend; and what goes wrong is said once, to whoever waits.

Most tests run over every backend in three weathers: calm, a storm of EAGAIN, EINTR and short transfers that must not be noticed, and delays.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import logging
import mmap
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zinf.aio import open_engine
from zinf.aio.faults import FaultyEngine, Rule, RuleSet, storm
from zinf.aio.probe import explain, probe
from zinf.errors import ConfigError, EngineError

PAGE, BLOCK, DEPTH = 4096, 64 << 10, 4
ROOT = Path(__file__).resolve().parent.parent
CXX = os.environ.get("CXX", "g++").split()

WEATHER = {
    "calm": [],
    "storm": storm(7, error=0.15, short=0.4, delay=0),
    "delays": [Rule("rwd", probability=0.2, seed=3, delay_ms=2), Rule("rwd", probability=0.1, seed=4, delay_ms=5)],
}


def runs(backend: str) -> bool:
    try:
        open_engine(backend).close()
    except ConfigError:
        return False
    return True


BACKENDS = [pytest.param(name, marks=() if runs(name) else pytest.mark.skip(f"{name} cannot run here")) for name in ("uring", "threads", "python")]
NATIVE = BACKENDS[:2]


class Memory:
    """Page-aligned bytes with an address."""

    def __init__(self, nbytes: int, fill: bytes | None = None) -> None:
        self.map = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.nbytes = nbytes
        if fill is not None:
            self.map[: len(fill)] = fill

    def bytes(self, begin: int = 0, end: int | None = None) -> bytes:
        return self.map[begin : self.nbytes if end is None else end]


def io_threads() -> list[str]:
    """Names of the engines' threads. One that was joined may show for another moment, so give it one before it counts."""
    deadline = time.monotonic() + 5
    while True:
        names = []
        for task in Path("/proc/self/task").iterdir():
            try:
                names.append((task / "comm").read_text().strip())
            except OSError:  # ended while we looked
                continue
        names = [name for name in names if name.startswith("zinf-io")]
        if not names or time.monotonic() > deadline:
            return names
        time.sleep(0.001)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def make(backend: str, weather: str = "calm", **options: int) -> FaultyEngine:
    options = {"block_size": BLOCK, "queue_depth": DEPTH, "threads": 3, **options}
    return FaultyEngine(open_engine(backend, **options), WEATHER[weather])


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(params=list(WEATHER))
def weather(request):
    return request.param


@pytest.fixture
def engine(backend, weather):
    """A small engine (many pieces, little depth) that must leave nothing behind."""
    gc.collect()
    before = descriptors()
    engine = make(backend, weather)
    yield engine
    engine.close()
    assert io_threads() == []
    gc.collect()
    assert descriptors() == before


@pytest.fixture
def calm(backend):
    engine = make(backend)
    yield engine
    engine.close()
    assert io_threads() == []


def wait_all(tickets) -> None:
    for ticket in tickets:
        ticket.wait(60)


# ---- moving bytes


@pytest.mark.parametrize("direct", ["auto", False])
def test_roundtrip(engine, tmp_path, direct):
    """One op longer than block_size times queue_depth; and many ops into the same file."""
    data = random.Random(1).randbytes(BLOCK * DEPTH * 3 + 5 * PAGE)
    memory = Memory(2 * len(data), data)
    with engine.open(tmp_path / "f", write=True, create=True, direct=direct) as file:
        wait_all(engine.submit([("w", file, 3 * PAGE, memory.address, len(data))], owner=memory))
        engine.datasync(file).wait()
        assert Path(file.path).read_bytes() == bytes(3 * PAGE) + data
        ops = [("r", file, 3 * PAGE + i, memory.address + len(data) + i, min(7 * PAGE, len(data) - i)) for i in range(0, len(data), 7 * PAGE)]
        wait_all(engine.submit(ops, owner=memory))
    assert memory.bytes(len(data)) == data
    stats = engine.stats()
    assert stats["bytes_written"] == stats["bytes_read"] == len(data)
    assert (stats["ops_written"], stats["ops_read"], stats["ops_datasync"], stats["errors"], stats["in_flight"]) == (1, len(ops), 1, 0, 0)
    assert stats["busy_seconds"] > 0


def test_storm_really_blows(backend, tmp_path):
    engine = make(backend, "storm")
    memory = Memory(BLOCK * 40)
    file = engine.open(tmp_path / "f", write=True, create=True)
    wait_all(engine.submit([("w", file, 0, memory.address, memory.nbytes)]))
    engine.close()
    again, interrupted, short = engine.fired()
    assert again and interrupted and short
    assert engine.stats()["retries"] == again + interrupted
    assert engine.stats()["short"] == short


def test_buffered_files_take_any_alignment(engine, tmp_path):
    data = random.Random(2).randbytes(BLOCK * 2 + 77)
    memory = Memory(len(data) + 13, bytes(13) + data)
    file = engine.open(tmp_path / "f", write=True, create=True, direct=False)
    wait_all(engine.submit([("w", file, 1001, memory.address + 13, len(data))]))
    assert Path(file.path).read_bytes() == bytes(1001) + data
    copy = Memory(len(data))
    wait_all(engine.submit([("r", file, 1001, copy.address, len(data))]))
    assert copy.bytes() == data


MODEL_PAGES = 64
transfers = st.lists(st.tuples(st.sampled_from("rw"), st.integers(0, MODEL_PAGES - 1), st.integers(1, 40), st.integers(0, 255)), min_size=1, max_size=12)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(transfers, min_size=1, max_size=3))
def test_random_ops_equal_a_plain_file(engine, tmp_path, batches):
    """Ops of one batch may overlap in time, so within a batch the writes are disjoint in the file and the reads see only untouched pages."""
    model = bytearray(random.Random(0).randbytes(MODEL_PAGES * PAGE))
    path = tmp_path / "model"
    path.write_bytes(model)
    with engine.open(path, write=True) as file:
        for batch in batches:
            touched: set[int] = set()
            ops, checks = [], []
            for kind, first, count, seed in batch:
                pages = range(first, min(first + count, MODEL_PAGES))
                if touched & set(pages):
                    continue
                touched |= set(pages)
                begin, nbytes = first * PAGE, len(pages) * PAGE
                memory = Memory(nbytes, random.Random(seed).randbytes(nbytes) if kind == "w" else None)
                ops.append((kind, file, begin, memory.address, nbytes))
                if kind == "w":
                    model[begin : begin + nbytes] = memory.bytes()
                checks.append((memory, begin))
            wait_all(engine.submit(ops, owner=checks))
            for memory, begin in checks:
                assert memory.bytes() == model[begin : begin + memory.nbytes]
    assert path.read_bytes() == model


def test_more_ops_than_the_ring_holds(engine, tmp_path):
    count = 1500
    data = random.Random(3).randbytes(count * PAGE)
    memory = Memory(len(data), data)
    file = engine.open(tmp_path / "f", write=True, create=True)
    wait_all(engine.submit([("w", file, i * PAGE, memory.address + i * PAGE, PAGE) for i in range(count)]))
    assert Path(file.path).read_bytes() == data
    assert engine.stats()["ops_written"] == count


def test_many_threads_submit_at_once(engine, tmp_path):
    per, size = 12, 3 * PAGE
    memory = Memory(8 * per * size, random.Random(4).randbytes(8 * per * size))
    file = engine.open(tmp_path / "f", write=True, create=True)
    start = threading.Barrier(8)
    errors = []

    def work(k: int) -> None:
        try:
            start.wait()
            for i in range(k * per, (k + 1) * per):
                wait_all(engine.submit([("w", file, i * size, memory.address + i * size, size)]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert Path(file.path).read_bytes() == memory.bytes()


@pytest.mark.parametrize("name", NATIVE)
def test_length_beyond_32_bits(name, tmp_path):
    """One read of more than 4 GiB, into an address range that is the same 32 MiB of memory over and over."""
    small, copies = 32 << 20, 129
    total = small * copies + PAGE
    with open(tmp_path / "big", "wb") as sparse:
        sparse.truncate(total)
        os.pwrite(sparse.fileno(), b"last page".ljust(PAGE, b"."), total - PAGE)
    fd = os.memfd_create("small")
    os.truncate(fd, small)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    span = small * (copies + 1)
    base = libc.mmap(None, span, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, -1, 0)
    for i in range(copies + 1):
        assert libc.mmap(base + i * small, small, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | 0x10, fd, 0) == base + i * small
    engine = open_engine(name)
    try:
        file = engine.open(tmp_path / "big", write=False)
        engine.submit([("r", file, 0, base, total)])[0].wait(120)
        assert engine.stats()["bytes_read"] == total > 1 << 32
        assert os.pread(fd, 9, 0) == b"last page"  # the last page of the range is the first page of the memory
    finally:
        engine.close()
        libc.munmap(ctypes.c_void_p(base), ctypes.c_size_t(span))
        os.close(fd)


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


# ---- who waits, and who owns what


def test_another_thread_runs_during_wait(calm, tmp_path):
    calm.arm([Rule("w", nth=1, delay_ms=400)])
    memory = Memory(PAGE)
    file = calm.open(tmp_path / "f", write=True, create=True)
    ticket = calm.submit([("w", file, 0, memory.address, PAGE)])[0]
    turns, stop = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1

    other = threading.Thread(target=count)
    other.start()
    before = turns
    ticket.wait()
    during = turns - before
    stop.set()
    other.join()
    assert during > 1000


def test_timeout(calm, tmp_path):
    calm.arm([Rule("w", nth=1, delay_ms=1000)])
    memory = Memory(PAGE)
    file = calm.open(tmp_path / "f", write=True, create=True)
    ticket = calm.submit([("w", file, 0, memory.address, PAGE)])[0]
    for timeout in (0, 0.05):
        with pytest.raises(TimeoutError, match=r"write 4096 bytes at 0 of .*f: still in flight"):
            ticket.wait(timeout)
    assert not ticket.done()
    ticket.wait(60)
    ticket.wait(0)
    assert ticket.done()


def test_ctrl_c_interrupts_a_wait(calm, tmp_path):
    calm.arm([Rule("w", nth=1, delay_ms=1500)])
    memory = Memory(PAGE)
    file = calm.open(tmp_path / "f", write=True, create=True)
    ticket = calm.submit([("w", file, 0, memory.address, PAGE)])[0]
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ticket.wait()
    assert not ticket.done()
    ticket.wait()  # the op itself goes on
    timer.join()


class Owner:
    """Memory whose end can be seen."""

    def __init__(self) -> None:
        self.memory = Memory(PAGE, b"y" * PAGE)


def test_owner_lives_until_the_op_is_complete(calm, tmp_path):
    calm.arm([Rule("w", nth=1, delay_ms=1500)])
    file = calm.open(tmp_path / "f", write=True, create=True)
    owner = Owner()
    seen = weakref.ref(owner)
    tickets = calm.submit([("w", file, 0, owner.memory.address, PAGE), ("w", file, PAGE, owner.memory.address, PAGE)], owner=owner)
    del owner
    gc.collect()
    tickets[1].wait()
    assert seen() is not None  # the first is still under way
    tickets[0].wait()
    gc.collect()
    assert seen() is None
    assert Path(file.path).read_bytes() == b"y" * 2 * PAGE


def test_dropped_tickets(calm, tmp_path):
    """Nobody waits: the op completes all the same, and its owner is released without another call."""
    calm.arm([Rule("w", nth=1, delay_ms=700)])
    file = calm.open(tmp_path / "f", write=True, create=True)
    owner = Owner()
    seen = weakref.ref(owner)
    calm.submit([("w", file, 0, owner.memory.address, PAGE)], owner=owner)
    del owner
    gc.collect()
    assert seen() is not None
    deadline = time.monotonic() + 20
    while seen() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert seen() is None
    assert Path(file.path).read_bytes() == b"y" * PAGE


def test_owner_of_a_refused_op_is_released(calm, tmp_path):
    file = calm.open(tmp_path / "f", write=True, create=True)
    owner = Owner()
    seen = weakref.ref(owner)
    with pytest.raises(ValueError):
        calm.submit([("w", file, 0, owner.memory.address, PAGE), ("w", file, 1, owner.memory.address, PAGE)], owner=owner)
    del owner
    calm.stats()
    gc.collect()
    assert seen() is None
    file.close()  # and does not wait for it


@pytest.mark.parametrize("what", ["file", "engine"])
def test_close_waits_for_what_is_in_flight(calm, tmp_path, what):
    calm.arm([Rule("w", probability=1, delay_ms=100)])
    memory = Memory(BLOCK * 6, b"z" * BLOCK * 6)
    file = calm.open(tmp_path / "f", write=True, create=True)
    ticket = calm.submit([("w", file, 0, memory.address, memory.nbytes)])[0]
    (file if what == "file" else calm).close()
    assert ticket.done() and file.closed
    assert Path(file.path).read_bytes() == memory.bytes()
    assert calm.stats()["in_flight"] == 0


def test_after_close(backend, tmp_path):
    engine = make(backend)
    memory = Memory(PAGE)
    file = engine.open(tmp_path / "f", write=True, create=True)
    closers = [threading.Thread(target=engine.close) for _ in range(4)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join()
    engine.close()
    uses = [
        lambda: engine.submit([("w", file, 0, memory.address, PAGE)]),
        lambda: engine.datasync(file),
        lambda: engine.open(tmp_path / "g", write=True, create=True),
    ]
    for use in uses:
        with pytest.raises(EngineError, match="the I/O engine is closed"):
            use()
    assert engine.stats()["ops_written"] == 0
    assert engine.report()["backend"] == backend
    engine.unregister(memory.address)


def test_threads_are_named(backend, tmp_path):
    engine = make(backend)
    memory = Memory(BLOCK * 16)
    file = engine.open(tmp_path / "f", write=True, create=True)
    wait_all(engine.submit([("w", file, 0, memory.address, memory.nbytes)]))
    names = {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    names = {name for name in names if name.startswith("zinf-io")}
    engine.close()
    pool = {"zinf-io-0", "zinf-io-1", "zinf-io-2"}
    assert names == {"uring": {"zinf-io"}, "threads": pool, "python": {"zinf-io"} | pool}[backend]


# ---- files


def test_how_files_are_opened(calm, tmp_path):
    file = calm.open(tmp_path / "new", write=True, create=True)
    assert stat.S_IMODE(os.stat(file.fd).st_mode) == 0o600
    assert not os.get_inheritable(file.fd)
    assert file.path == str(tmp_path / "new") and file.writable and not file.closed
    os.symlink(tmp_path / "new", tmp_path / "link")
    with pytest.raises(OSError) as caught:
        calm.open(tmp_path / "link", write=True)
    assert caught.value.errno == errno.ELOOP
    with pytest.raises(FileNotFoundError) as missing:
        calm.open(tmp_path / "missing", write=False)
    assert missing.value.filename == str(tmp_path / "missing")
    with pytest.raises(ValueError, match="direct"):
        calm.open(tmp_path / "new", write=True, direct="sometimes")


@pytest.mark.skipif(not os.path.isdir("/dev/shm") or not os.access("/dev/shm", os.W_OK), reason="no /dev/shm")
def test_tmpfs_is_buffered_and_said_once(calm, caplog):
    caplog.set_level(logging.INFO, "zinf")
    paths = [f"/dev/shm/zinf-test-{os.getpid()}-{i}" for i in range(2)]
    memory = Memory(2 * PAGE, b"t" * 2 * PAGE)
    try:
        for path in paths:
            with calm.open(path, write=True, create=True) as file:
                assert not file.direct and "memory" in file.note
                wait_all(calm.submit([("w", file, 0, memory.address + 1, PAGE)]))
            assert Path(path).read_bytes() == b"t" * PAGE
        assert [record.getMessage() for record in caplog.records] == ["buffered I/O in /dev/shm: the filesystem is in memory"]
        with pytest.raises(OSError, match="O_DIRECT"):
            calm.open(paths[0], write=True, direct=True)
    finally:
        for path in paths:
            os.unlink(path)


def test_a_thousand_files_leave_nothing(calm, tmp_path):
    memory = Memory(PAGE)
    calm.open(tmp_path / "f", write=True, create=True).close()
    before = descriptors()
    for i in range(1000):
        file = calm.open(tmp_path / "f", write=True)
        if i % 10 == 0:
            calm.submit([("w", file, 0, memory.address, PAGE)])[0].wait()
        if i % 2:
            file.close()
        del file
    gc.collect()
    assert descriptors() == before


@pytest.mark.parametrize("name, cycles", [pytest.param("uring", 1000, marks=NATIVE[0].marks), ("threads", 1000), ("python", 100)])
def test_a_thousand_engines_leave_nothing(name, cycles, tmp_path):
    memory = Memory(PAGE)
    (tmp_path / "f").write_bytes(bytes(PAGE))
    open_engine(name).close()
    before = descriptors()
    for i in range(cycles):
        engine = open_engine(name, threads=2)
        if i % 20 == 0:
            engine.submit([("r", engine.open(tmp_path / "f", write=False), 0, memory.address, PAGE)])[0].wait()
        if i % 2 or name == "python":
            engine.close()
        del engine
    gc.collect()
    assert io_threads() == []
    assert descriptors() == before


# ---- registered buffers


@pytest.mark.parametrize("weather", list(WEATHER))
@pytest.mark.parametrize("name", NATIVE[:1])
def test_registered_buffers(name, weather, tmp_path):
    """Many ranges, registered and forgotten while I/O is in flight; inside them every piece uses the fixed buffer."""
    engine = make(name, weather)
    size = BLOCK * 3
    ranges = [Memory(size, random.Random(i).randbytes(size)) for i in range(50)]
    file = engine.open(tmp_path / "f", write=True, create=True)
    tickets = []
    for i, memory in enumerate(ranges):
        owner = Owner()
        seen = weakref.ref(owner)
        assert engine.register(memory.address, size, owner)
        del owner
        assert seen() is not None
        tickets += engine.submit([("w", file, i * size, memory.address, size)])
    with pytest.raises(ValueError, match="overlaps"):
        engine.register(ranges[0].address + PAGE, PAGE, None)
    wait_all(tickets)
    stats = engine.stats()
    assert stats["registered_bytes"] == 50 * size
    assert stats["pieces"] == 50 * 3
    assert stats["pieces_fixed"] == 50 * 3 + stats["short"] or weather == "storm"
    assert stats["pieces_fixed"] >= 50 * 3
    for memory in ranges[:49]:
        engine.unregister(memory.address)
    engine.unregister(ranges[0].address)  # a no-op
    assert engine.stats()["registered_bytes"] == size
    assert engine.register(ranges[0].address, size, None)
    assert Path(file.path).read_bytes() == b"".join(memory.bytes() for memory in ranges)
    assert engine.report()["registered_buffers"] == engine.report()["registered_files"] == "in use"
    engine.close()
    assert engine.stats()["errors"] == 0


@pytest.mark.parametrize("name", NATIVE[:1])
def test_an_op_across_the_end_of_a_registered_range(name, tmp_path):
    engine = make(name)
    memory = Memory(BLOCK * 4, random.Random(9).randbytes(BLOCK * 4))
    assert engine.register(memory.address + PAGE, BLOCK, None)
    file = engine.open(tmp_path / "f", write=True, create=True)
    wait_all(engine.submit([("w", file, 0, memory.address, memory.nbytes)]))
    assert Path(file.path).read_bytes() == memory.bytes()
    assert engine.stats()["pieces_fixed"] == 1
    engine.close()


@pytest.mark.parametrize("name", ["threads", "python"])
def test_backends_without_registration_say_so(name):
    engine = make(name)
    assert engine.register(Memory(PAGE).address, PAGE, None) is False
    engine.unregister(1)
    assert "io_uring" in engine.report()["registered_buffers"]
    engine.close()


# ---- processes


def script(body: str, *, timeout: float = 60, **env: str) -> str:
    """Runs Python in a process of its own; its output. A hang or a non-zero exit fails the test."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(body)], cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=env)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("name", NATIVE[:1])
def test_memlock_too_small(name):
    """Goes on without registered buffers: one log line, and the report says why."""
    out = script("""
        import ctypes, logging, mmap, os, resource, sys
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        import zinf.aio.native
        from zinf.aio import open_engine
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        if os.getuid() == 0:
            os.setresuid(65534, 65534, 65534)  # root is exempt
        engine = open_engine("uring")
        memory = mmap.mmap(-1, 1 << 20)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        print(engine.register(address, 1 << 20, memory), engine.register(address, 1 << 20, memory))
        print(engine.report()["registered_buffers"])
        engine.close()
    """)
    log, results, report = out.strip().splitlines()
    assert "without registered buffers" in log and "RLIMIT_MEMLOCK" in log
    assert results == "False False"
    assert "RLIMIT_MEMLOCK" in report


SECCOMP = """
    import ctypes, struct
    def forbid_io_uring(code):
        # BPF: load the number of the system call; 425 (io_uring_setup) -> errno, everything else is allowed
        program = struct.pack("HBBI" * 4, 0x20, 0, 0, 0, 0x15, 0, 1, 425, 0x06, 0, 0, 0x50000 | code, 0x06, 0, 0, 0x7FFF0000)
        memory = ctypes.create_string_buffer(program)
        header = struct.pack("HxxxxxxP", 4, ctypes.addressof(memory))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
        assert libc.prctl(22, 2, header, 0, 0) == 0, ctypes.get_errno()
"""


@pytest.mark.parametrize("name", NATIVE[:1])
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_io_uring_forbidden(name, code):
    """auto takes the threads and says why in one line; asking for uring is an error that names seccomp."""
    out = script(
        textwrap.dedent(SECCOMP)
        + textwrap.dedent(f"""
        import logging, sys
        logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
        from zinf.aio import open_engine
        from zinf.aio.probe import probe
        from zinf.errors import ConfigError
        forbid_io_uring({code})
        engine = open_engine("auto")
        print(engine.name)
        engine.close()
        try:
            open_engine("uring")
        except ConfigError as error:
            print(error)
        print(probe()["io_uring"])
        """)
    )
    log, name, error, works = out.strip().splitlines()
    assert log.startswith("I/O backend threads (uring: ") and "seccomp" in log
    assert name == "threads"
    assert error.startswith("I/O backend 'uring' cannot run here: ") and "seccomp" in error
    assert works == "False"


def test_without_the_compiled_module():
    out = script("""
        import sys
        sys.modules["zinf._aio"] = None
        from zinf.aio import open_engine
        from zinf.aio.probe import probe
        from zinf.errors import ConfigError
        engine = open_engine("auto")
        print(engine.name)
        engine.close()
        try:
            open_engine("threads")
        except ConfigError as error:
            print(error)
        print(probe()["built"])
    """)
    name, error, built = out.strip().splitlines()
    assert name == "python"
    assert "compiled module is not there" in error
    assert built.startswith("no")


def test_unknown_backend():
    with pytest.raises(ConfigError, match="uring, threads, python"):
        open_engine("aio")


def test_environment_chooses_what_auto_means(monkeypatch):
    monkeypatch.setenv("ZINF_IO_BACKEND", "faults:threads")
    monkeypatch.setenv("ZINF_FAULTS_SEED", "11")
    engine = open_engine()
    assert engine.name == "faults:threads" and engine.rules == storm(11)
    engine.close()


USE = """
    import ctypes, mmap, os, sys
    from zinf.aio import open_engine
    from zinf.aio.faults import FaultyEngine, Rule
    from zinf.errors import EngineError
    engine = FaultyEngine(open_engine({backend!r}), [Rule("w", probability=1, delay_ms=300)])
    file = engine.open({path!r}, write=True, create=True)
    memory = mmap.mmap(-1, 4096)
    memory[:] = b"e" * 4096
    op = ("w", file, 0, ctypes.addressof(ctypes.c_char.from_buffer(memory)), 4096)
    tickets = engine.submit([op], owner=memory)
"""


def test_interpreter_exit_without_close(backend, tmp_path):
    """Neither hangs nor loses what is in flight."""
    script(textwrap.dedent(USE.format(backend=backend, path=str(tmp_path / "f"))))
    if backend != "python":  # concurrent.futures closes its pools before anyone is asked
        assert (tmp_path / "f").read_bytes() == b"e" * PAGE


def test_a_forked_child_does_not_hang(backend, tmp_path):
    out = script(
        textwrap.dedent(USE.format(backend=backend, path=str(tmp_path / "f")))
        + textwrap.dedent("""
        child = os.fork()
        if child == 0:
            try:
                engine.submit([op])
            except EngineError as error:
                print(error, flush=True)
            engine.close()
            sys.exit(0)  # atexit, destructors and all
        tickets[0].wait()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        engine.submit([op])[0].wait()
        engine.close()
        """)
    )
    assert "belongs to the process that made it" in out


# ---- the native part by itself


@pytest.mark.skipif(shutil.which(CXX[0]) is None, reason="no compiler")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_native_driver(sanitizer, tmp_path):
    """csrc/tests/aio_test.cpp: what Python cannot reach, under the sanitizers. One translation unit, so that it builds in seconds."""
    sources = [f"aio/{path.name}" for path in sorted((ROOT / "csrc/aio").glob("*.cpp")) if path.name != "bindings.cpp"]
    (tmp_path / "all.cpp").write_text("".join(f'#include "{source}"\n' for source in [*sources, "tests/aio_test.cpp"]))
    header = subprocess.run([*CXX, "-E", "-xc++", "-"], input=b"#include <liburing.h>", capture_output=True)
    uring = ["-DZINF_HAVE_LIBURING=1", "-luring", "-ldl"] if header.returncode == 0 else []
    flags = ["-std=c++20", "-O0", "-g1", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizer}", "-pthread", "-I", str(ROOT / "csrc")]
    build = subprocess.run([*CXX, *flags, "-o", tmp_path / "driver", tmp_path / "all.cpp", *uring], capture_output=True, text=True)
    if "cannot find" in build.stderr:
        pytest.skip(f"no {sanitizer} sanitizer here")
    assert build.returncode == 0, build.stderr
    run = subprocess.run([tmp_path / "driver"], env={**os.environ, "ZINF_TEST_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=200)
    assert (run.returncode, run.stderr) == (0, "") and run.stdout == "ok\n", run.stderr


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
