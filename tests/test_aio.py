"""The I/O engine moves exactly the bytes asked for, in any weather, on every backend; and what goes wrong is said once, to whoever waits.

Most tests run over every backend in three weathers: calm, a storm of EAGAIN, EINTR and short transfers that must not be noticed, and delays.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import logging
import mmap
import os
import random
import stat
import threading
import time
import weakref
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from io_rig import BLOCK, DEPTH, NATIVE, PAGE, WEATHER, Memory, Owner, descriptors, io_threads, make, wait_all

from zinf.aio import open_engine

pytest_plugins = ["io_rig"]


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
    # A piece that finds the ring full is decided upon again, so a rule may fire without consequence; never the other way round.
    assert 0 < engine.stats()["retries"] <= again + interrupted
    assert 0 < engine.stats()["short"] <= short


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


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_closed_file_is_let_go_of(calm, tmp_path, how):
    """Also by the ring, whose table of fixed files holds files open by itself: a lock on it would live on."""
    file = calm.open(tmp_path / "f", write=True, create=True)
    fcntl.flock(file.fd, fcntl.LOCK_EX)
    if how == "close":
        file.close()
    del file
    with open(tmp_path / "f") as again:
        deadline = time.monotonic() + (0 if how == "close" else 20)  # a dropped file is forgotten by the reactor when it comes to it
        while True:
            try:
                fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
    assert calm.report().get("fixed_files", 0) == 0


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
def test_backends_without_registration_say_so(name, caplog):
    caplog.set_level(logging.INFO, "zinf")
    engine = make(name)
    for _ in range(2):
        assert engine.register(Memory(PAGE).address, PAGE, None) is False
    engine.unregister(1)
    assert "io_uring" in engine.report()["registered_buffers"]
    assert sum("without registered buffers" in record.getMessage() for record in caplog.records) == 1
    engine.close()
