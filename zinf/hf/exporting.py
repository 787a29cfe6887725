"""`zinf export`: a checkpoint -> a normal Hugging Face folder, without the model, streamed."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import shutil
from typing import Any

import torch

from zinf import layout
from zinf.aio import open_engine
from zinf.checkpoint import Part, export_safetensors, tags
from zinf.checkpoint.staging import Progress
from zinf.errors import CheckpointError
from zinf.tiers.nvme import Store

log = logging.getLogger("zinf")

CONFIGS = ("config.json", "generation_config.json")
_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def export_checkpoint(path: str, out: str, *, dtype: str | None = None, progress: Progress | None = None) -> list[str]:
    """Write the weights of the checkpoint at `path` (itself, or the folder that holds it, for the last one) to `out`; the files written.

    Config, tokenizer and the like come from the folder that the model was imported from, if it is still there.

    Args:
        dtype: None for the weights' own; "fp32" for the full master.

    Raises:
        CheckpointError: no checkpoint there.
        IntegrityError, OSError: it cannot be read, or `out` cannot be written.
    """
    path = tags.find(path, None)
    with contextlib.ExitStack() as stack:
        io = stack.enter_context(contextlib.closing(open_engine()))
        store = stack.enter_context(contextlib.closing(Store.open([path], io, verify="read", writable=False)))
        origin: dict[str, Any] = store.extra.get("origin") or {}
        names = {
            name: where if isinstance(where, str) else [Part(n, tuple(s), a, c) for n, s, a, c in where] for name, where in origin.get("names", {}).items()
        }
        buffers = {origin.get("buffers", {}).get(name, name): b for name, b in _buffers(path, store.extra).items()}
        files = export_safetensors(out, store.model, store.read, names=names, buffers=buffers, dtype=dtype, progress=progress)
        return files + _extras(origin, out, dtype or _common(store.model))


def _buffers(path: str, extra: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {}
    for name, text in extra["engine"]["buffers"].items():
        try:
            dtype, shape = extra[tags.MARK]["buffers"][name]
            data = bytearray(base64.b64decode(text))
            found[name] = torch.frombuffer(data, dtype=getattr(torch, dtype)).reshape(shape) if data else torch.empty(shape, dtype=getattr(torch, dtype))
        except (KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"{path}: buffer {name} is damaged ({type(e).__name__}: {e})") from None
    return found


def _common(model: layout.Model) -> str:
    """The dtype of most parameters."""
    numel: dict[str, int] = {}
    for shard in model.shards:
        for run in shard.runs:
            numel[run.dtype] = numel.get(run.dtype, 0) + run.numel
    return max(numel, key=lambda d: numel[d])


def _extras(origin: dict[str, Any], out: str, dtype: str) -> list[str]:
    """Copy what is not weights; the config says the dtype of the weights."""
    source = origin.get("source")
    if source is None or not os.path.isfile(os.path.join(source, CONFIGS[0])):
        log.warning("%s has weights only: %s", out, f"{source} is not there any more" if source else "the model was not imported from a folder")
        return []
    written = []
    for name in (*CONFIGS, *origin.get("files", ())):
        if not os.path.isfile(os.path.join(source, name)):
            continue
        target = os.path.join(out, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if name == CONFIGS[0]:
            with open(os.path.join(source, name), encoding="utf-8") as f:
                config = json.load(f)
            config["torch_dtype" if "torch_dtype" in config else "dtype"] = _NAMES[dtype]
            with open(target, "w", encoding="utf-8") as f:
                f.write(json.dumps(config, indent=2) + "\n")
        else:
            shutil.copyfile(os.path.join(source, name), target)
        written.append(target)
    return written
