"""The folder that an export writes to: its files under temporary names until all are whole, and what of a killed export can be gone on with.

    .FILE.PID.tmp   a file until publish(), locked by its process: what is not locked a killed one has left
    .zinf-export    the journal of an export that can be gone on with, locked while it runs: what is exported, then a line for each file that
                    is finished and durable, with a digest of its bytes. Gone when everything is there

Only an export of the same values into files with the same headers goes on, and compares every byte of a finished file first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import xxhash

from zinf.checkpoint import direct
from zinf.checkpoint.format import Tensor
from zinf.checkpoint.sources import INDEX, SINGLE
from zinf.errors import CheckpointError

log = logging.getLogger("zinf")

JOURNAL = ".zinf-export"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_TEMPORARY = re.compile(r"\.(model.*\.safetensors|model\.safetensors\.index\.json)\.\d+\.tmp")


class Journal:
    """Which files of an export to `folder` are finished. Leaving the `with` block without done() keeps them, for the next one with the same mark."""

    def __init__(self, folder: str) -> None:
        """Raises CheckpointError if another export writes there."""
        try:
            os.makedirs(folder, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise CheckpointError(f"{folder} is not a folder, or a part of it is a file: export to another one") from None
        self.path = os.path.join(folder, JOURNAL)
        if os.path.lexists(self.path) and (os.path.islink(self.path) or not os.path.isfile(self.path)):
            raise CheckpointError(f"{self.path} is no file of an export: remove it, or choose another folder")
        self._mark: str | None = None
        self.finished: dict[str, tuple[str, str]] = {}  # file -> (its temporary name, digest)
        while True:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._fd)
                raise CheckpointError(f"another export is writing to {folder}: wait for it, or choose another folder") from None
            except OSError:
                pass  # a network mount may have no locks
            if os.fstat(self._fd).st_nlink:
                break
            os.close(self._fd)  # it was just finished by another one
        self._load()

    def _load(self) -> None:
        with open(os.dup(self._fd), "rb") as f:
            lines = f.read(1 << 26).split(b"\n")[:-1]  # what has no end is torn
        whole = 0
        for line in lines:
            try:
                entry = json.loads(line)
                if "mark" in entry:
                    self._mark = str(entry["mark"])
                elif _TEMPORARY.fullmatch(entry["temporary"]) and entry["file"] == os.path.basename(entry["file"]):
                    self.finished[entry["file"]] = (entry["temporary"], str(entry["digest"]))
            except (ValueError, KeyError, TypeError, RecursionError):
                break
            whole += len(line) + 1
        os.ftruncate(self._fd, whole)

    @property
    def resumes(self) -> bool:
        """Has an export to this folder begun, and not come to its end?"""
        return self._mark is not None

    def begin(self, mark: str) -> None:
        """This is what is exported now; what is finished of anything else does not count."""
        if mark == self._mark:
            return
        os.ftruncate(self._fd, 0)
        self._mark, self.finished = mark, {}
        self._append({"mark": mark})

    def finish(self, file: str, temporary: str, digest: str) -> None:
        """A file is whole and durable."""
        self.finished[file] = (temporary, digest)
        self._append({"file": file, "temporary": temporary, "digest": digest})

    def _append(self, entry: dict[str, str]) -> None:
        _pwrite(self._fd, self.path, os.fstat(self._fd).st_size, json.dumps(entry).encode() + b"\n")
        os.fsync(self._fd)
        sync(os.path.dirname(self.path))  # the name of the file, and ours

    def done(self) -> None:
        """Everything is there."""
        self.finished.clear()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self.finished:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        os.close(self._fd)


class Folder:
    """The files of one export, until publish() under temporary names; leaving the `with` block removes what is neither published nor in the journal."""

    def __init__(self, folder: str, journal: Journal | None = None) -> None:
        self.folder = folder
        self._journal = journal
        self._direct: dict[str, int | None] = {}  # the same files, past the page cache
        self._fds: dict[str, int] = {}  # open and locked until they are published
        self._temporary: dict[str, str] = {}  # file -> temporary name, for those that wait to be published
        self._published: list[str] = []  # finished files that an earlier export has given their names already

    def __enter__(self) -> Folder:
        keep = {temporary for temporary, _ in self._journal.finished.values()} if self._journal is not None else set()
        for file in filter(_TEMPORARY.fullmatch, os.listdir(self.folder)):
            if file not in keep:
                with contextlib.suppress(OSError):
                    fd = os.open(self._path(file), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while whoever made it lives
                        os.unlink(self._path(file))
                    finally:
                        os.close(fd)
        return self

    def __exit__(self, *exc: object) -> None:
        keep = {temporary for temporary, _ in self._journal.finished.values()} if self._journal is not None else set()
        for temporary in self._temporary.values():
            if temporary not in keep:
                with contextlib.suppress(OSError):
                    os.unlink(self._path(temporary))
        self._temporary.clear()
        self.close()

    def close(self) -> None:
        """Close what is open; idempotent."""
        while self._fds:
            os.close(self._fds.popitem()[1])
        while self._direct:
            direct.close(self._direct.popitem()[1])

    def _path(self, file: str) -> str:
        return os.path.join(self.folder, file)

    def create(self, file: str, header: bytes, nbytes: int = 0) -> None:
        """Begin a file with its header; `nbytes` long in the end."""
        self._temporary[file] = f".{file}.{os.getpid()}.tmp"
        self._fds[file] = fd = _new(self._path(self._temporary[file]), os.O_RDWR)
        with contextlib.suppress(OSError):  # a network mount may have no locks; then what a killed export leaves stays
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._direct[file] = direct.open_direct(self._path(self._temporary[file]), os.O_WRONLY) if nbytes else None
        if self._direct[file] is not None:  # blocks that are there already are written in any order, and in parallel
            try:
                os.posix_fallocate(fd, 0, nbytes)
            except OSError as e:
                raise OSError(e.errno, f"export: allocate {nbytes} bytes: {os.strerror(e.errno or 0)}", self._path(file)) from e
        _pwrite(fd, self._path(file), 0, header)

    def adopt(self, file: str, check: Callable[[int, str], bool]) -> bool:
        """Take up a file that the journal has as finished, if check(descriptor, digest) finds it unchanged: publish() publishes it."""
        temporary, digest = self._journal.finished.get(file, ("", "")) if self._journal is not None else ("", "")
        for name in (temporary, file) if temporary else ():
            if (fd := self._unchanged(name, digest, check)) is not None:
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._fds[file] = fd
                self._published += [file] if name == file else []
                self._temporary |= {file: temporary} if name != file else {}
                return True
        if temporary:  # it is written anew under a name of this process, so nobody else would remove it
            with contextlib.suppress(OSError):
                os.unlink(self._path(temporary))
        return False

    def _unchanged(self, name: str, digest: str, check: Callable[[int, str], bool]) -> int | None:
        """A descriptor of a file that is what was finished. None if it is not there, is another, or cannot be read: a file can be written again."""
        try:
            fd = os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        same = False
        try:
            same = check(fd, digest)
        except OSError as e:
            log.warning("%s cannot be read back and is written again: %s", self._path(name), e)
        finally:
            if not same:
                os.close(fd)
        return fd if same else None

    def check_space(self, need: int) -> None:
        stat = os.statvfs(self.folder)
        free = stat.f_bavail * stat.f_frsize
        if need > free:
            raise OSError(errno.ENOSPC, f"export needs {need} bytes and {free} are free; free {need - free} bytes, or export elsewhere", self.folder)

    def write(self, tensor: Tensor, start: int, raw: torch.Tensor) -> None:
        """Write uint8 `raw` from byte `start` of a tensor on; its `path` is the name of a file that was created."""
        fd, path, at = self._fds[tensor.path], self._path(tensor.path), tensor.begin + start
        try:
            first, end = direct.write(self._direct[tensor.path], at, raw)
        except OSError as e:
            raise OSError(e.errno, f"export: write {len(raw)} bytes at {at}: {e.strerror}", path) from e
        for part, offset in ((raw[:first], at), (raw[end:], at + end)):
            if len(part):
                _pwrite(fd, path, offset, part.numpy().data)
        if end == first:
            os.posix_fadvise(fd, at, len(raw), os.POSIX_FADV_DONTNEED)  # starts writeback now: dirty pages must not pile up until the fsync

    def finish(self, file: str, digest: str | None) -> None:
        """Make a file durable, and note that if there is a journal."""
        fd = self._fds[file]
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if self._journal is not None and digest is not None:
            self._journal.finish(file, self._temporary[file], digest)

    def publish(self, index: str | None) -> list[str]:
        """Give all files, which are durable, their names, see [Note: a crash leaves no half checkpoint] in exporting.py."""
        files = [*self._published, *self._temporary]
        if index is not None:
            self.create(INDEX, index.encode())
            self.finish(INDEX, None)
            files.append(INDEX)
        stale = [f for f in os.listdir(self.folder) if f in (SINGLE, INDEX) or _SHARD.fullmatch(f)]
        if index is not None and INDEX in stale:
            os.unlink(self._path(INDEX))
            sync(self.folder)
        for file, temporary in self._temporary.items():
            os.replace(self._path(temporary), self._path(file))
        sync(self.folder)
        for file in set(stale) - set(files):
            os.unlink(self._path(file))
        sync(self.folder)
        self._temporary.clear()
        self.close()
        return [self._path(file) for file in sorted(files, key=lambda f: (f == INDEX, f))]


def digest_of(header: bytes, pieces: Iterable[tuple[int, int]]) -> str:
    """Of a file that begins with `header`, from (offset, checksum) of its pieces, in any order."""
    found = xxhash.xxh3_64(header)
    for offset, checksum in sorted(pieces):
        found.update(offset.to_bytes(8, "little") + checksum.to_bytes(8, "little"))
    return found.hexdigest()


def put(path: str, data: bytes) -> None:
    """Write a small file, durable and whole under its name or not at all."""
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.zinf")
    fd = _new(temporary, os.O_WRONLY)
    try:
        _pwrite(fd, path, 0, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(temporary, path)
    sync(os.path.dirname(path))


def _new(path: str, flags: int) -> int:
    """An empty file of our own: whatever has that name (a killed process had our pid, a symlink) is removed, and not written through."""
    flags |= os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o666)
    except FileExistsError:
        os.unlink(path)
        return os.open(path, flags, 0o666)


def sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _pwrite(fd: int, path: str, offset: int, data: bytes | memoryview) -> None:
    view, done = memoryview(data), 0
    try:
        while done < len(view):
            done += os.pwrite(fd, view[done:], offset + done)
    except OSError as e:
        raise OSError(e.errno, f"export: write {len(view)} bytes at {offset}: {e.strerror}", path) from e


def what_is_there(folder: str) -> list[str]:
    """The names in a folder that no export has left as it was killed."""
    names: list[Any] = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [name for name in names if name != JOURNAL and not _TEMPORARY.fullmatch(name) and not name.endswith(".zinf")]
