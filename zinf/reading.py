"""Reading and setting weights outside of a forward: gather, state_dict, load_state_dict, save. Whatever step is pending is applied first."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from zinf import averages
from zinf.buffers import persistent
from zinf.checkpoint import export_safetensors
from zinf.chunks import DTYPES
from zinf.discover import base_of
from zinf.editing import Edit, editable
from zinf.editing import write as write_values
from zinf.errors import EngineError
from zinf.shard import Shard

if TYPE_CHECKING:
    from zinf.engine import Engine


@contextlib.contextmanager
def gather(engine: Engine, params: str | nn.Parameter | Iterable[str | nn.Parameter], write: bool) -> Iterator[None]:
    """See Engine.gather."""
    wanted = {w if isinstance(w, str) else id(w) for w in ([params] if isinstance(params, (str, nn.Parameter)) else params)}
    names = {name: id(p) for name, p in engine.module.named_parameters(remove_duplicate=False)}
    unknown = wanted - names.keys() - set(names.values())
    if unknown:
        raise KeyError(f"{', '.join(w if isinstance(w, str) else 'a parameter' for w in unknown)}: not of this engine's model")
    ids = {names[w] if isinstance(w, str) else w for w in wanted}
    shards = [s for s in engine.shards if any(id(p) in ids for *_, p in s.params)]
    if write:
        _check_editable(engine, ids)
        engine.synchronize()  # a commit must not see half of what the block does
    with contextlib.ExitStack() as stack:
        engine.health.gathered += 1
        stack.callback(lambda: setattr(engine.health, "gathered", engine.health.gathered - 1))
        for shard in shards:
            engine.bring(shard)
            shard.bind()
            stack.callback(shard.unbind)
        with _editing(engine, shards) if write else _only_reading(engine, shards):
            yield


def _check_editable(engine: Engine, ids: set[int]) -> None:
    for shard in engine.shards:
        for r, spec, p in shard.params:
            if id(p) in ids and not editable(shard, r):
                raise EngineError(
                    f"{spec.name} is frozen, and its only copy on NVMe belongs to the last commit: name it in zinf.Engine(model, trainable=...), "
                    "or change it before the engine is built"
                )


@contextlib.contextmanager
def _only_reading(engine: Engine, shards: Sequence[Shard]) -> Iterator[None]:
    yield
    for shard in shards:
        try:
            shard.check_values()
        except EngineError as error:
            if shard.parts.records.weights(shard.index) is None or not shard.parts.device.direct:
                shard.valid = False  # the record is what it was
            else:
                engine.health.error = error
            raise


@contextlib.contextmanager
def _editing(engine: Engine, shards: Sequence[Shard]) -> Iterator[None]:
    edits = [Edit(shard) for shard in shards if not shard.edited]  # the outermost block writes
    try:
        yield
    except BaseException:
        for edit in edits:
            edit.undo()
            engine.bring(edit.shard)
        raise
    changed = False
    with engine.health.noting(Exception, KeyboardInterrupt):
        for edit in edits:
            changed |= edit.write()
    _seal(engine, changed)


def _seal(engine: Engine, changed: bool) -> None:
    engine.progress.marks.clear()
    if changed and engine.step_mode == "backward":  # which undoes a step by going back to a commit
        engine.commit()


def load_state_dict(engine: Engine, state: Mapping[str, torch.Tensor], strict: bool) -> Any:
    """See Engine.load_state_dict."""
    module = engine.module
    params, buffers = dict(module.named_parameters(remove_duplicate=False)), dict(persistent(module))
    there: dict[str, torch.Tensor] = {**params, **buffers}
    missing, unexpected = [n for n in there if n not in state], [n for n in state if n not in there]
    wrong = [f"{n} is {list(t.shape)}, and {list(there[n].shape)} here" for n, t in state.items() if n in there and t.shape != there[n].shape]
    if strict:
        wrong += [f"{n} is missing" for n in missing] + [f"{n} is not of the model" for n in unexpected]
    if wrong:
        raise RuntimeError(f"load_state_dict of {type(module).__name__}: {'; '.join(wrong[:8])}{'; ...' if len(wrong) > 8 else ''}")
    given = {id(params[n]): t.detach().reshape(-1) for n, t in state.items() if n in params}
    _check_editable(engine, set(given))
    engine.synchronize()
    changed = False
    with engine.health.noting(Exception, KeyboardInterrupt):
        for shard in engine.shards:
            flat = {spec.name: given[id(p)] for _, spec, p in shard.params if id(p) in given}
            if flat and write_values(shard, lambda p, start, count, flat=flat: flat[p.name][start : start + count].cpu() if p.name in flat else None):  # type: ignore[misc]
                changed = True
                shard.valid = engine.memory.parts.device.direct and shard.slab is not None and shard.slab.holder is None
                if shard.bound:
                    engine.bring(shard)
    with torch.no_grad():
        for name, b in buffers.items():
            if name in state:
                b.copy_(state[name])
    _seal(engine, changed)
    return _IncompatibleKeys(missing, unexpected)


def hand_over(engine: Engine) -> None:
    """Give every parameter a copy of its values."""
    for shard in engine.shards:
        engine.bring(shard)
        shard.hand_over()


def state_dict(engine: Engine, ema: bool) -> dict[str, torch.Tensor]:
    """See Engine.state_dict."""
    if ema:
        averages.check(engine)
        return state_dict(engine, False) | _averages(engine)
    values: dict[int, torch.Tensor] = {}
    for shard in engine.shards:
        with gather(engine, [p for *_, p in shard.params], False):
            for *_, p in shard.params:
                values[id(p)] = p.detach().cpu().clone()
    out = {name: values[id(p)] for name, p in engine.module.named_parameters(remove_duplicate=False)}
    return out | {name: b.detach().clone() for name, b in persistent(engine.module)}


def _averages(engine: Engine) -> dict[str, torch.Tensor]:
    """Of all parameters that may be trained, under each of their names, in fp32."""
    found = averages.values(engine)
    own = {id(p): found[spec.name] for shard in engine.shards for _, spec, p in shard.params if spec.name in found}
    return {name: own[id(p)] for name, p in engine.module.named_parameters(remove_duplicate=False) if id(p) in own}


def save_pretrained(engine: Engine, folder: str | os.PathLike[str], max_shard_size: int, dtype: str | None, ema: bool) -> None:
    """See Engine.save_pretrained."""
    if ema:
        averages.check(engine)
    engine.synchronize()
    if base_of(engine.module) is not None:
        _save_adapters(engine, folder, ema)
        return
    averaged = averages.averaged(engine) if ema else frozenset()
    origin, module = engine.origin, engine.module
    names, buffers = (origin.names, origin.buffers_of(module)) if origin is not None else (None, dict(persistent(module)))
    read = engine.memory.parts.records.read
    export_safetensors(folder, engine.layout, read, names=names, buffers=buffers, max_shard_size=max_shard_size, dtype=dtype, averaged=averaged)
    save_extras(engine, module, folder, dtype)


def save_extras(engine: Engine, module: nn.Module, folder: str | os.PathLike[str], dtype: str | None = None) -> None:
    """What a Hugging Face folder has beside the weights of `module`, which are of `dtype`: config, tokenizer."""
    if engine.origin is not None:
        engine.origin.save_extras(module, folder, dtype=DTYPES[dtype] if dtype is not None else None)
        return
    save_config: Any = getattr(getattr(module, "config", None), "save_pretrained", None)
    if save_config is not None:
        save_config(folder)


def _save_adapters(engine: Engine, folder: str | os.PathLike[str], ema: bool) -> None:
    """What the model's own save_pretrained saves: adapters are resident; a large layer that is trained as a whole comes into memory for it."""
    module: Any = engine.module
    trained = {id(p) for s in engine.shards for r, _, p in s.params if s.spec.runs[r].trainable}
    state = module.state_dict() | _values(engine, trained)
    if ema:
        state |= {name: average.to(state[name].dtype) for name, average in _averages(engine).items()}
    try:
        module.save_pretrained(folder, state_dict=state)
    except EngineError:  # embeddings that were resized or have adapters are saved as well: they are needed after all
        layers = [layer for layer in (module.get_input_embeddings(), module.get_output_embeddings()) if layer is not None]
        module.save_pretrained(folder, state_dict=state | _values(engine, {id(p) for layer in layers for p in layer.parameters()}))


def _values(engine: Engine, ids: set[int]) -> dict[str, torch.Tensor]:
    """Copies of parameters, under each of their names."""
    out: dict[str, torch.Tensor] = {}
    for shard in engine.shards:
        here = {id(p) for *_, p in shard.params} & ids
        with gather(engine, [p for *_, p in shard.params if id(p) in here], False):
            out |= {name: p.detach().cpu().clone() for name, p in engine.module.named_parameters(remove_duplicate=False) if id(p) in here}
    return out
