"""Coming from DeepSpeed: its Python interface and its config, on zinf's engine.

    from zinf.integrations import deepspeed      # was: import deepspeed
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds_config.json")

reading.py reads its JSON, keys.py is the table of what becomes of each key, config.py takes one through it; building.py makes an engine from
that, engine.py is what the loop calls. The names below are loaded when they are first used, so that reading a config needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zinf.integrations.deepspeed.accelerator import get_accelerator
    from zinf.integrations.deepspeed.building import add_config_arguments, initialize
    from zinf.integrations.deepspeed.comm import init_distributed
    from zinf.integrations.deepspeed.engine import DeepSpeedEngine
    from zinf.integrations.deepspeed.inference import InferenceEngine, init_inference
    from zinf.integrations.deepspeed.trainer import take_argument, trainer_options

__all__ = [
    "DeepSpeedEngine",
    "InferenceEngine",
    "add_config_arguments",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "initialize",
    "take_argument",
    "trainer_options",
]

_HOMES = {
    "initialize": "building",
    "add_config_arguments": "building",
    "init_inference": "inference",
    "InferenceEngine": "inference",
    "init_distributed": "comm",
    "get_accelerator": "accelerator",
    "DeepSpeedEngine": "engine",
    "trainer_options": "trainer",
    "take_argument": "trainer",
}
_MODULES = ("zero", "utils", "comm", "ops", "checkpoint", "checkpointing", "accelerator", "lr_schedules")  # as attributes, as of DeepSpeed


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"zinf has no deepspeed.{name}: see docs/from-deepspeed.md for what there is")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
