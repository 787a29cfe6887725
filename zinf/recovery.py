"""Going on in the same process after an error of the disk.

An error of the tiers may leave a step half made, so the engine stops at it. Once the cause is gone (space freed, drive back),
recover() makes the engine usable again, in the cheapest way that is exact:

    nothing lost   the state after the last step is whole: a fetch for compute failed, or a commit. What the failed forward or
                   backward had begun is dropped, and a commit that failed is made again
    rolled back    a chunk was not stepped, or not written: every tier goes back to the last commit, as resume=True would

Either way the generators, the buffers and the learning rates are those of the step that is returned, so the same batches give
the same bits as in a run without the error.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from zinf.errors import EngineError

if TYPE_CHECKING:
    from zinf.engine import Engine

log = logging.getLogger("zinf")


class Marks:
    """Snapshots (Engine._snapshot) of steps that recover() may go back to and the store cannot tell of: the first, which is in no commit, and the last."""

    def __init__(self) -> None:
        self._first: tuple[int, dict[str, Any]] | None = None
        self._last: tuple[int, dict[str, Any]] | None = None

    def set(self, step: int, snapshot: dict[str, Any]) -> None:
        self._last = (step, snapshot)
        self._first = self._first or self._last

    def clear(self) -> None:
        """The state of a step was changed by hand: it is another one now."""
        self._first = self._last = None

    @property
    def empty(self) -> bool:
        return self._first is None

    def of(self, step: int) -> dict[str, Any] | None:
        """The snapshot of `step`, if there is one."""
        return next((snapshot for mark in (self._last, self._first) if mark is not None for n, snapshot in [mark] if n == step), None)


def recover(engine: Engine) -> int:
    """See Engine.recover."""
    if engine.gathered or torch._C._current_graph_task_id() != -1:  # type: ignore[attr-defined]
        raise EngineError("recover() inside a gather block or a backward: leave it first")
    stepper, parts = engine._stepper, engine.memory.parts
    error = engine._error
    harmless = error is None or error is engine._harmless
    stepper.settle(idle=True)
    parts.fetcher.drain()
    parts.stepper.drain()
    begun = bool(engine._trained) or stepper.interrupted  # has a forward drawn random numbers, or changed buffers, since the last step?
    mark = engine._marks.of(engine.global_step)
    whole = parts.stepper.error is None and not stepper.early and harmless and not (begun and mark is None)
    if whole:
        stepper.zero_grad()
        if begun:
            engine._restore(mark or {})
            engine.restore_rng()
    else:
        _roll_back(engine)
    for shard in engine.shards:
        shard.forget_calls()
        if shard.job is not None and shard.job.error is not None:
            shard.job, shard.valid = None, False
    engine._start_over()
    if engine._committer.failed:
        engine._committer.ask(engine.global_step, mark or engine._snapshot())
    engine.synchronize()
    log.warning("going on %s step %d after: %s", "from" if whole else "from the commit of", engine.global_step, error or "no error")
    return engine.global_step


def _roll_back(engine: Engine) -> None:
    store = engine.memory.parts.records.store
    if store is None:
        raise EngineError("there is no store to go back to (nvme_path is not set): build a new engine from a checkpoint") from engine._error
    snapshot = store.extra if "engine" in store.extra else engine._marks.of(store.step)
    if snapshot is None:
        raise EngineError(f"the commit of step {store.step} has no engine state to go back to: close the engine, and build a new one") from engine._error
    engine._error = engine._error or EngineError("recover() did not come to its end")  # until it does
    engine._late = None
    engine._stepper.forget()
    engine.memory.roll_back()
    engine._committer.forget()
    engine._restore(snapshot)
    engine.restore_rng()
