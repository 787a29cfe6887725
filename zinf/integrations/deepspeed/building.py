"""initialize: from a model and a DeepSpeed config to an engine, an optimizer, a loader and a schedule."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zinf import precision
from zinf.engine import Engine
from zinf.errors import ConfigError
from zinf.integrations.deepspeed import comm, lr_schedules, optimizers
from zinf.integrations.deepspeed.config import Translation, translate
from zinf.integrations.deepspeed.engine import DeepSpeedEngine
from zinf.integrations.deepspeed.fragments import belongs_to
from zinf.integrations.deepspeed.reading import read
from zinf.integrations.deepspeed.settings import Settings

log = logging.getLogger("zinf")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DEFAULT = ("fp16.enabled", "bf16.enabled")  # "auto" of these is their default where nobody fills it


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """--deepspeed and --deepspeed_config, as DeepSpeed adds them."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="for the script's own use; no effect on the engine")
    group.add_argument("--deepspeed_config", default=None, type=str, help="a DeepSpeed config (JSON)")
    return parser


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    **options: Any,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """(engine, optimizer, loader, schedule) as deepspeed.initialize.

    Args:
        args: may have `deepspeed_config`, a path.
        model: any nn.Module; one of zinf.from_pretrained streams from its store.
        optimizer: what the script has built, or a function of the parameters that builds it; it says what the engine's steps are. Else the config's.
        model_parameters: parameters or groups to be trained; default: all that want a gradient.
        training_data: a dataset, for the loader.
        lr_scheduler: a schedule on that optimizer, or a function of an optimizer that makes one. Else the config's.
        config, config_params: a path, a mapping, or base64 text.
        options: of zinf.Config, before those of the config: host_memory="48GiB", nvme_path=..., and `resume`.

    Raises:
        ConfigError: one line for what is wrong.
    """
    comm.init_distributed()
    if model is None:
        raise ConfigError("initialize needs a model")
    if mpu is not None or mesh_param is not None:
        raise ConfigError("mpu and mesh_param divide a model among ranks, and there is one: leave them out")
    given = read(_source(args, config, config_params))
    t = _translated(given)
    dtype = _cast(model, t)
    settings = Settings.of(given, t, dtype)
    groups = optimizers.groups_of(model, model_parameters)
    if optimizer is not None:
        optimizer, wanted, groups = _client(model, optimizer, groups)
        t.config.update(wanted)
    managed = {"step_mode": "deferred", **t.config, **options}
    resume = managed.pop("resume", False)
    engine = Engine(model, param_groups=groups, resume=resume, **managed)
    try:
        return _wrap(engine, settings, optimizer, lr_scheduler, training_data, collate_fn)
    except BaseException:
        engine.close()
        raise


def _wrap(engine: Engine, settings: Settings, client: Any, schedule: Any, data: Any, collate_fn: Any) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    if client is not None:
        client.param_groups = engine.optimizer.param_groups  # the same dicts already; the same list, too
    schedule = _schedule(engine, settings, client, schedule)
    steps = client is not None or settings.optimizer_name is not None
    made = DeepSpeedEngine(engine, settings, schedule, data, collate_fn, steps)
    made._client_optimizer = client
    for p in engine.module.parameters():
        belongs_to(p, engine)
    if steps:
        made.optimizer.overflow = False
    return made, made.optimizer, made.training_dataloader, made.lr_scheduler


def _source(args: Any, config: Any, config_params: Any) -> Any:
    config = config_params if config is None else config
    own = getattr(args, "deepspeed_config", None)
    if own is not None and config is not None:
        raise ConfigError("there is a config in args.deepspeed_config and another one in initialize(config=...): give one of them")
    found = own if config is None else config
    if found is None:
        raise ConfigError("initialize needs a config: a path, a mapping, or args.deepspeed_config")
    return found


def _translated(given: Mapping[str, Any]) -> Translation:
    t = translate(given)
    waiting = [key for key in t.waiting if key not in _DEFAULT]
    if waiting:
        more = f" and {len(waiting) - 3} more" if len(waiting) > 3 else ""
        raise ConfigError(
            f"{', '.join(waiting[:3])}{more} {'is' if len(waiting) == 1 else 'are'} auto, which Hugging Face's Trainer fills: "
            "give values, or train with zinf.hf.ZinfTrainer"
        )
    for line in t.report:
        log.debug("%s", line)
        if line.warns:
            log.warning("%s: %s", line.key, line.said)
    return t


def _cast(model: nn.Module, t: Translation) -> str:
    """Cast the parameters as DeepSpeed does (buffers stay, and what the architecture wants in fp32 does); returns the name of their dtype."""
    name = t.training["dtype"]
    main = max((p.dtype for p in model.parameters()), key=[p.dtype for p in model.parameters()].count, default=torch.float32)
    have = next((n for n, d in DTYPES.items() if d is main), "fp32")
    if name is None:
        return have
    if name == "fp32":
        if have != "fp32":
            log.warning("the model's weights are %s, and the config has neither bf16 nor fp16 enabled: they stay %s", have, have)
        return have
    dtype = DTYPES[name]
    if getattr(model, "zinf_origin", None) is not None:
        if have != name:
            raise ConfigError(
                f"the store has {have} weights, and the config says {name}: give dtype=torch.{str(dtype).removeprefix('torch.')} to from_pretrained"
            )
        return name
    kept = precision.named(model, t.config.pop("keep_in_fp32", None) or (precision.AUTO,), dtype)
    for full, p in model.named_parameters():
        wanted = torch.float32 if full in kept else dtype
        if p.dtype is not wanted and p.dtype in DTYPES.values():
            p.data = p.data.to(wanted)
    for b in (b for full, b in model.named_buffers() if full in kept and b.dtype in precision.HALF):
        b.data = b.data.float()
    return name


def _client(model: nn.Module, optimizer: Any, groups: list[dict[str, Any]] | None) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
    """The optimizer that the script gave, made if it is a function; what it wants, and its groups."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise ConfigError(f"optimizer is a {type(optimizer).__name__}: give a torch optimizer, or a function that makes one from parameters")
        optimizer = optimizer(groups if groups is not None else [p for p in model.parameters() if p.requires_grad])
    wanted, found = optimizers.take_over(optimizer)
    return optimizer, wanted, optimizers.trained(model, found)


def _schedule(engine: Engine, settings: Settings, client: Any, schedule: Any) -> Any:
    if schedule is None:
        if settings.scheduler is None:
            return None
        return lr_schedules.build(settings.scheduler["type"], engine.optimizer, settings.scheduler["params"])
    if not hasattr(schedule, "step"):
        return schedule(client if client is not None else engine.optimizer)
    if client is None and getattr(schedule, "optimizer", engine.optimizer) is not engine.optimizer:
        raise ConfigError("lr_scheduler is on another optimizer, and would move nothing here: pass that optimizer, too, or a function that makes the schedule")
    return schedule
