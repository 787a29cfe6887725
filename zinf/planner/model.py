"""A model's layout from its config alone: built on the meta device and split as the engine splits it, so that both decide the same.

MODEL is a folder with a config.json, a YAML or JSON file with the same keys (of a model that nobody has yet), or a hub id, of which
only config.json is downloaded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zinf import layout
from zinf.config import Config, read_file
from zinf.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the planner knows of a model."""

    name: str
    layout: layout.Model
    root: int | None  # index of the shard that stays on the device
    pinned: tuple[int, ...]  # shards of tied layers
    blocks: int  # that are recomputed, one boundary activation each
    hidden: int
    active: int  # parameters that a token meets: of a mixture, those of the experts it is sent to


def read(name: str) -> Facts:
    """Raises ConfigError: no config, or one that transformers cannot build a causal language model from."""
    from zinf import memory
    from zinf.discover import discover, layout_of
    from zinf.hf.loading import build_on_meta

    with _folder(name) as folder:
        try:
            module: Any = build_on_meta(folder)
        except (TypeError, AttributeError, KeyError) as e:
            raise ConfigError(f"{name}: transformers builds no model from it: {type(e).__name__}: {e}; compare its keys with another's") from e
        except ValueError as e:
            raise ConfigError(str(e).replace(folder, name)) from e
    units = discover(module)
    text = module.config.get_text_config()
    root, pinned = memory.roles(units)
    model = layout_of(units, Config().chunk_size)
    return Facts(name, model, root, tuple(pinned), sum(u.block for u in units), text.hidden_size, active_parameters(model, text.to_dict()))


def active_parameters(model: layout.Model, config: dict[str, Any]) -> int:
    """Parameters that compute for a token. Routed experts count by how many of them are chosen."""
    chosen = config.get("num_experts_per_tok") or 0
    experts = next((config[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)), 0)
    every = [p for shard in model.shards for run in shard.runs for p in run.params]
    routed = sum(p.numel for p in every if ".experts." in p.name) if chosen and experts else 0
    return model.numel - routed + (routed * chosen // experts if routed else 0)


@contextmanager
def _folder(name: str) -> Iterator[str]:
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
