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
from typing import TYPE_CHECKING

import torch

from zinf.errors import EngineError

if TYPE_CHECKING:
    from zinf.engine import Engine

log = logging.getLogger("zinf")


def recover(engine: Engine) -> int:
    """See Engine.recover."""
    if engine.health.gathered or torch._C._current_graph_task_id() != -1:  # type: ignore[attr-defined]
        raise EngineError("recover() inside a gather block or a backward: leave it first")
    stepper, parts = engine.stepper, engine.memory.parts
    error = engine.health.error
    harmless = error is None or error is engine.health.harmless
    stepper.settle(idle=True)
    parts.fetcher.drain()
    parts.stepper.drain()
    begun = engine.conductor.under_way or stepper.summed  # has a forward drawn random numbers, or changed buffers, since the last step?
    mark = engine.progress.marks.of(engine.global_step)
    whole = parts.stepper.error is None and not stepper.early and harmless and not (begun and mark is None)
    if whole:
        stepper.zero_grad()
        if begun:
            engine.progress.restore(mark or {})
            engine.progress.restore_rng()
    else:
        _roll_back(engine)
    for shard in engine.shards:
        shard.forget_calls()
        if shard.job is not None and shard.job.error is not None:
            shard.job, shard.valid = None, False
    engine.health.error = engine.health.harmless = None
    engine.conductor.start_over()
    if engine.committer.failed:
        engine.committer.ask(engine.global_step, mark or engine.progress.snapshot())
    engine.synchronize()
    log.warning("going on %s step %d after: %s", "from" if whole else "from the commit of", engine.global_step, error or "no error")
    return engine.global_step


def _roll_back(engine: Engine) -> None:
    store = engine.memory.parts.records.store
    if store is None:
        raise EngineError("there is no store to go back to (nvme_path is not set): build a new engine from a checkpoint") from engine.health.error
    snapshot = store.extra if "engine" in store.extra else engine.progress.marks.of(store.step)
    if snapshot is None:
        raise EngineError(f"the commit of step {store.step} has no engine state to go back to: close the engine, and build a new one") from engine.health.error
    engine.health.error = engine.health.error or EngineError("recover() did not come to its end")  # until it does
    engine.progress.late = None
    engine.stepper.forget()
    engine.memory.roll_back()
    engine.committer.forget()
    engine.progress.restore(snapshot)
    engine.progress.restore_rng()
