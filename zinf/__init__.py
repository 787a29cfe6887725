"""zinf fine-tunes models larger than the GPU, and larger than the RAM, on one card.

    HF checkpoint --import--> NVMe --fetch--> host chunk --upload--> device slab --> compute
                               ^                 ^                        |
                               |                 +------- offload --------+   (gradients)
                               +----- flush ----- step (CPU optimizer on the host chunk)

A forward of layer i needs its weights; a backward of layer i needs its weights again and makes its gradients; step(i) needs its
gradients and state and makes its weights and state. Everything else here exists so that no one waits for the left side.

    model = zinf.from_pretrained("folder", nvme_path="/mnt/nvme")
    engine = zinf.Engine(model, lr=1e-5, max_grad_norm=1.0)

The names below are loaded when they are first used: `import zinf` imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from zinf.config import Config
    from zinf.engine import Engine
    from zinf.errors import BudgetError, CheckpointError, CommitError, ConfigError, EngineError, IntegrityError, NonFiniteError, StoreError, ZinfError
    from zinf.heads import count_targets, linear_cross_entropy
    from zinf.hf.loading import from_pretrained
    from zinf.loader import ResumableLoader
    from zinf.optimizer import decay_groups
    from zinf.profiler import profile

__all__ = [
    "BudgetError",
    "CheckpointError",
    "CommitError",
    "Config",
    "ConfigError",
    "Engine",
    "EngineError",
    "IntegrityError",
    "NonFiniteError",
    "ResumableLoader",
    "StoreError",
    "ZinfError",
    "__version__",
    "count_targets",
    "decay_groups",
    "from_pretrained",
    "linear_cross_entropy",
    "profile",
]

_HOMES = {"Engine": "zinf.engine", "from_pretrained": "zinf.hf.loading", "Config": "zinf.config", "ResumableLoader": "zinf.loader"}
_HOMES.update(count_targets="zinf.heads", linear_cross_entropy="zinf.heads", decay_groups="zinf.optimizer", profile="zinf.profiler")
_HOMES.update((name, "zinf.errors") for name in __all__ if name.endswith("Error"))


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    try:
        return importlib.import_module(f"zinf.{name}")  # zinf.hf and the like, as after `import zinf.hf`
    except ModuleNotFoundError as e:
        if e.name != f"zinf.{name}":
            raise
    raise AttributeError(f"module 'zinf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
