"""All records of a model, wherever they live: in host memory, or in the store on NVMe.

A record that lives in host memory has a *home* there, laid out as on NVMe; the store has it as of the last commit, and
`flush` brings the store up to date. Everything that reads or writes whole chunks (import, export, save, the step's staging)
goes through `read` and `write` here and need not know which of the two it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from zinf import layout
from zinf.layout import STATE, WEIGHTS, Key
from zinf.placement import Plan, Tier
from zinf.tiers.device import DONE
from zinf.tiers.host import Arena
from zinf.tiers.nvme import Store

Items = Sequence[tuple[Key, torch.Tensor]]


class Records:
    """Homes and store of one model. Not for concurrent use of the same record."""

    def __init__(self, model: layout.Model, plan: Plan, arena: Arena | None, store: Store | None, direct: bool):
        self.model, self.store = model, store
        self._homes: dict[Key, torch.Tensor] = {}
        self._dirty: set[Key] = set()
        self._whole: dict[int, torch.Tensor] = {}  # shard -> all of its weights, contiguous
        for s, shard in enumerate(model.shards):
            if arena is not None and (plan.weights[s] is Tier.HOST or (plan.weights[s] is Tier.DEVICE and not direct)):
                self.adopt_weights(s, arena.carve(shard.weights_nbytes, f"weights of {shard.name}"))
            if arena is not None and plan.state[s] is Tier.HOST and shard.has_state:
                self._adopt_state(s, arena.carve(shard.state_nbytes, f"state of {shard.name}"))

    def adopt_weights(self, s: int, buffer: torch.Tensor) -> None:
        """Let `buffer` (uint8, the bytes of a slab) be the home of a shard's weights."""
        shard = self.model.shards[s]
        self._whole[s] = buffer[: shard.weights_nbytes]
        for r, run in enumerate(shard.runs):
            base, size = shard.run_offset(r), run.mode.weights_bytes
            for chunk in self.model.chunks(s, r):
                start = base + chunk.start * size
                self._homes[WEIGHTS, s, r, chunk.index] = buffer[start : start + chunk.length * size]

    def _adopt_state(self, s: int, buffer: torch.Tensor) -> None:
        at = 0
        for r, run in enumerate(self.model.shards[s].runs):
            for chunk in self.model.chunks(s, r) if run.has_state else ():
                nbytes = chunk.length * run.mode.state_bytes
                self._homes[STATE, s, r, chunk.index] = buffer[at : at + nbytes].zero_()
                at += nbytes

    def home(self, key: Key) -> torch.Tensor | None:
        """The chunk's bytes in host memory, if it lives there."""
        return self._homes.get(key)

    def weights(self, s: int) -> torch.Tensor | None:
        """All weights of a shard in host memory, if they live there."""
        return self._whole.get(s)

    def touch(self, key: Key) -> None:
        """The home of `key` was changed."""
        self._dirty.add(key)

    def read(self, items: Items) -> list:
        """Bring chunks into buffers of exactly their size; tickets as of Store.read."""

        def from_home(key: Key, home: torch.Tensor, buffer: torch.Tensor) -> None:
            buffer.copy_(home)

        return self._each(items, from_home, lambda remote: self._need_store().read(remote))

    def write(self, items: Items) -> list:
        """Take chunks from buffers; tickets as of Store.write. The inverse of read."""

        def to_home(key: Key, home: torch.Tensor, buffer: torch.Tensor) -> None:
            home.copy_(buffer)
            self._dirty.add(key)

        return self._each(items, to_home, lambda remote: self._need_store().write(remote))

    def _each(self, items: Items, local: Callable[[Key, torch.Tensor, torch.Tensor], None], transfer: Callable[[Items], list]) -> list:
        """Serve the items that have a home by `local`, the others by one `transfer`; a ticket for each, in order."""
        tickets: list = [DONE] * len(items)
        remote = []
        for i, (key, buffer) in enumerate(items):
            home = self._homes.get(key)
            if home is None:
                remote.append(i)
            else:
                local(key, home, buffer)
        if remote:
            for i, ticket in zip(remote, transfer([items[i] for i in remote]), strict=True):
                tickets[i] = ticket
        return tickets

    def flush(self) -> None:
        """Write every home that changed since the last flush to the store. Returns when the writes are submitted."""
        if self.store is not None and self._dirty:
            keys = sorted(self._dirty)
            self.store.write([(key, self._homes[key]) for key in keys])
            self._dirty.clear()

    def lost(self) -> list[Key]:
        """Chunks that a failed write has lost since the last commit. Those that have a home are not lost: they will be flushed again."""
        lost = self.store.lost() if self.store is not None else []
        self._dirty.update(key for key in lost if key in self._homes)
        return [key for key in lost if key not in self._homes]

    def load_homes(self, runs: Collection[tuple[int, int]] | None = None) -> None:
        """Fill every home, or those of these (shard, run)s, from the store (after open or rollback)."""
        if self.store is not None:
            for ticket in self.store.read([(key, home) for key, home in self._homes.items() if runs is None or key[1:3] in runs]):
                ticket.wait()
            self._dirty.clear()

    def dirty_all(self, apart: Collection[tuple[int, int]] = ()) -> None:
        """Every home is newer than the store (after an import into homes), but those of the (shard, run)s `apart`."""
        self._dirty.update(key for key in self._homes if key[1:3] not in apart)

    def _need_store(self) -> Store:
        if self.store is None:
            raise RuntimeError("a record has neither a home in host memory nor a store: the plan and the records disagree")
        return self.store
