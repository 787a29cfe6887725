"""What becomes of each key of a DeepSpeed config (0.19.8), as data: honoured (to what), ignored (why) or refused (what instead).

A key is written with its section, "zero_optimization.stage". A section of which nothing matters is one row; its contents are not looked at. An ignored
key may have any value. A refused one may have the values that ask for nothing (`off`), or be a section that is not enabled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row. `said`: to what, why, or what instead. `hint`: the type of a honoured value. `option`: the option of zinf.Config that it is, unchanged."""

    kind: Literal["honoured", "ignored", "refused"]
    said: str
    hint: Any = None
    option: str | None = None
    off: tuple[Any, ...] = (None, False)


def honoured(said: str, hint: Any) -> Entry:
    return Entry("honoured", said, hint)


def as_option(option: str, hint: Any) -> Entry:
    """The value is that of an option of zinf.Config."""
    return Entry("honoured", option, hint, option)


def refused(instead: str, *off: Any) -> Entry:
    return Entry("refused", instead, off=(None, False, *off))


def ignored(why: str, *keys: str) -> dict[str, Entry]:
    """Rows for `keys`, each of which may be "section.{a b c}"."""
    rows = {}
    for key in keys:
        section, brace, names = key.partition("{")
        for name in names.rstrip("}").split() if brace else [""]:
            rows[section + name] = Entry("ignored", why)
    return rows


# Parameters of each learning rate schedule and their defaults; REQUIRED has none.
REQUIRED = "required"
_WARMUP: dict[str, Any] = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000, "warmup_type": "log"}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "WarmupLR": {**_WARMUP, "warmup_max_lr": None},  # None: the optimizer's own
    "WarmupDecayLR": {"total_num_steps": REQUIRED, **_WARMUP},
    "WarmupCosineLR": {"total_num_steps": REQUIRED, "warmup_min_ratio": 0.0, "warmup_num_steps": 1000, "cos_min_ratio": 1e-4, "warmup_type": "log"},
    "LRRangeTest": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2000, "lr_range_test_step_rate": 1.0, "lr_range_test_staircase": False},
    "OneCycle": {
        "cycle_min_lr": REQUIRED, "cycle_max_lr": REQUIRED, "decay_lr_rate": 0.0, "cycle_first_step_size": 2000, "cycle_second_step_size": None,
        "cycle_first_stair_count": 0, "cycle_second_stair_count": None, "decay_step_size": 0, "cycle_momentum": True, "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9, "decay_mom_rate": 0.0,
    },
}  # fmt: skip
for _params in SCHEDULERS.values():
    _params["last_batch_iteration"] = -1
_WHOLE = ("_steps", "_step_size", "_count", "_iteration")  # what parameters that are whole numbers end with
_SWITCHES = ("lr_range_test_staircase", "cycle_momentum")


def _schedule_hint(name: str) -> Any:
    if name == "warmup_type":
        return Literal["log", "linear"]
    if name.endswith(("_lr", "_mom")):
        return float | tuple[float, ...]  # one for all parameter groups, or one for each
    return bool if name in _SWITCHES else int | None if name.endswith(_WHOLE) else float


DTYPES = {"fp32": "fp32", "float32": "fp32", "float": "fp32", "fp16": "fp16", "float16": "fp16", "half": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
_ONE_CARD = "nothing is exchanged with other ranks on one card"
_BUDGETS = "device_memory and host_memory bound what zinf holds; it decides by itself what moves when"
_PINNED = "zinf decides what is pinned"
_STEPS = "zinf reads, steps and writes chunks at the same time, always; host_memory bounds the buffers"
_OLD = "DeepSpeed refuses it here; it has no effect"
_UNKNOWN = "DeepSpeed does not know it and does nothing for it"
_LOSSLESS = "leave it out: zinf keeps an fp32 master, losslessly split, in 12 bytes a parameter"
_EXACT = "leave it out: zinf moves weights and grads as they are"
_REMOVED = "leave it out: DeepSpeed has removed it, too"
_LOGS = "the training loop logs; engine.stats() has the numbers"

KEYS: dict[str, Entry] = {
    # batch and step
    "train_batch_size": honoured("train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps, on one card", int),
    "train_micro_batch_size_per_gpu": honoured("rows of a forward and backward", int),
    "gradient_accumulation_steps": honoured("gradient_accumulation_steps", int),
    "gradient_clipping": honoured("max_grad_norm; 0 is none", float),
    "dataloader_drop_last": honoured("the loader leaves out a last batch that is not full", bool),
    "optimizer.type": honoured("optimizer", str),
    "optimizer.params.lr": as_option("lr", float),
    "optimizer.params.betas": as_option("betas", tuple[float, float]),
    "optimizer.params.eps": as_option("eps", float),
    "optimizer.params.weight_decay": as_option("weight_decay", float),
    "optimizer.params.momentum": as_option("momentum", float),
    "optimizer.params.dampening": as_option("dampening", float),
    "optimizer.params.nesterov": as_option("nesterov", bool),
    "optimizer.params.lr_decay": as_option("lr_decay", float),
    "optimizer.params.initial_accumulator_value": as_option("initial_accumulator_value", float),
    "optimizer.params.adam_w_mode": honoured("optimizer: adamw where it is true (the default), also of Adam", bool),
    "optimizer.params.torch_adam": honoured("weight_decay, of which torch's AdamW has the default 0.01", bool),
    "optimizer.params.amsgrad": refused("leave it out: zinf's Adam keeps two moments"),
    "optimizer.params.maximize": refused("leave it out, and negate the loss"),
    "optimizer.params.bias_correction": refused("leave it out: zinf's Adam corrects the bias", True),
    "optimizer.params.fp32_optimizer_states": refused("leave it out: zinf keeps state in fp32", True),
    "optimizer.params.max_grad_norm": refused("use gradient_clipping"),
    "scheduler.type": honoured("the schedule", Literal[tuple(SCHEDULERS)]),
    **{f"scheduler.params.{name}": honoured("the schedule", _schedule_hint(name)) for params in SCHEDULERS.values() for name in params},
    # precision
    "fp16.enabled": honoured("dtype of the weights", bool),
    "fp16.loss_scale": as_option("loss_scale", float),
    "fp16.initial_scale_power": as_option("initial_scale_power", int),
    "fp16.loss_scale_window": as_option("loss_scale_window", int),
    "fp16.hysteresis": as_option("hysteresis", int),
    "fp16.consecutive_hysteresis": as_option("consecutive_hysteresis", bool),
    "fp16.min_loss_scale": as_option("min_loss_scale", float),
    "fp16.fp16_master_weights_and_grads": refused(_LOSSLESS),
    "bf16.enabled": honoured("dtype of the weights", bool),
    "bf16.bf16_master_weights_and_grads": refused(_LOSSLESS),
    "bf16.bf16_optimizer_states": refused(_LOSSLESS),
    "data_types.grad_accum_dtype": honoured("grad_accum_dtype", Literal[tuple(DTYPES)]),
    "data_types.keep_in_fp32_modules": honoured("keep_in_fp32; auto: what a transformers model asks for", tuple[str, ...]),
    "data_types.param_dtype": refused("use fp16.enabled or bf16.enabled", "auto"),
    "data_types.buffer_dtype": refused("convert the buffers before zinf.Engine", "auto"),
    "torch_autocast": refused("leave it out, and put torch.autocast around the forward"),
    # where what lives
    "zero_optimization.stage": honoured("3: offload_param says where weights rest; below 3 zinf chooses; nothing is partitioned on one card", int | bool),
    "zero_optimization.offload_param.device": honoured("weights: host or nvme; none: zinf chooses; only with stage 3", Literal["none", "cpu", "nvme"]),
    "zero_optimization.offload_param.nvme_path": honoured("nvme_path", str),
    "zero_optimization.offload_optimizer.device": honoured("state: host or nvme; none: zinf chooses", Literal["none", "cpu", "nvme"]),
    "zero_optimization.offload_optimizer.nvme_path": honoured("nvme_path", str),
    "zero_optimization.cpu_offload": honoured("state: host, as offload_optimizer.device: cpu", bool),
    "zero_optimization.cpu_offload_param": honoured("weights: host, as offload_param.device: cpu", bool),
    "zero_optimization.cpu_offload_params": honoured("weights: host, as offload_param.device: cpu", bool),
    "aio.block_size": as_option("block_size", int),
    "aio.queue_depth": as_option("queue_depth", int),
    "aio.intra_op_parallelism": as_option("io_threads", int),
    "aio.thread_count": honoured("io_threads, where intra_op_parallelism is not given", int),
    "flops_profiler.enabled": honoured("one step is counted; its table goes to the log, or to output_file", bool),
    "flops_profiler.profile_step": honoured("which step is counted", int),
    "flops_profiler.module_depth": honoured("how deep its table goes; -1: all", int),
    "flops_profiler.top_modules": honoured("how many of the largest kinds of module are named", int),
    "flops_profiler.detailed": honoured("with a row for each module", bool),
    "flops_profiler.output_file": honoured("where its table is written", str),
    **ignored("what is recomputed is counted, and apart", "flops_profiler.recompute_fwd_factor"),
    # what would change the numbers
    "zero_optimization.zenflow": refused("leave it out: each step of zinf is over before its weights are used"),
    "zero_optimization.zero_quantized_weights": refused(_EXACT),
    "zero_optimization.zero_quantized_nontrainable_weights": refused(_EXACT),
    "zero_optimization.zero_quantized_gradients": refused(_EXACT),
    "zero_optimization.zeropp_loco_param": refused(_EXACT),
    "amp": refused("use fp16.enabled or bf16.enabled"),
    "elasticity": refused(_REMOVED),
    "curriculum_learning": refused(_REMOVED),
    "compression_training": refused(_REMOVED),
    "quantize_training": refused(_REMOVED),
    "progressive_layer_drop": refused(_REMOVED),
    "sparse_attention": refused(_REMOVED),
    "sparse_gradients": refused(_REMOVED),
    **ignored("it changes no number, and DeepSpeed has removed it", "eigenvalue", "nebula", "graph_harvesting"),
    **ignored(_ONE_CARD, "zero_optimization.{mics_shard_size mics_hierarchical_params_gather}"),
    **ignored(
        _ONE_CARD,
        "zero_optimization.{contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions}",
        "zero_optimization.{allgather_bucket_size overlap_comm round_robin_gradients parameter_alignment zero_hpz_partition_size legacy_stage1}",
        "zero_optimization.{stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential}",
        "prescale_gradients", "gradient_predivide_factor", "communication_data_type", "seq_parallel_communication_data_type", "disable_allgather",
        "use_data_before_expert_parallelism", "comms_logger", "tensor_parallel", "sequence_parallel_size", "pipeline", "legacy_fusion",
    ),
    **ignored(
        _BUDGETS,
        "zero_optimization.{stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold}",
        "zero_optimization.{stage3_max_live_parameters stage3_max_reuse_distance sub_group_size memory_efficient_linear}",
        "zero_optimization.offload_param.{buffer_count buffer_size max_in_cpu}",
    ),
    **ignored(_PINNED, "zero_optimization.cpu_offload_use_pin_memory", "zero_optimization.{offload_param.pin_memory offload_optimizer.pin_memory}"),
    **ignored(_STEPS, "zero_optimization.offload_optimizer.{buffer_count pipeline_read pipeline_write fast_init super_offload}"),
    **ignored("all of the state steps on the CPU; cpu_threads bounds its threads", "zero_optimization.offload_optimizer.{ratio cpuadam_cores_perc}"),
    **ignored("zinf finds the blocks that travel as one; `blocks` names them", "zero_optimization.stage3_module_granularity_threshold"),
    **ignored("zinf finds the blocks that travel as one; `blocks` names them", "zero_optimization.leaf_module.{classes names name_suffixes}"),
    **ignored(
        "save_pretrained always writes all weights",
        "zero_optimization.{stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save}",
    ),
    **ignored("checkpoints hold the exact fp32 master, whatever the placement", "zero_optimization.{load_from_fp32_weights elastic_checkpoint}"),
    **ignored("it concerns only how DeepSpeed works", "zero_optimization.{compute_grad_norm ignore_unused_parameters pipeline_loading_checkpoint}"),
    **ignored("it concerns only how DeepSpeed works", "zero_optimization.{override_module_apply save_muon_momentum_buffer_in_memory}"),
    **ignored("it concerns only how DeepSpeed works", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "managed_gradient_accumulation"),
    **ignored("it concerns only how DeepSpeed works", "disable_python_gc", "vocabulary_size", "hybrid_engine", "autotuning", "optimizer.legacy_fusion"),
    **ignored("it chooses a kernel, not the numbers", "optimizer.params.{foreach fused capturable differentiable set_grad_none}"),
    **ignored("`debug` checks at every use whose a buffer is", "zero_optimization.{log_trace_cache_warnings enable_sanity_checks}"),
    **ignored("inputs go into the model as they are", "fp16.auto_cast"),
    **ignored("grads are summed as each backward ends, and a step with one that is not finite is skipped", "bf16.{immediate_grad_update check_grad_overflow}"),
    **ignored("bf16 needs no loss scale", "bf16.{loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale}"),
    **ignored("`backend` chooses how to read and write", "aio.{single_submit overlap_events use_gds}"),
    **ignored(
        "it acts on deepspeed.checkpointing only; `recompute` and `activations` are zinf's",
        "activation_checkpointing.{partition_activations contiguous_memory_optimization cpu_checkpointing number_checkpoints}",
        "activation_checkpointing.{synchronize_checkpoint_boundary profile}",
    ),
    **ignored("`compile_blocks` is zinf's", "compile"),
    **ignored("the data that a loader gives is used as it is", "data_efficiency"),
    **ignored(
        _LOGS, "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "timers", "comet",
        "tensorboard.{enabled output_path job_name}", "wandb.{enabled group team project}", "csv_monitor.{enabled output_path job_name}",
    ),
    **ignored(
        "zinf has checkpoints of its own",
        "checkpoint.{tag_validation checkpoint_serialization load_universal use_node_local_storage parallel_write writer}",
    ),
    # what public files have in places where DeepSpeed has no such key
    **ignored(_UNKNOWN, "tensor_parallel_size", "step_per_print", "logging"),
    **ignored("only inside zero_optimization it has an effect, in DeepSpeed too", "offload_param", "offload_optimizer"),
    **ignored(_OLD, "fp16.opt_level", "zero_optimization.offload_optimizer.{buffer_size max_in_cpu}"),
    **ignored(_OLD, "zero_optimization.offload_param.{pipeline_read pipeline_write fast_init ratio}"),
}  # fmt: skip

SECTIONS = {key.rsplit(".", n)[0] for key in KEYS for n in range(1, key.count(".") + 1)}
AUTO_IS_DEFAULT = ("zero_optimization.", "fp16.", "bf16.", "data_types.keep_in_fp32_modules")  # beginnings of keys
LENIENT = (
    "",
    "aio",
    "activation_checkpointing",
    "checkpoint",
    "flops_profiler",
    "data_types",
    "optimizer",
    "scheduler",
)  # where DeepSpeed ignores unknown keys
MOVED = {"bfloat16": "bf16", "zero_optimization.aio": "aio"}  # sections that are elsewhere in some files


def _same(value: Any) -> Any:
    return value


# What Hugging Face's Trainer writes in place of "auto": names (of TrainingArguments, of the model or the run), and the value from theirs.
FILLS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "train_micro_batch_size_per_gpu": (("per_device_train_batch_size",), _same),
    "gradient_accumulation_steps": (("gradient_accumulation_steps",), _same),
    "train_batch_size": (("per_device_train_batch_size", "gradient_accumulation_steps"), lambda rows, steps: rows * steps),
    "gradient_clipping": (("max_grad_norm",), _same),
    "optimizer.params.lr": (("learning_rate",), _same),
    "optimizer.params.betas": (("adam_beta1", "adam_beta2"), lambda first, second: [first, second]),
    "optimizer.params.eps": (("adam_epsilon",), _same),
    "optimizer.params.weight_decay": (("weight_decay",), _same),
    "scheduler.params.warmup_min_lr": ((), lambda: 0),
    "scheduler.params.warmup_max_lr": (("learning_rate",), _same),
    "scheduler.params.total_num_steps": (("num_training_steps",), _same),
    "scheduler.params.warmup_num_steps": (("warmup_steps",), lambda steps: max(1, steps)),
    "fp16.enabled": (("fp16",), _same),
    "bf16.enabled": (("bf16",), _same),
    "zero_optimization.reduce_bucket_size": (("hidden_size",), lambda h: h * h),
    "zero_optimization.stage3_prefetch_bucket_size": (("hidden_size",), lambda h: int(0.9 * h * h)),
    "zero_optimization.stage3_param_persistence_threshold": (("hidden_size",), lambda h: 10 * h),
}
FILL_ONLY = ("scheduler.params.warmup_min_lr", "zero_optimization.")  # keys, or beginnings of keys, whose own values need not agree with the Trainer's


def canonical(key: str) -> str:
    """The key's name in KEYS: "stage3_" may be left out, some sections have two names."""
    for old, new in MOVED.items():
        if key == old or key.startswith(old + "."):
            return new + key[len(old) :]
    section, dot, name = key.partition(".")
    long = f"{section}.stage3_{name}"
    return long if dot and key not in KEYS and long in KEYS else key
