"""One chunk's way through the pipeline, and what a step means for it.

    read     the chunk of weights, if they are not in host memory already, and of state, if it is to be stepped
    step     the optimizer, in place, on the chunk's weights and state in host memory
    upload   to the slab, where compute does not read host memory
    write    what was stepped and does not live in host memory

The bytes stay where they landed from the read to the write: in the slab itself on the cpu device, else in a slot.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from zinf import layout, ops
from zinf.algorithms import Algorithm
from zinf.layout import STATE, WEIGHTS, Chunk, Key
from zinf.pipeline import Immediate, Pipeline, happened, landed, settle
from zinf.tiers.device import Event
from zinf.tiers.host import Slot, Slots
from zinf.trace import Verb

if TYPE_CHECKING:
    from zinf.shard import Shard

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int16": torch.int16}


@dataclasses.dataclass(frozen=True)
class Segment:
    """Elements [start, end) of a run that are stepped alike; `step` counts from 1 (bias correction)."""

    start: int
    end: int
    algorithm: Algorithm
    step: int


@dataclasses.dataclass
class StepSpec:
    """One shard's step: what multiplies its grads, what then clips each of them, and the segments of each run. A run without segments is left alone.

    `gate` runs on the stepping thread before anything is changed, and raises if the step must not be made.
    """

    scale: float
    segments: list[list[Segment]]
    max_abs: float = math.inf
    gate: Callable[[], None] | None = None


def plane_views(run: layout.Run, length: int, state: torch.Tensor) -> dict[str, torch.Tensor]:
    """The planes of a chunk of state (uint8) of `length` elements, by name, each in its dtype."""
    planes, at = {}, 0
    for name, dtype in run.mode.planes:
        nbytes = length * layout.ITEMSIZE[dtype]
        planes[name] = state[at : at + nbytes].view(DTYPES[dtype])
        at += nbytes
    return planes


def master_of(weights: torch.Tensor, planes: Mapping[str, torch.Tensor], pool: ops.Pool | None = None) -> torch.Tensor:
    """The fp32 master of a chunk: of its weights (in their dtype) and what `planes` have beyond them."""
    if "lo" in planes:
        out = torch.empty(weights.numel())
        ops.join(weights, planes["lo"], out, pool=pool)
        return out
    return planes.get("master", weights)


class ChunkItem:
    """One chunk of one shard on its way to compute: read, step, upload, write. See pipeline.Item."""

    __slots__ = (
        "_events",
        "_reads",
        "_slots",
        "_started",
        "_writes",
        "chunk",
        "grads",
        "had_weights",
        "has_state",
        "keys",
        "pipeline",
        "run",
        "segments",
        "shard",
        "spec",
        "state",
        "weights",
    )

    def __init__(self, shard: Shard, run: int, chunk: Chunk, segments: list[Segment], spec: StepSpec | None, had_weights: bool, pipeline: Pipeline):
        self.shard, self.run, self.chunk, self.segments, self.spec = shard, run, chunk, segments, spec
        self.had_weights, self.pipeline = had_weights, pipeline
        self.has_state = shard.spec.runs[run].has_state
        self.keys: tuple[Key, Key] = ((WEIGHTS, shard.index, run, chunk.index), (STATE, shard.index, run, chunk.index))
        self.weights: torch.Tensor | None = None  # host bytes of the chunk's weights
        self.state: torch.Tensor | None = None
        self.grads: torch.Tensor | None = None  # the chunk's own, where they waited on NVMe
        self._slots: list[Slot] = []
        self._reads: list = []
        self._writes: list = []
        self._events: list[Event] = []

    def start(self) -> bool:
        parts, records = self.shard.parts, self.shard.parts.records
        reads = []
        weights, state = records.home(self.keys[0]), records.home(self.keys[1])
        if weights is None and parts.device.direct:
            weights = self.shard.chunk_view(self.run, self.chunk)
            if not self.had_weights:
                reads.append((self.keys[0], weights))
        elif weights is None and (self.segments or not self.had_weights):
            weights = self._slot(parts.weights_slots[self.pipeline], self.chunk.length * self.shard.spec.runs[self.run].mode.weights_bytes)
            if weights is None:
                return False
            reads.append((self.keys[0], weights))
        if self.segments and state is None and self.has_state:
            assert parts.state_slots is not None
            state = self._slot(parts.state_slots, self.chunk.length * self.shard.spec.runs[self.run].mode.state_bytes)
            if state is None:
                self._release()
                return False
            reads.append((self.keys[1], state))
        if self.segments and self.shard.grads[self.run] is None and not self._start_grads():
            self._release()
            return False
        self.weights, self.state = weights, state
        if reads or self._reads:
            parts.trace.begin(Verb.FETCH)
            try:
                if reads:
                    assert records.store is not None
                    self._reads += records.store.read(reads)
            except BaseException:
                if not self._reads:  # else `abandon` does
                    parts.trace.end(Verb.FETCH)
                raise
        return True

    def _start_grads(self) -> bool:
        """Start reading the chunk's grads from NVMe. False: no slot is free."""
        away, slots, spec = self.shard.grads_away, self.shard.parts.grads_slots, self.shard.spec
        assert away is not None and slots is not None
        nbytes = self.chunk.length * away.itemsize(spec.runs[self.run])
        grads = self._slot(slots, nbytes)
        if grads is None:
            return False
        self.grads = grads
        self._reads = away.read(self.run, self.chunk.start, grads)
        return True

    def work(self) -> None:
        parts = self.shard.parts
        self._landed()
        if self.segments and self.spec is not None and self.spec.gate is not None:
            self.spec.gate()
        self._check_owner("step")
        if self.segments:
            nbytes = sum(t.numel() for t in (self.weights, self.state) if t is not None)
            with parts.trace.span(Verb.STEP, self.shard.index, "", nbytes):
                self._step()
            self._flush()
        stale = bool(self.segments) or not self.had_weights
        if not parts.device.direct and stale and self.shard.slab is not None:
            assert self.weights is not None
            event = parts.device.upload(self.weights, self.shard.chunk_view(self.run, self.chunk), self.shard.left)
            self._events.append(event)
            self.shard._uploads.append(event)
            parts.trace.copying(Verb.UPLOAD, self.shard.index, self.weights.numel(), event)

    def _landed(self) -> None:
        if self._reads:
            try:
                for ticket in self._reads:
                    ticket.wait()
            finally:
                self._reads = []
                self.shard.parts.trace.end(Verb.FETCH)

    def _step(self) -> None:
        run = self.shard.spec.runs[self.run]
        whole, first = self.shard.grads[self.run], self.chunk.start
        if self.grads is not None:
            assert self.shard.grads_away is not None
            grads = self.grads.view(DTYPES[self.shard.grads_away.dtype(run)])
        else:
            assert whole is not None
            grads = whole[first : first + self.chunk.length]
        assert self.weights is not None and self.spec is not None
        weights = self.weights.view(DTYPES[run.dtype])
        planes = plane_views(run, self.chunk.length, self.state) if self.state is not None else {}
        parts = self.shard.parts
        for s in self.segments:
            a, b = max(s.start - first, 0), min(s.end - first, self.chunk.length)
            here = {name: plane[a:b] for name, plane in planes.items()}
            ema = (here["ema"], parts.ema_decay) if parts.ema_decay is not None else None
            s.algorithm.step(weights[a:b], here, grads[a:b], step=s.step, grad_scale=self.spec.scale, max_abs=self.spec.max_abs, ema=ema, pool=parts.pool)

    def _flush(self) -> None:
        records = self.shard.parts.records
        writes = []
        for key, buffer in zip(self.keys, (self.weights, self.state), strict=True):
            if buffer is None:
                continue  # this optimizer keeps nothing for this dtype
            if records.home(key) is not None:
                records.touch(key)
            else:
                writes.append((key, buffer))
        if writes:
            assert records.store is not None
            self.shard.parts.trace.begin(Verb.FLUSH)
            try:
                self._writes = records.store.write(writes)
            except BaseException:
                self.shard.parts.trace.end(Verb.FLUSH)
                raise

    def finish(self, timeout: float | None) -> bool:
        if not landed(self._writes, timeout):
            return False
        self._written()
        if not happened(self._events, timeout):
            return False
        self._check_owner("flush")
        self._release()
        return True

    def _written(self) -> None:
        if self._writes:
            self._writes = []
            self.shard.parts.trace.end(Verb.FLUSH)

    def abandon(self) -> None:
        settle((*self._reads, *self._writes, *self._events))
        if self._reads:
            self._reads = []
            self.shard.parts.trace.end(Verb.FETCH)
        self._written()
        self._release()

    def _check_owner(self, use: str) -> None:
        """In debug mode: are the bytes of this chunk still this item's, and is the slab still the shard's?"""
        owners, shard = self.shard.parts.owners, self.shard
        if not owners.watching:
            return
        for slot in self._slots:
            owners.check(slot.buffer, self.keys, use)
        if self.segments:
            owners.uses(self.weights, use)
        if shard.slab is not None:
            owners.check(self.shard.chunk_view(self.run, self.chunk), shard.name, use)
        if self.segments and use == "step":
            owners.check(shard.grads[self.run], shard.name, use)

    def _slot(self, slots: Slots, nbytes: int) -> torch.Tensor | None:
        slot = slots.try_acquire()
        if slot is None:
            return None
        self.shard.parts.owners.lend(slot.buffer, self.keys)
        self._slots.append(slot)
        return slot.buffer[:nbytes]

    def _release(self) -> None:
        for slot in self._slots:
            self.shard.parts.owners.give_back(slot.buffer, self.keys)
            slot.release()
        self._slots = []


class NormItem(Immediate):
    """The sum of squares of a shard's grads, once they are in host memory."""

    def __init__(self, shard: Shard, arrived: Event, found: Callable[[float], None]):
        self._shard, self._arrived, self._found = shard, arrived, found
        self._grads = list(shard.grads)  # they may leave for NVMe right behind this

    def work(self) -> None:
        self._arrived.wait()
        total = 0.0
        for run, grads in zip(self._shard.spec.runs, self._grads, strict=True):
            if grads is not None:
                self._shard.parts.owners.check(grads, self._shard.name, "sum")
                total = ops.sum_squares(grads[: run.numel], total, pool=self._shard.parts.pool)
        self._found(total)


class CallItem(Immediate):
    """Anything else that must happen in order with the moves, as one item."""

    def __init__(self, call: Callable[[], None]):
        self._call = call

    def work(self) -> None:
        self._call()
