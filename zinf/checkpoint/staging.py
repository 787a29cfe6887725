"""What import and export share: parts of parameters, page-aligned buffers, and the pipeline of two stages.

[Note: the memory of a stream] Both directions hold a few buffers of one chunk each (slots_nbytes says how much in all) and STAGE
bytes for each worker, allocated before the first byte moves. Nothing else grows with the model, except a few hundred bytes a parameter.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import contextlib
import dataclasses
import mmap
import queue
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from zinf import layout, ops

SLOTS = (3, 12)  # fewest and most chunks in flight; half of them, rounded up, in their first stage
IN_FLIGHT = 64 << 20  # bytes that keep a fast drive busy: small chunks get more slots
LARGE = 2 << 20  # bytes of a large page: a drive takes a transfer from few of them faster than from many small ones
THREADS = 4  # workers: they mostly wait for the drive, which wants several transfers at once, however few the cores
TRANSFER = 4 << 20  # bytes of one read or write of a checkpoint file
STAGE = 3 * TRANSFER  # bytes of a worker's stage: raw elements (8 bytes at most), and the same elements as fp32 (twice a transfer of bf16)
Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
Item = tuple[layout.Key, torch.Tensor]


class Ticket(Protocol):
    """Something that completes, as the store's tickets do."""

    def wait(self, timeout: float | None = None) -> None: ...


Transfer = Callable[[Sequence[Item]], Sequence[Ticket]]  # Store.read or Store.write; tensors: uint8, page-aligned, exactly a chunk


@dataclasses.dataclass(frozen=True)
class Part:
    """`count` elements, from element `start` on, of the tensor `name` in the files; `shape` is that whole tensor's.

    A parameter is one or more parts end to end. That covers what transformers' converters do to checkpoints without
    touching a value: renames, experts stacked into one tensor, fused projections split apart.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    count: int


@dataclasses.dataclass(frozen=True)
class Segment:
    """Elements [start, start + count) of a parameter stand at element `at` of a chunk."""

    param: layout.Param
    start: int
    at: int
    count: int


def segments(run: layout.Run, chunk: layout.Chunk) -> list[Segment]:
    """The parameters in a chunk, in order."""
    end = chunk.start + chunk.length
    first = bisect.bisect_right(run.params, chunk.start, key=lambda p: p.offset) - 1
    found = []
    for p in run.params[max(first, 0) :]:
        if p.offset >= end:
            break
        a, b = max(p.offset, chunk.start), min(p.offset + p.numel, end)
        if a < b:
            found.append(Segment(p, a - p.offset, a - chunk.start, b - a))
    return found


def pages(nbytes: int) -> torch.Tensor:
    """`nbytes` of page-aligned memory as a uint8 tensor, in large pages where there are some; touched pages count, and all go when the tensor does."""
    room = nbytes + (LARGE if nbytes >= LARGE else 0)
    memory = mmap.mmap(-1, max(room, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    if nbytes < LARGE:
        return whole[:nbytes]
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    skip = -whole.data_ptr() % LARGE
    return whole[skip : skip + nbytes]


@dataclasses.dataclass
class Slot:
    """Room for one chunk: its weights, and its state where that is needed (else empty)."""

    weights: torch.Tensor  # uint8
    state: torch.Tensor  # uint8


def slot_nbytes(model: layout.Model, states: bool) -> tuple[int, int]:
    """Bytes of the largest chunk of weights, and of state (0 unless `states`)."""
    lengths = [(min(model.chunk, run.padded), run) for shard in model.shards for run in shard.runs]
    weights = max((n * run.mode.weights_bytes for n, run in lengths), default=0)
    state = max((n * run.mode.state_bytes for n, run in lengths if run.trainable), default=0)
    return weights, state if states else 0


def slots_nbytes(model: layout.Model, states: bool) -> int:
    """Bytes of all slots."""
    return _slot_count(model, states) * sum(slot_nbytes(model, states))


def _slot_count(model: layout.Model, states: bool) -> int:
    least, most = SLOTS
    return min(max(least, IN_FLIGHT // max(sum(slot_nbytes(model, states)), 1)), most)


def make_slots(model: layout.Model, states: bool, buffer: torch.Tensor | None) -> list[Slot]:
    """The slots, carved from `buffer` (page-aligned uint8, at least slots_nbytes(...) long) or from new memory."""
    weights, state = slot_nbytes(model, states)
    count, need = _slot_count(model, states), slots_nbytes(model, states)
    if buffer is None:
        buffer = pages(need)
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.data_ptr() % layout.PAGE or buffer.numel() < need:
        raise ValueError(f"buffer must be a page-aligned 1-D uint8 tensor of at least {need} bytes, not {buffer.dtype} of {buffer.numel()}")
    parts = buffer[:need].split([weights, state] * count)
    return [Slot(parts[i], parts[i + 1]) for i in range(0, 2 * count, 2)]


class Workers:
    """A few threads that move and cast pieces of a chunk; each has a stage of its own for the cast."""

    def __init__(self, threads: int | None = None) -> None:
        threads = threads or THREADS
        self._stages: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(threads):
            self._stages.put(pages(STAGE))
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="zinf-checkpoint")

    def submit(self, work: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        """Call work(stage, *args) on a worker; `stage` is its STAGE bytes."""
        return self._pool.submit(self._run, work, args)

    def _run(self, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        stage = self._stages.get()
        try:
            return work(stage, *args)
        finally:
            self._stages.put(stage)

    def close(self) -> None:
        """Drop what has not begun, wait for what has."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def stage_views(stage: torch.Tensor, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of a stage: `count` elements of `dtype` (a TRANSFER at most), and `count` fp32 elements beside them."""
    raw = stage[: count * dtype.itemsize].view(dtype)
    return raw, stage[TRANSFER : TRANSFER + 4 * count].view(torch.float32)


def cast(src: torch.Tensor, dst: torch.Tensor) -> None:
    """dst = src, rounded to nearest even."""
    if src.dtype == torch.float64:
        dst.copy_(src)
    else:
        ops.cast(src, dst)


def cut(count: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """(start, length) of the transfers of `count` elements."""
    step = TRANSFER // itemsize
    for start in range(0, count, step):
        yield start, min(step, count - start)


Job = TypeVar("Job")
Pending = Sequence[Any]  # tickets (`wait()`) or futures (`result()`)


class Stream(Generic[Job]):
    """Runs jobs through two stages that overlap: while one job is in its second stage, the next are in their first.

    `begin(job, slot)` and `finish(job, slot)` start the stages and return what they wait for; both run in the caller's
    thread, `finish` once all of `begin`'s is done. A slot is reused when its second stage is over.
    """

    def __init__(self, slots: Sequence[Slot], begin: Callable[[Job, Slot], Pending], finish: Callable[[Job, Slot], Pending]) -> None:
        self._free = deque(slots)
        self._ahead = (len(slots) + 1) // 2
        self._begin, self._finish = begin, finish
        self._first: deque[tuple[Job, Slot, Pending]] = deque()
        self._second: deque[tuple[Job, Slot, Pending]] = deque()

    def run(self, jobs: Iterable[Job]) -> Generator[Job, None, None]:
        """Yield each job when both of its stages are over. On an error, and when it is closed, nothing is left in flight."""
        try:
            for job in jobs:
                if len(self._first) == self._ahead:
                    self._advance()
                if not self._free:
                    yield self._retire()
                slot = self._free.popleft()
                self._first.append((job, slot, self._begin(job, slot)))
            while self._first:
                self._advance()
            while self._second:
                yield self._retire()
        finally:
            self._drain()

    def _advance(self) -> None:
        job, slot, pending = self._first[0]
        _wait(pending)
        self._first.popleft()
        self._second.append((job, slot, self._finish(job, slot)))

    def _retire(self) -> Job:
        job, slot, pending = self._second[0]
        _wait(pending)
        self._second.popleft()
        self._free.append(slot)
        return job

    def _drain(self) -> None:
        """Wait for what is in flight, whatever becomes of it: the slots' memory must not be written to after we return."""
        for _, _, pending in [*self._first, *self._second]:
            for p in pending:
                if not (isinstance(p, concurrent.futures.Future) and p.cancel()):
                    with contextlib.suppress(Exception):  # the first error is on its way already
                        _wait([p])


def _wait(pending: Pending) -> None:
    for p in pending:
        if isinstance(p, concurrent.futures.Future):
            p.result()
        else:
            p.wait()
