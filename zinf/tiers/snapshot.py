"""The committed step of a store, readable while training goes on.

[Note: how a snapshot is kept] A step writes the versions that are not committed, so the committed ones stay intact for one more
step (in a store with one version, until the next step). A snapshot puts a Hold on each of its chunks, which to the store looks
like a read in flight: a write to that place waits for it. Reading a chunk lets its Hold go. So a step waits only where it has
caught up with whoever copies, and only for that one chunk, which then comes next.

Whoever holds a snapshot must not need anything that a waiting step holds (a slot, say) in order to read on: have it before.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from zinf.errors import StoreError
from zinf.layout import Key
from zinf.tiers.chunk import Entry, Ticket
from zinf.tiers.manifest import UNWRITTEN

if TYPE_CHECKING:
    from zinf import aio
    from zinf.tiers.manifest import Manifest
    from zinf.tiers.nvme import Store


class Hold:
    """Stands in `Entry.reads` for a read that is still to come."""

    __slots__ = ("_over", "_snapshot", "key", "version")
    version: int

    def __init__(self, snapshot: Snapshot, key: Key, version: int) -> None:
        self._snapshot, self.key, self.version = snapshot, key, version
        self._over = False

    def done(self) -> bool:
        return self._over

    def error(self) -> None:
        """Wait until the chunk has been read, and have it read next."""
        with self._snapshot._changed:
            if not self._over:
                self._snapshot._wanted.append(self.key)
                self._snapshot._changed.wait_for(self.done)


class Snapshot:
    """See [Note: how a snapshot is kept]. Made by Store.snapshot; close() lets everything go.

    Attributes:
        committed: the manifest of the step.
    """

    def __init__(self, store: Store, committed: Manifest, entries: dict[Key, Entry]) -> None:
        """Not for users: under the store's lock, with no write to a committed version in flight."""
        self._store, self._entries, self.committed = store, entries, committed
        self._changed = threading.Condition()  # a Hold was let go; writers wait
        self._wanted: deque[Key] = deque()  # what writers wait for
        self._holds: dict[Key, Hold] = {}
        for key, entry in entries.items():
            if self.written(key) and not entry.frozen:
                self._holds[key] = hold = Hold(self, key, committed.versions[entry.index])
                entry.reads.append(hold)

    def written(self, key: Key) -> bool:
        """False for a chunk that reads as zeros."""
        return self.committed.versions[self._entries[key].index] != UNWRITTEN

    def digest(self, key: Key) -> int:
        """The checksum of the chunk's bytes, if it is written."""
        return self.committed.sums[self._entries[key].index]

    def place(self, key: Key) -> tuple[aio.File, int, int]:
        """(file, offset, length) of a chunk that is written."""
        entry = self._entries[key]
        return entry.file, entry.offsets[self.committed.versions[entry.index]], entry.length

    def keys(self) -> Iterator[Key]:
        """Every chunk that is written, once, in the order of the store; but first those that a step waits for."""
        given: set[Key] = set()
        for key in self._entries:
            while self._wanted:
                wanted = self._wanted.popleft()
                if wanted not in given:
                    given.add(wanted)
                    yield wanted
            if self.written(key) and key not in given:
                given.add(key)
                yield key

    def read(self, key: Key, tensor: torch.Tensor, at: int = 0) -> Ticket:
        """Start reading a chunk, or from byte `at` of it what fits `tensor`; the ticket of a whole chunk compares its checksum.

        Args:
            tensor: uint8, page-aligned, a multiple of a page long.

        Raises:
            StoreError: the store was closed.
        """
        entry = self._entries[key]
        version = self.committed.versions[entry.index]
        whole = tensor.numel() == entry.length
        with self._store._changed:
            self._store._check_open()
            op = ("r", entry.file, entry.offsets[version] + at, tensor.data_ptr(), tensor.numel())
            started = self._store._io.submit([op], [tensor])[0]
            checked = (tensor, self.digest(key)) if whole else (None, None)
            ticket = Ticket(self._store.model, entry, version, started, *checked)
            entry.reads.append(ticket)
        if whole:
            self.let_go(key)
        return ticket

    def let_go(self, key: Key) -> None:
        """The chunk may be overwritten. No-op if it may already."""
        hold = self._holds.pop(key, None)
        if hold is not None:
            with self._changed:
                hold._over = True
                self._changed.notify_all()

    def close(self) -> None:
        """Let every chunk go. Idempotent."""
        for key in list(self._holds):
            self.let_go(key)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def take(store: Store) -> Snapshot:
    """See Store.snapshot."""
    with store._alone(writing=False), store._changed:
        if store.step < 0 or not store._committed.clean:
            raise StoreError(f"the store at {store.paths[0]} has no whole committed step to take a snapshot of: commit first")
        return Snapshot(store, store._committed, store._entries)
