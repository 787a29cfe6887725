"""Boundary activations: what a recomputed call keeps of its inputs, and where that waits for the call's backward.

    device   as it is; nothing moves
    host     offloaded after the call's forward into a region of the arena, uploaded ahead of its backward
    nvme     the same through a few slots of host memory, flushed to a scratch file and fetched from there

`Kept` owns one range of bytes from a call's forward to the death of the last graph that needs it. Its bytes, once away, never
change: backward gets a copy of its own each time it asks, so a graph may be walked twice. Moves are jobs of one pipeline, in
order; at most AHEAD of them are on their way out with the tensor still there, and at most AHEAD are fetched before their turn,
latest first, as backward asks in the reverse order of forward. So device memory holds a handful of them, not one for a layer.

Rules
- What several calls keep (rotary tables, masks, an encoder's output) stays on the device: one copy serves them all.
- Less than a page, a tensor with gaps, a leaf that needs a gradient, and what is no plain tensor of the device stays.
- Where host memory is full the rest goes to NVMe, and stays on the device if there is no store; that is counted, and said once.

[Note: when a tensor may go] The copy out runs while the model goes on, and an in-place change would spoil it. The thread that
computes drops the tensor itself, some calls later: if its version is then still that of the call, no change began before the
copy was over. Else the tensor's backward is refused, as it would be had it stayed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zinf.errors import EngineError
from zinf.layout import PAGE, round_up
from zinf.owners import Unwatched
from zinf.pipeline import Item, Job, Pipeline, happened, landed, settle
from zinf.tiers.device import DONE, Device, Event
from zinf.tiers.host import Slot, Slots
from zinf.tiers.scratch import Scratch, Space
from zinf.trace import Trace, Verb

log = logging.getLogger("zinf")

AHEAD = 2  # tensors on their way out while they still hold device memory, and tensors fetched before their turn


@dataclasses.dataclass(frozen=True)
class Home:
    """Where a kept tensor's bytes are away: [start, start + nbytes) of a space, in host memory or in the scratch file."""

    space: Space
    start: int
    nbytes: int
    region: torch.Tensor | None  # the host memory; None: NVMe


class Kept:
    """One range of bytes that calls keep. Made by Activations.keep."""

    def __init__(self, owner: Activations, t: torch.Tensor, number: int, nbytes: int, storage: StorageWeakRef):
        self.number, self.nbytes = number, nbytes
        self._owner = owner
        self._storage = storage  # while this lives, no other storage has the key under which this is known
        self._version = t._version
        self._align = t.data_ptr() % 64  # bytes: kernels may round differently for another alignment
        self._source: torch.Tensor | None = t.detach()  # shares version and bytes; None once they are away
        self._changed = False
        self.shared = False
        self.home: Home | None = None
        self.leaving: Job | None = None
        self.coming: tuple[torch.Tensor, Job] | None = None
        owner.hold(nbytes)

    def stay(self, t: torch.Tensor) -> None:
        """Another call keeps the same bytes: let them stay on the device."""
        self.shared = True
        if self._source is None:
            self._source = t.detach()
            self._owner.hold(self.nbytes)
        if self.leaving is None:
            self._give_home()

    def _give_home(self) -> None:
        home, self.home = self.home, None
        self._owner.bury(home, [self.coming[1]] if self.coming is not None else [])

    def retire(self) -> None:
        """Wait until the bytes are away, and let go of the tensor. See [Note: when a tensor may go]. Raises what the move raised."""
        job, self.leaving = self.leaving, None
        if job is None:
            return
        try:
            self._owner.settle(job, Verb.OFFLOAD)
        except BaseException:
            self._give_home()
            raise
        assert self._source is not None
        if self._source._version != self._version:
            self._changed = True
        if self.shared:
            self._give_home()
        else:
            self._source = None
            self._owner.hold(-self.nbytes)

    @property
    def away(self) -> bool:
        """Must it be brought before it can be read?"""
        return self._source is None and self.coming is None

    def start(self) -> None:
        """Start bringing the bytes to the device. No-op where they are, or are coming."""
        if self.away:
            buffer = self._owner.buffer(self.nbytes, self._align)
            self.coming = (buffer, self._owner.bring(self, buffer))

    def wait(self) -> torch.Tensor | None:
        """The bytes (uint8, flat) as they were at the call, on the device; None if they were changed in place since.

        Raises:
            OSError: the drive failed. A later call tries again.
        """
        if self._changed or (self._source is not None and self._source._version != self._version):
            return None
        if self.leaving is not None and self.leaving.over and self.leaving.error is not None:
            raise self.leaving.error  # it is still here, but the drive should not fail unheard
        if self._source is not None:
            return _bytes(self._source, self.nbytes)
        self.start()
        assert self.coming is not None
        (buffer, job), self.coming = self.coming, None
        self._owner.hold(-self.nbytes)  # from here on it is the recompute's
        self._owner.settle(job, Verb.FETCH)
        self._owner.owners.uses(buffer, "compute from")
        return buffer

    def __del__(self) -> None:  # in any thread
        jobs = [job for job in (self.leaving, self.coming[1] if self.coming is not None else None) if job is not None]
        self._owner.bury(self.home, jobs, self.nbytes * ((self._source is not None) + (self.coming is not None)))


class Activations:
    """All boundary activations of an engine. Called by the thread that computes.

    Args:
        region: host memory (uint8), None to keep nothing there.
        slots, scratch: None to keep nothing on NVMe.
    """

    def __init__(
        self,
        device: Device,
        trace: Trace,
        region: torch.Tensor | None = None,
        slots: Slots | None = None,
        scratch: Scratch | None = None,
        poison: bool = False,
        owners: Unwatched | None = None,
    ):
        self.device, self.trace, self.owners = device, trace, owners or Unwatched()
        self.slots, self.scratch = slots, scratch
        self._region, self._poison = region, poison
        self._host = Space(region.numel() if region is not None else 0)
        self._nvme = Space()
        self._pipeline = Pipeline("zinf-activations") if region is not None or scratch is not None else None
        self._known: weakref.WeakValueDictionary[tuple, Kept] = weakref.WeakValueDictionary()
        self._by_number: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()
        self._leaving: collections.deque[weakref.ref[Kept]] = collections.deque()
        self._dead: collections.deque[tuple[Home | None, list[Job], int]] = collections.deque()
        self._count = 0
        self._held = self._peak = 0
        self._told = False

    # -- keep -----------------------------------------------------------------------------------------------------------------

    def keep(self, t: torch.Tensor, mine: Sequence[Kept]) -> Kept | None:
        """Take over a tensor that a call keeps, beside `mine`, and start moving it; None for one that stays with the call."""
        if self._pipeline is None or not self._moves(t):
            return None
        self._bury()
        nbytes = _extent(t) * t.element_size()
        storage = StorageWeakRef(t.untyped_storage())
        key = (storage.cdata, t.data_ptr(), nbytes, t._version)
        kept = self._known.get(key)
        if kept is not None:
            if not any(kept is other for other in mine):
                kept.stay(t)
            return kept
        self._count += 1
        kept = self._known[key] = self._by_number[self._count] = Kept(self, t, self._count, nbytes, storage)
        kept.home = self._home(nbytes)
        if kept.home is not None:
            kept.leaving = self._pipeline.submit(Job(self._items(kept.home, _bytes(t, nbytes), True, self.device.mark()), "offload of an activation"))
            self._leaving.append(weakref.ref(kept))
            while len(self._leaving) > AHEAD:
                oldest = self._leaving.popleft()()
                if oldest is not None:
                    oldest.retire()
        return kept

    def _moves(self, t: torch.Tensor) -> bool:
        return (
            type(t) is torch.Tensor
            and t.layout is torch.strided
            and t.device == self.device.torch_device
            and not (t.is_leaf and t.requires_grad)
            and not (t.is_inference() or t.is_conj() or t.is_neg())
            and _extent(t) <= t.numel()
            and _extent(t) * t.element_size() >= PAGE
        )

    def _home(self, nbytes: int) -> Home | None:
        start = self._host.take(nbytes)
        if start is None and self._region is not None and self._dead:
            self._bury(wait=True)
            start = self._host.take(nbytes)
        if start is not None:
            return Home(self._host, start, nbytes, self._region)
        if self.scratch is None:
            self.trace.count("activations left on the device")
            if not self._told:
                log.info("activation_memory holds no more inputs of blocks: the others stay on the device")
            self._told = True
            return None
        start = self._nvme.take(nbytes)
        assert start is not None
        try:
            self.scratch.grow(self._nvme.end)
        except BaseException:
            self._nvme.give(start, nbytes)
            self._nvme.end = min(self._nvme.end, self.scratch.nbytes)
            raise
        return Home(self._nvme, start, nbytes, None)

    def _items(self, home: Home, tensor: torch.Tensor, out: bool, after: Event) -> Iterator[Item]:
        """What moves `tensor` (device, uint8) to its home, or back. `after`: compute is through with what that overwrites or reads."""
        self.trace.count("activation bytes out" if out else "activation bytes in", home.nbytes)
        if home.region is not None:
            yield _HostCopy(self, home.region[home.start : home.start + home.nbytes], tensor, out, after)
            return
        assert self.slots is not None
        for at in range(0, home.nbytes, self.slots.nbytes):
            yield _Piece(self, home.start + at, tensor[at : at + self.slots.nbytes], out, after)

    # -- bring ----------------------------------------------------------------------------------------------------------------

    def buffer(self, nbytes: int, align: int) -> torch.Tensor:
        """Device memory for bytes that come back, from torch's allocator: it lives as long as the recompute needs it."""
        whole = self.device.empty(nbytes + align)
        if self._poison:
            self.device.poison(whole)
        self.hold(nbytes)
        return whole[align:]

    def bring(self, kept: Kept, buffer: torch.Tensor) -> Job:
        """Start filling `buffer` with what is away."""
        assert kept.home is not None and self._pipeline is not None
        return self._pipeline.submit(Job(self._items(kept.home, buffer, False, self.device.mark()), "fetch of an activation"))

    def settle(self, job: Job, verb: Verb) -> None:
        """Wait for a move; raises what it raised."""
        assert self._pipeline is not None
        try:
            with self.trace.wait(verb):
                job.wait_over()
        except BaseException:
            self._pipeline.error = None  # it is told now; its traceback would keep the graph
            raise

    def ahead(self, number: int) -> None:
        """Backward has come to the tensor of that number: have those before it here, or coming."""
        self._bury()
        found = 0
        for before in range(number - 1, max(number - 64, 0), -1):
            kept = self._by_number.get(before)
            if kept is not None and not kept.shared:
                kept.start()
                found += 1
            if found == AHEAD:
                return

    # -- what is held ---------------------------------------------------------------------------------------------------------

    def hold(self, nbytes: int) -> None:
        """Count bytes of device memory."""
        self._held += nbytes
        self._peak = max(self._peak, self._held)

    def bury(self, home: Home | None, jobs: list[Job], nbytes: int = 0) -> None:
        """Nobody needs these any more. In any thread; they are free from the next `keep` after the jobs on."""
        self._dead.append((home, jobs, nbytes))

    def _bury(self, wait: bool = False) -> None:
        for _ in range(len(self._dead)):
            home, jobs, nbytes = self._dead.popleft()
            for job in jobs if wait else ():
                with contextlib.suppress(Exception):  # whoever needed the bytes is gone
                    job.wait_over()
            if not all(job.over for job in jobs):
                self._dead.append((home, jobs, nbytes))
                continue
            self._held -= nbytes
            if home is not None:
                if self._poison and home.region is not None:
                    home.region[home.start : home.start + home.nbytes].fill_(0xFF)
                home.space.give(home.start, home.nbytes)

    def report(self) -> dict[str, int]:
        """Bytes now, and the most there were: on the device (kept or fetched ahead), in host memory, on NVMe."""
        self._bury()
        return {
            "device": self._held,
            "device_peak": self._peak,
            "host": self._host.used,
            "host_peak": self._host.end,
            "nvme": self._nvme.used,
            "nvme_peak": self._nvme.end,
        }

    def close(self) -> None:
        """Wait for what moves, stop, give the scratch back. Idempotent."""
        if self._pipeline is not None:
            self._pipeline.close()
        if self.scratch is not None:
            self.scratch.close()


class _HostCopy:
    """All of a tensor between device and host memory; see pipeline.Item."""

    def __init__(self, owner: Activations, host: torch.Tensor, tensor: torch.Tensor, out: bool, after: Event):
        self._owner, self._host, self._tensor, self._out, self._after = owner, host, tensor, out, after
        self._event: Event = DONE

    def start(self) -> bool:
        return True

    def work(self) -> None:
        device, verb = self._owner.device, Verb.OFFLOAD if self._out else Verb.UPLOAD
        if self._out:
            self._event = device.offload(self._tensor, self._host, after=self._after)
        else:
            self._event = device.upload(self._host, self._tensor, self._after)
        self._owner.trace.copying(verb, -1, self._tensor.numel(), self._event, "activation")

    def finish(self, timeout: float | None) -> bool:
        if not happened([self._event], timeout):
            return False
        self._event = DONE
        return True

    def abandon(self) -> None:
        settle([self._event])


class _Piece:
    """What one slot holds of a tensor, between device and NVMe; see pipeline.Item."""

    def __init__(self, owner: Activations, start: int, tensor: torch.Tensor, out: bool, after: Event):
        self._owner, self._start, self._tensor, self._out, self._after = owner, start, tensor, out, after
        self._slot: Slot | None = None
        self._moving: list = []  # tickets; on the way back, once they have landed, the event of the upload

    def start(self) -> bool:
        assert self._owner.slots is not None and self._owner.scratch is not None
        self._slot = self._owner.slots.try_acquire()
        if self._slot is None:
            return False
        if not self._out:
            self._moving = list(self._owner.scratch.read(self._start, self._pages()))
        return True

    def _pages(self) -> torch.Tensor:
        assert self._slot is not None
        return self._slot.buffer[: round_up(self._tensor.numel(), PAGE)]

    def work(self) -> None:
        device, trace = self._owner.device, self._owner.trace
        host = self._pages()[: self._tensor.numel()]
        if self._out:
            with trace.span(Verb.OFFLOAD, -1, "activation", host.numel()):
                device.offload(self._tensor, host, after=self._after).wait()
            assert self._owner.scratch is not None
            self._moving = list(self._owner.scratch.write(self._start, self._pages()))
            return
        with trace.span(Verb.FETCH, -1, "activation"):
            for ticket in self._moving:
                ticket.wait()
        self._moving = [device.upload(host, self._tensor, self._after)]
        trace.copying(Verb.UPLOAD, -1, host.numel(), self._moving[0], "activation")

    def finish(self, timeout: float | None) -> bool:
        if not (landed if self._out else happened)(self._moving, timeout):
            return False
        self._release()
        return True

    def abandon(self) -> None:
        settle(self._moving)
        self._release()

    def _release(self) -> None:
        slot, self._slot = self._slot, None
        self._moving = []
        if slot is not None:
            slot.release()


def _extent(t: torch.Tensor) -> int:
    """Elements from the first to the last of `t` in memory."""
    return 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0


def _bytes(t: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The memory from the first element of `t` on, flat."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage(), t.storage_offset() * t.element_size(), (nbytes,), (1,))


class Away:
    """One kept tensor as one call sees it: bytes, and how to look at them."""

    def __init__(self, kept: Kept, t: torch.Tensor):
        self.kept = kept
        self._meta = (t.dtype, t.shape, t.stride(), t.requires_grad)

    def get(self, name: str) -> torch.Tensor:
        """The tensor, detached, on the device. Raises EngineError if it was changed in place since the call; OSError."""
        found = self.kept.wait()
        if found is None:
            raise EngineError(f"an input of {name} was changed in place before its recompute: write x = x + y, or set recompute=False")
        dtype, shape, stride, needs = self._meta
        start = found.storage_offset() // dtype.itemsize
        return torch.empty(0, dtype=dtype, device=found.device).set_(found.untyped_storage(), start, shape, stride).requires_grad_(needs)
