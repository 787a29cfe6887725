"""torch.compile of blocks, for training: parameters are inputs of the compiled graph, so equal blocks share one, whatever slab they compute from.

Without a graph (evaluation, generation) a block runs its plain forward: a KV cache would be compiled anew for every layer and length.
Single layers stay plain: they are one kernel each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zinf.config import nearest
from zinf.errors import ConfigError
from zinf.guards import set_on


def check_backend(backend: str | None) -> None:
    """Raise ConfigError for a backend that torch does not have."""
    if backend is not None:
        known = torch._dynamo.list_backends(exclude_tags=())  # type: ignore[attr-defined]
        if backend not in known:
            raise ConfigError(f"compile_blocks is {backend!r}, which is no backend of torch.compile; {nearest(backend, known)}")


def compile_forward(module: nn.Module, backend: str) -> Callable[[], None]:
    """Let calls of `module` that make a graph run compiled; returns what undoes it. Compilation happens in the first one."""
    plain = module.forward
    fast = torch.compile(plain, backend=backend)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return fast(*args, **kwargs) if torch.is_grad_enabled() else plain(*args, **kwargs)

    return set_on(module, "forward", forward)
