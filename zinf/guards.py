"""What a module does for its callers while an engine trains it: what would reach past the engine goes through it, or is refused.

state_dict()         names, shapes and dtypes; of streamed parameters no values (shard.UnboundTensor)
load_state_dict(s)   engine.load_state_dict
to, half, cuda, ...  nothing where nothing would change; else refused, before anything is changed
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zinf.errors import EngineError


def install(module: nn.Module, load_state_dict: Callable[..., Any]) -> list[Callable[[], None]]:
    """Set all that on the instance `module`; returns what undoes it."""

    def load(state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return load_state_dict(state_dict, strict)

    def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        return _apply(module, fn)

    return [set_on(module, "load_state_dict", load), set_on(module, "_apply", apply)]


def set_on(module: nn.Module, name: str, value: Callable[..., Any]) -> Callable[[], None]:
    """Set an attribute of the instance; returns what undoes it, unless someone has set it again since."""
    before = module.__dict__.get(name)
    module.__dict__[name] = value

    def undo() -> None:
        if module.__dict__.get(name) is value:
            del module.__dict__[name]
            if before is not None:
                module.__dict__[name] = before

    return undo


def _apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """nn.Module._apply, for an `fn` that leaves parameters as they are; buffers follow it."""
    for name, p in module.named_parameters():
        probe = torch.empty(0, dtype=p.dtype, device=p.device)
        out = fn(probe)
        if (out.dtype, out.device) != (probe.dtype, probe.device):
            raise EngineError(
                f"{name} is {p.dtype} on {p.device} and would become {out.dtype} on {out.device} (model.to, half, float, cuda) in an engine, "
                "which has laid it out already: do that before zinf.Engine(model)"
            )
    for m in module.modules():
        for name, b in m._buffers.items():
            if b is not None:
                m._buffers[name] = fn(b)
    return module
