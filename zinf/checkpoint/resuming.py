"""import, whole: a source of parameters -> a committed store, which a killed one goes on with.

While chunks are written, a thread makes those that are done durable now and then, and has the store note them (tiers/partial.py). So a kill
or a power loss costs what was imported since the last note: SECONDS, or 20 times what a note takes, if that is more.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from zinf import layout
from zinf.aio import IoEngine
from zinf.checkpoint.importing import import_tensors
from zinf.checkpoint.sources import Source
from zinf.checkpoint.staging import Progress
from zinf.layout import STATE, WEIGHTS, Key
from zinf.tiers.nvme import Store

log = logging.getLogger("zinf")

SECONDS = 1.0  # between two notes


def import_store(
    paths: Sequence[str],
    model: layout.Model,
    source: Source,
    io: IoEngine,
    *,
    mark: Any,
    extra: dict[str, Any],
    crash_safe: bool = True,
    overwrite: bool = False,
    shares: Sequence[float] | None = None,
    anew: Collection[str] = (),
    progress: Progress | None = None,
    check_unchanged: Callable[[], None] | None = None,
) -> None:
    """Make a store of `model` at `paths` with the values of `source`, and commit it as step 0.

    Args:
        mark: what the values depend on, as JSON: an import with another one does not go on where this one was killed.
        extra: of the commit.
        anew: parameters that `mark` does not cover (random ones): their runs are always imported.
        shares, overwrite: as for Store.create.
        progress: called with (bytes of weights there, bytes in all).
        check_unchanged: called before the commit; raises if what was read may not be of one source.

    Raises:
        As Store.create and import_tensors.
    """
    total = sum(shard.weights_nbytes for shard in model.shards)
    verified = (lambda done, _: progress(min(done, total), total)) if progress is not None else None
    store = Store.go_on(paths, model, io, mark=mark, crash_safe=crash_safe, progress=verified)
    if store is None:
        store = Store.create(paths, model, io, crash_safe=crash_safe, shares=shares, overwrite=overwrite)
    with contextlib.closing(store):
        random = {(s, r) for s, shard in enumerate(model.shards) for r, run in enumerate(shard.runs) if any(p.name in anew for p in run.params)}
        there = {(s, r, c) for kind, s, r, c in store.written() if kind == WEIGHTS}
        if there:
            log.info("%s: goes on with %d chunks that an interrupted import has left", paths[0], len(there))
        with contextlib.closing(_Notes(store, mark, random)) as notes:
            import_tensors(model, source, store.write, progress=progress, there=there, wrote=notes.wrote)
        if check_unchanged is not None:
            check_unchanged()
        store.commit(0, extra)


class _Notes:
    """Has the store note what is done, on a thread of its own, one note at a time."""

    def __init__(self, store: Store, mark: Any, random: Collection[tuple[int, int]]) -> None:
        self._store, self._mark, self._random = store, mark, random
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="zinf-import")
        self._note: concurrent.futures.Future[float] | None = None
        self._keys: list[Key] = []
        self._next = time.monotonic() + SECONDS

    def wrote(self, shard: int, run: int, chunk: int) -> None:
        """A chunk is written: its weights, and its state if it has any that are not zeros."""
        if (shard, run) in self._random:
            return
        self._keys.append((WEIGHTS, shard, run, chunk))
        if self._store.model.shards[shard].runs[run].has_state:
            self._keys.append((STATE, shard, run, chunk))
        if time.monotonic() < self._next or (self._note is not None and not self._note.done()):
            return
        took = self._note.result() if self._note is not None else 0.0
        self._next = time.monotonic() + max(SECONDS, 20 * took)
        self._note, self._keys = self._pool.submit(self._keep, self._keys), []

    def _keep(self, keys: Sequence[Key]) -> float:
        start = time.monotonic()
        try:
            self._store.keep(keys, self._mark)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            log.warning("no room to note how far the import is: %s", e)  # the import has its room
        return time.monotonic() - start

    def close(self) -> None:
        """Wait for the note that is being made. Whatever becomes of it: the commit that comes syncs and examines all that was written."""
        self._pool.shutdown(wait=True)
