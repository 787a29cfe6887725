"""A checkpoint of DeepSpeed into zinf's records: into a store of its own, or into an engine that is there. Masters and moments keep every bit.

One chunk at a time is put together from the mapped files and written; nothing is held whole.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zinf import layout, ops, rng
from zinf.aio import open_engine
from zinf.algorithms import moments
from zinf.checkpoint import check
from zinf.checkpoint.staging import Transfer, pages, segments
from zinf.chunks import DTYPES, plane_views
from zinf.config import Config
from zinf.discover import discover, layout_of
from zinf.engine import Engine
from zinf.errors import CheckpointError
from zinf.integrations.deepspeed.zero_files import ZeroCheckpoint
from zinf.layout import STATE, WEIGHTS
from zinf.tiers.nvme import Store

Progress = Callable[[int, int], None]


def write_records(
    model: layout.Model, source: ZeroCheckpoint, write: Transfer, *, states: bool = True, frozen: bool = True, progress: Progress | None = None
) -> None:
    """Write every chunk of `model`: weights and masters, and with `states` the moments (else zeros).

    Args:
        write: Store.write, Records.write.
        frozen: also the weights that are not trained.
    """
    done, total = 0, sum(s.weights_nbytes for s in model.shards)
    for s, shard in enumerate(model.shards):
        for r, run in enumerate(shard.runs):
            for chunk in model.chunks(s, r) if run.trainable or frozen else ():
                items = _chunk(run, chunk, source, states)
                keyed = [((kind, s, r, chunk.index), buffer) for kind, buffer in items]
                for ticket in write(keyed):
                    ticket.wait()
                done += chunk.length * run.mode.weights_bytes
                if progress is not None:
                    progress(done, total)


def _chunk(run: layout.Run, chunk: layout.Chunk, source: ZeroCheckpoint, states: bool) -> list[tuple[str, torch.Tensor]]:
    """The bytes of one chunk of weights, and of its state."""
    buffer = pages(chunk.length * run.mode.weights_bytes)
    weights = buffer.view(DTYPES[run.dtype])
    state = pages(chunk.length * run.mode.state_bytes if run.trainable else 0)
    planes = plane_views(run, chunk.length, state) if run.trainable else {}
    for segment in segments(run, chunk):
        here = slice(segment.at, segment.at + segment.count)
        reader = source.open(segment.param.name)
        raw = torch.empty(segment.count, dtype=reader.dtype)
        reader.read(segment.start, raw)
        if "lo" in planes:
            ops.split(raw.float(), weights[here], planes["lo"][here])
        else:
            weights[here].copy_(raw)
            if "master" in planes:
                planes["master"][here].copy_(raw)
        for plane in run.moments if states and run.trainable and segment.param.name in source.trained else ():
            if plane != "ema":
                source.moment(segment.param.name, plane).read(segment.start, planes[plane][here])
    return [(WEIGHTS, buffer)] + ([(STATE, state)] if run.has_state else [])


def check_fits(model: layout.Model, source: ZeroCheckpoint) -> None:
    """Raise CheckpointError unless every parameter is there with its shape, and trained where it is trained here."""
    check(model, source)  # type: ignore[arg-type]
    names = [p.name for shard in model.shards for run in shard.runs if run.trainable for p in run.params]
    fresh = [name for name in names if source._shared.get(name, name) not in source.trained]
    if fresh:
        raise CheckpointError(f"{source.where} has no moments of {', '.join(fresh[:3])}, which it has frozen: freeze it, or load the weights only")


def load_into(engine: Engine, source: ZeroCheckpoint, *, states: bool = True) -> None:
    """Let an engine go on from a checkpoint of DeepSpeed: weights, moments, step counts, the groups' learning rates, buffers.

    With `states` false only the weights. Frozen weights stay the engine's where a store has them.

    Raises:
        CheckpointError: it is of another model or optimizer.
    """
    engine.health.check_usable(idle=True)
    if states:
        check_fits(engine.layout, source)
    else:
        check(engine.layout, source)  # type: ignore[arg-type]
    if states and len(source.groups) != len(engine.optimizer.param_groups):
        raise CheckpointError(
            f"{source.where} has {len(source.groups)} parameter groups, this engine {len(engine.optimizer.param_groups)}: "
            "use the same, or load the weights only"
        )
    records = engine.memory.parts.records
    engine.zero_grad()
    engine.synchronize()
    engine.memory.forget_values()
    with engine.health.noting(Exception, KeyboardInterrupt):
        write_records(engine.layout, source, records.write, states=states, frozen=records.store is None)
        _set_buffers(engine, source)
        engine.progress.marks.clear()
        step = source.step if states else 0
        engine.stepper.load_state({"global_step": step, "skipped_steps": source.saved.get("skipped_steps", 0) if states else 0, "counts": {}})
        for group, saved in zip(engine.optimizer.param_groups, source.groups, strict=False) if states else ():
            group.update({key: saved[key] for key in group if key in saved and key != "params"})
    engine.commit()
    engine.synchronize()


def _set_buffers(engine: Engine, source: ZeroCheckpoint) -> None:
    own = dict(engine.module.named_buffers())
    with torch.no_grad():
        for name, value in source.module.items():
            if name in own and own[name].shape == value.shape:
                own[name].copy_(value)


def import_deepspeed(
    checkpoint: str | os.PathLike[str],
    model: str | os.PathLike[str],
    nvme_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    tag: str | None = None,
    run_name: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    optimizer: str = "adamw",
    weights_only: bool = False,
    overwrite: bool = False,
    chunk_size: int | None = None,
    crash_safe: bool = True,
    progress: Progress | None = None,
    **build: Any,
) -> tuple[int, int]:
    """Make a store from a checkpoint of DeepSpeed (ZeRO-1, 2, 3 or universal): zinf.from_pretrained(model, ..., resume=True) goes on from it.

    Args:
        checkpoint: what DeepSpeed's save_checkpoint was given, or one tag's folder.
        model: folder or hub id with the config (and tokenizer) of the model that was trained.
        nvme_path, run_name: where the store stands, as of from_pretrained.
        weights_only: no moments, step 0.
        build: see hf.loading.build_on_meta.

    Returns (the step that it is at, the number of parameters).

    Raises:
        CheckpointError, ConfigError, StoreError, OSError: one line; no store is left that could be taken for a whole one.
    """
    from zinf.hf import loading

    source = ZeroCheckpoint(os.fspath(checkpoint), tag)
    folder = loading.resolve(model, code=build.get("trust_remote_code", False))
    module = loading.build_on_meta(folder, dtype=dtype, **build)
    for name, p in module.named_parameters():
        p.requires_grad_(source._shared.get(name, name) in source.trained)
    plan = layout_of(discover(module), chunk_size or Config.chunk_size, moments=moments(Config(optimizer=optimizer)))  # type: ignore[arg-type]
    (check if weights_only else check_fits)(plan, source)  # type: ignore[operator]
    drives = [nvme_path] if isinstance(nvme_path, (str, os.PathLike)) else list(nvme_path)
    paths = [os.path.join(os.fspath(drive), run_name or Config.run_name) for drive in drives]
    with (
        contextlib.closing(open_engine("auto")) as io,
        contextlib.closing(Store.create(paths, plan, io, crash_safe=crash_safe, overwrite=overwrite)) as store,
    ):
        write_records(plan, source, store.write, states=not weights_only, progress=progress)
        step = 0 if weights_only else source.step
        store.commit(step, _extra(source, _origin(module, folder, paths, plan), optimizer, weights_only))
    return step, plan.numel


def _origin(module: Any, folder: str, paths: Sequence[str], plan: layout.Model) -> Any:
    from zinf.hf import loading

    stateful = frozenset(p.name for shard in plan.shards for run in shard.runs if run.trainable for p in run.params)
    names: dict[str, Any] = {p.name: p.name for shard in plan.shards for run in shard.runs for p in run.params}
    buffers = {name: name for name in loading.persistent_buffers(module)}
    return loading.Origin(folder, tuple(paths), plan.chunk, stateful, names, buffers, loading.extra_files(folder))


def _extra(source: ZeroCheckpoint, origin: Any, optimizer: str, weights_only: bool) -> dict[str, Any]:
    """What the manifest has beside the records: an engine goes on from it as from a commit of its own."""
    extra: dict[str, Any] = {"origin": origin.to_json()}
    if weights_only:
        return extra
    groups = [
        {k: list(v) if isinstance(v, tuple) else v for k, v in g.items() if isinstance(v, (int, float, str, bool, tuple, list, type(None)))}
        for g in source.groups
    ]
    engine = {"global_step": source.step, "skipped_steps": int(source.saved.get("skipped_steps", 0)), "counts": {}, "optimizer": optimizer, "groups": groups}
    return extra | {"engine": {**engine, "rng": rng.capture(), "buffers": {}}}
