"""One thread that moves chunks: reads ahead, works on what has landed, writes behind.

A Job is a list of Items, one for each chunk it touches. An item goes through

    start    take a slot and submit its reads   (False: no slot is free now, ask again when one is)
    landed   wait for its reads
    work     whatever must happen on the host: a step of the optimizer, the copy to the device, a sum of squares
    finish   wait for its writes, give the slot back

Items start strictly in order, as many ahead as there are slots; they work in order; they finish behind. So at any moment the
drive reads item k+1, a core works on item k, the drive writes item k-1. The job is `ready` when all its items have worked,
and `over` when all have finished.

[Note: who may block] Only the pipeline's thread waits for slots. Slabs are taken by the thread that computes, before it
submits the job: so a job that was submitted can always run to its end, and waiting for it cannot deadlock.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

IDLE_SLICE = 1e-3  # seconds the thread waits for a write before it looks for new jobs again

LOST_WAKEUP = 1.0  # seconds after which an idle thread looks by itself: Ctrl-C in another thread's notify may have eaten it


class Moving(Protocol):
    """The end of one move: an event (tiers.device) of a copy, or a ticket (aio) of a read or write, whose wait takes a timeout."""

    @property
    def wait(self) -> Callable[..., None]: ...

    def done(self) -> bool: ...


class Item(Protocol):
    """One chunk's way through the pipeline; see the module's docstring."""

    def start(self) -> bool: ...

    def work(self) -> None: ...

    def finish(self, timeout: float | None) -> bool:
        """Wait for the writes up to `timeout` seconds (None: until done). True when finished and released."""

    def abandon(self) -> None:
        """The job failed: wait for what is in flight and release it. Never raises."""


class Immediate:
    """An item that only works: there is nothing to wait for before, nor after. Alone it is a marker behind all that was submitted before."""

    def start(self) -> bool:
        return True

    def work(self) -> None:
        pass

    def finish(self, timeout: float | None) -> bool:
        return True

    def abandon(self) -> None:
        pass


def landed(tickets: Iterable[Moving], timeout: float | None) -> bool:
    """Wait up to `timeout` seconds for each of `tickets` (None: until they are done); False: not all are. Raises what one of them raised."""
    for ticket in tickets:
        if timeout == 0 and not ticket.done():
            return False
        try:
            ticket.wait(timeout or None)
        except TimeoutError as e:
            if e.errno is not None:  # of a network drive
                raise
            return False
    return True


def happened(events: Iterable[Moving], timeout: float | None) -> bool:
    """The same for events, which are waited for until they happen unless `timeout` is 0."""
    for event in events:
        if timeout == 0 and not event.done():
            return False
        event.wait()
    return True


def settle(moving: Iterable[Moving]) -> None:
    """Wait until all of `moving` is over, however it ends: the job already carries its first error."""
    for waitable in moving:
        with contextlib.suppress(Exception):
            waitable.wait()


class Job:
    """Items, and what their end means to others. `items` is consumed lazily, on the pipeline's thread."""

    def __init__(self, items: Iterable[Item], what: str, on_ready: Callable[[], None] | None = None, on_over: Callable[[], None] | None = None):
        self.what = what
        self.error: BaseException | None = None
        self._items: Iterator[Item] | None = iter(items)
        self._on_ready, self._on_over = on_ready, on_over  # called on the pipeline's thread, before the event, also of a job that failed
        self._ready = threading.Event()  # all items have worked: what the job brings may be used
        self._over = threading.Event()  # all items have finished: buffers and slots are free
        self._open = self._unworked = 0  # items that have not finished, not worked
        self._exhausted = False

    def next_item(self) -> Item | None:
        item = next(self._items, None) if self._items is not None else None
        if item is None:
            self._exhausted = True
            self._items = None
        else:
            self._open += 1
            self._unworked += 1
        return item

    def wait(self) -> None:
        """Until the job is ready; raises its error."""
        self._ready.wait()
        if self.error is not None:
            raise self.error

    def wait_over(self) -> None:
        """Until everything the job held is released; raises its error."""
        self._over.wait()
        if self.error is not None:
            raise self.error

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        self._items, self._exhausted = None, True

    def item_worked(self) -> None:
        self._unworked -= 1
        self.settle()

    def item_finished(self) -> None:
        self._open -= 1
        self.settle()

    def settle(self) -> None:
        """Set the events that are due."""
        if not self._ready.is_set() and (self.error is not None or (self._exhausted and self._unworked == 0)):
            self._tell(self._on_ready)
            self._ready.set()
        if self._exhausted and self._open == 0 and not self._over.is_set():
            self._tell(self._on_over)
            self._over.set()

    def _tell(self, call: Callable[[], None] | None) -> None:
        """Whatever a callback does, those who wait for the job are woken."""
        try:
            if call is not None:
                call()
        except BaseException as error:
            self.fail(error)


class Pipeline:
    """A FIFO of jobs and the thread that runs them. `close` runs what was submitted and joins the thread."""

    def __init__(self, name: str):
        self.error: BaseException | None = None  # of the first job that failed; whoever makes good for it clears this
        self._jobs: deque[Job] = deque()
        self._lock = threading.Lock()  # entered by itself: Ctrl-C in Condition.__enter__, which is Python, would leave it held
        self._cond = threading.Condition(self._lock)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Job:
        with self._lock:
            if self._stopping:
                raise RuntimeError(f"{job.what}: the engine is closed")
            self._jobs.append(job)
            self._cond.notify()
        return job

    def drain(self) -> None:
        """Wait until all jobs submitted so far are over. Errors stay with their jobs."""
        marker = self.submit(Job([Immediate()], "drain"))  # an item, as a job without any is over while those before it still move
        marker._over.wait()

    def close(self) -> None:
        with self._lock:
            self._stopping = True
            self._cond.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        reading: deque[tuple[Job, Item]] = deque()  # started, not yet worked
        writing: deque[tuple[Job, Item]] = deque()  # worked, not yet finished
        waiting: tuple[Job, Item] | None = None  # next to start, no slot yet
        while True:
            waiting = self._start_items(reading, waiting)
            while writing and self._finish_oldest(writing, 0):
                pass
            if reading:
                self._work_oldest(reading, writing)
            elif writing:
                self._finish_oldest(writing, None if waiting else IDLE_SLICE)
            elif waiting is None and not self._await_job():
                return

    def _work_oldest(self, reading: deque[tuple[Job, Item]], writing: deque[tuple[Job, Item]]) -> None:
        job, item = reading.popleft()
        if job.error is None:
            try:
                item.work()
            except BaseException as error:
                self._fail(job, error)
        if job.error is not None:
            self._abandon(job, item)
        else:
            writing.append((job, item))
            job.item_worked()

    def _finish_oldest(self, writing: deque[tuple[Job, Item]], timeout: float | None) -> bool:
        """True if the oldest item has left the queue, finished or abandoned."""
        job, item = writing[0]
        finished = False
        if job.error is None:
            try:
                finished = item.finish(timeout)
            except BaseException as error:
                self._fail(job, error)
        if job.error is None and not finished:
            return False
        writing.popleft()
        if finished:
            job.item_finished()
        else:
            self._abandon(job, item)
        return True

    def _start_items(self, reading: deque[tuple[Job, Item]], waiting: tuple[Job, Item] | None) -> tuple[Job, Item] | None:
        """Start items in order until one finds no slot (returned), or there is none left (None)."""
        while True:
            if waiting is None:
                with self._lock:
                    job = self._jobs[0] if self._jobs else None
                if job is None:
                    return None
                item = self._next(job)
                if item is None:
                    with self._lock:
                        self._jobs.popleft()
                    job.settle()
                    continue
                waiting = (job, item)
            job, item = waiting
            if job.error is not None:
                self._abandon(job, item)
            else:
                try:
                    started = item.start()
                except BaseException as error:
                    self._fail(job, error)
                    self._abandon(job, item)
                else:
                    if not started:
                        return waiting
                    reading.append((job, item))
            waiting = None

    def _next(self, job: Job) -> Item | None:
        try:
            return job.next_item()
        except BaseException as error:
            self._fail(job, error)
            return None

    def _fail(self, job: Job, error: BaseException) -> None:
        job.fail(error)
        if self.error is None:
            self.error = error

    def _abandon(self, job: Job, item: Item) -> None:
        try:
            item.abandon()
        except BaseException as error:  # a fault in the item; its slots may be lost, but nobody waits for ever
            self._fail(job, error)
        job.item_finished()

    def _await_job(self) -> bool:
        """Sleep until there is a job. False when the pipeline is closed and empty."""
        with self._lock:
            while not self._jobs and not self._stopping:
                self._cond.wait(LOST_WAKEUP)
            return bool(self._jobs)
