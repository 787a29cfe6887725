"""What becomes of each key of transformers' TrainingArguments: the Trainer's own business, mapped to an option of zinf, or refused.

TRAINER   the Trainer does it, and nothing differs under zinf: every key that the tables below do not have
MAPPED    done by the engine; `options` is the mapping
REFUSED   said in one line before any work, with what to do instead; `check` is where
NOTHING   has nothing to act on: one process, one device

The options of zinf itself are a Config, a mapping, or a YAML or JSON file: `config_of`. What TrainingArguments says stays there:
a learning rate in both is refused.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zinf.config import Config, from_env, read_file
from zinf.errors import ConfigError

log = logging.getLogger("zinf")

MAPPED = {
    "learning_rate": "lr; schedules drive the engine's parameter groups",
    "weight_decay": "of the groups that get_decay_parameter_names makes: none for norms and biases",
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "adam_epsilon": "eps",
    "optim": "adamw_torch, adamw_torch_fused, adamw_anyprecision and paged_adamw_32bit: adamw; lion_32bit and paged_lion_32bit: lion; sgd; adagrad",
    "optim_args": "sgd: momentum, dampening, nesterov; adagrad: lr_decay, eps",
    "max_grad_norm": "max_grad_norm; the true norm is logged; 0 lets shards be stepped under backward",
    "gradient_accumulation_steps": "gradient_accumulation_steps, with sums in fp32",
    "bf16": "autocast, as in the Trainer; weights keep their dtype",
    "fp16": "weights must be fp16 (from_pretrained(dtype=torch.float16)): the engine keeps an fp32 master and scales the loss",
    "activation_checkpointing": "taken over, said once in the log: the option recompute decides, and is on by default",
    "activation_checkpointing_kwargs": "offload: activations=host; the rest is recompute's and keep_last's business",
    "gradient_checkpointing": "as activation_checkpointing",
    "gradient_checkpointing_kwargs": "as activation_checkpointing_kwargs",
    "torch_compile": "compile_blocks",
    "torch_compile_backend": "compile_blocks",
    "use_liger_kernel": "its kernels for layers; the loss is the engine's (fused_head)",
    "liger_kernel_config": "fused_linear_cross_entropy is off; for its loss set fused_head: liger",
    "use_cpu": "device: cpu",
    "bf16_full_eval": "weights must be bf16 already: evaluation uses them as they are",
    "fp16_full_eval": "weights must be fp16 already: evaluation uses them as they are",
    "use_cache": "off in training, since recompute would fill the cache twice; free in generation",
    "save_only_model": "no zinf_state in a checkpoint: the store is then the only thing to go on from",
}

REFUSED = {
    "auto_find_batch_size": "set per_device_train_batch_size; what does not fit is refused before any work, and micro_batch_size splits a batch",
    "deepspeed": "leave it out, and give zinf=zinf.integrations.deepspeed.trainer.trainer_options(FILE, args)",
    "fsdp": "leave it out: zinf streams the model through one device",
    "fsdp_config": "goes with fsdp",
    "parallelism_config": "leave it out: zinf runs one process on one device",
    "torch_compile_mode": "leave it out: compile_blocks takes a backend alone",
    "optim_target_modules": "of optimizers that zinf has not",
    "debug": "underflow_overflow reads weights that are not in memory: a skipped step names the first shard whose gradient is not finite",
}

NOTHING = (
    "local_rank ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout "
    "average_tokens_across_devices save_on_each_node log_on_each_node log_level_replica"
).split()

# Fields of Config that TrainingArguments has under its own names.
OWNED = {
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "decay_norms_and_biases": "weight_decay",
    "betas": "adam_beta1 and adam_beta2",
    "eps": "adam_epsilon",
    "momentum": "optim_args",
    "dampening": "optim_args",
    "nesterov": "optim_args",
    "lr_decay": "optim_args",
    "initial_accumulator_value": "optim_args",
    "optimizer": "optim",
    "max_grad_norm": "max_grad_norm",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}

_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_anyprecision", "paged_adamw_32bit")
_LION = ("lion_32bit", "paged_lion_32bit")


def config_of(given: Config | Mapping[str, Any] | str | os.PathLike[str] | None) -> Config:
    """The options of zinf that a trainer was given; ZINF_* variables stand between a file and what the code says.

    Raises:
        ConfigError: an unknown key, a bad value, or a key that belongs to TrainingArguments.
    """
    if isinstance(given, Config):
        config, keys = given, {f.name for f in dataclasses.fields(Config) if getattr(given, f.name) != f.default}
    else:
        values = dict(given) if isinstance(given, Mapping) else read_file(given) if given is not None else {}
        env = from_env(Config, os.environ)
        config = Config.from_dict({**env, **values} if isinstance(given, Mapping) else {**values, **env}, "zinf")
        keys = set(values) | set(env)
    for key in OWNED:
        if key in keys:
            raise ConfigError(f"zinf: {key} is said by TrainingArguments ({OWNED[key]}): leave it out here")
    return config


def check(args: Any) -> None:
    """Refuse what zinf cannot do.

    Args:
        args: TrainingArguments.

    Raises:
        ConfigError: one line: the key, why or what instead.
    """
    world = max(args.world_size, int(os.environ.get("WORLD_SIZE", "1") or 1))
    if world > 1:
        raise ConfigError(f"{world} processes were started (WORLD_SIZE), and zinf trains with one process on one device: start the script with plain python")
    fsdp = args.fsdp if isinstance(args.fsdp, (list, tuple)) else [args.fsdp] if args.fsdp else []
    set_ = {key: getattr(args, key, None) for key in REFUSED if key not in ("fsdp_config", "debug")} | {"fsdp": fsdp, "debug": args.debug}
    for key, value in set_.items():
        if value:
            raise ConfigError(f"TrainingArguments({key}={_plain(value)!r}) does not go with zinf: {REFUSED[key]}")
    if args.device.type not in ("cpu", "cuda"):
        raise ConfigError(f"TrainingArguments put the batches on {args.device.type}, and zinf computes on cuda or cpu: set use_cpu=True")
    optimizer(args)


def _plain(value: Any) -> Any:
    return [str(getattr(v, "value", v)) for v in value] if isinstance(value, (list, tuple)) else getattr(value, "value", value)


def optimizer(args: Any) -> dict[str, Any]:
    """The optimizer of TrainingArguments, in Config's words.

    Raises:
        ConfigError: one that zinf has not.
    """
    name = str(getattr(args.optim, "value", args.optim))
    more = dict(pair.split("=", 1) for pair in (args.optim_args or "").replace(" ", "").split(",") if "=" in pair)
    found: dict[str, Any] = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    if name in _ADAMW:
        return found | {"optimizer": "adamw", "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if name in _LION:
        return found | {"optimizer": "lion", "betas": (args.adam_beta1, args.adam_beta2)}
    if name == "sgd":
        return found | {"optimizer": name} | {k: more[k] for k in ("momentum", "dampening", "nesterov") if k in more}
    if name == "adagrad":
        return found | {"optimizer": name} | {k: more[k] for k in ("lr_decay", "eps") if k in more}
    why = "its states are approximate, and zinf's are exact and need no GPU memory" if "8bit" in name or "4bit" in name else "zinf has not got it"
    raise ConfigError(f"TrainingArguments(optim={name!r}): {why}; it can be {', '.join((*_ADAMW, *_LION, 'sgd', 'adagrad'))}")


def options(args: Any, config: Config) -> dict[str, Any]:
    """What an engine is told beside `config`.

    Raises:
        ConfigError: the device of one is not that of the other.
    """
    found = optimizer(args)
    found["max_grad_norm"] = args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else None
    found["gradient_accumulation_steps"] = args.gradient_accumulation_steps
    if args.torch_compile and config.compile_blocks is None:
        found["compile_blocks"] = args.torch_compile_backend
    kwargs = getattr(args, "activation_checkpointing_kwargs", None) or {}
    if kwargs.get("offload") and config.activations == "auto":
        found["activations"] = "host"
    if args.device.type == "cpu":
        if config.device == "cuda":
            raise ConfigError("zinf: device is cuda, but TrainingArguments put the batches on the CPU: set use_cpu=False, or leave device out")
        found["device"] = "cpu" if config.device == "auto" else config.device
    elif config.device in ("cpu", "sim"):
        raise ConfigError(f"zinf: device is {config.device}, but TrainingArguments put the batches on {args.device}: set use_cpu=True, or leave device out")
    return found


def adjust(args: Any) -> None:
    """Take out of TrainingArguments what would reach past the engine, and say so."""
    if args.n_gpu > 1:
        log.info("%d GPUs are visible, and zinf uses the first: nn.DataParallel is off", args.n_gpu)
        args._n_gpu = 1
    if args.use_liger_kernel:
        args.liger_kernel_config = {**(args.liger_kernel_config or {}), "fused_linear_cross_entropy": False}


def check_dtypes(args: Any, dtypes: Mapping[str, Any]) -> None:
    """Do the flags of precision go with the weights?

    Args:
        dtypes: torch dtype of each parameter, by name.

    Raises:
        ConfigError: fp16 with other weights, or an evaluation that would convert them.
    """
    wanted: Sequence[tuple[str, str, Callable[[str], bool]]] = (
        ("fp16", "load the model with dtype=torch.float16 (the engine keeps an fp32 master and scales the loss), or set bf16=True", lambda d: d == "float16"),
        ("fp16_full_eval", "leave it out: evaluation uses the weights as they are", lambda d: d == "float16"),
        ("bf16_full_eval", "leave it out: evaluation uses the weights as they are", lambda d: d == "bfloat16"),
    )
    for key, instead, fits in wanted:
        names = [name for name, dtype in dtypes.items() if not fits(str(dtype).removeprefix("torch."))]
        if getattr(args, key, False) and (names if key != "fp16" else len(names) == len(dtypes)):
            raise ConfigError(f"TrainingArguments({key}=True), but {names[0]} is {dtypes[names[0]]}: {instead}")


def kinds(names: Sequence[str]) -> dict[str, str]:
    """trainer, mapped, refused or nothing, for each key."""
    table = dict.fromkeys(names, "trainer") | dict.fromkeys(NOTHING, "nothing") | dict.fromkeys(REFUSED, "refused") | dict.fromkeys(MAPPED, "mapped")
    return {name: table[name] for name in names}
