"""The grads of one shard while they wait on NVMe: only where host memory cannot hold those of all shards, or when asked.

The sum of a backward leaves its host buffer once its squares are summed. The next backward of the same step brings it back, to
be added to; the step reads it chunk by chunk, beside the chunk's state. It lies in a region of a scratch file that no commit
names: after a crash the step is made again from its batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from zinf.layout import ITEMSIZE, Run
from zinf.pipeline import Job, landed, settle
from zinf.shard import Shard
from zinf.tiers.device import Event
from zinf.tiers.scratch import Scratch
from zinf.trace import Verb


class GradsAway:
    """One region, and the moves in and out of it. At most one is under way."""

    def __init__(self, scratch: Scratch, start: int, shard: Shard, wide: bool):
        self.scratch, self.start, self.nbytes = scratch, start, shard.spec.grads_nbytes(wide)
        self.shard, self._wide = shard.index, wide
        self._spec, self._pipeline, self.trace = shard.spec, shard.parts.fetcher, shard.parts.trace
        self.move: Job | None = None  # the last one
        starts = [self._chunks(run, shard.parts.records.model.chunk) for run in range(len(shard.spec.runs))]
        self.cuts = [at for run in starts for at in run if at]  # where the chunks begin that `read` reads, but for the first

    def _chunks(self, run: int, size: int) -> list[int]:
        spec = self._spec.runs[run]
        first = self._spec.grads_offset(run, self._wide)
        return [first + chunk.start * self.itemsize(spec) for chunk in spec.chunks(size)] if spec.trainable else []

    @property
    def moving(self) -> bool:
        return self.move is not None and not self.move.over

    def leave(self, host: torch.Tensor, arrived: Event, then: Callable[[], None]) -> None:
        """Start flushing `host` (uint8, page-aligned) once the sum has `arrived` there; `then` runs when it is another's again."""
        self.move = self._pipeline.submit(Job([_Move(self, host, "w", arrived)], f"flush of the grads of {self._spec.name}", on_over=then))

    def come(self, host: torch.Tensor) -> None:
        """Start fetching into `host`."""
        self.move = self._pipeline.submit(Job([_Move(self, host, "r", None)], f"fetch of the grads of {self._spec.name}"))

    def wait(self) -> None:
        """Until the last move is over; raises what it raised."""
        move = self.move
        if move is not None:
            with self.trace.wait(Verb.FLUSH, self.shard):
                move.wait_over()

    def forget(self) -> None:
        """The grads are dropped: wait for what is under way, whatever comes of it."""
        with contextlib.suppress(Exception):
            self.wait()
        self.move = None

    def dtype(self, run: Run) -> str:
        """Of the grads of a run."""
        return run.grads_dtype(self._wide)

    def itemsize(self, run: Run) -> int:
        """Bytes of an element."""
        return ITEMSIZE[self.dtype(run)]

    def read(self, run: int, first: int, buffer: torch.Tensor) -> list:
        """Start reading the grads of a run from element `first` on; tickets. Waits first until they have left."""
        self.wait()
        at = self._spec.grads_offset(run, self._wide) + first * self.itemsize(self._spec.runs[run])
        return self.scratch.read(self.start + at, buffer)


class _Move:
    """All grads of a shard at once; see pipeline.Item."""

    def __init__(self, away: GradsAway, host: torch.Tensor, kind: str, after: Event | None):
        self._away, self._host, self._kind, self._after = away, host, kind, after
        self._verb = Verb.FETCH if kind == "r" else Verb.FLUSH
        self._tickets: list = []

    def start(self) -> bool:
        if self._kind == "r":
            self._begin()
        return True

    def work(self) -> None:
        if self._kind == "r":
            for ticket in self._tickets:
                ticket.wait()
            self._over()
            return
        assert self._after is not None
        self._after.wait()
        self._begin()

    def finish(self, timeout: float | None) -> bool:
        if not landed(self._tickets, timeout):
            return False
        self._over()
        return True

    def abandon(self) -> None:
        settle(self._tickets)
        self._over()

    def _begin(self) -> None:
        away = self._away
        scratch = away.scratch
        self._tickets = list(scratch.read(away.start, self._host) if self._kind == "r" else scratch.write(away.start, self._host, away.cuts))
        away.trace.begin(self._verb)

    def _over(self) -> None:
        if self._tickets:
            self._tickets = []
            self._away.trace.end(self._verb)
