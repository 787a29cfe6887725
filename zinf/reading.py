"""Reading weights outside of a forward: gather, state_dict, save. Whatever step is pending is applied first."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zinf.buffers import persistent
from zinf.checkpoint import export_safetensors
from zinf.chunks import DTYPES

if TYPE_CHECKING:
    from zinf.engine import Engine


@contextlib.contextmanager
def gather(engine: Engine, params: str | nn.Parameter | Sequence[str | nn.Parameter]) -> Iterator[None]:
    """See Engine.gather."""
    wanted = {w if isinstance(w, str) else id(w) for w in ([params] if isinstance(params, (str, nn.Parameter)) else params)}
    unknown = wanted - {key for s in engine.shards for _, spec, p in s.params for key in (spec.name, id(p))}
    if unknown:
        raise KeyError(f"{', '.join(w if isinstance(w, str) else 'a parameter' for w in unknown)}: not of this engine's model")
    with contextlib.ExitStack() as stack:
        engine.gathered += 1
        stack.callback(lambda: setattr(engine, "gathered", engine.gathered - 1))
        for shard in engine.shards:
            if any(spec.name in wanted or id(p) in wanted for _, spec, p in shard.params):
                engine.bring(shard)
                shard.bind()
                stack.callback(shard.unbind)
        yield


def hand_over(engine: Engine) -> None:
    """Give every parameter a copy of its values."""
    for shard in engine.shards:
        engine.bring(shard)
        shard.hand_over()


def state_dict(engine: Engine) -> dict[str, torch.Tensor]:
    """See Engine.state_dict."""
    values: dict[int, torch.Tensor] = {}
    for shard in engine.shards:
        with gather(engine, [p for *_, p in shard.params]):
            for *_, p in shard.params:
                values[id(p)] = p.detach().cpu().clone()
    out = {name: values[id(p)] for name, p in engine.module.named_parameters(remove_duplicate=False)}
    return out | {name: b.detach().clone() for name, b in persistent(engine.module)}


def save_pretrained(engine: Engine, folder: str | os.PathLike[str], max_shard_size: int, dtype: str | None) -> None:
    """See Engine.save_pretrained."""
    engine.synchronize()
    origin, module = engine.origin, engine.module
    names, buffers = (origin.names, origin.buffers_of(module)) if origin is not None else (None, None)
    read = engine.memory.parts.records.read
    export_safetensors(folder, engine.layout, read, names=names, buffers=buffers, max_shard_size=max_shard_size, dtype=dtype)
    if origin is not None:
        origin.save_extras(module, folder, dtype=DTYPES[dtype] if dtype is not None else None)
        return
    save_config: Any = getattr(getattr(module, "config", None), "save_pretrained", None)
    if save_config is not None:
        save_config(folder)
