"""What a run did, and how long anyone waited for it: sums by verb always, a timeline where one is asked for.

    Trace       seconds and bytes of the seven verbs and of waiting, summed over the run; may be read at any time
    Recorder    (recorder.py) keeps each event of them in a file that ui.perfetto.dev opens; there is none unless `trace` is set
    Timeline    (reading.py) that file, read back, however it ended
    bottleneck  (bottleneck.py) busy and idle fractions of a step, and its critical path
    RunLog      (runlog.py) a line for each step of `zinf train`: loss, seconds, bytes, stalls
    page        (page.py) all of that as one HTML file

`busy` is the time a verb took wherever it ran; `waited` is the part of it that compute stood still for.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zinf.trace.recorder import Moving, Recorder


class Verb(str, enum.Enum):
    """The seven verbs."""

    IMPORT = "import"  # checkpoint or module -> records
    FETCH = "fetch"  # NVMe -> host (or straight into the slab where compute reads host memory)
    UPLOAD = "upload"  # host -> device slab
    OFFLOAD = "offload"  # gradients: device -> host
    STEP = "step"  # the optimizer on a chunk in host memory
    FLUSH = "flush"  # host -> NVMe
    EVICT = "evict"  # the slab is given to another shard


class Trace:
    """Sums by verb; what a recorder, if there is one, is told beside that. Safe to use from several threads.

    Of the seven verbs, fetch and flush are recorded where the I/O is done (aio.traced), as the copies are (`copying`); the others here.
    """

    def __init__(self, recorder: Recorder | None = None):
        self.recorder = recorder
        self.busy: Counter[Verb] = Counter()
        self.waited: Counter[Verb] = Counter()
        self.moved: Counter[Verb] = Counter()  # bytes; of fetch and flush the I/O engine knows them
        self.counts: Counter[str] = Counter()
        self._active: Counter[Verb] = Counter()
        self._since: dict[Verb, float] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def span(self, verb: Verb, shard: int, detail: str = "", nbytes: int = 0) -> Iterator[None]:
        """Time a verb in the thread that does it. `shard` is an index, -1 for none: then `detail` says what."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            with self._lock:
                self.busy[verb] += end - start  # type: ignore[assignment]
                self.moved[verb] += nbytes
            if self.recorder is not None:
                self.recorder.span(verb.value, shard, detail, start, end, nbytes)

    def begin(self, verb: Verb) -> None:
        """An asynchronous verb was started. Busy time counts while at least one is under way."""
        with self._lock:
            if not self._active[verb]:
                self._since[verb] = time.perf_counter()
            self._active[verb] += 1

    def end(self, verb: Verb) -> None:
        """One of the asynchronous verbs under way has ended."""
        with self._lock:
            self._active[verb] -= 1
            if not self._active[verb]:
                self.busy[verb] += time.perf_counter() - self._since[verb]  # type: ignore[assignment]

    def copying(self, verb: Verb, shard: int, nbytes: int, event: Moving, detail: str = "") -> None:
        """A copy between host and device was started; `event` is its end."""
        with self._lock:
            self.moved[verb] += nbytes
        if self.recorder is not None:
            self.recorder.moving(verb.value, shard, nbytes, event, detail)

    @contextlib.contextmanager
    def wait(self, verb: Verb, shard: int = -1) -> Iterator[None]:
        """Time that compute stands still for a verb, on a shard if it is one's."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            with self._lock:
                self.waited[verb] += end - start  # type: ignore[assignment]
            if self.recorder is not None:
                self.recorder.waited(verb.value, shard, start, end)

    def computing(self, phase: str, shard: int) -> None:
        """From now on the calling thread computes: a pass through a shard, or (-1) what lies between them."""
        if self.recorder is not None:
            self.recorder.computing(phase, shard)

    def idle(self) -> None:
        """The calling thread does not compute any more."""
        if self.recorder is not None:
            self.recorder.idle()

    def stepped(self, step: int) -> None:
        """That step is fixed."""
        if self.recorder is not None:
            self.recorder.stepped(step)

    def count(self, what: str, n: int = 1) -> None:
        with self._lock:
            self.counts[what] += n
