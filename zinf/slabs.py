"""The slabs: few equal device buffers in each size class, handed from shard to shard as a step goes through the model.

Taking a slab is the one place where a shard is evicted. A holder that computes is never evicted, nor a pinned one: something
is still moving in or out of its slab. The thread that computes takes slabs; pins may be dropped by any thread.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from zinf.errors import BudgetError
from zinf.owners import Unwatched
from zinf.placement import SlabClass, human
from zinf.schedule import Cycle, victim
from zinf.tiers.device import Device
from zinf.trace import Trace, Verb

if TYPE_CHECKING:
    from zinf.shard import Shard


class Slab:
    """One flat device buffer (uint8) and who holds it."""

    __slots__ = ("buffer", "holder", "index")

    def __init__(self, buffer: torch.Tensor, index: int):
        self.buffer, self.index = buffer, index
        self.holder: Shard | None = None


class Slabs:
    """All slabs of a device, by size class."""

    def __init__(self, classes: Sequence[SlabClass], device: Device, trace: Trace, owners: Unwatched, poison: bool = False):
        self.lock = threading.RLock()  # guards pins and holders; entered by itself, see pipeline.Pipeline
        self.cond = threading.Condition(self.lock)
        self._device, self._trace, self._owners, self._poison = device, trace, owners, poison
        self._classes = classes
        self._class_of: dict[int, int] = {s: k for k, c in enumerate(classes) for s in c.members}
        self._index = itertools.count()
        self._slabs = [[Slab(device.alloc(c.nbytes, f"slab of {human(c.nbytes)}"), next(self._index)) for _ in range(c.count)] for c in classes]

    def take(self, shard: Shard, cycle: Cycle, before: int | None = None) -> bool:
        """Give `shard` a slab, evicting another holder if need be.

        With `before` (a prefetch) it only takes what is free or is used later than the shard `before`, and returns False
        otherwise; without, it waits for pins to drop.

        Raises:
            BudgetError: every slab of the class is held by a computation that will not end before this one.
        """
        slabs = self._slabs[self._class_of[shard.index]]
        with self.lock:
            while True:
                free = next((slab for slab in slabs if slab.holder is None), None)
                if free is None:
                    free = self._evict_one(slabs, cycle, before)
                if free is not None:
                    self._owners.lend(free.buffer, shard.name)
                    free.holder, shard.slab, shard.valid = shard, free, False
                    return True
                if before is not None:
                    return False
                if all(slab.holder is not None and slab.holder.computing for slab in slabs):
                    names = ", ".join(slab.holder.name for slab in slabs if slab.holder)
                    raise BudgetError(
                        f"{shard.name} needs a slab of {human(slabs[0].buffer.numel())}, and all {len(slabs)} of that size are computing ({names}): "
                        "raise device_memory"
                    )
                with self._trace.wait(Verb.FLUSH):
                    self.cond.wait()

    def _evict_one(self, slabs: list[Slab], cycle: Cycle, before: int | None) -> Slab | None:
        """Evict the holder whose use is farthest away. None if that one is still moving: the second best is needed sooner."""
        holders = {slab.holder.index: slab for slab in slabs if slab.holder is not None and not slab.holder.computing}
        out = victim(holders, cycle, before)
        if out is None or holders[out].holder.pins:  # type: ignore[union-attr]
            return None
        self._evict(holders[out])
        return holders[out]

    def _evict(self, slab: Slab) -> None:
        shard = slab.holder
        assert shard is not None
        with self._trace.span(Verb.EVICT, shard.index):
            if self._poison:
                self._device.poison(slab.buffer)
            self._owners.give_back(slab.buffer, shard.name)
            slab.holder = shard.slab = None
            shard.valid = False

    def evict_all(self) -> None:
        """Take every slab from its holder (after a rollback). No one may be computing."""
        with self.lock:
            for slab in (slab for slabs in self._slabs for slab in slabs):
                while slab.holder is not None and slab.holder.pins:  # computations there are none
                    self.cond.wait()
                if slab.holder is not None:
                    self._evict(slab)

    def grow(self, room: int) -> int:
        """Make slabs for more shards, as far as they fit into `room` bytes of device memory; returns the bytes of those that were made."""
        made = 0
        for c, slabs in zip(self._classes, self._slabs, strict=True):
            while len(slabs) < len(c.members) and made + c.nbytes <= room:
                buffer = self._device.extend(c.nbytes, f"slab of {human(c.nbytes)}")
                if buffer is None:
                    return made
                with self.lock:
                    slabs.append(Slab(buffer, next(self._index)))
                made += c.nbytes
        return made

    def pin(self, shard: Shard) -> None:
        """Keep the shard's slab until the matching `unpin`."""
        with self.lock:
            shard.pins += 1

    def unpin(self, shard: Shard) -> None:
        with self.lock:
            shard.pins -= 1
            if not shard.pins:
                self.cond.notify_all()
