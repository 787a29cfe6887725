"""save: a committed step -> a checkpoint of its own, in the fewest bytes that the filesystem allows.

    reflink     all chunks share their blocks with the store's files until those are overwritten (btrfs, xfs): nothing is copied
    hard link   frozen chunks are never overwritten, so an earlier checkpoint's file of them, or the store's, can be this one's
    stream      everything else is copied through a few buffers, its checksums compared on the way

The checkpoint is a store with one path and one version of each chunk (layout.place), so whatever reads a store reads it. See
[Note: a tag is whole or not there] in tags.py.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from zinf import layout
from zinf.checkpoint import tags
from zinf.checkpoint.staging import Slot, Stream
from zinf.layout import Key
from zinf.tiers import directory, manifest
from zinf.tiers.chunk import checksum
from zinf.tiers.manifest import UNWRITTEN, Manifest
from zinf.tiers.snapshot import Snapshot

if TYPE_CHECKING:
    from zinf import aio

FROZEN = "frozen"  # the file of frozen chunks
_SLACK = 8 << 20  # bytes beside the chunks: manifest, directory blocks
_FICLONERANGE = 0x4020940D  # _IOW(0x94, 13, struct file_clone_range)
_IN_FLIGHT = 8  # chunks, where they are written from where they live


class Stopped(Exception):
    """The engine closes without waiting for the copy."""


class Target:
    """A checkpoint that is being written, until `publish` under another name. Leaving the `with` block removes what is not published."""

    def __init__(self, folder: str, tag: str, model: layout.Model, io: aio.IoEngine) -> None:
        """Makes the directory and takes its lock; moves no byte."""
        self.folder, self.tag, self.model = folder, tag, model
        self.path = tags.partial(folder, tag)
        self._io = io
        self._placement = layout.place(model, (1.0,), 1)
        self._index = {key: i for i, key in enumerate(self._placement.places)}
        self._versions = bytearray([UNWRITTEN]) * len(self._index)
        self._sums = array.array("Q", bytes(8 * len(self._index)))
        self._files: dict[str, aio.File] = {}
        self._uuid = uuid.uuid4().hex
        os.makedirs(folder, exist_ok=True)
        tags.check_free(folder, tag)
        directory.make(self.path)
        self._lock: directory.Lock | None = None
        try:
            self._lock = directory.Lock([self.path])
            manifest.publish(self.path, manifest.MEMBER, manifest.Member(self._uuid, 0, 1).encode())  # from here on, what a crash leaves is recognised
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def create(self, links: Sequence[str], frozen: Mapping[Key, int]) -> bool:
        """Make the files, all their bytes allocated. True if one of `links` could be the file of frozen chunks, which then is complete.

        Args:
            links: files with the frozen chunks of this model.
            frozen: the frozen chunks' checksums.

        Raises:
            OSError: ENOSPC with the numbers if they do not fit.
        """
        sizes = self._placement.sizes[0]
        linked = FROZEN in sizes and any(self._link(path) for path in links)
        self.check_space(sum(n for name, n in sizes.items() if not (linked and name == FROZEN)))
        for name, nbytes in sizes.items():
            if not (linked and name == FROZEN):
                directory.allocate(os.path.join(self.path, name), nbytes)
            self._files[name] = self._io.open(os.path.join(self.path, name), write=not (linked and name == FROZEN))
        if linked:
            self._note(frozen)
        return linked

    def clone(self, snapshot: Snapshot) -> bool:
        """Make the files out of the store's blocks. False, and nothing is there, where the filesystem cannot."""
        sizes = self._placement.sizes[0]
        self.check_space(sum(sizes.values()))  # the store's files were to never need a block more, and now each overwritten one does
        try:
            with contextlib.ExitStack() as stack:
                fds = {}
                for name, nbytes in sizes.items():
                    fds[name] = os.open(os.path.join(self.path, name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                    stack.callback(os.close, fds[name])
                    os.ftruncate(fds[name], nbytes)
                for key in snapshot.keys():
                    place = self._placement.places[key][0]
                    file, offset, length = snapshot.place(key)
                    clone_range(file.fd, offset, length, fds[place.file], place.offset)
                    snapshot.let_go(key)
                for fd in fds.values():
                    os.fsync(fd)
        except OSError as e:
            if e.errno not in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EBADF):
                raise
            for name in sizes:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.path, name))
            return False
        self._note({key: snapshot.digest(key) for key in self._index if snapshot.written(key)})
        return True

    def _link(self, source: str) -> bool:
        try:
            if os.stat(source).st_size != self._placement.sizes[0][FROZEN]:
                return False
            os.link(source, os.path.join(self.path, FROZEN))
            return True
        except OSError:
            return False

    def check_space(self, need: int) -> None:
        """Raise OSError (ENOSPC) with the numbers if `need` bytes and the slack do not fit."""
        room = os.statvfs(self.path)
        free, need = room.f_bavail * room.f_frsize, need + _SLACK
        if need > free:
            text = f"checkpoint {self.tag!r} needs {directory.size(need)} and {directory.size(free)} are free: free {need - free} bytes, or save elsewhere"
            raise OSError(errno.ENOSPC, text, self.folder)

    def write(self, key: Key, tensor: torch.Tensor, digest: int) -> aio.Ticket:
        """Start writing a chunk."""
        place = self._placement.places[key][0]
        ticket = self._io.submit([("w", self._files[place.file], place.offset, tensor.data_ptr(), place.length)], [tensor])[0]
        self._note({key: digest})
        return ticket

    def _note(self, digests: Mapping[Key, int]) -> None:
        for key, digest in digests.items():
            i = self._index[key]
            self._versions[i], self._sums[i] = 0, digest

    def publish(self, step: int, extra: dict[str, Any]) -> None:
        """Make it durable and give it its name.

        Raises:
            OSError: the disk failed; a checkpoint that had the tag before still has it.
        """
        for ticket in [self._io.datasync(file) for file in self._files.values() if file.writable]:
            ticket.wait()
        for file in self._files.values():
            file.close()
        extra = {**extra, tags.MARK: {**extra.get(tags.MARK, {}), "tag": self.tag, "saved": time.time_ns()}}
        made = Manifest(self._uuid, step, self.model, (1.0,), False, True, bytes(self._versions), self._sums, extra)
        manifest.publish(self.path, manifest.MANIFEST, made.encode())
        tags.publish(self.folder, self.tag)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Target:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in self._files.values():
            file.close()
        if self._lock is not None:
            with contextlib.suppress(OSError):
                directory.remove(self.path)
        self._release()


def clone_range(source: int, offset: int, length: int, target: int, at: int) -> None:
    """Let `length` bytes of the file `target` share the blocks of the file `source`. Raises OSError where that cannot be."""
    fcntl.ioctl(target, _FICLONERANGE, struct.pack("qQQQ", source, offset, length, at))


def frozen_links(folder: str, frozen: Mapping[Key, int], model: layout.Model, paths: Sequence[str]) -> list[str]:
    """Files that hold exactly the `frozen` chunks (with these checksums) where the checkpoint has them; `paths` are the store's."""
    if not frozen:
        return []
    found = []
    places = layout.place(model, (1.0,), 1).places
    index = {key: i for i, key in enumerate(places)}
    for tag, m in reversed(tags.listed(folder).items()):
        if m.model == model and all(m.versions[index[key]] == 0 and m.sums[index[key]] == digest for key, digest in frozen.items()):
            found.append(os.path.join(folder, tag, FROZEN))
    if len(paths) == 1:  # then they stand in one file, in the same places
        found.append(os.path.join(paths[0], FROZEN))
    return found


def frozen_digests(snapshot: Snapshot, model: layout.Model) -> dict[Key, int]:
    """The checksums of the frozen chunks; {} if one of them was never written."""
    keys = [
        (layout.WEIGHTS, s, r, c.index)
        for s, shard in enumerate(model.shards)
        for r, run in enumerate(shard.runs)
        if not run.trainable
        for c in model.chunks(s, r)
    ]
    return {key: snapshot.digest(key) for key in keys} if all(map(snapshot.written, keys)) else {}


def copy_snapshot(snapshot: Snapshot, target: Target, buffers: Sequence[torch.Tensor], skip: Mapping[Key, int], stopped: Callable[[], bool]) -> None:
    """Stream the snapshot's chunks to `target` through `buffers` (page-aligned, each as long as the longest chunk).

    Raises:
        IntegrityError: a chunk is not what was committed.
        OSError: the disk failed.
        Stopped: `stopped()` said so.
    """

    def jobs() -> Iterator[Key]:
        for key in snapshot.keys():
            if stopped():
                raise Stopped
            if key not in skip:
                yield key

    def part(key: Key, slot: Slot) -> torch.Tensor:
        return slot.weights[: snapshot.place(key)[2]]

    empty = torch.empty(0, dtype=torch.uint8)
    slots = [Slot(buffer, empty) for buffer in buffers]
    stream: Stream[Key] = Stream(
        slots, lambda key, slot: [snapshot.read(key, part(key, slot))], lambda key, slot: [target.write(key, part(key, slot), snapshot.digest(key))]
    )
    for _ in stream.run(jobs()):
        pass


def copy_homes(home: Callable[[Key], torch.Tensor | None], target: Target) -> None:
    """Write every chunk to `target` from where it lives in host memory. Raises OSError."""
    flight: list[aio.Ticket] = []
    try:
        for key in target._placement.places:
            tensor = home(key)
            assert tensor is not None  # without a store every record has a home
            flight.append(target.write(key, tensor, checksum(tensor)))
            if len(flight) == _IN_FLIGHT:
                flight.pop(0).wait()
        while flight:
            flight.pop(0).wait()
    finally:
        for ticket in flight:
            with contextlib.suppress(OSError):
                ticket.wait()
