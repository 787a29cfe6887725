"""A model to ask that need not fit: an engine that trains nothing, on a store of frozen weights or on one that a run left.

open_model   from a Hugging Face folder or hub id; imported once, without room for optimizer state
open_store   from a store; of one that has optimizer state only the weights are read, and nothing is written
write        prompts in, texts out, all prompts as one batch

[Note: what a token costs] A forward of one new token for all rows uses each shard once. So it reads the weights that the budgets do not
hold, once, however many rows there are; keys and values of earlier tokens stay on the device.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import torch

from zinf.algorithms import moments
from zinf.checkpoint.staging import Progress
from zinf.chunks import DTYPES
from zinf.config import OPTIMIZERS, Config
from zinf.engine import Engine
from zinf.errors import ConfigError, StoreError
from zinf.hf.loading import from_pretrained, resolve
from zinf.memory import check_budgets
from zinf.tiers import manifest


def is_store(path: str) -> bool:
    """Is `path` the (first) folder of a store with a commit?"""
    return os.path.lexists(os.path.join(path, manifest.MANIFEST))


def open_model(name_or_dir: str, config: Config, dtype: torch.dtype = torch.bfloat16, progress: Progress | None = None) -> Engine:
    """An engine for inference on a model; its weights go to nvme_path/NAME-DTYPE, or are there already.

    Raises:
        ConfigError, CheckpointError, StoreError, BudgetError, OSError: one line.
    """
    if not config.nvme_path:
        raise ConfigError(f"nvme_path must be given: a folder on the drive that is to hold the weights of {name_or_dir}")
    folder = resolve(name_or_dir)
    name = os.path.basename(os.path.abspath(name_or_dir)) or "model"
    config = dataclasses.replace(config, run_name=f"{name}-{str(dtype).removeprefix('torch.')}")
    return _engine(folder, config, dtype, progress, trainable=False)


def open_store(paths: Sequence[str], config: Config) -> Engine:
    """An engine for inference on the store at `paths`.

    Raises:
        StoreError: it was not imported from a Hugging Face model, or that is no longer there; it is in use, damaged, ...
    """
    paths = [os.path.abspath(path) for path in paths]
    found = manifest.load(paths[0])
    source = (found.extra.get("origin") or {}).get("source")
    if source is None:
        raise StoreError(f"{paths[0]} was not imported from a Hugging Face model: use an export of its weights")
    if not os.path.isdir(source):
        raise StoreError(f"{source}, which {paths[0]} was imported from, is gone, and its config.json is needed: `zinf export {paths[0]} OUT` and use OUT")
    runs = [run for shard in found.model.shards for run in shard.runs]
    trained = {p.name for run in runs if run.trainable for p in run.params}
    config = dataclasses.replace(config, nvme_path=tuple(os.path.dirname(path) for path in paths), run_name=os.path.basename(paths[0]))
    config = _keeping(config, found.model.moments, paths[0])
    return _engine(source, config, DTYPES[max(runs, key=lambda run: run.numel).dtype], None, trainable=lambda name: name in trained)


def _engine(folder: str, config: Config, dtype: torch.dtype, progress: Progress | None, trainable: Any) -> Engine:
    model = from_pretrained(
        folder, nvme_path=config.nvme_path, run_name=config.run_name, dtype=dtype, resume=True, trainable=trainable, progress=progress,
        blocks=config.blocks, leaf_bytes=config.leaf_bytes, optimizer=config.optimizer, momentum=config.momentum, ema_decay=config.ema_decay,
        backend=config.backend, fits=lambda layout, units: check_budgets(config, layout, units),
    )  # fmt: skip
    model.requires_grad_(False)
    return Engine(model, config, param_groups=[])


def _keeping(config: Config, planes: tuple[str, ...], path: str) -> Config:
    """`config` with an optimizer that keeps these planes: they are not read, but have their places in the store."""
    for optimizer in OPTIMIZERS:
        for momentum in (None, 0.9) if optimizer == "sgd" else (None,):
            for ema in (None, 0.9):
                tried = dataclasses.replace(config, optimizer=optimizer, momentum=momentum, ema_decay=ema)  # type: ignore[arg-type]
                if moments(tried) == planes:
                    return tried
    raise StoreError(f"{path} keeps {', '.join(planes)}, which no optimizer of this version of zinf does: use an export of its weights")


def write(engine: Engine, tokenizer: Any, prompts: Sequence[str], *, chat: bool = False, streamer: Any = None, **how: Any) -> list[str]:
    """What the model writes after each prompt, all of them as one batch.

    Args:
        chat: each prompt is the first message of a user.
        streamer: as for transformers' generate, for one prompt.
        how: as for transformers' generate.
    """
    if chat:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("--chat: this model's tokenizer has no chat template; it may not be made for chats: leave --chat out")
        prompts = [tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True) for p in prompts]
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=len(prompts) > 1, add_special_tokens=not chat)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if not mask.sum(1).all():
        raise ConfigError("a prompt has no tokens: give at least one word")
    out = engine.generate(ids, attention_mask=mask, pad_token_id=tokenizer.pad_token_id, streamer=streamer, **how)
    return [str(tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True)) for row in out]
