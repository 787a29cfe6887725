"""Seconds, bytes and order of the seven verbs: what a run did, and how long anyone waited for it.

`busy` is the time a verb took wherever it ran; `waited` is the part of it that compute stood still for. Both are summed over
the run and may be read at any time. With `record=True` every verb is also kept as an event, in order, for tests and timelines.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple


class Verb(str, enum.Enum):
    """The seven verbs, and compute, which they serve."""

    IMPORT = "import"  # checkpoint or module -> records
    FETCH = "fetch"  # NVMe -> host (or straight into the slab where compute reads host memory)
    UPLOAD = "upload"  # host -> device slab
    OFFLOAD = "offload"  # gradients: device -> host
    STEP = "step"  # the optimizer on a chunk in host memory
    FLUSH = "flush"  # host -> NVMe
    EVICT = "evict"  # the slab is given to another shard
    COMPUTE = "compute"  # forward or backward of a shard


class Event(NamedTuple):
    """One verb on one shard; times in seconds of time.perf_counter, thread by name."""

    verb: Verb
    shard: int
    detail: str
    start: float
    end: float
    thread: str


class Trace:
    """Sums by verb, and the events themselves when asked for. Safe to use from several threads."""

    def __init__(self, record: bool = False):
        self.events: list[Event] | None = [] if record else None
        self.busy: Counter[Verb] = Counter()
        self.waited: Counter[Verb] = Counter()
        self.counts: Counter[str] = Counter()
        self._active: Counter[Verb] = Counter()
        self._since: dict[Verb, float] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def span(self, verb: Verb, shard: int, detail: str = "") -> Iterator[None]:
        """Time a verb in the thread that does it."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(verb, shard, start, time.perf_counter(), detail)

    def begin(self, verb: Verb) -> None:
        """An asynchronous verb was started. Busy time counts while at least one is under way."""
        with self._lock:
            if not self._active[verb]:
                self._since[verb] = time.perf_counter()
            self._active[verb] += 1

    def end(self, verb: Verb, shard: int, detail: str = "") -> None:
        """One of the asynchronous verbs under way has ended."""
        with self._lock:
            self._active[verb] -= 1
            now = time.perf_counter()
            if not self._active[verb]:
                self.busy[verb] += now - self._since[verb]  # type: ignore[assignment]
            if self.events is not None:
                self.events.append(Event(verb, shard, detail, self._since[verb], now, threading.current_thread().name))

    def add(self, verb: Verb, shard: int, start: float, end: float, detail: str = "") -> None:
        with self._lock:
            self.busy[verb] += end - start  # type: ignore[assignment]
            if self.events is not None:
                self.events.append(Event(verb, shard, detail, start, end, threading.current_thread().name))

    @contextlib.contextmanager
    def wait(self, verb: Verb) -> Iterator[None]:
        """Time that compute stands still for a verb."""
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.waited[verb] += time.perf_counter() - start  # type: ignore[assignment]

    def count(self, what: str, n: int = 1) -> None:
        with self._lock:
            self.counts[what] += n
