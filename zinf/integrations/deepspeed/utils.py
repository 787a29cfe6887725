"""deepspeed.utils: one parameter in full, whatever tier it rests in. Only its own chunks are read, not a whole sub-group.

On one card a rank's part of a parameter is all of it: the local functions give the same values, flat.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zinf.integrations.deepspeed import fragments
from zinf.integrations.deepspeed.zero import get_z3_leaf_modules, set_z3_leaf_modules, unset_z3_leaf_modules, z3_leaf_module

__all__ = [
    "OnDevice", "get_z3_leaf_modules", "log_dist", "logger", "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param", "safe_get_local_grad", "safe_get_local_optimizer_state", "safe_set_full_fp32_param", "safe_set_full_grad",
    "safe_set_full_optimizer_state", "safe_set_local_fp32_param", "safe_set_local_grad", "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized", "set_z3_leaf_modules", "unset_z3_leaf_modules", "z3_leaf_module",
]  # fmt: skip

logger = logging.getLogger("zinf")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """There is one rank."""
    logger.log(level, message)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The fp32 master, exactly; None of a parameter that is no engine's."""
    return fragments.master(param)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the fp32 master, and the weights with it."""
    fragments.set_master(param, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """A moment ("exp_avg", "exp_avg_sq", ...), in fp32."""
    return fragments.state(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set a moment."""
    fragments.set_state(param, value, optim_state_key)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient between backward and step, in the dtype that it is summed in."""
    return fragments.grad(param)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Let the step take another gradient."""
    fragments.set_grad(param, value)


def safe_update_full_grad_vectorized(param_list: Sequence[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]) -> None:
    """Replace the gradient of each parameter that has one by update_func(gradient, parameter)."""
    for p in param_list:
        grad = fragments.grad(p)
        if grad is not None:
            fragments.set_grad(p, update_func(grad, p))


def _flat(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.reshape(-1)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    return _flat(fragments.master(param))


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    return _flat(fragments.state(param, optim_state_key))


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    return _flat(fragments.grad(param))


safe_set_local_fp32_param = safe_set_full_fp32_param
safe_set_local_optimizer_state = safe_set_full_optimizer_state
safe_set_local_grad = safe_set_full_grad


@contextlib.contextmanager
def OnDevice(dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> Iterator[None]:
    """Modules made in the block are on `device`, with parameters of `dtype`."""
    if not enabled:
        yield
        return
    before: Any = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
