"""Which stores stand on a drive, and removing them: what `zinf inspect` and `zinf clean` show and do.

Pure looking: nothing is opened for writing, and no run is disturbed. A store whose directories are spread over several paths is
one entry, put together by the uuid that each directory's member.json holds.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from zinf.errors import StoreError
from zinf.tiers import directory, manifest


def inspect(paths: Sequence[str]) -> dict[str, Any]:
    """The stores at `paths`, or one level below them.

    Returns:
        {"stores": [...]}, each with: uuid; paths (as found); count (paths it should have); state ("committed",
        "uncommitted" while or after a creation that never committed, "incomplete" where paths are missing among those given,
        "damaged"); locked_by (pid, 0 if unknown, None if free); bytes (on disk); and, where the manifest can be read: step, clean,
        crash_safe, fingerprint, shards, parameters, chunk (elements), chunks, chunks_written, checkpoint (tag, zinf, torch, config; None for a
        run's store); error (one line) where it cannot.
    """
    found: dict[tuple[str, int], list[tuple[int, str, int]]] = {}
    copies: Counter[tuple[str, int]] = Counter()  # somebody may have copied a store, or a checkpoint: that is another one
    broken: list[dict[str, Any]] = []
    for path in _candidates(paths):
        try:
            member = manifest.load_member(path)
            found.setdefault((member.uuid, copies[member.uuid, member.index]), []).append((member.index, path, member.count))
            copies[member.uuid, member.index] += 1
        except (StoreError, OSError) as e:
            begun = _is_begun(path)
            store = {"uuid": None, "paths": [path], "count": None, "locked_by": directory.holder(path), "bytes": directory.disk_usage(path)}
            broken.append(store | ({"state": "uncommitted"} if begun else {"state": "damaged", "error": str(e)}))
    return {"stores": [_summary(uuid, sorted(parts)) for (uuid, _), parts in found.items()] + broken}


def clean(paths: Sequence[str], *, yes: bool) -> dict[str, list[Any]]:
    """Remove stores at `paths` or one level below: those that never committed always, others only with yes=True, none that is in use.

    A directory whose member.json cannot be read may be anybody's: it is shown, and kept whatever was confirmed.

    Returns:
        {"removed": [paths...], "kept": [(paths, why)...]}.
    """
    removed: list[Any] = []
    kept: list[Any] = []
    for store in inspect(paths)["stores"]:
        where = store["paths"]
        if store["uuid"] is None and store["state"] != "uncommitted":
            kept.append((where, f"it may not be zinf's: {store['error']}"))
            continue
        if store["state"] != "uncommitted" and not yes:
            kept.append((where, f"it is {store['state']}" + (f" at step {store['step']}" if "step" in store else "") + ": removed only when confirmed"))
            continue
        try:
            lock = directory.Lock(where)
        except StoreError as e:
            kept.append((where, str(e)))
            continue
        try:
            if store["state"] == "uncommitted" and os.path.lexists(os.path.join(where[0], manifest.MANIFEST)):
                kept.append((where, "it was committed meanwhile"))
                continue
            for path in directory.in_removal(where):
                directory.remove(path)
            removed.extend(where)
        finally:
            lock.release()
    return {"removed": removed, "kept": kept}


def _candidates(paths: Sequence[str]) -> list[str]:
    """The directories at `paths` and one level below that look like a store's. No symlink is followed below."""
    seen: list[str] = []
    for path in map(os.path.abspath, paths):
        if _is_store(path):
            seen.append(path)
        elif os.path.isdir(path):
            seen.extend(entry.path for entry in sorted(os.scandir(path), key=lambda e: e.name) if entry.is_dir(follow_symlinks=False) and _is_store(entry.path))
    return list(dict.fromkeys(seen))


def _is_store(path: str) -> bool:
    """Other programs have a manifest.json too; a store has a member.json beside it."""
    return not os.path.islink(path) and (os.path.lexists(os.path.join(path, manifest.MEMBER)) or _is_begun(path))


def _is_begun(path: str) -> bool:
    """Only the lock is there (pid and boot id, at most), as when a run was killed at the begin of a creation, or at the end of a removal."""
    try:
        if directory.LOCK not in (names := set(os.listdir(path))) or names - {directory.LOCK, manifest.MEMBER + manifest.TMP}:
            return False
        lock = os.path.join(path, directory.LOCK)
        return os.lstat(lock).st_size <= 64 and re.fullmatch(rb"\d+( [0-9a-f-]*)?\s*", manifest.read_file(lock)) is not None
    except (OSError, StoreError):
        return False


def _summary(uuid: str, parts: list[tuple[int, str, int]]) -> dict[str, Any]:
    paths = [path for _, path, _ in parts]
    holders = [pid for path in paths if (pid := directory.holder(path)) is not None]
    store: dict[str, Any] = {
        "uuid": uuid,
        "paths": paths,
        "count": parts[0][2],
        "state": "committed",
        "locked_by": max(holders, default=None),
        "bytes": sum(map(directory.disk_usage, paths)),
    }
    if parts[0][0] != 0:
        return store | {"state": "incomplete", "error": "the first path, which holds the manifest, is not among those given"}
    try:
        m = manifest.load(paths[0])
    except FileNotFoundError:
        return store | {"state": "uncommitted"}
    except (StoreError, OSError) as e:
        return store | {"state": "damaged", "error": str(e)}
    if len(parts) < parts[0][2]:
        store |= {"state": "incomplete", "error": f"{parts[0][2] - len(parts)} of its {parts[0][2]} paths are not among those given"}
    return store | {
        "step": m.step,
        "clean": m.clean,
        "crash_safe": m.crash_safe,
        "fingerprint": m.model.fingerprint(),
        "shards": len(m.model.shards),
        "parameters": m.model.numel,
        "chunk": m.model.chunk,
        "chunks": len(m.versions),
        "chunks_written": len(m.versions) - m.versions.count(manifest.UNWRITTEN),
        "checkpoint": m.extra.get("checkpoint"),
    }
