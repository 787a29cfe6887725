"""deepspeed.checkpointing: activation checkpointing that a model's own code asks for. It is torch's, non-reentrant, with random numbers restored.

An engine recomputes its blocks by itself (`recompute`); what is inside such a block and asks for more is computed once more, with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

_configured = False


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), recomputed in backward."""
    return torch_checkpoint(function, *args, use_reentrant=False, early_stop=False) if torch.is_grad_enabled() else function(*args)


non_reentrant_checkpoint = checkpoint


def configure(mpu_: Any = None, deepspeed_config: Any = None, **options: Any) -> None:
    """Taken, and without effect: where inputs of recomputed blocks wait is zinf's `activations`."""
    global _configured
    _configured = True


def is_configured() -> bool:
    """Was `configure` called?"""
    return _configured


def reset() -> None:
    """Nothing is kept between steps."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """One rank: torch.manual_seed."""
    torch.manual_seed(seed)


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed
