"""Where gradients are summed, and where they wait for their step.

Two buffers for a shard, both in the layout of its trainable runs:

    pass   the sum over one backward: over the calls of the shard in it (micro-batches, users of a tied weight), on the device
    host   the sum over the backwards of one step, in host memory

Where host memory cannot hold the grads of all shards until their step, `leave` sends them to NVMe (grads_away.py) and gives the
host buffer to another shard; those of the root and of tied layers, which stay open through a whole backward, remain.

Where compute reads host memory, both have the same dtype and it is the first backward, the pass lands in the host buffer
itself and nothing is copied. The order of additions is fixed (calls as backward makes them: the last micro-batch first, a tied
head before its embedding; then passes), so every device and every placement gives the same bits.

`grad_accum_dtype` is the dtype of both: that of the weights (each sum is rounded to it, as torch's .grad is), or fp32. Autograd hands
over each call's gradient in the weights' dtype in any case. With fp32 and no micro-batches only the host's sum is wide: the
pass is then what .grad would be, and half as many bytes cross.

A parameter that got no gradient in any backward of the step is not `seen`: its elements are zero for the norm, and the step
leaves it alone, as torch's optimizers leave a parameter whose grad is None.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from zinf.chunks import DTYPES
from zinf.errors import StoreError
from zinf.grads_away import GradsAway
from zinf.layout import PAGE
from zinf.owners import Unwatched
from zinf.placement import Plan
from zinf.shard import Shard
from zinf.tiers.device import DONE, Event
from zinf.tiers.host import Arena, Slot, Slots
from zinf.tiers.scratch import Scratch
from zinf.trace import Verb


class ShardGrads:
    """The gradients of one shard."""

    def __init__(self, shard: Shard, lender: Grads, own_host: torch.Tensor | None, own_pass: torch.Tensor | None, away: GradsAway | None):
        self.shard, self._lender = shard, lender
        self.trainable = [i for i, (r, *_) in enumerate(shard.params) if shard.spec.runs[r].trainable]
        self.waiting = False  # the host buffer holds the sum of at least one backward
        self.assigned = False  # a step has been given these grads and has not read them all yet
        self.seen = [False] * len(shard.params)  # in this step
        self.counts = [0] * len(shard.params)  # contributions in this backward
        self.arrived: Event = DONE  # the last pass has been added in host memory
        self._gives = False  # the host buffer that is leaving was lent, and goes to the next
        self.away = away  # where they wait on NVMe; None: they never do
        self._own_host, self._own_pass = own_host, own_pass
        self._host: torch.Tensor | None = None
        self._host_slot: Slot | None = None
        self._pass: torch.Tensor | None = None
        self._pass_slot: Slot | _Lent | None = None
        self._views: dict[int, list[torch.Tensor | None]] = {}  # of own buffers, by address: they never change

    @property
    def open(self) -> bool:
        """Has the current backward made a gradient?"""
        return self._pass is not None

    def take(self, i: int, grad: torch.Tensor) -> None:
        """Add one contribution to parameter `i` (index into shard.params); `grad` has the parameter's shape."""
        if self._pass is None:
            self._open()
        view = self._pass_views[i]
        self._lender.owners.check(view, self.shard.name, "add to")
        assert view is not None
        if self.counts[i]:
            view.add_(grad)
        else:
            view.copy_(grad)
        self.counts[i] += 1

    def close(self) -> Event:
        """The backward is over for this shard: add its pass to the host's sum. The event: the sum is in host memory."""
        assert self._pass is not None
        for i in self.trainable:
            if not self.counts[i]:
                self._pass_views[i].zero_()  # type: ignore[union-attr]
            else:
                self.seen[i] = True
            self.counts[i] = 0
        buffer, self._pass = self._pass, None
        trace, index, nbytes = self.shard.parts.trace, self.shard.index, self.shard.spec.grads_nbytes(self._lender.pass_wide)
        if self.shard.parts.device.direct:
            in_place = buffer is self._host
            with trace.span(Verb.OFFLOAD, index, "", 0 if in_place else nbytes):
                self.arrived = DONE if in_place else self._merge(buffer)
        else:
            self.arrived = self._merge(buffer)
            trace.copying(Verb.OFFLOAD, index, nbytes, self.arrived)
        self.waiting = True
        return self.arrived

    def leave(self) -> None:
        """Let the sum wait on NVMe, and give its host buffer to another shard. No-op where grads wait in host memory."""
        if self.away is None:
            return
        assert self._host is not None
        host, slot, name, owners = self._host[: self.away.nbytes], self._host_slot, self.shard.name, self._lender.owners
        self._host = self._host_slot = None
        self._gives = slot is not None
        self.shard.grads = [None] * len(self.shard.spec.runs)

        def gone() -> None:
            if slot is not None:
                owners.give_back(slot.buffer, name)
                slot.release()

        self.away.leave(host, self.arrived, gone)

    @property
    def will_give(self) -> bool:
        """Is there a host buffer that comes free by itself?"""
        return (self.assigned and self._host_slot is not None) or (self.away is not None and self.away.moving and self._gives)

    def drop(self) -> None:
        """Forget what was summed: the step was skipped, done, or abandoned."""
        with contextlib.suppress(OSError, StoreError):  # of grads that could not be brought from NVMe
            self.arrived.wait()
        self.arrived = DONE
        if self.away is not None:
            self.away.forget()
        if self._pass_slot is not None:
            self._pass_slot.release()
            self._pass_slot = None
        self._pass = None
        self.counts = [0] * len(self.counts)
        self.release()

    def release(self) -> None:
        """The step has read the grads, or failed before it did: then their copy may still be under way, and the buffer not yet another's."""
        with contextlib.suppress(Exception):  # told where the step, or the next backward, waits for it
            self.arrived.wait()
        self.waiting = self.assigned = False
        self.seen = [False] * len(self.seen)
        self.shard.grads = [None] * len(self.shard.spec.runs)
        self._host = None
        if self._host_slot is not None:
            self._lender.owners.give_back(self._host_slot.buffer, self.shard.name)
            self._host_slot.release()
            self._host_slot = None

    def _open(self) -> None:
        self.arrived.wait()
        lender = self._lender
        if self._host is None:
            self._lend_host()
        if not self.waiting and lender.lands_in_host:
            self._pass = self._host
        elif self._own_pass is not None:
            self._pass = self._own_pass
        else:
            self._pass, self._pass_slot = lender.lend_pass(self.shard)
        assert self._pass is not None
        own = self._pass is self._own_host or self._pass is self._own_pass
        key = self._pass.data_ptr()
        if own and key in self._views:
            self._pass_views = self._views[key]
            return
        flats = lender.flats(self.shard, self._pass, lender.pass_wide)
        for flat, run in zip(flats, self.shard.spec.runs, strict=True):  # another shard has its parameters where we have gaps
            for a, b in run.gaps() if flat is not None else ():
                flat[a : min(b, run.numel)].zero_()  # type: ignore[index]
        self._pass_views = [None if flats[r] is None else flats[r][p.offset : p.offset + p.numel].view(p.shape) for r, p, _ in self.shard.params]  # type: ignore[index]
        if own:
            self._views[key] = self._pass_views

    def _lend_host(self) -> None:
        if self._own_host is not None:
            self._host = self._own_host
        else:
            if self.away is not None:
                self.away.wait()
            self._host, self._host_slot = self._lender.lend_host(self.shard)
            self._gives = False
            if self.away is not None and self.waiting:  # the sum comes back while backward makes what is added to it
                self.away.come(self._host[: self.away.nbytes])
        self.shard.grads = self._lender.flats(self.shard, self._host, self._lender.host_wide)

    def _merge(self, buffer: torch.Tensor) -> Event:
        """Bring the pass in `buffer` to host memory and add it to the host's sum."""
        lender, device = self._lender, self.shard.parts.device
        first, slot = not self.waiting, self._pass_slot
        self._pass_slot = None
        nbytes = self.shard.spec.grads_nbytes(lender.pass_wide)
        host = self.shard.grads
        if first and lender.pass_wide == lender.host_wide:
            assert self._host is not None
            return device.offload(buffer[:nbytes], self._host[:nbytes], slot.release if slot is not None else None)
        target = buffer if device.direct else lender.staging
        assert target is not None
        arrived = lender.flats(self.shard, target, lender.pass_wide)
        coming = self.away.move if self.away is not None and not first else None  # as of now: the next move waits for this addition

        def add() -> None:
            try:
                if coming is not None:
                    coming.wait()  # and no longer: the fetcher, which ends it, may be waiting for this addition
                for run, mine, sum_ in zip(self.shard.spec.runs, arrived, host, strict=True):
                    if mine is not None and sum_ is not None:
                        a, b = sum_[: run.numel], mine[: run.numel]
                        a.copy_(b) if first else a.add_(b)
            finally:
                if slot is not None:
                    slot.release()

        return device.offload(buffer[:nbytes], target[:nbytes], add)


class Grads:
    """All gradients of an engine, and the buffers that shards share."""

    def __init__(
        self, shards: Sequence[Shard], plan: Plan, arena: Arena | None, host_wide: bool, pass_wide: bool, pinned: Sequence[int], scratch: Scratch | None = None
    ):
        self.host_wide, self.pass_wide = host_wide, pass_wide
        parts = shards[0].parts
        self.owners = parts.owners
        self.lands_in_host = parts.device.direct and pass_wide == host_wide
        self.staging: torch.Tensor | None = None
        self._host_slots: Slots | None = None
        trainable = [s for s in shards if s.spec.trainable]
        pass_nbytes = max((s.spec.grads_nbytes(pass_wide) for s in trainable if s.index not in pinned), default=0)
        if plan.grad_buffers and trainable and arena is not None:
            shared = [s.spec.grads_nbytes(host_wide) for s in trainable if s.index not in pinned]
            if shared:
                self._host_slots = arena.slots(plan.grad_buffers, max(shared), "grads")
        if plan.grads_staging and arena is not None:
            self.staging = arena.carve(plan.grads_staging, "arriving grads")
        self.of: list[ShardGrads] = []
        at = 0  # bytes of the scratch
        for s in shards:
            own_host = own_pass = None
            if s.spec.trainable:
                if arena is not None and (not plan.grad_buffers or s.index in pinned):
                    own_host = arena.carve(s.spec.grads_nbytes(host_wide), f"grads of {s.name}")
                if plan.pass_buffers and s.index in pinned:
                    own_pass = parts.device.alloc(s.spec.grads_nbytes(pass_wide), f"grads of {s.name} in one backward").zero_()
            away = None
            if scratch is not None and s.spec.trainable and own_host is None:
                away = s.grads_away = GradsAway(scratch, at, s, host_wide)
                at += away.nbytes
            grads = ShardGrads(s, self, own_host, own_pass, away)
            s.release_grads = grads.release  # type: ignore[method-assign]
            self.of.append(grads)
        if scratch is not None:
            scratch.grow(at)
        self._pass_slots = _Pool(
            [parts.device.alloc(pass_nbytes, "grads of one backward") for _ in range(plan.pass_buffers if pass_nbytes else 0)], self.owners
        )

    def lend_host(self, shard: Shard) -> tuple[torch.Tensor, Slot | None]:
        """A host buffer for grads until their step. Waits for a step, or a flush, that will give one back; if none will, one more is allocated."""
        assert self._host_slots is not None
        slot = self._host_slots.try_acquire()
        if slot is None and any(g.will_give for g in self.of):
            with shard.parts.trace.wait(Verb.STEP):
                slot = self._host_slots.acquire()
        if slot is None:
            shard.parts.trace.count("grad buffers beyond the plan")
            more = torch.zeros(shard.spec.grads_nbytes(self.host_wide) + PAGE, dtype=torch.uint8)
            return more[-more.data_ptr() % PAGE :], None
        self.owners.lend(slot.buffer, shard.name)
        return slot.buffer, slot

    def lend_pass(self, shard: Shard) -> tuple[torch.Tensor, _Lent | None]:
        """A device buffer for one backward's grads. Waits for one on its way to the host; where none is, one more is allocated, and counted."""
        slot = self._pass_slots.acquire(shard.name)
        for grads in self.of:
            if slot is None and not grads.arrived.done():  # its copy to the host is under way, and then gives its buffer back
                with shard.parts.trace.wait(Verb.OFFLOAD, grads.shard.index):
                    grads.arrived.wait()
                slot = self._pass_slots.acquire(shard.name)
        if slot is None:
            shard.parts.trace.count("grad buffers beyond the plan")
            return shard.parts.device.empty(shard.spec.grads_nbytes(self.pass_wide)), None
        return slot.buffer, slot

    def flats(self, shard: Shard, buffer: torch.Tensor, wide: bool) -> list[torch.Tensor | None]:
        """For each run its grads in `buffer` as a flat tensor; None for a frozen run."""
        out: list[torch.Tensor | None] = []
        for r, run in enumerate(shard.spec.runs):
            start = shard.spec.grads_offset(r, wide)
            out.append(buffer[start : start + run.grads_nbytes(wide)].view(DTYPES[run.grads_dtype(wide)]) if run.trainable else None)
        return out


class _Pool:
    """Buffers that are lent without ever waiting."""

    def __init__(self, buffers: list[torch.Tensor], owners: Unwatched):
        self._free, self._owners = buffers, owners

    def acquire(self, owner: str) -> _Lent | None:
        if not self._free:
            return None
        buffer = self._free.pop()
        self._owners.lend(buffer, owner)
        return _Lent(buffer, self, owner)

    def give_back(self, buffer: torch.Tensor, owner: str) -> None:
        self._owners.give_back(buffer, owner)
        self._free.append(buffer)


class _Lent:
    def __init__(self, buffer: torch.Tensor, pool: _Pool, owner: str):
        self.buffer, self._pool, self._owner = buffer, pool, owner

    def release(self) -> None:
        self._pool.give_back(self.buffer, self._owner)
