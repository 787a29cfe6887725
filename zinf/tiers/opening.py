"""What Store.create and Store.open look at before the first byte moves. Every refusal is one StoreError line."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from zinf import layout
from zinf.errors import StoreError
from zinf.layout import Key
from zinf.tiers import directory, manifest
from zinf.tiers.manifest import Manifest

if TYPE_CHECKING:
    from zinf import aio

log = logging.getLogger("zinf")


def check_verify(verify: str) -> None:
    if verify not in ("resume", "always", "read", "off"):
        raise ValueError(f"verify is {verify!r}; it must be resume, always, read or off")


def real_paths(paths: Sequence[str]) -> list[str]:
    if isinstance(paths, str | os.PathLike) or not paths:
        raise TypeError(f"paths is a list of at least one directory, not {paths!r}")
    absolute = [os.path.abspath(path) for path in paths]
    if len({os.path.realpath(path) for path in absolute}) < len(absolute):
        raise StoreError(f"the same directory is given twice: {', '.join(absolute)}")
    return absolute


def quietly(action: Callable[[str], None], path: str) -> None:
    """Undo, after an error that is the one to tell."""
    with contextlib.suppress(OSError):
        action(path)


@dataclasses.dataclass(frozen=True)
class Shared:
    """Frozen weights of another store that a new one has in the same places: on each path its file of them (or None), and their checksums."""

    files: Sequence[str | None]
    digests: Mapping[Key, int]


def build(
    paths: Sequence[str], placement: layout.Placement, uuid: str, undo: contextlib.ExitStack, *, overwrite: bool, shared: Shared | None = None
) -> directory.Lock:
    """Directories, lock, member files and data files of a new store, durable. `undo` takes all of it away again.

    Raises:
        OSError: among others, of a `shared` file that this filesystem cannot link.
    """
    for path in paths:
        if directory.make(path):
            undo.callback(quietly, os.rmdir, path)  # and no more: until we hold the lock, what is in it may be another's
    unlocked = [path for path in paths if not os.path.lexists(os.path.join(path, directory.LOCK))]
    lock = directory.Lock(paths)
    undo.callback(lock.release)
    for path in unlocked:
        undo.callback(quietly, os.unlink, os.path.join(path, directory.LOCK))
    make_room(paths, placement, overwrite, linked=shared is not None)
    for i, path in enumerate(paths):
        directory.warn_if_memory(path)
        undo.callback(quietly, directory.empty, path)
        manifest.publish(path, manifest.MEMBER, manifest.Member(uuid, i, len(paths)).encode())
        for name, nbytes in placement.sizes[i].items():
            link = shared.files[i] if shared is not None and name == layout.FROZEN else None
            if link is not None:
                os.link(link, os.path.join(path, name))
            else:
                directory.allocate(os.path.join(path, name), nbytes)
        manifest.sync_directory(path)
    return lock


def make_room(paths: Sequence[str], placement: layout.Placement, overwrite: bool, linked: bool = False) -> None:
    """Refuse, or remove, what stands in the way of a new store; check the free bytes before anything is removed."""
    left = manifest.MEMBER + manifest.TMP  # of a creation that was killed as it began; it will be written over
    there = {path: [name for name in directory.own_files() if name != left and os.path.lexists(os.path.join(path, name))] for path in paths}
    for path, names in there.items():
        if names and manifest.MEMBER not in names:  # whose they are is not known: other programs have a manifest.json too
            raise StoreError(f"{path} has files that are not zinf's ({', '.join(names)}): choose another directory")
        if manifest.MANIFEST in names and not overwrite:
            raise StoreError(f"there is a store at {path} already: go on from it with resume=True, take another run_name, or remove it with `zinf clean`")
    ours = [path for path, names in there.items() if names]
    if not overwrite:
        # What is left are creations that never came to a commit. A path that is not the first cannot tell: its first must be here too.
        members = {path: manifest.load_member(path) for path in ours}
        first = {member.uuid for member in members.values() if member.index == 0}
        for path, member in members.items():
            if member.uuid not in first:
                raise StoreError(f"{path} is path {member.index} of a store whose first path is elsewhere: remove it with zinf clean, or pass overwrite=True")
    needs = {path: placement.nbytes(i) - (placement.sizes[i].get(layout.FROZEN, 0) if linked else 0) for i, path in enumerate(paths)}
    directory.check_space(needs, {path: directory.disk_usage(path) for path in ours})
    for path in directory.in_removal(ours):
        directory.empty(path)


def open_files(
    paths: Sequence[str], placement: layout.Placement, io: aio.IoEngine, undo: contextlib.ExitStack, *, direct: bool | str, write: bool
) -> list[dict[str, aio.File]]:
    """Every data file, checked to be a regular file of the right size."""
    opened: list[dict[str, aio.File]] = []
    for path, sizes in zip(paths, placement.sizes, strict=True):
        opened.append({})
        for name, nbytes in sizes.items():
            full = os.path.join(path, name)
            try:
                file = io.open(full, write=write, direct=direct)
            except FileNotFoundError:
                raise StoreError(f"{full} is missing: a part of the store was deleted; restore it, or remove the store with zinf clean") from None
            undo.callback(file.close)
            directory.check_file(full, file.fd, nbytes)
            opened[-1][name] = file
    return opened


def in_order(paths: Sequence[str]) -> list[str]:
    """`paths` in the store's own order, whatever order they were given in. Raises StoreError unless they are all of one store."""
    members = []
    for path in paths:
        directory.check(path)
        try:
            members.append(manifest.load_member(path))
        except FileNotFoundError:
            raise StoreError(f"there is no store at {path}: it has no {manifest.MEMBER}") from None
    if len({member.uuid for member in members}) > 1:
        raise StoreError(
            f"these directories belong to different stores: {', '.join(f'{path} ({member.uuid})' for path, member in zip(paths, members, strict=True))}"
        )
    missing = sorted(set(range(members[0].count)) - {member.index for member in members})
    if missing or len(paths) != members[0].count:
        given = ", ".join(f"{path} is path {member.index}" for path, member in zip(paths, members, strict=True))
        lacks = f"; path {', '.join(map(str, missing))} is missing" if missing else ""
        raise StoreError(f"the store has {members[0].count} paths, and {len(paths)} are given ({given}{lacks}): give them all")
    return [path for _, path in sorted(zip((member.index for member in members), paths, strict=True))]


def load(paths: Sequence[str]) -> Manifest:
    """The committed manifest. Raises StoreError if there is none, or not of this store."""
    try:
        committed = manifest.load(paths[0])
    except FileNotFoundError:
        raise StoreError(
            f"the store at {paths[0]} was never committed: it ended while it was being imported; "
            "give the same import again, which goes on with it, or remove it with zinf clean"
        ) from None
    if committed.uuid != manifest.load_member(paths[0]).uuid or len(committed.shares) != len(paths):
        raise StoreError(f"{os.path.join(paths[0], manifest.MANIFEST)} belongs to another store than {manifest.MEMBER} beside it")
    if not committed.clean:
        raise StoreError(
            f"the store at {paths[0]} was being overwritten in place (crash_safe: false, or a load of other frozen weights) after step "
            f"{committed.step} when its run ended: "
            "its chunks are of two steps; remove it with zinf clean and import again"
        )
    return committed


def check_versions(path: str, committed: Manifest, placement: layout.Placement) -> None:
    """Raise StoreError if the manifest names a version of a chunk for which there is no place."""
    for version, (key, places) in zip(committed.versions, placement.places.items(), strict=True):
        if version >= len(places) and version != manifest.UNWRITTEN:
            raise StoreError(f"{os.path.join(path, manifest.MANIFEST)} is damaged: chunk {key} has a version that its store does not have")


def check_live(path: str, committed: Manifest) -> None:
    """Raise StoreError for a checkpoint, which is only ever read."""
    if "checkpoint" in committed.extra:
        raise StoreError(f"{path} is a checkpoint, and training would overwrite it: give a nvme_path of its own, and call engine.load_checkpoint({path!r})")


def users(moments: tuple[str, ...]) -> str:
    """The optimizers that keep these planes, for people: "adamw or adam (m, v)"."""
    average = moments[-1:] == ("ema",)
    names = _USERS.get(moments[:-1] if average else moments, "an optimizer unknown here")
    return f"{names}{' with an average of the weights' if average else ''} ({', '.join(moments) or 'none'})"


_USERS = {("m", "v"): "adamw or adam", ("m",): "lion or sgd with momentum", ("s",): "adagrad", (): "sgd without momentum"}


def _parameters(model: layout.Model) -> set[tuple[str, tuple[int, ...], str]]:
    return {(p.name, tuple(p.shape), run.dtype) for shard in model.shards for run in shard.runs for p in run.params}


def check_expected(path: str, committed: Manifest, expect: layout.Model | None) -> None:
    if expect is None:
        return
    if committed.model.moments != expect.moments:
        raise StoreError(
            f"the store at {path} has room for the state of {users(committed.model.moments)}, and this run needs that of {users(expect.moments)}: "
            f"use the optimizer it was made for, or import again under another run_name (from_pretrained takes optimizer, momentum and ema_decay)"
        )
    found, wanted = committed.model.fingerprint(), expect.fingerprint()
    if found != wanted:
        hint = ""
        if _parameters(committed.model) == _parameters(expect):
            hint = "the parameters are the same, but others are trained, or they are cut into other shards: use trainable, blocks and leaf_bytes as then, or "
        raise StoreError(
            f"the store at {path} is of another model (fingerprint {found}, this model has {wanted}): "
            f"{hint}choose another run_name, or import this model with overwrite=True"
        )
    if committed.model.chunk != expect.chunk:
        raise StoreError(
            f"the store at {path} has another layout (chunk_size {committed.model.chunk}, this run has {expect.chunk}; fingerprint {found}): "
            f"set chunk_size to {committed.model.chunk}"
        )


def say_what_is_lost(paths: Sequence[str]) -> None:
    log.warning(
        "%s: crash_safe is off: one version of each chunk is kept; if this run ends between two commits the store must be imported again", ", ".join(paths)
    )
