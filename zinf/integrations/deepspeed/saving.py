"""save_checkpoint, load_checkpoint and save_16bit_model of DeepSpeed's engine, on zinf's checkpoints.

A checkpoint is zinf's (a store that is only read), under DeepSpeed's names: a folder for each tag, and `latest`. The script's own values,
`client_state`, are a part of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from zinf.checkpoint import tags
from zinf.errors import EngineError
from zinf.integrations.deepspeed import zero_files
from zinf.integrations.deepspeed.importing import load_into
from zinf.objects import decode
from zinf.tiers import manifest

if TYPE_CHECKING:
    from zinf.integrations.deepspeed.engine import DeepSpeedEngine

log = logging.getLogger("zinf")


def save(engine: DeepSpeedEngine, folder: str, tag: str | None, client: dict[str, Any], latest: bool) -> bool:
    """See DeepSpeedEngine.save_checkpoint."""
    if not folder:
        raise ValueError(f"save_dir is {folder!r}: give a folder")
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    before = _latest(folder)
    counters = engine._counters
    counters.client = client
    try:
        engine.zinf.save_checkpoint(folder, tag)
    finally:
        counters.client = {}
    if not latest:
        _name_latest(folder, before)
    return True


def _latest(folder: str) -> str | None:
    try:
        return manifest.read_file(os.path.join(folder, tags.LATEST)).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _name_latest(folder: str, tag: str | None) -> None:
    if tag is not None:
        manifest.publish(folder, tags.LATEST, f"{tag}\n".encode())
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, tags.LATEST))


def load(engine: DeepSpeedEngine, folder: str, tag: str | None, states: bool, schedule: bool, module_only: bool) -> tuple[str | None, dict[str, Any] | None]:
    """See DeepSpeedEngine.load_checkpoint."""
    if zero_files.is_deepspeed(folder, None if tag is None else str(tag)):
        return _load_theirs(engine, folder, tag, states, schedule, module_only)
    if tag is None and _latest(folder) is None and tags.load(os.path.abspath(folder)) is None:
        log.warning("%s has no file %r, so nothing is loaded: give a tag, or another folder", folder, tags.LATEST)
        return None, None
    path = tags.find(folder, None if tag is None else str(tag))
    counters = engine._counters
    with _kept(engine, not schedule or module_only):
        engine.zinf.load_checkpoint(path, weights_only=not states)
    if not states:
        _take_objects(engine, path, schedule and not module_only, not module_only)
    client, counters.client = counters.client, {}
    return path, client


def _load_theirs(engine: DeepSpeedEngine, folder: str, tag: str | None, states: bool, schedule: bool, module_only: bool) -> tuple[str, dict[str, Any]]:
    """The same of a checkpoint that DeepSpeed itself has written."""
    source = zero_files.ZeroCheckpoint(folder, None if tag is None else str(tag))
    load_into(engine.zinf, source, states=states)
    saved, own = source.saved, engine.lr_scheduler
    if schedule and not module_only and own is not None and saved.get("lr_scheduler"):
        own.load_state_dict(saved["lr_scheduler"])
    if not module_only:
        engine._counters.samples = int(saved.get("global_samples", 0))
        engine._counters.micro_steps = int(saved.get("global_steps", 0)) * engine.settings.accumulation
    return source.where, source.client


@contextlib.contextmanager
def _kept(engine: DeepSpeedEngine, keep: bool) -> Iterator[None]:
    """With `keep` the schedule, and the learning rates that it has set, are after the block what they were before."""
    schedule = engine.lr_scheduler
    if not keep or schedule is None or not hasattr(schedule, "state_dict"):
        yield
        return
    state, groups = schedule.state_dict(), [dict(group) for group in engine.zinf.optimizer.param_groups]
    yield
    schedule.load_state_dict(state)
    for group, before in zip(engine.zinf.optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in before.items() if key != "params"})


def _take_objects(engine: DeepSpeedEngine, path: str, schedule: bool, counters: bool) -> None:
    """Of a checkpoint whose weights alone were loaded: client_state, and the schedule and the counters if they are wanted."""
    states = manifest.load(path).extra.get("objects", {})
    saved = decode(states["deepspeed"]) if "deepspeed" in states else {"client": {}}
    engine._counters.client = saved["client"]
    if counters and "samples" in saved:
        engine._counters.micro_steps, engine._counters.samples = saved["micro_steps"], saved["samples"]
    if schedule and engine.lr_scheduler is not None and "lr_scheduler" in states:
        engine.lr_scheduler.load_state_dict(decode(states["lr_scheduler"]))


def save_16bit(engine: DeepSpeedEngine, folder: str, filename: str, exclude_frozen: bool) -> bool:
    """See DeepSpeedEngine.save_16bit_model."""
    name = os.path.splitext(filename)[0]
    name = {"pytorch_model": "model"}.get(name, name) + ".safetensors"
    if name != filename:
        log.warning("%s is written as %s: zinf pickles nothing", filename, name)
    if not exclude_frozen and name == "model.safetensors" and not hasattr(engine.module, "peft_config"):
        engine.zinf.save_pretrained(folder)
        return True
    from safetensors.torch import save_file

    os.makedirs(folder, exist_ok=True)
    state = engine.module_state_dict(exclude_frozen_parameters=exclude_frozen)
    if not state:
        raise EngineError("save_16bit_model with exclude_frozen_parameters: all parameters are frozen, and nothing is left to save")
    save_file({key: value.contiguous().clone() for key, value in state.items()}, os.path.join(folder, name), metadata={"format": "pt"})
    return True
