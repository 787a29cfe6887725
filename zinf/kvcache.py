"""No KV cache in a forward with a graph: recompute would fill it twice, and silently change gradients.

What wraps a model (PEFT, a trainer's own module, DataParallel) need not know of `use_cache`, and may call the model's forward
past its hooks. So it is turned off wherever an argument of that name is: at every module outside of the blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from zinf.errors import EngineError


def refuse(kwargs: dict[str, Any]) -> None:
    """Raise EngineError if a forward with a graph was asked for a cache."""
    if kwargs.get("use_cache"):
        raise EngineError(
            "use_cache=True in training: recompute would fill the cache twice and change gradients; pass use_cache=False, or generate under torch.no_grad()"
        )


def turn_off(model: nn.Module, blocks: Collection[nn.Module]) -> list[Callable[[], None]]:
    """Let no module of `model` outside of `blocks` keep a cache while grad is enabled; returns what undoes it."""
    inside = {m for block in blocks for m in block.modules()}
    undo: list[Callable[[], None]] = []
    for m in model.modules():
        names = list(inspect.signature(m.forward).parameters)
        if m not in inside and "use_cache" in names:
            undo.append(m.register_forward_pre_hook(_without(names.index("use_cache")), with_kwargs=True).remove)
    return undo


def _without(index: int) -> Callable[[nn.Module, Any, dict[str, Any]], tuple[Any, dict[str, Any]] | None]:
    def without(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not torch.is_grad_enabled():
            return None
        if len(args) > index:  # given by position
            return (*args[:index], False, *args[index + 1 :]), kwargs
        return args, {**kwargs, "use_cache": False}

    return without
