"""Which tensors of a checkpoint a transformers model's parameters are.

Names in files are not names in memory: prefixes differ, modules were renamed, experts are stacked, fused projections split.
transformers knows all that as a list of conversions for each architecture. Those that move no value inside a tensor are
renames, or parts (checkpoint.Part) laid end to end, and zinf streams them; of the others it says that it cannot.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from zinf.checkpoint import Part
from zinf.errors import CheckpointError

Where = str | tuple[Part, ...]  # a tensor of the files, or parts of some


@dataclasses.dataclass
class Names:
    """How the tensors of some files are a model's. Parameters go by the first of their names, in state_dict order."""

    load: dict[str, Where]  # parameter -> where its values are
    save: dict[str, Where]  # parameter -> where an export puts it: as in the files, but with the prefixes of this model
    buffers: dict[str, str]  # persistent buffer -> tensor
    copies: list[tuple[str, str]]  # two tensors of the files that are one parameter here, and must be equal
    unexpected: list[str]  # tensors that are nothing in this model
    ignored: list[str]  # of those, the ones its class says to ignore

    @classmethod
    def same(cls, model: nn.Module) -> Names:
        """Of a model that comes from no files: its own names."""
        own = {name: name for name, _ in model.named_parameters()}
        return cls(dict(own), dict(own), {}, [], [], [])


def match(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Names:
    """Match tensors (name -> shape) with the parameters and persistent buffers of `model`, as its from_pretrained does.

    Raises:
        CheckpointError: names the architecture, the tensors and the conversion that zinf does not stream.
    """
    state = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(p), name)
    found, unexpected = _places(model, shapes, state)
    names = Names({}, {}, {}, [], unexpected, _ignorable(model, unexpected))
    for name, tensor in state.items():
        if name not in found:
            continue
        load, save = found[name]
        if not isinstance(tensor, nn.Parameter):
            if not isinstance(load, str):
                raise CheckpointError(f"the buffer {name} is made of several tensors of the checkpoint, which zinf does not load")
            names.buffers[name] = load
            continue
        owner = first[id(tensor)]
        if owner not in names.load:
            names.load[owner], names.save[owner] = load, save
        elif isinstance(load, str) and isinstance(kept := names.load[owner], str) and load != kept:
            names.copies.append((kept, load))
    return names


def _places(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], state: dict[str, Any]) -> tuple[dict[str, tuple[Where, Where]], list[str]]:
    """For each name in `state`: where it is in the files, and where an export puts it. And the tensors that are nothing."""
    convert = _Conversions(model)
    found: dict[str, tuple[Where, Where]] = {}
    unexpected = []
    groups: dict[tuple[int, str], _Group] = {}
    for tensor in convert.sort(shapes):
        name, save, converter, pattern = convert(tensor, state)
        if name not in state:
            unexpected.append(tensor)
        elif converter is not None:
            group = groups.setdefault((id(converter), name), _Group(converter, name))
            group.tensors.setdefault(pattern, []).append((tensor, save))
        elif name in found:
            raise CheckpointError(f"{tensor} and {found[name][0]} of the checkpoint are both {name} in {type(model).__name__}")
        else:
            found[name] = (tensor, save)
    for group in groups.values():
        found.update(group.parts(type(model).__name__, shapes))
    return found, unexpected


class _Conversions:
    """transformers' conversions for a model, as functions of names. Plain names for a model that is not transformers'."""

    def __init__(self, model: Any) -> None:
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        self._prefix = getattr(model, "base_model_prefix", "") or None
        if not hasattr(model, "config"):
            return
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        conversions = get_model_conversion_mapping(model)
        self._renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        self._converters = [c for c in conversions if isinstance(c, WeightConverter)]

    def sort(self, names: Mapping[str, object]) -> list[str]:
        """In the order in which transformers collects tensors: experts by number."""
        from transformers.core_model_loading import dot_natural_key

        return sorted(names, key=dot_natural_key)

    def __call__(self, tensor: str, state: dict[str, Any]) -> tuple[str, str, Any, str]:
        """(name in memory, name at export, converter or None, its pattern that matched) of a tensor of the files."""
        from transformers.core_model_loading import rename_source_key

        bare, _ = rename_source_key(tensor, self._renamings, self._converters)
        name, pattern = rename_source_key(tensor, self._renamings, self._converters, self._prefix, state)
        if name not in state and tensor in state:
            return tensor, tensor, None, ""
        if name not in state:
            bare, name, pattern = tensor, rename_source_key(tensor, [], [], self._prefix, state)[0], None
        save = tensor
        if self._prefix and name == f"{self._prefix}.{bare}":
            save = f"{self._prefix}.{tensor}"
        elif self._prefix and bare == f"{self._prefix}.{name}":
            save = tensor.removeprefix(f"{self._prefix}.")
        if pattern is None:
            return name, save, None, ""
        return name, save, next(c for c in self._converters if pattern in c.source_patterns), pattern


@dataclasses.dataclass
class _Group:
    """The tensors that one use of a converter takes, by the pattern that they match."""

    converter: Any
    name: str  # its first result
    tensors: dict[str, list[tuple[str, str]]] = dataclasses.field(default_factory=dict)  # (name in the files, name at export)

    def parts(self, architecture: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[Where, Where]]]:
        """(parameter, (where it is, where an export puts it)) for each result.

        Raises:
            CheckpointError: the conversion is none of those that only lay tensors end to end.
        """
        steps = [(type(op).__name__, getattr(op, "dim", None)) for op in self.converter.operations]
        lists = [self.tensors.get(pattern, []) for pattern in self.converter.source_patterns]
        even = lists[0] and all(len(x) == len(lists[0]) for x in lists)
        if even and steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
            order = [t for together in zip(*lists, strict=True) for t in together]  # expert by expert
        elif even and steps == [("Concatenate", 0)]:
            order = [t for x in lists for t in x]
        elif steps == [("Chunk", 0)] and len(lists) == 1 and len(lists[0]) == 1 and self.converter.operations[0].num_shards_attribute is None:
            yield from self._chunks(*lists[0][0], shapes)
            return
        else:
            how = ", ".join(map(repr, self.converter.operations))
            some = [tensor for x in lists for tensor, _ in x]
            raise CheckpointError(
                f"{architecture}: {self.name} is made from {len(some)} tensors of the checkpoint ({', '.join(some[:3] + ['...'] * (len(some) > 3))}) by {how}, "
                "which zinf does not stream yet; load and save the model once with transformers (save_original_format=False)"
            )
        yield self.name, (_whole([t for t, _ in order], [t for t, _ in order], shapes), _whole([s for _, s in order], [t for t, _ in order], shapes))

    def _chunks(self, tensor: str, save: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[Where, Where]]]:
        """One tensor cut into equal results along its first dimension."""
        targets, shape = self.converter.target_patterns, shapes[tensor]
        before, _, after = self.name.partition(targets[0])
        if not shape or shape[0] % len(targets):
            raise CheckpointError(f"{tensor} {list(shape)} cannot be cut into {len(targets)} equal parts")
        count = math.prod(shape) // len(targets)
        for i, target in enumerate(targets):
            yield before + target + after, ((Part(tensor, shape, i * count, count),), (Part(save, shape, i * count, count),))


def _whole(names: Sequence[str], tensors: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> tuple[Part, ...]:
    return tuple(Part(name, shapes[t], 0, math.prod(shapes[t])) for name, t in zip(names, tensors, strict=True))


def _ignorable(model: nn.Module, unexpected: Sequence[str]) -> list[str]:
    """The unexpected tensors that the model's class expects, and those that used to be buffers of every layer."""
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    for name, pattern in (("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"), ("position_ids", r"(^|\.)position_ids$")):
        if any(b.endswith(name) for b in buffers):
            patterns.add(pattern)
    return [name for name in unexpected if any(re.search(p, name) for p in patterns)]
