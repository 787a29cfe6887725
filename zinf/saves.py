"""engine.save_checkpoint and engine.load_checkpoint: what of an engine goes into a checkpoint, and how it comes back.

A save is a commit, and a copy of that commit. A load writes the records, then sets what stands beside them, then commits: until that
commit the store is at the step that it had, and an error on the way goes back to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

import zinf
from zinf import layout, measured
from zinf.aio import open_engine
from zinf.checkpoint import tags
from zinf.checkpoint.restoring import restore
from zinf.checkpoint.saver import Saved, longest, room
from zinf.errors import CheckpointError, EngineError, StoreError
from zinf.tiers.nvme import Store
from zinf.tiers.opening import users

if TYPE_CHECKING:
    from zinf.engine import Engine

log = logging.getLogger("zinf")

BUFFERS = 4  # chunks on their way in a load


def save(engine: Engine, folder: str | os.PathLike[str], tag: str | None, extra: dict[str, Any] | None, keep_last: int | None, wait: bool) -> Saved:
    """See Engine.save_checkpoint."""
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; it must be 1 or more")
    folder, step = os.path.abspath(os.fspath(folder)), engine.global_step
    tag = tags.check(f"step-{step}" if tag is None else tag)
    engine.health.check_whole()
    _check_not_gathered(engine, "save_checkpoint")
    if engine.stepper.summed:
        raise EngineError("save_checkpoint between a backward and its step: grads are not saved: call step() first, or zero_grad() to drop them")
    engine.commit(extra)
    engine.synchronize()
    saved = engine.saver.save(folder, tag, step, content(engine), keep_last)
    if wait:
        saved.wait()
    return saved


def _check_not_gathered(engine: Engine, what: str) -> None:
    if engine.health.gathered:
        raise EngineError(f"{what} within a gather block, which may be writing to the weights: end the block first")


def content(engine: Engine) -> dict[str, Any]:
    """A commit's payload, with all buffers, and what the checkpoint was made by."""
    payload = engine.progress.snapshot()
    payload["engine"] = {**payload["engine"], "buffers": engine.progress.buffers.capture(all=True)}
    made = {"zinf": zinf.__version__, "torch": str(torch.__version__), "config": engine.config.to_dict(), "buffers": engine.progress.buffers.describe()}
    return {**payload, tags.MARK: made}


def load(engine: Engine, folder: str | os.PathLike[str], tag: str | None, weights_only: bool, rng: bool) -> dict[str, Any]:
    """See Engine.load_checkpoint."""
    engine.health.check_usable(idle=True)
    _check_not_gathered(engine, "load_checkpoint")
    engine.saver.finish()  # what is looked for may be on its way
    path = tags.find(os.fspath(folder), tag)
    records = engine.memory.parts.records
    engine.zero_grad()
    engine.commit()
    engine.synchronize()
    with contextlib.ExitStack() as stack:
        io = open_engine(engine.config.backend, **measured.io_options([path], engine.config.block_size, engine.config.queue_depth))
        stack.callback(io.close)
        source = stack.enter_context(contextlib.closing(Store.open([path], io, verify="read", writable=False)))
        check(engine, path, source.model, source.extra, weights_only)
        undoable = records.store is not None and records.store.crash_safe
        if not undoable or weights_only or source.model.chunk != records.model.chunk:
            source.verify()
        with _loading(engine), room(engine.memory.parts.state_slots, longest(engine.layout), BUFFERS) as buffers:
            restore(source, records, buffers, moments=not weights_only)
        saved, step = source.extra, source.step
    with engine.health.noting(Exception, KeyboardInterrupt):  # of a registered object that refuses its state: the weights are loaded, the rest is not
        _take_over(engine, saved, weights_only, rng)
    log.info("loaded step %d from %s", step, path)
    engine.commit()
    engine.synchronize()
    return saved.get("user", {})


def check(engine: Engine, path: str, model: layout.Model, saved: dict[str, Any], weights_only: bool) -> None:
    """Raise CheckpointError unless the checkpoint is of this model, and (unless weights_only) of this optimizer."""
    if not weights_only and model.moments != engine.layout.moments:
        raise CheckpointError(
            f"{path} has the state of {users(model.moments)}, this engine needs that of {users(engine.layout.moments)}: "
            f"use the same optimizer, momentum and ema_decay, or weights_only=True"
        )
    theirs, ours = model.keeping(engine.layout.moments).fingerprint(), engine.layout.fingerprint()
    if theirs != ours:
        raise CheckpointError(f"{path} is of another model (fingerprint {theirs}, this one has {ours}): {difference(model, engine.layout)}")
    if weights_only:
        return
    optimizer, groups = saved[tags.MARK]["config"]["optimizer"], len(saved["engine"]["groups"])
    if optimizer != engine.config.optimizer:
        raise CheckpointError(f"{path} was trained with {optimizer}, this engine has {engine.config.optimizer}: use the same, or weights_only=True")
    if groups != len(engine.optimizer.param_groups):
        raise CheckpointError(f"{path} has {groups} parameter groups, this engine {len(engine.optimizer.param_groups)}: use the same, or weights_only=True")
    missing = set(saved["engine"]["buffers"]) - set(engine.progress.buffers.describe())
    if missing:
        raise CheckpointError(f"{path} has a buffer {min(missing)} that this model has not: build the same model")


def difference(theirs: layout.Model, ours: layout.Model) -> str:
    """The first parameter that two layouts disagree on."""
    a, b = ({p.name: (list(p.shape), run.dtype, run.trainable, s.name) for s in m.shards for run in s.runs for p in run.params} for m in (theirs, ours))
    for name in [*a, *b]:
        if a.get(name) != b.get(name):
            there, here = (_described(x.get(name)) for x in (a, b))
            return f"{name} is {there} there and {here} here"
    return "its parameters are cut into shards in another order"


def _described(param: tuple[list[int], str, bool, str] | None) -> str:
    return "missing" if param is None else f"{param[1]} {param[0]}, {'trained' if param[2] else 'frozen'}, in shard {param[3]}"


@contextlib.contextmanager
def _loading(engine: Engine) -> Iterator[None]:
    """Nothing may keep values of before the load; after an error the records are what they were."""
    engine.memory.forget_values()
    try:
        yield
    except BaseException as error:
        _undo(engine, error)
        raise


def _undo(engine: Engine, error: BaseException) -> None:
    store = engine.memory.parts.records.store
    try:
        if store is None:
            raise StoreError("the load was interrupted, and the weights in memory are of two steps")
        store.rollback()
        engine.memory.parts.records.load_homes()
    except BaseException as again:
        again.__context__ = error
        engine.health.error = again


def _take_over(engine: Engine, saved: dict[str, Any], weights_only: bool, rng: bool) -> None:
    """Set what a checkpoint says beside the records."""
    state = saved["engine"]
    engine.progress.marks.clear()
    engine.progress.buffers.restore(state["buffers"])
    if weights_only:
        engine.stepper.load_state({"global_step": 0, "skipped_steps": 0, "counts": {}})
        return
    engine.progress.restore({**engine.progress.imported, "engine": state, "user": saved.get("user", {}), "objects": saved.get("objects", {})})
    if rng:
        engine.progress.restore_rng()
