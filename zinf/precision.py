"""Which parameters of a half-precision model are fp32 all the same, since its architecture or its user asks for it.

Done before anything is laid out, so that the records hold the fp32 values. Nothing else is changed: what a module computes from weights
of these dtypes is what plain PyTorch computes from them.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zinf.errors import ConfigError

HALF = (torch.float16, torch.bfloat16)
AUTO = "auto"  # what a transformers model says itself


def keep_in_fp32(model: nn.Module, names: Sequence[str], dtype: torch.dtype | None = None, stored: bool = False) -> None:
    """Make fp32, in place, what `wanted` finds.

    Raises:
        ConfigError: as `wanted`; or there is something, and the weights are `stored` already.
    """
    found = wanted(model, names, dtype)
    if found and stored:
        some = ", ".join(list(found)[:3])
        raise ConfigError(f"keep_in_fp32: the store has {some} in half precision: pass keep_in_fp32 to zinf.from_pretrained, which lays the store out")
    for t in found.values():
        t.data = t.data.float()


def wanted(model: nn.Module, names: Sequence[str], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The half-precision parameters and buffers that `names` want in fp32, by name.

    Args:
        model: parameters may be on the meta device, and stay the same objects.
        names: each a class of modules ("LlamaRMSNorm"), a pattern of names of modules or parameters ("*.mlp.gate", "lm_head"), or "auto":
            what transformers' `_keep_in_fp32_modules` and `_keep_in_fp32_modules_strict` say for the model's dtype.
        dtype: the model's; None: that of most of its parameters.

    Raises:
        ConfigError: a name that nothing in the model has.
    """
    return {name: t for name, t in named(model, names, dtype).items() if t.dtype in HALF}


def named(model: nn.Module, names: Sequence[str], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """As `wanted`, whatever dtype they have now."""
    chosen: dict[str, torch.Tensor] = {}
    for name in names:
        found = _asked_by(model, dtype or _dtype(model)) if name == AUTO else _named(model, name)
        if not found and name != AUTO:
            raise ConfigError(f"keep_in_fp32: {type(model).__name__} has no {name}; give a class of modules, a pattern of names such as '*.norm', or {AUTO}")
        chosen.update(found)
    return chosen


def _dtype(model: nn.Module) -> torch.dtype:
    sizes: Counter[torch.dtype] = Counter()
    for p in model.parameters():
        sizes[p.dtype] += p.numel()
    return max(sizes, key=lambda d: sizes[d], default=torch.float32)


def _tensors(module: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a module and all below it, under their names in the model."""
    prefix = f"{prefix}." if prefix else ""
    pairs = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {prefix + name: t for name, t in pairs}


def _named(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        if fnmatch.fnmatchcase(type(module).__name__, name) or (path and fnmatch.fnmatchcase(path, name)):
            found.update(_tensors(module, path))
    found.update({path: p for path, p in model.named_parameters(remove_duplicate=False) if fnmatch.fnmatchcase(path, name)})
    return found


def _asked_by(model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """As transformers: each word is searched for in names; buffers that are not saved are left alone."""
    words = [*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())]
    if dtype is torch.float16:
        words += getattr(model, "_keep_in_fp32_modules", None) or ()
    if not words or dtype not in HALF:
        return {}
    pattern = re.compile("|".join(word.replace("*", ".*") for word in words))
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        unsaved = module._non_persistent_buffers_set
        for name, t in (*module._parameters.items(), *((n, b) for n, b in module._buffers.items() if n not in unsaved)):
            full = f"{path}.{name}" if path else name
            if t is not None and pattern.search(full):
                found[full] = t
    return found


def check_sums(grad_accum_dtype: str, trained: Sequence[str]) -> None:
    """Raise ConfigError if gradients cannot be summed in this dtype beside weights of the dtypes `trained`."""
    if grad_accum_dtype not in ("auto", "fp32", *trained):
        have = "/".join(dict.fromkeys(trained))
        raise ConfigError(
            f"grad_accum_dtype is {grad_accum_dtype}, but the weights are {have}: gradients are summed in their dtype or in fp32; set fp32, or auto"
        )
