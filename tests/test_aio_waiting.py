"""Who waits for the I/O engine, what they may do meanwhile, and who keeps memory alive."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from pathlib import Path

import pytest
from io_rig import BLOCK, PAGE, Memory, Owner, make, wait_all

from zinf.aio.faults import Rule
from zinf.errors import EngineError

pytest_plugins = ["io_rig"]


def test_another_thread_runs_during_wait(calm, tmp_path):
    """A clock that ticks in another thread goes on ticking; with the GIL held it would tick once before and once after."""
    calm.arm([Rule("w", nth=1, delay_ms=1000)])
    memory = Memory(PAGE)
    file = calm.open(tmp_path / "f", write=True, create=True)
    ticks, stop = [], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.01)

    clock = threading.Thread(target=tick)
    clock.start()
    ticket = calm.submit([("w", file, 0, memory.address, PAGE)])[0]
    start = time.monotonic()
    ticket.wait()
    end = time.monotonic()
    stop.set()
    clock.join()
    assert sum(start < at < end for at in ticks) > 10


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
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite run in the background has it ignored
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            ticket.wait()
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert not ticket.done()
    ticket.wait()  # the op itself goes on


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
    if backend == "python":  # its pool starts a thread when it needs one
        assert "zinf-io" in names and names & pool and names <= pool | {"zinf-io"}
    else:
        assert names == {"uring": {"zinf-io"}, "threads": pool}[backend]
