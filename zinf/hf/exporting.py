"""`zinf export`: a store, or a checkpoint -> a normal Hugging Face folder, without the model, streamed.

An export that was killed is gone on with by the next one of the same step to the same folder (checkpoint/folder.py).
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from zinf import layout
from zinf.aio import open_engine
from zinf.checkpoint import Part, SafetensorsSource, export_safetensors, tags
from zinf.checkpoint.folder import Journal, put, what_is_there
from zinf.checkpoint.staging import Progress
from zinf.errors import CheckpointError, StoreError
from zinf.hf.loading import extra_files
from zinf.tiers import manifest, nvme
from zinf.tiers.nvme import Store

log = logging.getLogger("zinf")

CONFIGS = ("config.json", "generation_config.json")
_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def export_checkpoint(
    path: str | Sequence[str],
    out: str,
    *,
    dtype: str | None = None,
    max_shard_size: int = 5_000_000_000,
    overwrite: bool = True,
    progress: Progress | None = None,
) -> list[str]:
    """Write the weights of a store (its paths) or of a checkpoint (itself, or the folder that holds it, for the last one) to `out`; the files written.

    Config, tokenizer and the like come from the folder that the model was imported from, if it is still there.

    Args:
        dtype: None for the weights' own; "fp32" for the full master.
        max_shard_size: bytes of tensors in a file, unless a single tensor has more.
        overwrite: replace a model that is in `out`. Else `out` must be new, empty, or what a killed export of the same has left.
        progress: called with (bytes of weights read, bytes in all).

    Raises:
        CheckpointError, StoreError: nothing to export there; or `out` has other files, and overwrite is False.
        IntegrityError, OSError: it cannot be read, or `out` cannot be written. Files that were finished stay, for the next try.
    """
    paths = find(path)
    with contextlib.ExitStack() as stack:
        io = stack.enter_context(contextlib.closing(open_engine()))
        store = stack.enter_context(contextlib.closing(Store.open(paths, io, verify="read", writable=False)))
        _check_whole_model(store)
        origin: dict[str, Any] = store.extra.get("origin") or {}
        names = {
            name: where if isinstance(where, str) else [Part(n, tuple(s), a, c) for n, s, a, c in where] for name, where in origin.get("names", {}).items()
        }
        buffers = {origin.get("buffers", {}).get(name, name): b for name, b in _buffers(paths[0], store.extra, origin).items()}
        journal = stack.enter_context(Journal(out))
        if not overwrite and not journal.resumes and (there := what_is_there(out)):
            raise CheckpointError(f"{out} is not empty ({', '.join(there[:3])}): choose a new folder, or replace the model in it with --overwrite")
        options: dict[str, Any] = dict(names=names, buffers=buffers, dtype=dtype, max_shard_size=max_shard_size, progress=progress)
        files = export_safetensors(out, store.model, store.read, journal=journal, contents=store.contents(), **options)
        files += _extras(origin, out, dtype or _common(store.model))
        journal.done()
        return files


def find(path: str | Sequence[str]) -> list[str]:
    """The directories of a store, or of a checkpoint.

    Raises:
        CheckpointError: neither is there; names what is near.
    """
    paths = [os.path.abspath(p) for p in ([path] if isinstance(path, str) else path)]
    if len(paths) > 1 or os.path.lexists(os.path.join(paths[0], manifest.MEMBER)):
        return paths
    try:
        return [tags.find(paths[0], None)]
    except CheckpointError as e:
        if stores := [store["paths"][0] for store in nvme.inspect(paths)["stores"]]:
            raise CheckpointError(f"{paths[0]} is no store but holds {', '.join(stores)}: give one of these") from None
        raise CheckpointError(f"there is no store and no checkpoint at {paths[0]}: give the folder of a run, NVME_PATH/RUN_NAME, or a checkpoint") from e


def _check_whole_model(store: Store) -> None:
    adapters = [p.name for shard in store.model.shards for run in shard.runs for p in run.params if ".base_layer." in p.name or ".lora_" in p.name]
    if adapters:
        what = f"{store.paths[0]} has a model with adapters ({adapters[0]})"
        raise StoreError(f"{what}: write it with engine.merge_and_save, or the adapter alone with engine.save_pretrained")


def _buffers(path: str, extra: dict[str, Any], origin: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The persistent buffers: those of a checkpoint, or those that a run has changed and else those of the folder it began with."""
    captured = extra.get("engine", {}).get("buffers", {})
    described = extra.get(tags.MARK, {}).get("buffers") or origin.get("persistent", {})
    found = {}
    for name, text in captured.items():
        try:
            dtype, shape = described[name]
            data = bytearray(base64.b64decode(text))
            found[name] = torch.frombuffer(data, dtype=getattr(torch, dtype)).reshape(shape) if data else torch.empty(shape, dtype=getattr(torch, dtype))
        except (KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"{path}: buffer {name} is damaged ({type(e).__name__}: {e})") from None
    if missing := {name: origin.get("buffers", {}).get(name, name) for name in described if name not in found}:
        try:
            with SafetensorsSource(origin["source"]) as source:
                found |= {name: source.load(there) for name, there in missing.items() if there in source.tensors}
        except (CheckpointError, OSError) as e:
            raise CheckpointError(f"{path}: the buffers {', '.join(missing)} are those of the folder that the model was imported from: {e}") from None
    return {name: found[name] for name in described if name in found}


def _common(model: layout.Model) -> str:
    """The dtype of most parameters."""
    numel: dict[str, int] = {}
    for shard in model.shards:
        for run in shard.runs:
            numel[run.dtype] = numel.get(run.dtype, 0) + run.numel
    return max(numel, key=lambda d: numel[d])


def _config(path: str, data: bytes, dtype: str) -> bytes:
    """A config.json that says the dtype of the exported weights."""
    try:
        config = json.loads(data)
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = _NAMES[dtype]
    except (ValueError, TypeError, RecursionError) as e:
        raise CheckpointError(f"{path} is not a config any more ({type(e).__name__}): restore it and export again, the weights are there") from None
    return (json.dumps(config, indent=2) + "\n").encode()


def _extras(origin: dict[str, Any], out: str, dtype: str) -> list[str]:
    """Copy what is not weights; the config says the dtype of the weights."""
    source = origin.get("source")
    if source is None or not os.path.isfile(os.path.join(source, CONFIGS[0])):
        log.warning("%s has weights only: %s", out, f"{source} is not there any more" if source else "the model was not imported from a folder")
        return []
    written = []
    own = extra_files(source)  # a manifest may be anybody's: it cannot name other files, nor places outside of `out`
    for name in (*CONFIGS, *(name for name in origin.get("files", ()) if name in own)):
        if not os.path.isfile(os.path.join(source, name)):
            continue
        target = os.path.join(out, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(os.path.join(source, name), "rb") as f:
            data = f.read()
        if name == CONFIGS[0]:
            data = _config(os.path.join(source, name), data, dtype)
        put(target, data)
        written.append(target)
    return written
