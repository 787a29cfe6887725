"""A DeepSpeed config gives the same effective values in zinf: every key has its row, public files and their quirks load, the rest is refused by name."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zinf import cli
from zinf.config import Config
from zinf.errors import ConfigError
from zinf.integrations.deepspeed.config import Translation, is_known, translate
from zinf.integrations.deepspeed.keys import FILLS, KEYS, SCHEDULERS, SECTIONS
from zinf.integrations.deepspeed.reading import read

FILES = Path(__file__).parent / "ds_configs"
ZERO = "zero_optimization"

# Every key that DeepSpeed 0.19.8 documents or accepts, by section.
DEEPSPEED: dict[str, str] = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping zero_allow_untested_optimizer"
    " zero_force_ds_cpu_optimizer managed_gradient_accumulation prescale_gradients gradient_predivide_factor communication_data_type"
    " seq_parallel_communication_data_type disable_allgather dump_state steps_per_print wall_clock_breakdown memory_breakdown dataloader_drop_last"
    " disable_python_gc log_level vocabulary_size legacy_fusion use_data_before_expert_parallelism torch_autocast comet comms_logger data_efficiency"
    " autotuning hybrid_engine tensor_parallel sequence_parallel_size pipeline compile timers amp sparse_gradients elasticity curriculum_learning"
    " compression_training eigenvalue nebula progressive_layer_drop quantize_training sparse_attention graph_harvesting bfloat16",
    "optimizer": "type params",
    "optimizer.params": "lr betas eps weight_decay torch_adam adam_w_mode fp32_optimizer_states max_grad_norm",
    "scheduler": "type params",
    "scheduler.params": "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps warmup_min_ratio cos_min_ratio last_batch_iteration",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "aio": "block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events use_gds",
    "activation_checkpointing": "partition_activations contiguous_memory_optimization cpu_checkpointing number_checkpoints"
    " synchronize_checkpoint_boundary profile",
    "flops_profiler": "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    "checkpoint": "tag_validation checkpoint_serialization load_universal use_node_local_storage parallel_write writer",
    "fp16": "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads",
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
    "tensorboard": "enabled output_path job_name",
    "csv_monitor": "enabled output_path job_name",
    "wandb": "enabled group team project",
    ZERO: "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size"
    " overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size cpu_offload"
    " cpu_offload_param cpu_offload_params cpu_offload_use_pin_memory stage3_prefetch_bucket_size stage3_param_persistence_threshold"
    " stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save"
    " stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential stage3_gather_fp16_weights_on_model_save"
    " prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance"
    " gather_16bit_weights_on_model_save module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential"
    " ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment zero_hpz_partition_size zero_quantized_weights"
    " zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply"
    " log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module mics_shard_size zeropp_loco_param",
    f"{ZERO}.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    f"{ZERO}.offload_optimizer": "device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload cpuadam_cores_perc",
    f"{ZERO}.zenflow": "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio full_warm_up_rounds"
    " pt_reserved_cores_perc steps_per_epoch",
    f"{ZERO}.leaf_module": "classes names name_suffixes",
}
TRAINER = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_grad_norm": 0.7, "learning_rate": 3e-5, "adam_beta1": 0.8, "adam_beta2": 0.99,
    "adam_epsilon": 1e-7, "weight_decay": 0.02, "num_training_steps": 500, "warmup_steps": 0, "fp16": False, "bf16": True, "hidden_size": 100,
}  # fmt: skip


def said(t: Translation, key: str) -> str:
    """How and why, of the one line about `key`."""
    (line,) = [f"{line.kind}: {line.said}" for line in t.report if line.key == key]
    return line


def config(**values: Any) -> dict[str, Any]:
    """The options that are not there in each config."""
    return {k: v for k, v in translate(values).config.items() if (k, v) != ("max_grad_norm", 1.0)}


def zero(**values: Any) -> dict[str, Any]:
    return config(zero_optimization=values)


# ------------------------------------------------------------------------------------------------------------ the table


def test_every_key_of_deepspeed_is_in_the_table() -> None:
    keys = [f"{section}.{name}".lstrip(".") for section, names in DEEPSPEED.items() for name in names.split()]
    assert len(keys) > 190 and [key for key in keys if not is_known(key)] == []
    assert not is_known("zero_optimization.stag") and not is_known("stage")


def test_the_table_is_whole() -> None:
    options = set(Config().to_dict())
    for key, entry in KEYS.items():
        assert entry.said and (entry.hint is not None) == (entry.kind == "honoured"), key
        assert entry.option is None or entry.option in options, key
        assert not (key in SECTIONS and entry.kind == "honoured"), key
    assert set(FILLS) <= set(KEYS)


# ------------------------------------------------------------------------------------------------------------ the files


@pytest.mark.parametrize("name", [f.name for f in sorted(FILES.glob("*.json"))])
def test_each_file_loads_and_fills(name: str) -> None:
    """Bare, what is auto waits; filled, nothing does."""
    ds = read(FILES / name)
    bare = translate(ds)
    assert all(f"{key}: auto" in "\n".join(map(str, bare.report)) for key in bare.waiting)
    filled = translate(ds, auto={k: v for k, v in TRAINER.items() if name.endswith("auto.json") or k in ("hidden_size",)})
    assert filled.waiting == {} or not name.endswith("auto.json")


def test_nvme_with_everything_explicit() -> None:
    t = translate(read(FILES / "nvme_explicit.json"))
    assert t.config == {
        "optimizer": "adamw", "lr": 2e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "weights": "nvme", "state": "nvme",
        "nvme_path": ["/local_nvme"], "block_size": 1 << 20, "queue_depth": 8, "io_threads": 2, "gradient_accumulation_steps": 4, "max_grad_norm": 0.5,
    }  # fmt: skip
    params = {"total_num_steps": 1000, "warmup_min_lr": 0.0, "warmup_max_lr": 2e-5, "warmup_num_steps": 100, "warmup_type": "log", "last_batch_iteration": -1}
    assert t.training == {
        "zero_stage": 3, "dtype": "bf16", "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
        "dataloader_drop_last": False, "scheduler": {"type": "WarmupDecayLR", "params": params},
    }  # fmt: skip
    assert t.waiting == {} and Config(**t.config).nvme_path == ("/local_nvme",)


def test_the_usual_template_as_the_trainer_fills_it() -> None:
    t = translate(read(FILES / "zero3_offload_auto.json"), auto=TRAINER)
    scale = {"loss_scale": 0.0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1.0}
    assert t.config == {**scale, "weights": "host", "state": "host", "gradient_accumulation_steps": 3, "max_grad_norm": 0.7}
    assert t.training["dtype"] == "bf16" and t.training["train_batch_size"] == 6 and t.training["train_micro_batch_size_per_gpu"] == 2
    assert said(t, f"{ZERO}.reduce_bucket_size").endswith("auto is 10000")
    assert said(t, f"{ZERO}.stage3_prefetch_bucket_size").endswith("auto is 9000")
    assert said(t, f"{ZERO}.stage3_param_persistence_threshold").endswith("auto is 1000")


def test_auto_that_nobody_fills_waits_by_name() -> None:
    t = translate(read(FILES / "zero2_short.json"))
    assert t.waiting == {
        "fp16.enabled": ("fp16",),
        "train_micro_batch_size_per_gpu": ("per_device_train_batch_size",),
        "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    }
    assert t.config == {"state": "host", "max_grad_norm": 1.0} and t.training["dtype"] is None and t.training["train_batch_size"] is None


def test_optimizer_and_schedule_as_the_trainer_fills_them() -> None:
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    warmup = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    ds = {"optimizer": {"type": "AdamW", "params": params}, "scheduler": {"type": "WarmupDecayLR", "params": warmup}, "train_batch_size": "auto"}
    t = translate(ds, auto=TRAINER)
    assert t.config == {"optimizer": "adamw", "lr": 3e-5, "betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.02, "max_grad_norm": 0.7} | {
        "gradient_accumulation_steps": 1
    }
    filled = {"warmup_min_lr": 0.0, "warmup_max_lr": 3e-5, "warmup_num_steps": 1, "total_num_steps": 500}  # no warmup: one step, as transformers has it
    assert t.training["scheduler"]["params"] == {**filled, "warmup_type": "log", "last_batch_iteration": -1}
    bare = translate(ds)
    assert "lr" not in bare.config and set(bare.waiting) == {*(f"optimizer.params.{k}" for k in params), "train_batch_size"} | {
        f"scheduler.params.{k}" for k in warmup if k != "warmup_min_lr"
    }


def test_values_that_disagree_with_the_trainer() -> None:
    ds = {"gradient_accumulation_steps": 4, "fp16": {"enabled": True}, ZERO: {"reduce_bucket_size": 5e8}, "gradient_clipping": 0.7}
    with pytest.raises(ConfigError) as e:
        translate(ds, auto=TRAINER)
    wrong = "gradient_accumulation_steps is 4, but the Trainer's gradient_accumulation_steps say 3: set it to auto"
    assert str(e.value) == f"{wrong}; fp16.enabled is true, but the Trainer's fp16 say false: set it to auto"
    with pytest.raises(ConfigError, match=r"auto: unknown name learning_rat; it can be .*learning_rate"):
        translate({}, auto={"learning_rat": 1})


# ----------------------------------------------------------------------------------------------------- effective values


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"type": "AdamW"}, {"optimizer": "adamw", "lr": 1e-3}),
        ({"type": "Adam", "params": {"lr": "1e-4"}}, {"optimizer": "adamw", "lr": 1e-4}),  # as DeepSpeed has it
        ({"type": "Adam", "params": {"adam_w_mode": False}}, {"optimizer": "adam", "lr": 1e-3}),
        ({"type": "AdamW", "params": {"torch_adam": True}}, {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.01}),
        ({"type": "adagrad"}, {"optimizer": "adagrad", "lr": 1e-2}),
        ({"type": "Lion", "params": {"betas": [0.9, 0.98]}}, {"optimizer": "lion", "lr": 1e-3, "betas": (0.9, 0.98)}),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9}),
        ({"type": None}, {}),
    ],
)
def test_optimizers(optimizer: dict[str, Any], expected: dict[str, Any]) -> None:
    assert config(optimizer=optimizer) == expected


@pytest.mark.parametrize(("given", "norm"), [({}, 1.0), ({"gradient_clipping": 0.0}, None), ({"gradient_clipping": 0.3}, 0.3)])
def test_clipping(given: dict[str, Any], norm: float | None) -> None:
    assert translate(given).config == {"max_grad_norm": norm}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((8, 2, 4), (8, 2, 4)), ((8, 2, None), (8, 2, 4)), ((8, None, 4), (8, 2, 4)), ((None, 2, 4), (8, 2, 4)), ((8, None, None), (8, 8, 1)),
        ((None, 2, None), (2, 2, 1)), ((None, None, 4), (None, None, 4)), ((None, None, None), (None, None, None)),
    ],
)  # fmt: skip
def test_batches(given: tuple[int | None, ...], expected: tuple[int | None, ...]) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    t = translate({name: value for name, value in zip(names, given, strict=True) if value is not None})
    assert tuple(t.training[name] for name in names) == expected
    assert t.config.get("gradient_accumulation_steps") == expected[2]


def test_scheduler_defaults() -> None:
    t = translate({"scheduler": {"type": "WarmupLR"}})
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log", "last_batch_iteration": -1}
    assert t.training["scheduler"] == {"type": "WarmupLR", "params": params}
    assert set(SCHEDULERS) == {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "LRRangeTest", "OneCycle"}


def test_data_types() -> None:
    assert config(data_types={"grad_accum_dtype": "fp32", "keep_in_fp32_modules": ["norm"]}) == {"grad_accum_dtype": "fp32", "keep_in_fp32": ("norm",)}
    assert config(data_types={"grad_accum_dtype": None, "keep_in_fp32_modules": "auto"}) == {}
    assert config(data_types={"grad_accum_dtype": "bfloat16"}) == {"grad_accum_dtype": "bf16"}


# --------------------------------------------------------------------------------------------------------------- quirks


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({ZERO: {"aio": {"queue_depth": 32, "thread_count": 3}}}, {"queue_depth": 32, "io_threads": 3}),
        ({"aio": {"thread_count": 3, "intra_op_parallelism": 5}}, {"io_threads": 5}),
        ({"bf16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}}, {}),
        ({"fp16": {"opt_level": "O2", "initial_scale_power": 64}}, {"initial_scale_power": 64}),
        ({"fp16": {"loss_scale": "auto", "hysteresis": 2.0}}, {"hysteresis": 2}),  # as DeepSpeed: auto is the default
        ({ZERO: {"stage": 3, "offload_param": {"device": "cpu", "pipeline_read": True}}}, {"weights": "host"}),
        ({ZERO: {"offload_optimizer": {"device": "cpu", "buffer_size": 1e8}}}, {"state": "host"}),
        ({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}}, {}),
        ({ZERO: {"stage": 2, "offload_param": {"device": "cpu"}}}, {}),
        ({ZERO: {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "drive"}}}, {"state": "nvme", "nvme_path": ["drive"]}),
        ({ZERO: {"stage": 3, "offload_param": {"device": "nvme"}}}, {"weights": "nvme"}),
        ({ZERO: {"stage": 3, "offload_param": {"device": None}, "offload_optimizer": {"device": "none", "pin_memory": True}}}, {}),
        ({ZERO: {"stage": 3, "offload_param": None}, "optimizer": None}, {}),
        ({ZERO: {"stage": True, "cpu_offload": True, "cpu_offload_use_pin_memory": True}}, {"state": "host"}),
        ({ZERO: {"stage": 3, "cpu_offload_params": True}}, {"weights": "host"}),
        ({ZERO: {"stage": 3, "sub_group_size": 0}}, {}),
        ({ZERO: {"stage": 3, "sub_group_size": 1e14}}, {}),
        ({ZERO: {"stage": 3, "sub_group_size": "auto", "max_live_parameters": 1.5}}, {}),
        ({"amp": {"enabled": False, "opt_level": "O1"}, "sparse_gradients": False, "zero_optimization": {"mics_shard_size": -1}}, {}),
        ({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}}, {}),
        ({"tensor_parallel_size": 1, "step_per_print": 10, "logging": {"level": "info"}, "_comment": "x"}, {}),
        ({"wandb": {"enabled": True, "project": "p"}, "comms_logger": {"enabled": True, "any": 1}}, {}),
    ],
)  # fmt: skip
def test_what_public_files_have(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert config(**given) == expected


def test_quirks_leave_a_line() -> None:
    given = {ZERO: {"stage": 2, "offload_param": {"device": "cpu", "ratio": 0.3}}, "step_per_print": 10, "bfloat16": {"enabled": "true"}}
    t = translate(given)
    assert said(t, f"{ZERO}.offload_param") == "ignored: stage is 2; it has an effect with stage 3 only"
    assert said(t, f"{ZERO}.offload_param.ratio") == "ignored: DeepSpeed refuses it here; it has no effect"
    assert said(t, "step_per_print").startswith("ignored: DeepSpeed does not know it")
    assert said(t, "gradient_clipping").startswith("honoured: max_grad_norm: 1.0") and t.training["dtype"] == "bf16"
    missing = translate({ZERO: {"offload_optimizer": {"device": "nvme"}}})
    assert "zinf.Engine will want an nvme_path" in said(missing, f"{ZERO}.offload_optimizer.nvme_path")


def test_two_drives_are_both_used() -> None:
    devices = {name: {"device": "nvme", "nvme_path": f"/{name}"} for name in ("offload_param", "offload_optimizer")}
    assert zero(stage=3, **devices)["nvme_path"] == ["/offload_param", "/offload_optimizer"]


# ------------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({ZERO: {"stag": 3}}, "zero_optimization.stag: unknown key; did you mean zero_optimization.stage?"),
        ({ZERO: {"offload_param": {"nvme_pth": "/x"}}}, "nvme_pth: unknown key; did you mean zero_optimization.offload_param.nvme_path?"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled are both true: choose one"),
        ({ZERO: {"stage": 4}}, "zero_optimization.stage is 4, expected 0, 1, 2 or 3"),
        ({ZERO: {"stage": 1.5}}, "zero_optimization.stage is 1.5, expected a whole number"),
        ({"fp16": {"hysteresis": 1.5}}, "fp16.hysteresis is 1.5, expected a whole number"),
        ({ZERO: {"offload_param": {"device": "gpu"}}}, "zero_optimization.offload_param.device is 'gpu', expected one of none, cpu, nvme"),
        ({ZERO: {"zero_quantized_weights": True}}, "zero_optimization.zero_quantized_weights is true: leave it out: zinf moves weights and grads as they are"),
        ({ZERO: {"zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow is {\"topk_ratio\": 0.1}: leave it out: each step of zinf is over"),
        ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states is true: leave it out: zinf keeps an fp32 master"),
        ({"amp": {"enabled": True}}, "amp is {\"enabled\": true}: use fp16.enabled or bf16.enabled"),
        ({"compression_training": {"a": {"b": {"enabled": True}}}}, "compression_training is"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "optimizer.params.max_grad_norm is 1.0: use gradient_clipping"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type is Lamb: zinf has adam, adamw, lion, sgd, adagrad; choose one of them"),
        ({"optimizer": {"type": "SGD", "params": {"eps": 1e-8}}}, "eps is 1e-08, but sgd has no eps"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.params.total_num_steps is missing: WarmupDecayLR needs it"),
        ({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 3}}}, "scheduler.params.total_num_steps: WarmupLR has no such parameter"),
        ({"scheduler": {"type": "WarmupLr"}}, "did you mean 'WarmupLR'?"),
        ({"optimizer": {"type": "auto"}}, "optimizer.type is auto, and there is nothing to fill it from"),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 3}, "train_batch_size is 32, but train_micro_batch_size_per_gpu 3 x"),
        ({"train_batch_size": 0}, "train_batch_size is 0, expected a positive number"),
        ({"train_batch_size": 2, "gradient_accumulation_steps": 4}, "but train_micro_batch_size_per_gpu 0 x gradient_accumulation_steps 4"),
        ({"aio": {"block_size": 1000}}, "in zinf's words: config: block_size is 1000, expected a multiple of 4096"),
        ({ZERO: {"max_live_parameters": 1, "stage3_max_live_parameters": 2}}, "stage3_max_live_parameters is there under two names: keep one"),
    ],
)  # fmt: skip
def test_refusals_name_the_key_and_what_to_do(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        translate(given)
    assert message in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("given", "key", "message"),
    [
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation", "did you mean zero_optimization?"),
        ({"loss_scale": 0}, "loss_scale", "did you mean fp16.loss_scale?"),
        ({"xyzzy": 1}, "xyzzy", "`zinf ds-config --keys` has all keys"),
        ({"aio": {"queue_dpeth": 8}}, "aio.queue_dpeth", "did you mean aio.queue_depth?"),
        ({"activation_checkpointing": {"profil": 1}}, "activation_checkpointing.profil", "did you mean activation_checkpointing.profile?"),
        ({"optimizer": {"type": "AdamW", "lr": 1}}, "optimizer.lr", "did you mean optimizer.params.lr?"),
    ],
)  # fmt: skip
def test_what_deepspeed_ignores_warns_and_names_the_nearest(given: dict[str, Any], key: str, message: str) -> None:
    t = translate(given)
    (line,) = [line for line in t.report if line.warns]
    assert line.key == key and line.kind == "ignored" and line.said == f"DeepSpeed ignores it, too: unknown key; {message}"


def test_zero_as_a_switch_is_stage_1() -> None:
    assert translate({ZERO: True}).training["zero_stage"] == 1 and translate({ZERO: False}).training["zero_stage"] == 0


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as e:
        translate({"fp16": {"xyzzy": 1}, "amp": {"enabled": True}, "bf16": {f"qq{i}": 1 for i in range(20)}})
    assert str(e.value).startswith("fp16.xyzzy: unknown key") and "; amp is" in str(e.value) and str(e.value).endswith("; and 14 more")


# -------------------------------------------------------------------------------------------------------------- reading

COMMENTED = """{
    // which // one
    "zero_optimization": {"stage": 3, /* of "three",
    really */ "offload_param": {"device": "nvme", "nvme_path": "/a//b#c,}",},}, # and no more
}"""


def test_comments_and_trailing_commas(tmp_path: Path) -> None:
    (tmp_path / "c").write_text(COMMENTED)
    assert read(tmp_path / "c") == {ZERO: {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/a//b#c,}"}}}


def test_base64_and_mappings() -> None:
    assert read(base64.urlsafe_b64encode(b'{"train_batch_size": 4}').decode()) == {"train_batch_size": 4}
    assert read({"train_batch_size": 4}) == {"train_batch_size": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "a": 2}', "a is there twice: keep one"),
        ('{"a": 1\n "b" 2}', "line 2 column 2"),
        ("[1]", "expected keys and values, found list"),
        ("[" * 100_000, ""),
        ('{"a": /*', "line 1"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    (tmp_path / "c").write_text(text)
    with pytest.raises(ConfigError) as e:
        read(tmp_path / "c")
    assert str(e.value).startswith(f"{tmp_path / 'c'}: ") and message in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("path", ["nowhere.json", "/", "a\0b", "x" * 5000])
def test_paths_that_are_no_file(path: str) -> None:
    with pytest.raises(ConfigError) as e:
        read(path)
    assert len(str(e.value)) < 300


HJSON = "{\n train_batch_size: 4\n optimizer: {\n type: AdamW\n }\n}"


def test_hjson_without_quotes(tmp_path: Path) -> None:
    pytest.importorskip("hjson")
    (tmp_path / "c").write_text(HJSON)
    assert read(tmp_path / "c") == {"train_batch_size": 4, "optimizer": {"type": "AdamW"}}
    (tmp_path / "c").write_text("{a: 1 /*")
    with pytest.raises(ConfigError, match="string index out of range"):
        read(tmp_path / "c")


def test_hjson_is_named_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)  # as if it were not installed
    (tmp_path / "c").write_text(HJSON)
    with pytest.raises(ConfigError, match=r"line 2 column 2 .*pip install hjson"):
        read(tmp_path / "c")


# ---------------------------------------------------------------------------------------------------------- the command


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(FILES / "zero3_bf16_params.json")
    assert cli.main(["ds-config", file]) == 0
    out = capsys.readouterr().out
    assert 'zero_optimization.offload_param.device: "cpu"' in out and "weights" in out and "nothing is exchanged with other ranks" in out
    assert cli.main(["ds-config", file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["weights"] == "host" and found["training"]["dtype"] == "bf16" and set(found) == {"config", "training", "waiting", "report"}
    assert cli.main(["ds-config", "--keys"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(KEYS)
    (tmp_path / "bad.json").write_text('{"zero_optimization": {"stag": 3}}')
    assert cli.main(["ds-config", str(tmp_path / "bad.json")]) == 1
    assert capsys.readouterr().err == f"zinf: error: {tmp_path / 'bad.json'}: zero_optimization.stag: unknown key; did you mean zero_optimization.stage?\n"
    assert cli.main(["ds-config"]) == 1 and "give a FILE" in capsys.readouterr().err


def test_no_torch_is_needed() -> None:
    code = "import sys, zinf.integrations.deepspeed.config as c\nc.translate({})\nprint({'torch', 'transformers', 'deepspeed'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"
