"""Which modules of a model travel as shards.

In order: transformer blocks (transformers' GradientCheckpointingLayer, or the classes a user names, or the repeated children
of a ModuleList or Sequential); then single torch.nn layers over a size (embeddings, heads, convolutions, LSTMs); what is left
is the root, small, and stays on the device. Works on modules on the meta device. A parameter belongs to exactly one unit:

- layers that share parameters (an embedding and the head tied to it) are one unit with several modules;
- a parameter that a block shares with anything outside of it belongs to the root;
- adapters do too: the few trained parameters of a block or layer that is frozen otherwise. So they stay, and the base streams
  read-only.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zinf import layout
from zinf.errors import ConfigError

# Layers whose forward is called wherever their weight is used. Others may be used through their attributes alone.
ADAPTERS = 4  # the trained parameters of a unit are adapters up to one for so many frozen ones
CALLED_LAYERS = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.modules.conv._ConvNd, nn.MultiheadAttention)


@dataclasses.dataclass
class Unit:
    """The modules and parameters of one shard. `modules` is empty for the root. `block` tells blocks from single layers."""

    name: str
    modules: list[nn.Module]
    params: list[tuple[str, nn.Parameter]]
    block: bool


def discover(model: nn.Module, blocks: Sequence[str] | None = None, leaf_bytes: int = 4 << 20, stateful: Collection[str] | None = None) -> list[Unit]:
    """Split `model` into units: blocks and large layers in registration order, the root last (absent if nothing is left).

    Args:
        model: any module; its parameters may be on the meta device.
        blocks: class names of the blocks; None finds them.
        leaf_bytes: a layer outside of every block becomes a unit of its own from this many bytes on.
        stateful: names of the parameters that have optimizer state; None: of those that want a gradient.

    Raises:
        ConfigError: a class in `blocks` does not occur in the model, or the model has no parameters.
    """
    first_names: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        first_names.setdefault(id(p), name)
    if not first_names:
        raise ConfigError(f"{type(model).__name__} has no parameters: there is nothing to stream or to train")
    found = list(_blocks(model, blocks))
    inside = {id(m) for _, block in found for m in block.modules()}
    groups = [Unit(name, [m], [], True) for name, m in found] + _merge_tied(list(_layers(model, inside, leaf_bytes)))
    homes = _homes(model, groups)
    root = Unit("root", [], [], False)
    for _, p in model.named_parameters():
        users = homes[id(p)]
        owner = users[0] if len(users) == 1 and users[0] is not None else root
        owner.params.append((first_names[id(p)], p))
    adapters = {name for unit in groups for name in _adapters(unit, stateful)}
    if adapters:  # in the order of the model
        resident = {name for name, _ in root.params} | adapters
        root.params = [(name, p) for name, p in model.named_parameters() if name in resident]
        for unit in groups:
            unit.params = [(name, p) for name, p in unit.params if name not in adapters]
    return [u for u in [*groups, root] if u.params]


def _layers(model: nn.Module, inside: set[int], leaf_bytes: int) -> Iterator[tuple[str, nn.Module]]:
    """The large layers outside of blocks, (name, module): one that an adapter layer wraps (as its base_layer) together with that."""
    seen = set(inside)
    for name, m in model.named_modules():
        layer: Any = m
        while isinstance(getattr(layer, "base_layer", None), nn.Module):
            layer = layer.base_layer
        if id(m) in seen or not isinstance(layer, CALLED_LAYERS) or sum(p.numel() * p.element_size() for p in layer.parameters()) < leaf_bytes:
            continue
        seen.update(id(part) for part in m.modules())
        yield name, m


def _adapters(unit: Unit, stateful: Collection[str] | None) -> list[str]:
    """The names of a unit's trained parameters, if they are few beside those that are frozen."""
    trained = [(name, p) for name, p in unit.params if (p.requires_grad if stateful is None else name in stateful)]
    few = sum(p.numel() for _, p in trained)
    return [name for name, _ in trained] if few * ADAPTERS <= sum(p.numel() for _, p in unit.params) - few else []


def base_of(module: nn.Module) -> nn.Module | None:
    """The model inside a model with adapters (PEFT); None if it has none."""
    get = getattr(module, "get_base_model", None)
    return get() if get is not None and hasattr(module, "peft_config") else None


def check_model(model: nn.Module, streamed: bool) -> None:
    """Is it a module, and does it have values (or a store has, if it was `streamed` into one)? Raises TypeError or ConfigError."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"zinf.Engine: expected an nn.Module, got {type(model).__name__}")
    if next(model.parameters(), None) is None:
        raise ConfigError(f"{type(model).__name__} has no parameters: there is nothing to stream or to train")
    for name, p in model.named_parameters():
        if isinstance(p, nn.UninitializedParameter):
            raise ConfigError(f"{name} is not initialised yet (a lazy module): run one batch through the model first")
        if p.is_meta and not streamed:
            raise ConfigError(f"{name} is on the meta device and has no values: load the model with zinf.from_pretrained, or materialise it")


def _blocks(model: nn.Module, classes: Sequence[str] | None) -> Iterator[tuple[str, nn.Module]]:
    """The outermost blocks, (name, module), each module once."""
    if classes is not None:
        present = {type(m).__name__ for m in model.modules()}
        for c in classes:
            if c not in present:
                raise ConfigError(f"blocks names the class {c}, which does not occur in {type(model).__name__}; it has {', '.join(sorted(present))}")

    def is_block(m: nn.Module) -> bool:
        if classes is not None:
            return type(m).__name__ in classes
        return any(c.__name__ == "GradientCheckpointingLayer" for c in type(m).__mro__)

    marked = any(is_block(m) for m in model.modules())
    seen: set[int] = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        repeated = set() if marked or classes is not None else _repeated(module)
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if id(child) in seen:
                continue
            if is_block(child) or id(child) in repeated:
                seen.add(id(child))
                if any(True for _ in child.parameters()):
                    yield path, child
            else:
                yield from walk(child, path)

    yield from walk(model, "")


def _repeated(module: nn.Module) -> set[int]:
    """Children of a ModuleList or Sequential whose class occurs there more than once and has parameters."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return set()
    children = [c for c in module.children() if any(True for _ in c.parameters()) and not isinstance(c, (nn.ModuleList, nn.ModuleDict))]
    classes = [type(c) for c in children]
    return {id(c) for c in children if classes.count(type(c)) > 1}


def _merge_tied(layers: list[tuple[str, nn.Module]]) -> list[Unit]:
    """One unit for each set of layers that share parameters."""
    units: list[Unit] = []
    for name, module in layers:
        mine = {id(p) for p in module.parameters()}
        for unit in units:
            if any(id(p) in mine for m in unit.modules for p in m.parameters()):
                if module not in unit.modules:
                    unit.modules.append(module)
                break
        else:
            units.append(Unit(name, [module], [], False))
    return units


def _homes(model: nn.Module, units: list[Unit]) -> dict[int, list[Unit | None]]:
    """For each parameter (by identity, while nothing moves yet) the units that use it; None stands for modules outside of all units."""
    owner: dict[int, Unit] = {}
    for unit in units:
        for top in unit.modules:
            for m in top.modules():
                owner.setdefault(id(m), unit)
    homes: dict[int, list[Unit | None]] = {}
    for m in model.modules():
        for p in m.parameters(recurse=False):
            users = homes.setdefault(id(p), [])
            if not any(u is owner.get(id(m)) for u in users):
                users.append(owner.get(id(m)))
    return homes


def dtype_name(dtype: torch.dtype) -> str:
    """The layout's name of a torch dtype ("bf16", ...); other dtypes keep torch's name and are refused by the layout."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(dtype, str(dtype).removeprefix("torch."))


def may_train(model: nn.Module, patterns: Sequence[str] | None = None) -> frozenset[str]:
    """The names of the parameters that want a gradient now, and of those that `patterns` (of fnmatch) say may want one later.

    Raises:
        ConfigError: a pattern that fits no name.
    """
    names = [name for name, _ in model.named_parameters()]
    later = {pattern: fnmatch.filter(names, pattern) for pattern in patterns or ()}
    for pattern, found in later.items():
        if not found:
            raise ConfigError(f"trainable has the pattern {pattern}, which fits no parameter of {type(model).__name__}; it has {', '.join(names[:3])} ...")
    return frozenset(name for name, p in model.named_parameters() if p.requires_grad).union(*later.values())


def layout_of(units: Sequence[Unit], chunk: int, stateful: Collection[str] | None = None, *, moments: tuple[str, ...] = layout.MOMENTS) -> layout.Model:
    """The layout of units, a shard for each, in chunks of `chunk` elements: dtypes and shapes are the parameters' now.

    Args:
        stateful: names of the parameters that have optimizer state; None: of those that want a gradient.
        moments: the planes that the optimizer keeps beside the master's.

    Raises:
        ValueError: a parameter without elements, or of a dtype that is not streamed; a chunk that is no multiple of a piece.
    """
    return layout.Model(
        tuple(
            layout.make_shard(
                u.name, [(n, tuple(p.shape), dtype_name(p.dtype), p.requires_grad if stateful is None else n in stateful) for n, p in u.params], moments
            )
            for u in units
        ),
        chunk,
    )
