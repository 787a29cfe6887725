"""Any sequence of batches, faults, waits, abandoned tickets and closes: the I/O engine against bytes in memory, on every backend.

HYPOTHESIS_PROFILE=long runs many more sequences.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import tempfile
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from io_rig import BACKENDS, BLOCK, DEPTH, PAGE, Memory, descriptors, io_threads

from zinf.aio import open_engine
from zinf.aio.faults import FaultyEngine, Rule, storm
from zinf.errors import EngineError

PAGES = 48  # of a file
FILES = 2


class Flight:
    """One op on its way, and what the model says of it: the bytes a read must give, page by page; None where nothing is known."""

    def __init__(self, kind: str, file: int, pages: range, memory: Memory, expected: list[bytes | None]) -> None:
        self.kind, self.file, self.pages, self.memory, self.expected = kind, file, pages, memory, expected
        self.ticket: Any = None


class Machine(RuleBasedStateMachine):
    """Ops in flight at the same time never touch the same page with a write among them, as an engine's user has to see to it.

    A page is known (its bytes) or unknown (None: a write of it failed). A fault is an error that the kernel gave for one piece; storms of EINTR, EAGAIN,
    short transfers and delays must not be noticed at all.
    """

    backend: str

    @initialize(seed=st.integers(0, 1 << 20), direct=st.sampled_from(["auto", False]), fixed=st.booleans())
    def start(self, seed: int, direct: bool | str, fixed: bool) -> None:
        gc.collect()
        self.descriptors = descriptors()
        self.folder = tempfile.TemporaryDirectory()
        self.direct, self.fixed, self.seed = direct, fixed, seed
        self.pages: list[list[bytes | None]] = [[bytes(PAGE)] * PAGES for _ in range(FILES)]
        for i in range(FILES):
            with open(self.path(i), "wb") as f:
                f.truncate(PAGES * PAGE)
        self.flights: list[Flight] = []
        self.open()

    def path(self, i: int) -> str:
        return os.path.join(self.folder.name, f"file{i}")

    def open(self) -> None:
        self.engine = FaultyEngine(open_engine(self.backend, block_size=BLOCK, queue_depth=DEPTH, threads=3), [])
        self.faulty = False
        self.files: list[Any] = [None] * FILES
        for i in range(FILES):
            self.open_file(i)

    def open_file(self, i: int) -> None:
        self.files[i] = self.engine.open(self.path(i), write=True, direct=self.direct)

    # ---- ops

    def clash(self, kind: str, file: int, pages: range) -> bool:
        return any(f.file == file and "w" in f.kind + kind and set(f.pages) & set(pages) for f in self.flights)

    @rule(batch=st.lists(st.tuples(st.sampled_from("rw"), st.integers(0, FILES - 1), st.integers(0, PAGES - 1), st.integers(1, 40)), min_size=1, max_size=8))
    def submit(self, batch: list[tuple[str, int, int, int]]) -> None:
        ops, new = [], []
        for kind, file, first, count in batch:
            pages = range(first, min(first + count, PAGES))
            if self.clash(kind, file, pages):
                continue
            self.seed += 1
            nbytes = len(pages) * PAGE
            memory = Memory(nbytes, random.Random(self.seed).randbytes(nbytes) if kind == "w" else b"\x55" * nbytes)
            if self.fixed and self.seed % 2:
                self.engine.register(memory.address, nbytes, memory)
            flight = Flight(kind, file, pages, memory, [self.pages[file][p] for p in pages])
            self.flights.append(flight)
            new.append(flight)
            ops.append((kind, self.files[file], first * PAGE, memory.address, nbytes))
        if ops:
            for flight, ticket in zip(new, self.engine.submit(ops, owner=[f.memory for f in new]), strict=True):
                flight.ticket = ticket

    def settle(self, flight: Flight) -> None:
        """Wait for one op, and let the model know."""
        error = None
        try:
            flight.ticket.wait(60)
        except OSError as e:
            error = e
        assert flight.ticket.done()
        self.flights.remove(flight)
        if error is not None:
            assert self.faulty and error.errno in (errno.EIO, errno.ENOSPC), error
            assert error.filename == self.path(flight.file) and f"at {flight.pages[0] * PAGE}" in str(error)
            if flight.kind == "w":
                for p in flight.pages:
                    self.pages[flight.file][p] = None
            with pytest.raises(OSError):  # the same answer again
                flight.ticket.wait()
        for k, p in enumerate(flight.pages if error is None else ()):
            found = flight.memory.bytes(k * PAGE, (k + 1) * PAGE)
            if flight.kind == "w":
                self.pages[flight.file][p] = found
            elif flight.expected[k] is not None:
                assert found == flight.expected[k], f"page {p} of file {flight.file}"
        self.engine.unregister(flight.memory.address)

    @precondition(lambda self: getattr(self, "flights", None))
    @rule(which=st.integers(0, 1 << 20))
    def wait(self, which: int) -> None:
        self.settle(self.flights[which % len(self.flights)])

    @precondition(lambda self: getattr(self, "flights", None))
    @rule(which=st.integers(0, 1 << 20))
    def hardly_wait(self, which: int) -> None:
        flight = self.flights[which % len(self.flights)]
        with contextlib.suppress(OSError):  # a TimeoutError is one too
            flight.ticket.wait(0.0)

    @precondition(lambda self: getattr(self, "flights", None))
    @rule()
    def abandon(self) -> None:
        """Nobody holds the tickets any more. The ops go on, and the memory lives until they are over; closing the file waits for them."""
        lost, self.flights = self.flights, []
        memories = []
        for flight in lost:
            memories.append(flight.memory.address)
            for k, p in enumerate(flight.pages if flight.kind == "w" else ()):
                self.pages[flight.file][p] = None if self.faulty else flight.memory.bytes(k * PAGE, (k + 1) * PAGE)
        del lost, flight
        gc.collect()
        for i in range(FILES):
            self.files[i].close()
            assert self.files[i].closed
            self.open_file(i)
        for address in memories:
            self.engine.unregister(address)

    # ---- weather, and the ends of things

    @rule(nth=st.integers(1, 6), code=st.sampled_from([errno.EIO, errno.ENOSPC]), kinds=st.sampled_from(["r", "w", "rw"]))
    def fault(self, nth: int, code: int, kinds: str) -> None:
        self.faulty = True
        self.engine.arm([Rule(kinds, nth=nth, error=code)])

    @rule(seed=st.integers(0, 1000))
    def storm(self, seed: int) -> None:
        """Errors that were armed may still come, of what is in flight."""
        self.engine.arm([*storm(seed, error=0.1, short=0.3, delay=0), Rule("rw", probability=0.1, seed=seed, delay_ms=1)])
        self.faulty = self.faulty and bool(self.flights)

    @rule()
    def datasync(self) -> None:
        for file in self.files:
            self.engine.datasync(file).wait(60)

    @rule(i=st.integers(0, FILES - 1))
    def close_file(self, i: int) -> None:
        """Waits for its ops; their tickets can be asked later."""
        self.files[i].close()
        assert all(f.ticket.done() for f in self.flights if f.file == i)
        self.open_file(i)

    @rule()
    def close_engine(self) -> None:
        self.engine.close()
        assert all(f.ticket.done() for f in self.flights)
        with pytest.raises(EngineError):
            self.engine.submit([("r", self.files[0], 0, 0, PAGE)])
        old = self.engine
        while self.flights:
            self.settle(self.flights[0])
        assert old.stats()["in_flight"] == 0
        self.open()

    @invariant()
    def no_more_is_in_flight_than_was_asked_for(self) -> None:
        if hasattr(self, "engine"):
            assert self.engine.stats()["in_flight"] <= len(self.flights)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.disarm()
        while self.flights:
            self.settle(self.flights[0])
        self.engine.close()
        for i, pages in enumerate(self.pages):
            with open(self.path(i), "rb") as f:
                data = f.read()
            assert len(data) == PAGES * PAGE
            for p, known in enumerate(pages):
                assert known is None or data[p * PAGE : (p + 1) * PAGE] == known, f"page {p} of file {i}"
        self.folder.cleanup()
        del self.engine, self.files
        assert io_threads() == []
        gc.collect()
        assert descriptors() == self.descriptors


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_sequence(backend: str) -> None:
    machine = type(f"On{backend.title()}", (Machine,), {"backend": backend}).TestCase
    machine.settings = settings(max_examples=settings().max_examples // 10, stateful_step_count=20, suppress_health_check=list(HealthCheck))
    machine().runTest()
