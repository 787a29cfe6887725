"""A model's facts for the planner from its config alone: built on the meta device, nothing downloaded but config.json.

MODEL is a folder with a config.json, a YAML or JSON file with the same keys (of a model that nobody has yet), or a hub id.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from zinf import memory
from zinf.algorithms import moments
from zinf.config import Config, read_file
from zinf.discover import discover, dtype_name, layout_of
from zinf.errors import ConfigError
from zinf.hf.loading import build_on_meta
from zinf.planner.model import Facts, active_parameters

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What of a training decides its layout, beside the model."""

    precision: str = "bf16"
    optimizer: str = "adamw"
    momentum: float | None = None
    ema_decay: float | None = None
    lora: int | None = None  # rank of the adapters; None: all is trained
    lora_targets: Sequence[str] = ("all-linear",)
    chunk_size: int = Config.chunk_size


def read(name: str, recipe: Recipe = Recipe()) -> Facts:
    """Raises ConfigError: no config, one that transformers cannot build a causal language model from, or a recipe that does not go with it."""
    keeps = moments(Config(optimizer=recipe.optimizer, momentum=recipe.momentum, ema_decay=recipe.ema_decay))  # type: ignore[arg-type]
    with config_folder(name) as folder:
        try:
            module: Any = build_on_meta(folder, dtype=DTYPES[recipe.precision])
        except (TypeError, AttributeError, KeyError) as e:
            raise ConfigError(f"{name}: transformers builds no model from it: {type(e).__name__}: {e}; compare its keys with another's") from e
        except ValueError as e:
            raise ConfigError(str(e).replace(folder, name)) from e
    text = module.config.get_text_config()
    if recipe.lora is not None:
        module = adapted(module, recipe.lora, recipe.lora_targets)
    units = discover(module)
    root, pinned = memory.roles(units)
    model = layout_of(units, recipe.chunk_size, moments=keeps)
    keys = text.to_dict()
    active, trained = active_parameters(model, keys), active_parameters(model, keys, trained=True)
    dtype = dtype_name(next(p.dtype for unit in units if unit.block for _, p in unit.params))
    return Facts(name, model, root, tuple(pinned), sum(u.block for u in units), text.hidden_size, active, trained, dtype)


def adapted(module: Any, rank: int, targets: Sequence[str]) -> Any:
    """The model with LoRA adapters of PEFT's, which alone are trained, on meta too."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as e:
        raise ConfigError('--lora needs PEFT: pip install "zinf[peft]"') from e
    wanted = "all-linear" if list(targets) == ["all-linear"] else list(targets)
    try:
        return get_peft_model(module, LoraConfig(r=rank, target_modules=wanted, task_type="CAUSAL_LM"), low_cpu_mem_usage=True)
    except ValueError as e:
        raise ConfigError(f"--lora-targets {' '.join(targets)}: {str(e).splitlines()[0]}") from e


@contextmanager
def config_folder(name: str) -> Iterator[str]:
    """A folder that holds the model's config.json."""
    if os.path.isdir(name):
        yield name
        return
    with tempfile.TemporaryDirectory(prefix="zinf-plan-") as work:
        target = Path(work, "config.json")
        if name.endswith((".json", ".yaml", ".yml")):
            values = read_file(name)
            if "model_type" not in values:
                raise ConfigError(f"{name} has no model_type: write the keys of the model's config.json, such as model_type: llama")
            target.write_text(json.dumps(values))
        else:
            shutil.copyfile(_downloaded(name), target)
        yield work


def _downloaded(name: str) -> str:
    """config.json of a hub id."""
    import huggingface_hub

    try:
        return huggingface_hub.hf_hub_download(name, "config.json")
    except Exception as e:  # the hub's client raises many kinds
        raise ConfigError(
            f"{name} is no folder, no .yaml or .json file, and its config.json cannot be had from the hub ({type(e).__name__}): "
            "write the keys of its config.json into a file, and give that"
        ) from e
