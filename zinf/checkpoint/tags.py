"""The folder that checkpoints are kept in: a directory for each tag, and a file `latest` that names the last one.

A checkpoint is a store with one version of each chunk that is only ever read; `checkpoint` in its manifest's extra marks it.

[Note: a tag is whole or not there] A checkpoint is written to the directory `.TAG.saving`. Its manifest comes last, when all else is
durable; without one it is a store that was never committed, which `zinf clean` removes. Then it gets its name, by exchange with an
older one of the same tag, which goes only after that; then `latest` names it; then older ones go. Where a filesystem cannot exchange,
there is an instant without the tag; `find` then takes the complete `.TAG.saving`.
"""

from __future__ import annotations

import errno
import logging
import os
import re

import cffi

from zinf.errors import CheckpointError, StoreError
from zinf.tiers import directory, manifest
from zinf.tiers.manifest import Manifest

log = logging.getLogger("zinf")

LATEST = "latest"
MARK = "checkpoint"  # key of a manifest's extra
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def check(tag: str) -> str:
    """`tag`, if it can be one. Raises ValueError."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag in (LATEST, manifest.MANIFEST, manifest.MEMBER):
        raise ValueError(f"tag is {tag!r}; it must be letters, digits, '.', '_' and '-', and not {LATEST!r}")
    return tag


def partial(folder: str, tag: str) -> str:
    """Where the checkpoint stands until it is whole."""
    return os.path.join(folder, f".{tag}.saving")


def load(path: str) -> Manifest | None:
    """The manifest of the checkpoint at `path`; None if there is none there that can be read."""
    try:
        found = manifest.load(path)
    except (OSError, StoreError):
        return None
    return found if MARK in found.extra else None


def listed(folder: str) -> dict[str, Manifest]:
    """The checkpoints in `folder` by tag, the last saved one last."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    found = {name: m for name in names if _TAG.fullmatch(name) and (m := load(os.path.join(folder, name))) is not None}
    return dict(sorted(found.items(), key=lambda item: (item[1].extra[MARK]["saved"], item[1].step)))


def find(folder: str, tag: str | None) -> str:
    """The directory of a checkpoint: of `tag`, or of the one that `latest` names; or `folder` itself if it is one.

    Raises:
        CheckpointError: there is none; names those that are there.
    """
    folder = os.path.abspath(folder)
    if tag is None:
        if load(folder) is not None:
            return folder
        try:
            tag = manifest.read_file(os.path.join(folder, LATEST)).decode().strip()
        except (OSError, UnicodeDecodeError):
            raise CheckpointError(f"there is no checkpoint at {folder}: it has no file {LATEST!r}; {_there(folder)}") from None
    check(tag)
    for path in (os.path.join(folder, tag), partial(folder, tag)):
        if os.path.lexists(os.path.join(path, manifest.MANIFEST)):
            if MARK not in manifest.load(path).extra:
                raise CheckpointError(f"{path} is the store of a run, not a checkpoint: give it as nvme_path, with resume=True")
            return path
    raise CheckpointError(f"there is no checkpoint {tag!r} in {folder}; {_there(folder)}")


def _there(folder: str) -> str:
    return f"there are {', '.join(tags)}" if (tags := list(listed(folder))) else "there are none"


def check_free(folder: str, tag: str) -> None:
    """Raise StoreError if something else than a checkpoint has the name `tag`, or a save of it is under way; remove what such a save has left."""
    path = os.path.join(folder, check(tag))
    if os.path.lexists(path) and load(path) is None and (not os.path.isdir(path) or os.path.islink(path) or os.listdir(path)):
        raise StoreError(f"{path} is there and is no checkpoint: choose another tag, or remove it")
    left = partial(folder, tag)
    if os.path.isdir(left) and not os.path.isdir(path) and load(left) is not None:
        _name(left, path)
    elif os.path.isdir(left):
        remove(left)
    if load(old := _old(left)) is not None:
        remove(old)


def _name(left: str, path: str) -> None:
    """Give a checkpoint its name that is whole but for that: `find` takes it for the tag, so it must not go before the next one is there."""
    lock = directory.Lock([left])
    try:
        os.rename(left, path)
    finally:
        lock.release()
    manifest.sync_directory(os.path.dirname(path))


def _old(made: str) -> str:
    """Where the older checkpoint of a tag stands for an instant, where the filesystem cannot exchange."""
    return made.removesuffix(".saving") + ".old"


def remove(path: str) -> None:
    """Remove a checkpoint that nobody uses. Raises StoreError if somebody does."""
    lock = directory.Lock([path])
    try:
        directory.remove(path)
    finally:
        lock.release()


def publish(folder: str, tag: str) -> None:
    """Give the complete checkpoint at partial(folder, tag) its name, and let `latest` name it. See [Note: a tag is whole or not there].

    Raises:
        StoreError: an older one of that tag is being read.
    """
    made, target = partial(folder, tag), os.path.join(folder, tag)
    if not os.path.isdir(target):
        os.rename(made, target)
    elif not os.listdir(target):
        os.rename(made, target)  # over an empty directory
    else:
        lock = directory.Lock([target])  # a reader between opening its manifest and its files would mix two
        try:
            _exchange(made, target)
        finally:
            lock.release()
    manifest.sync_directory(folder)
    manifest.publish(folder, LATEST, f"{tag}\n".encode())
    if os.path.isdir(made):
        remove(made)


def _exchange(made: str, target: str) -> None:
    ffi = cffi.FFI()
    ffi.cdef("int renameat2(int, const char *, int, const char *, unsigned int);")
    try:
        if ffi.dlopen(None).renameat2(_AT_FDCWD, os.fsencode(made), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE) == 0:
            return
        if ffi.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise OSError(ffi.errno, f"rename: {os.strerror(ffi.errno)}", target)
    except AttributeError:
        pass  # a libc without it
    old = _old(made)
    os.rename(target, old)
    os.rename(made, target)
    os.rename(old, made)  # where publish removes it


def prune(folder: str, keep: int, newest: str, fingerprint: str) -> None:
    """Remove all but the last `keep` checkpoints of the same model; `newest` is kept whatever the clock says. One that is in use stays."""
    tags = [tag for tag, m in listed(folder).items() if m.model.fingerprint() == fingerprint and tag != newest]
    for tag in tags[: max(0, len(tags) + 1 - keep)]:
        try:
            remove(os.path.join(folder, tag))
        except StoreError as e:
            log.warning("an old checkpoint stays: %s", e)
