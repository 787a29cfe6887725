"""Saves of one engine: at most one at a time, beside training if nobody waits.

[Note: what a save waits for] The space is looked at, allocated, and the snapshot taken, before `save` returns; so disk full is an
error of the call. The copy has buffers of its own (of the state ring, taken before the snapshot), and an I/O engine of its own for what
it writes. A step waits for it only as tiers/snapshot.py says. What goes wrong later is raised by wait(), by the next save, or by
close(), whichever comes first, and once; training goes on.

Where there is no store, records live in host memory only and the next step changes them in place: then `save` copies before it returns.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch

from zinf import layout, measured
from zinf.aio import open_engine
from zinf.checkpoint import saving, tags
from zinf.checkpoint.saving import Stopped, Target
from zinf.checkpoint.staging import pages
from zinf.config import Config
from zinf.errors import StoreError
from zinf.tiers.host import Slots
from zinf.tiers.records import Records

log = logging.getLogger("zinf")

BUFFERS = 3  # chunks on their way; few, as the drive is training's first


class Saved:
    """A checkpoint on its way.

    Attributes:
        path: its directory, once it is whole.
        tag, step: as saved.
    """

    def __init__(self, folder: str, tag: str, step: int) -> None:
        self.path, self.tag, self.step = os.path.join(folder, tag), tag, step
        self._over = threading.Event()
        self._error: BaseException | None = None
        self.told = False  # the error was raised somewhere

    @property
    def done(self) -> bool:
        """Is it over, well or badly? Never raises."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Until the checkpoint is whole and durable.

        Raises:
            OSError, IntegrityError: it could not be made; nothing of it is left, and a checkpoint that had the tag before still has it.
            TimeoutError: it is not over after `timeout` seconds.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"checkpoint {self.tag!r} is not over after {timeout} seconds")
        if self._error is not None:
            self.told = True
            raise self._error.with_traceback(None)


class Saver:
    """See the module. `save` and `finish` are for the thread that computes."""

    def __init__(self, records: Records, state_slots: Slots | None, config: Config) -> None:
        self._records, self._slots, self._config = records, state_slots, config
        self._now: Saved | None = None
        self._thread: threading.Thread | None = None
        self._stop = False

    def save(self, folder: str, tag: str, step: int, extra: dict[str, Any], keep_last: int | None) -> Saved:
        """Start a checkpoint of the store's committed step, which is `step` (or of the homes, where there is no store).

        Raises:
            OSError: ENOSPC with the numbers; or what the disk says.
            StoreError: something else has the tag, or another process saves or reads it.
        """
        self.finish()
        saved = Saved(folder, tag, step)
        with contextlib.ExitStack() as stack:
            io = open_engine(self._config.backend, threads=2, **measured.io_options([folder], self._config.block_size, BUFFERS))
            stack.callback(io.close)
            target = stack.enter_context(Target(folder, tag, self._records.model, io))
            store = self._records.store
            if store is None:
                target.create([], {})
                saving.copy_homes(self._records.home, target)
                self._publish(target, saved, extra, keep_last)
                saved._over.set()
                return saved
            buffers = stack.enter_context(room(self._slots, longest(self._records.model), BUFFERS, leave=1))
            snapshot = stack.enter_context(store.snapshot())
            if snapshot.committed.step != step:
                raise StoreError(f"the store at {store.paths[0]} is at step {snapshot.committed.step} and not {step}: it was committed meanwhile")
            frozen = saving.frozen_digests(snapshot, store.model)
            cloned = target.clone(snapshot)
            if not cloned and not target.create(saving.frozen_links(folder, frozen, store.model, store.paths), frozen):
                frozen = {}

            def copy() -> None:
                if not cloned:
                    saving.copy_snapshot(snapshot, target, buffers, frozen, lambda: self._stop)
                self._publish(target, saved, extra, keep_last)

            self._start(saved, copy, stack.pop_all())
        return saved

    def _start(self, saved: Saved, copy: Any, stack: contextlib.ExitStack) -> None:
        def run() -> None:
            try:
                with stack:
                    copy()
            except Stopped:
                saved._error = StoreError(f"checkpoint {saved.tag!r} was not made: its engine ended first")
            except BaseException as error:
                saved._error = error
            finally:
                saved._over.set()

        self._now, self._stop = saved, False
        self._thread = threading.Thread(target=run, name="zinf-save", daemon=True)
        self._thread.start()

    def _publish(self, target: Target, saved: Saved, extra: dict[str, Any], keep_last: int | None) -> None:
        target.publish(saved.step, extra)
        log.info("saved step %d as %s", saved.step, saved.path)
        if keep_last is not None:
            tags.prune(target.folder, keep_last, saved.tag, target.model.fingerprint())

    def finish(self) -> None:
        """Wait for the save that is under way. Raises what it raised, if nobody was told yet."""
        now, self._now = self._now, None
        if now is not None:
            self._join()
            if not now.told:
                now.wait()

    def stop(self) -> None:
        """End the save that is under way without finishing it. Raises nothing."""
        self._stop = True
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


@contextlib.contextmanager
def room(slots: Slots | None, nbytes: int, count: int, leave: int = 0) -> Iterator[list[torch.Tensor]]:
    """`count` buffers of `nbytes`: of the ring that steps use, which is within the budget, if it has that and `leave` more; else beside it."""
    with contextlib.ExitStack() as stack:
        if slots is not None and slots.nbytes >= nbytes and len(slots) >= count + leave:
            yield [stack.enter_context(slots.acquire()).buffer for _ in range(count)]
        else:
            yield [pages(nbytes) for _ in range(count)]


def longest(model: layout.Model) -> int:
    """Bytes of the longest chunk of any kind."""
    runs = [run for shard in model.shards for run in shard.runs]
    return max(min(model.chunk, run.padded) * max(run.mode.weights_bytes, run.mode.state_bytes if run.trainable else 0) for run in runs)
