"""What is not zinf's and must be where compute is: a model's buffers, for as long as it has an engine, and the tensors of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map


def buffers_to(module: nn.Module, device: torch.device) -> Callable[[], None]:
    """Move every buffer to `device`; returns what brings them back to where they were. Nothing moves between equal devices."""
    homes = [(m, name, b.device) for m in module.modules() for name, b in m._buffers.items() if b is not None and b.device != device]
    _move([(m, name, device) for m, name, _ in homes])
    return lambda: _move(homes)


def _move(where: list[tuple[nn.Module, str, torch.device]]) -> None:
    moved: dict[int, torch.Tensor] = {}  # a buffer that several modules share stays one
    for m, name, device in where:
        b = m._buffers.get(name)
        if b is not None:
            m._buffers[name] = moved.setdefault(id(b), b.to(device))


def tensors_to(tree: Any, device: torch.device) -> Any:
    """`tree`, its tensors of host memory on `device`. Scalars stay, as torch takes them from either."""
    if device.type == "cpu":
        return tree
    return tree_map(lambda t: t.to(device, non_blocking=True) if isinstance(t, torch.Tensor) and t.device.type == "cpu" and t.dim() else t, tree)
