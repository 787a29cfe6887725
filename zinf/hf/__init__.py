"""What meets transformers: loading, saving, the Trainer. Nothing in the rest of zinf imports it, and importing it imports no transformers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from zinf.hf.trainer import ZinfSeq2SeqTrainer, ZinfTrainer, ZinfTrainerMixin

__all__ = ["ZinfSeq2SeqTrainer", "ZinfTrainer", "ZinfTrainerMixin", "from_pretrained"]


def from_pretrained(*args: Any, **options: Any) -> nn.Module:
    """zinf.from_pretrained, with the class first as well: from_pretrained(AutoModelForSequenceClassification, "name", nvme_path=...)."""
    from zinf.hf import loading

    if args and isinstance(args[0], type):
        options["auto_class"], args = args[0], args[1:]
    return loading.from_pretrained(*args, **options)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("zinf.hf.trainer"), name)
    raise AttributeError(f"module 'zinf.hf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
