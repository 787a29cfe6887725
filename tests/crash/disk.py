"""What a power loss may leave of a disk, from a record of everything that was sent to it.

    ("w", path, offset, bytes[, number])   a write was submitted: from now on it may be on the disk, in part or whole
    ("sync", path[, numbers])              an fdatasync of a file came back: the writes that were complete when it began are durable, all if
                                           no numbers are given; or an fsync of a directory: its names are
    ("new", path, bytes)                   a file was made or made anew, and written
    ("rename", source, target)

Between two syncs nothing is promised: each write is there, or not, or torn at 512 bytes, on its own. `Recorder` writes the record
under a real I/O engine, `Journal` keeps it in a file that survives the process.
"""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zinf.tiers import manifest

SECTOR = 512

Event = tuple
Sink = Callable[[Event], None]


@dataclasses.dataclass
class Inode:
    """A file: what is durable, and the writes (offset, data, number) since then."""

    durable: bytes
    unsynced: list[tuple[int, bytes, int]] = dataclasses.field(default_factory=list)

    def sync(self, numbers: frozenset[int] | None = None) -> None:
        durable, left = bytearray(self.durable), []
        for offset, data, number in self.unsynced:
            if numbers is not None and number not in numbers:
                left.append((offset, data, number))
                continue
            if len(durable) < offset:
                durable.extend(bytes(offset - len(durable)))
            durable[offset : offset + len(data)] = data
        self.durable, self.unsynced = bytes(durable), left

    def after_crash(self, rng: random.Random) -> bytes:
        if not self.unsynced:
            return self.durable
        survivor = Inode(self.durable)
        for offset, data, _ in self.unsynced:
            fate = rng.choice(("dropped", "torn", "whole"))
            if fate == "whole":
                survivor.unsynced.append((offset, data, 0))
            elif fate == "torn":
                survivor.unsynced.extend((offset + at, data[at : at + SECTOR], 0) for at in range(0, len(data), SECTOR) if rng.random() < 0.5)
        survivor.sync()
        return survivor.durable


class Disk:
    """Replays events. Names are as durable as their directory: a rename counts for sure only after a sync of it."""

    def __init__(self, roots: list[str]) -> None:
        self.renamed: list[tuple[str, str]] = []  # not durable yet
        self.names: dict[str, Inode] = {}  # durable
        for root in roots:
            for name in os.listdir(root):
                path = os.path.join(root, name)
                if os.path.isfile(path):
                    self.names[path] = Inode(Path(path).read_bytes())
        self.now = dict(self.names)

    def play(self, event: Event) -> None:
        kind, path, *rest = event
        if kind == "w":
            self.now[path].unsynced.append((rest[0], rest[1], rest[2] if len(rest) > 2 else 0))
        elif kind == "new":
            self.now[path] = Inode(b"", [(0, rest[0], 0)])
            self.names[path] = self.now[path]  # the name of a temporary file may or may not be there: nobody may care
        elif kind == "sync" and path in self.now:
            self.now[path].sync(rest[0] if rest else None)
        elif kind == "sync":  # a directory
            self.names = dict(self.now)
            self.renamed = []
        elif kind == "rename":
            self.now[rest[0]] = self.now.pop(path)
            self.renamed.append((path, rest[0]))

    def after_crash(self, rng: random.Random) -> dict[str, bytes]:
        names = self.now if self.renamed and rng.random() < 0.5 else self.names
        return {path: inode.after_crash(rng) for path, inode in names.items()}


def watch_manifest(sink: Sink, replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Record how manifests are replaced. fsync is seen at the system call: one that is left out is missed."""
    write_file, rename, fsync = manifest.write_file, os.rename, os.fsync

    def new(path: str, data: bytes) -> None:
        sink(("new", path, data))
        write_file(path, data)

    def sync(fd: int) -> None:
        fsync(fd)
        sink(("sync", os.readlink(f"/proc/self/fd/{fd}")))

    def move(source: str, target: str) -> None:
        sink(("rename", source, target))
        rename(source, target)

    replace(manifest, "write_file", new)
    replace(os, "fsync", sync)
    replace(os, "rename", move)


class Recorder:
    """An I/O engine that is another one, and records its writes and fdatasyncs. Everything but the methods here is the inner engine's."""

    def __init__(self, inner: Any, sink: Sink) -> None:
        self.inner, self.name, self._sink = inner, inner.name, sink
        self._lock = threading.Lock()
        self._count = 0
        self._flight: dict[str, dict[int, Any]] = {}  # path -> number -> ticket of each write that no sync has covered

    def submit(self, ops: Any, owner: Any = None) -> list[Any]:
        with self._lock:
            numbers = []
            for kind, file, offset, address, length in ops:
                self._count += 1
                numbers.append(self._count)
                if kind == "w":
                    self._sink(("w", file.path, offset, ctypes.string_at(address, length), self._count))
            tickets = self.inner.submit(ops, owner)
            for (kind, file, *_), number, ticket in zip(ops, numbers, tickets, strict=True):
                if kind == "w":
                    self._flight.setdefault(file.path, {})[number] = ticket
        return tickets

    def datasync(self, file: Any) -> Any:
        with self._lock:
            complete = frozenset(number for number, ticket in self._flight.get(file.path, {}).items() if ticket.done())
        return _Sync(self, self.inner.datasync(file), file.path, complete)

    def _synced(self, path: str, numbers: frozenset[int]) -> None:
        with self._lock:
            for number in numbers:
                self._flight[path].pop(number, None)
            self._sink(("sync", path, numbers))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Sync:
    def __init__(self, owner: Recorder, inner: Any, path: str, complete: frozenset[int]) -> None:
        self._owner, self._inner, self._path, self._complete = owner, inner, path, complete
        self._told = False

    def wait(self, timeout: float | None = None) -> None:
        self._inner.wait(timeout)
        if not self._told:
            self._told = True
            self._owner._synced(self._path, self._complete)

    def done(self) -> bool:
        return self._inner.done()


class Journal:
    """A record in a file, each event whole or not there: what a killed process leaves."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def __call__(self, event: Event) -> None:
        data = repr(tuple(set(x) if isinstance(x, frozenset) else x for x in event)).encode()
        os.write(self._fd, len(data).to_bytes(8, "little") + data)

    @staticmethod
    def read(path: str) -> Iterator[Event]:
        """The events. The last may be torn: it had not been sent to the disk yet, or may as well not have been."""
        with open(path, "rb") as f:
            while len(head := f.read(8)) == 8:
                data = f.read(int.from_bytes(head, "little"))
                if len(data) < int.from_bytes(head, "little"):
                    return
                yield tuple(frozenset(x) if isinstance(x, set) else x for x in ast.literal_eval(data.decode()))
