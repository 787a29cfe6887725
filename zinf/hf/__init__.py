"""What meets transformers: loading, saving, the Trainer. Nothing in the rest of zinf imports it, and importing it imports no transformers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zinf.hf.loading import from_pretrained
    from zinf.hf.trainer import ZinfSeq2SeqTrainer, ZinfTrainer, ZinfTrainerMixin

__all__ = ["ZinfSeq2SeqTrainer", "ZinfTrainer", "ZinfTrainerMixin", "from_pretrained"]

_HOMES = {"from_pretrained": "loading"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"zinf.hf.{_HOMES.get(name, 'trainer')}"), name)
    raise AttributeError(f"module 'zinf.hf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
