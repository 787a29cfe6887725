"""One parameter of an engine in full: its fp32 master, its optimizer state, its gradient. What deepspeed.utils.safe_get_... and safe_set_... stand on.

A parameter says which engine it belongs to. Whatever step is pending is applied first, and only the chunks that the parameter lies in are read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zinf import layout
from zinf.checkpoint.staging import Segment, pages, segments
from zinf.chunks import DTYPES, master_of, plane_views
from zinf.engine import Engine
from zinf.errors import EngineError
from zinf.layout import STATE, WEIGHTS
from zinf.shard import Shard

# DeepSpeed's (torch's) names of optimizer state -> zinf's planes.
PLANES = {"exp_avg": "m", "exp_avg_sq": "v", "momentum_buffer": "m", "sum": "s"}


def belongs_to(p: nn.Parameter, engine: Engine) -> None:
    """Let `p` know its engine."""
    p.zinf_of = weakref.ref(engine)  # type: ignore[attr-defined]


def engine_of(p: torch.Tensor) -> Engine | None:
    """The engine that `p` belongs to; None if it is an ordinary parameter, or its engine is closed."""
    ref = p.__dict__.get("zinf_of") if isinstance(p, nn.Parameter) else None
    engine = ref() if ref is not None else None
    return engine if engine is not None and engine.module.__dict__.get("zinf_engine") is not None else None


def place_of(engine: Engine, p: nn.Parameter) -> tuple[Shard, int, layout.Param]:
    """(shard, which of its parameters it is, its place in its run)."""
    for shard in engine.shards:
        for i, (_, spec, own) in enumerate(shard.params):
            if own is p:
                return shard, i, spec
    raise EngineError("the parameter is not of this engine's model any more")


def _chunks(shard: Shard, r: int, spec: layout.Param) -> Iterator[tuple[layout.Chunk, Segment]]:
    for chunk in shard.parts.records.model.chunks(shard.index, r):
        for segment in segments(shard.spec.runs[r], chunk):
            if segment.param.name == spec.name:
                yield chunk, segment


def _read(shard: Shard, key: layout.Key, nbytes: int) -> torch.Tensor:
    buffer = pages(nbytes)
    for ticket in shard.parts.records.read([(key, buffer)]):
        ticket.wait()
    return buffer


def master(p: nn.Parameter) -> torch.Tensor | None:
    """The fp32 master, in the parameter's shape; of a frozen parameter its weights in fp32. None if it has no engine."""
    engine = engine_of(p)
    if engine is None:
        return None
    engine.synchronize()
    shard, i, spec = place_of(engine, p)
    r = shard.params[i][0]
    run, out = shard.spec.runs[r], torch.empty(spec.numel)
    for chunk, s in _chunks(shard, r, spec):
        weights = _read(shard, (WEIGHTS, shard.index, r, chunk.index), chunk.length * run.mode.weights_bytes).view(DTYPES[run.dtype])
        if run.has_state and run.dtype != "fp32":
            state = _read(shard, (STATE, shard.index, r, chunk.index), chunk.length * run.mode.state_bytes)
            weights = master_of(weights, plane_views(run, chunk.length, state), shard.parts.pool)
        out[s.start : s.start + s.count] = weights[s.at : s.at + s.count]
    return out.view(spec.shape)


def set_master(p: nn.Parameter, value: torch.Tensor) -> None:
    """Set the fp32 master exactly, and the weights that compute reads with it."""
    engine = _owner(p)
    _, _, spec = place_of(engine, p)
    engine.load_state_dict({spec.name: value.detach().reshape(spec.shape).float()}, strict=False)


def state(p: nn.Parameter, name: str) -> torch.Tensor | None:
    """A moment, in fp32 and in the parameter's shape; None if it has no engine, or is frozen."""
    engine = engine_of(p)
    if engine is None:
        return None
    engine.synchronize()
    shard, i, spec = place_of(engine, p)
    r, plane = shard.params[i][0], _plane(shard, shard.params[i][0], name)
    if plane is None:
        return None
    run, out = shard.spec.runs[r], torch.empty(spec.numel)
    for chunk, s in _chunks(shard, r, spec):
        planes = plane_views(run, chunk.length, _read(shard, (STATE, shard.index, r, chunk.index), chunk.length * run.mode.state_bytes))
        out[s.start : s.start + s.count] = planes[plane][s.at : s.at + s.count]
    return out.view(spec.shape)


def set_state(p: nn.Parameter, value: torch.Tensor, name: str) -> None:
    """Set a moment."""
    engine = _owner(p)
    engine.synchronize()
    shard, i, spec = place_of(engine, p)
    r, plane = shard.params[i][0], _plane(shard, shard.params[i][0], name)
    if plane is None:
        raise EngineError(f"{spec.name} is frozen, and has no {name}")
    run, flat = shard.spec.runs[r], value.detach().reshape(-1).float().cpu()
    with engine.health.noting(Exception, KeyboardInterrupt):
        for chunk, s in _chunks(shard, r, spec):
            key = (STATE, shard.index, r, chunk.index)
            buffer = _read(shard, key, chunk.length * run.mode.state_bytes)
            plane_views(run, chunk.length, buffer)[plane][s.at : s.at + s.count] = flat[s.start : s.start + s.count]
            for ticket in shard.parts.records.write([(key, buffer)]):
                ticket.wait()
    engine.progress.marks.clear()


def _plane(shard: Shard, r: int, name: str) -> str | None:
    run = shard.spec.runs[r]
    if not run.trainable:
        return None
    known = [torchs for torchs, own in PLANES.items() if own in run.moments]
    if PLANES.get(name) not in run.moments:
        raise EngineError(f"there is no optimizer state {name!r}; this optimizer has {', '.join(known) or 'none'}")
    return PLANES[name]


def grad(p: nn.Parameter) -> torch.Tensor | None:
    """A copy of the gradient summed since the last step, as it is summed (scaled, where weights are fp16); None if there is none."""
    view = _grad_view(p)
    return None if view is None else view.clone()


def set_grad(p: nn.Parameter, value: torch.Tensor) -> None:
    """Put another gradient in its place, which the next step takes."""
    engine = _owner(p)
    view = _grad_view(p)
    shard, _, spec = place_of(engine, p)
    if view is None:
        raise EngineError(f"{spec.name} has no gradient to be replaced: call backward first")
    engine.stepper.grads_changed(shard)
    view.copy_(value.detach().reshape(view.shape))


def _grad_view(p: nn.Parameter) -> Any:
    engine = engine_of(p)
    if engine is None:
        return getattr(p, "grad", None)
    shard, i, spec = place_of(engine, p)
    grads = engine.stepper.grads.of[shard.index]
    if not grads.waiting or grads.assigned or not grads.seen[i]:
        return None
    if grads.away is not None:
        raise EngineError(f"the gradient of {spec.name} waits on NVMe: give more host_memory (or grads='host') to look at gradients")
    grads.arrived.wait()
    flat = shard.grads[shard.params[i][0]]
    return None if flat is None else flat[spec.offset : spec.offset + spec.numel].view(spec.shape)


def _owner(p: nn.Parameter) -> Engine:
    engine = engine_of(p)
    if engine is None:
        raise EngineError("the parameter belongs to no engine that is open: take it from the model that initialize was given")
    return engine
