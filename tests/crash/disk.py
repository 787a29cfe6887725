"""What a power loss may leave of a disk, from a record of everything that was sent to it.

    ("w", path, offset, bytes[, number])   a write was submitted: from now on it may be on the disk, in part or whole
    ("cut", path, length)                  a file was truncated, with the same promise
    ("sync", path[, numbers])              an fdatasync of a file came back: the writes that were complete when it began are durable, all if
                                           no numbers are given; or an fsync of a directory: its names are
    ("new", path, bytes)                   a file was made or made anew, and written
    ("create", path)                       a file was made
    ("rename", source, target)
    ("unlink", path)

Between two syncs nothing is promised: each write is there, or not, or torn at 512 bytes, on its own, and so is each change of a name. `Recorder`
writes the record under a real I/O engine, `watch_files` under os, `Journal` keeps it in a file that survives the process.
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
    """A file: what is durable, and the writes (offset, data, number) since then; data is None where it was cut at the offset."""

    durable: bytes
    unsynced: list[tuple[int, bytes | None, int]] = dataclasses.field(default_factory=list)

    def sync(self, numbers: frozenset[int] | None = None) -> None:
        durable, left = bytearray(self.durable), []
        for offset, data, number in self.unsynced:
            if numbers is not None and number not in numbers:
                left.append((offset, data, number))
                continue
            if data is None:
                del durable[offset:]
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
            if fate == "whole" or (fate == "torn" and data is None):
                survivor.unsynced.append((offset, data, 0))
            elif fate == "torn" and data is not None:
                survivor.unsynced.extend((offset + at, data[at : at + SECTOR], 0) for at in range(0, len(data), SECTOR) if rng.random() < 0.5)
        survivor.sync()
        return survivor.durable


Change = Callable[[dict[str, Inode]], object]  # of names


class Disk:
    """Replays the events below `roots`. Names are as durable as their directory: a change of one counts for sure only after a sync of it."""

    def __init__(self, roots: list[str]) -> None:
        self.roots = tuple(os.path.join(root, "") for root in roots)
        self.changes: list[tuple[str, Change]] = []  # (directory, change) that are not durable yet
        self.names: dict[str, Inode] = {}  # durable
        for path in (os.path.join(folder, name) for root in roots for folder, _, names in os.walk(root) for name in names):
            self.names[path] = Inode(Path(path).read_bytes())
        self.now = dict(self.names)

    def play(self, event: Event) -> None:
        kind, path, *rest = event
        if not os.path.join(path, "").startswith(self.roots):
            return
        if kind in ("w", "cut"):
            if path not in self.now:
                return  # it has lost its name: it is a scratch file
            self.now[path].unsynced.append((rest[0], rest[1] if kind == "w" else None, rest[2] if len(rest) > 2 else 0))
        elif kind in ("new", "create"):
            made = Inode(b"", [(0, rest[0], 0)] if rest else [])
            self._change(path, lambda names: names.__setitem__(path, made))
        elif kind == "rename":
            moved, target = self.now[path], rest[0]
            self._change(path, lambda names: (names.pop(path, None), names.__setitem__(target, moved)))
        elif kind == "unlink":
            self._change(path, lambda names: names.pop(path, None))
        elif kind == "sync" and path in self.now:
            self.now[path].sync(rest[0] if rest else None)
        elif kind == "sync":  # a directory
            for directory, change in self.changes:
                if directory == path:
                    change(self.names)
            self.changes = [(directory, change) for directory, change in self.changes if directory != path]

    def _change(self, path: str, change: Change) -> None:
        change(self.now)
        self.changes.append((os.path.dirname(path), change))

    def after_crash(self, rng: random.Random) -> dict[str, bytes]:
        names, first = dict(self.names), rng.choice((0.0, 0.5, 1.0))
        for _, change in self.changes:
            if rng.random() < first:
                change(names)
        return {path: inode.after_crash(rng) for path, inode in names.items()}

    def crash(self, rng: random.Random) -> None:
        """Make the files below the roots what they may be after a crash."""
        files = self.after_crash(rng)
        for path in [os.path.join(folder, name) for root in self.roots for folder, _, names in os.walk(root) for name in names]:
            if path not in files:
                os.unlink(path)
        for path, data in files.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            Path(path).write_bytes(data)


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


def watch_files(sink: Sink, replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Record what is done to files through os: made, written, cut, synced, renamed, removed. And how manifests are replaced."""
    watch_manifest(sink, replace)
    opened, pwrite, allocate, cut, unlink, move = os.open, os.pwrite, os.posix_fallocate, os.ftruncate, os.unlink, os.replace
    inside = threading.local()  # manifest.write_file is recorded as a whole

    def name(fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")

    def watched_open(path: Any, flags: int, *args: Any, **options: Any) -> int:
        there = os.path.lexists(path)
        fd = opened(path, flags, *args, **options)
        if flags & os.O_CREAT and not there and not getattr(inside, "manifest", False):
            sink(("create", os.path.abspath(os.fspath(path))))
        elif there and flags & os.O_TRUNC and not getattr(inside, "manifest", False):
            sink(("cut", name(fd), 0))
        return fd

    def watched_write(fd: int, data: Any, offset: int) -> int:
        done = pwrite(fd, data, offset)
        sink(("w", name(fd), offset, bytes(data)[:done]))
        return done

    def watched_allocate(fd: int, offset: int, length: int) -> None:
        allocate(fd, offset, length)
        if length:
            sink(("w", name(fd), offset + length - 1, b"\0"))

    def watched_cut(fd: int, length: int) -> None:
        cut(fd, length)
        sink(("cut", name(fd), length))

    def watched_unlink(path: Any, *args: Any, **options: Any) -> None:
        unlink(path, *args, **options)
        sink(("unlink", os.path.abspath(os.fspath(path))))

    def watched_replace(source: Any, target: Any) -> None:
        sink(("rename", os.path.abspath(source), os.path.abspath(target)))
        move(source, target)

    write_file = manifest.write_file

    def whole(path: str, data: bytes) -> None:
        inside.manifest = True
        try:
            write_file(path, data)
        finally:
            inside.manifest = False

    for owner, attribute, function in (
        (manifest, "write_file", whole), (os, "open", watched_open), (os, "pwrite", watched_write), (os, "posix_fallocate", watched_allocate),
        (os, "ftruncate", watched_cut), (os, "unlink", watched_unlink), (os, "replace", watched_replace),
    ):  # fmt: skip
        replace(owner, attribute, function)


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
