"""An import that is under way: which chunks of it are on the drive for good, so that one that was killed goes on where it was.

    import.json   in the first path, until the first commit. A manifest in all but its name: what it lists is durable, and nobody overwrites it

A store that has no manifest.json is no store yet, whatever else is there. Only an import of the same model from the same files takes up what
another has left, and compares every byte of it with its checksum first; all others begin anew.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

from zinf import layout
from zinf.errors import StoreError
from zinf.tiers import directory, manifest, opening
from zinf.tiers.chunk import Entry
from zinf.tiers.manifest import UNWRITTEN, LayoutText, Manifest

log = logging.getLogger("zinf")

MARK = "import"  # key of its extra: what is imported, and how


def find(paths: Sequence[str], model: layout.Model, crash_safe: bool, mark: Any) -> Manifest | None:
    """What an import of `model` with this `mark` has noted at `paths`, at step -1; None if there is nothing to go on from. Call it with the lock held."""
    if os.path.lexists(os.path.join(paths[0], manifest.MANIFEST)):
        return None
    path = os.path.join(paths[0], directory.IMPORT)
    try:
        noted = manifest.decode(manifest.read_file(path), path)
        if noted.uuid != manifest.load_member(paths[0]).uuid or len(noted.shares) != len(paths):
            return None
    except (StoreError, OSError) as e:
        log.info("an import that was interrupted cannot be taken up: %s", e)
        return None
    if (noted.model, noted.crash_safe, noted.extra) != (model, crash_safe, {MARK: mark}):
        log.info("%s: the import that was interrupted was of another model, or of other files: it begins anew", paths[0])
        return None
    return dataclasses.replace(noted, step=-1, extra={})


def note(path: str, committed: Manifest, entries: Iterable[Entry], mark: Any, text: LayoutText) -> None:
    """Write down that these chunks are durable, beside those that `committed` (of step -1) and what was written down before have. Raises OSError."""
    versions, sums = bytearray(committed.versions), array.array("Q", committed.sums)
    for entry in entries:
        if entry.newest != UNWRITTEN:
            versions[entry.index], sums[entry.index] = entry.newest, entry.newest_sum
    noted = dataclasses.replace(committed, step=0, extra={MARK: mark}, versions=bytes(versions), sums=sums)
    manifest.publish(path, directory.IMPORT, noted.encode(text))


def forget(path: str) -> None:
    """There is a commit now: the note says nothing any more. One that stays, as after a crash, is never looked at again."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(path, directory.IMPORT))


def taken_up(paths: Sequence[str], model: layout.Model, crash_safe: bool, mark: Any) -> tuple[list[str], directory.Lock, Manifest] | None:
    """The paths in their own order, their lock, and what `find` finds there."""
    if not os.path.lexists(os.path.join(paths[0], directory.IMPORT)):
        return None
    try:
        paths = opening.in_order(paths)
    except StoreError:
        return None  # they are not of one store: whoever creates one there says what is wrong
    lock = directory.Lock(paths)
    noted = None
    try:
        noted = find(paths, model, crash_safe, mark)
    finally:
        if noted is None:
            lock.release()
    return None if noted is None else (list(paths), lock, noted)
