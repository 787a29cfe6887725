"""A model with adapters (PEFT), merged: streamed, layer by layer, into a normal Hugging Face folder.

Adapter layers know how to merge themselves, whatever their method, and do it here on a copy of one layer at a time: the bits
are those of PEFT's merge_and_unload, and the engine's weights stay as they are. PEFT is not imported: what an adapter layer is
can be seen from its methods.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zinf import layout
from zinf.buffers import persistent
from zinf.checkpoint import export_safetensors
from zinf.checkpoint.staging import Item, segments
from zinf.chunks import DTYPES
from zinf.discover import base_of, dtype_name
from zinf.errors import EngineError
from zinf.reading import save_extras
from zinf.tiers.device import DONE

if TYPE_CHECKING:
    from zinf.engine import Engine


@dataclasses.dataclass
class Part:
    """What comes into memory together: a parameter, or an adapter layer with all that it merges into."""

    needs: list[nn.Parameter]
    params: dict[str, nn.Parameter]  # by name in the merged model; of an adapter layer, what its base has of them now
    merge: Callable[[], dict[str, torch.Tensor]]  # their values, while `needs` are in memory


def merge_and_save(engine: Engine, folder: str | os.PathLike[str], max_shard_size: int) -> None:
    """See Engine.merge_and_save."""
    base = base_of(engine.module)
    if base is None:
        raise EngineError(f"{type(engine.module).__name__} has no adapters to merge: use save_pretrained")
    parts = _parts_of(base)
    shards = [layout.make_shard(next(iter(p.params)), [(n, tuple(w.shape), dtype_name(w.dtype), False) for n, w in p.params.items()]) for p in parts]
    model = layout.Model(tuple(shards), engine.layout.chunk)
    origin = engine.origin
    buffers = origin.buffers_of(base) if origin is not None else dict(persistent(base))
    names = origin.names if origin is not None else {n: n for n in base.state_dict()}
    reader = _Reader(engine, model, parts)
    export_safetensors(folder, model, reader.read, names=names, buffers=buffers, max_shard_size=max_shard_size)
    save_extras(engine, base, folder)


def _parts_of(base: nn.Module) -> list[Part]:
    """All of the merged model, in the order of its modules, each parameter once."""
    parts = list(_walk(base, ""))
    merged = {id(p): part for part in parts if len(part.needs) > len(part.params) for p in part.params.values()}
    seen: set[int] = set()
    out = []
    for part in parts:
        fresh = {n: p for n, p in part.params.items() if id(p) not in seen}
        seen.update(id(p) for p in part.params.values())
        adapted = next((merged[id(p)] for p in fresh.values() if id(p) in merged), None)
        if adapted is not None and adapted is not part:  # tied to a layer that has an adapter: its first name, that one's values
            fresh = {n: p for n, p in part.params.items()}
            part = _renamed(adapted, fresh)
        if fresh:
            out.append(Part(part.needs, fresh, part.merge))
    return out


def _renamed(adapted: Part, names: dict[str, nn.Parameter]) -> Part:
    other = {id(p): n for n, p in adapted.params.items()}

    def merge() -> dict[str, torch.Tensor]:
        values = adapted.merge()
        return {n: values[other[id(p)]] for n, p in names.items()}

    return Part(adapted.needs, names, merge)


def _walk(module: nn.Module, prefix: str) -> Iterator[Part]:
    if _adapts(module):
        inner = _unloaded(module, merge=False)
        yield Part(list(module.parameters()), {f"{prefix}{n}": p for n, p in inner.named_parameters()}, lambda: _merged(module, prefix))
        return
    for name, p in module._parameters.items():
        if p is not None:
            yield Part([p], {f"{prefix}{name}": p}, lambda name=name, p=p: {f"{prefix}{name}": p.detach()})  # type: ignore[misc]
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}{name}.")


def _adapts(module: nn.Module) -> bool:
    return hasattr(module, "unload_and_optionally_merge_module") or (hasattr(module, "base_layer") and hasattr(module, "get_base_layer"))


def _unloaded(module: Any, merge: bool) -> nn.Module:
    """What PEFT puts in the place of an adapter layer."""
    if hasattr(module, "unload_and_optionally_merge_module"):
        return module.unload_and_optionally_merge_module(merge=merge, safe_merge=False, adapter_names=None)
    if merge:
        layer = module
        while hasattr(layer, "base_layer") and hasattr(layer, "merge"):  # several parameters of one module have a layer each
            layer.merge(safe_merge=False, adapter_names=None)
            layer = layer.base_layer
    return module.get_base_layer()


def _merged(module: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {f"{prefix}{n}": p.detach() for n, p in _unloaded(copy.deepcopy(module), merge=True).named_parameters()}


class _Reader:
    """Reads chunks of the merged model, part after part."""

    def __init__(self, engine: Engine, model: layout.Model, parts: Sequence[Part]):
        self._engine, self._model, self._parts = engine, model, parts
        self._current = -1
        self._values: dict[str, torch.Tensor] = {}  # of the current part, flat, on the CPU

    def read(self, items: Sequence[Item]) -> list[Any]:
        """As Store.read."""
        for (_, s, r, index), buffer in items:
            run = self._model.shards[s].runs[r]
            if s != self._current:
                self._bring(s)
            out = buffer.view(DTYPES[run.dtype]).zero_()
            for segment in segments(run, run.chunks(self._model.chunk)[index]):
                out[segment.at : segment.at + segment.count] = self._values[segment.param.name][segment.start : segment.start + segment.count]
        return [DONE] * len(items)

    def _bring(self, s: int) -> None:
        part = self._parts[s]
        self._values = {}
        with self._engine.gather(part.needs):
            self._values = {n: v.reshape(-1).to("cpu", copy=True) for n, v in part.merge().items() if n in part.params}
        self._current = s
