"""A job that passed --deepspeed to Hugging Face's Trainer moves over: its file gives zinf's options, and must agree with TrainingArguments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import LEAF_BYTES, llama
from transformers import TrainingArguments

from zinf.errors import ConfigError
from zinf.hf.arguments import config_of
from zinf.hf.trainer import ZinfTrainer
from zinf.integrations.deepspeed.trainer import trainer_options

FILES = sorted((Path(__file__).parent / "ds_configs").glob("*.json"))
ARGS: dict = {
    "eval": dict(per_device_train_batch_size=1),
    "nvme_explicit": dict(
        bf16=True, learning_rate=2e-5, adam_beta2=0.95, weight_decay=0.1, gradient_accumulation_steps=4, per_device_train_batch_size=2, max_grad_norm=0.5
    ),
    "zero3_bf16_params": dict(bf16=True),
}

PLACES = {
    "eval": ("auto", "auto", ()),
    "nvme_explicit": ("nvme", "nvme", ("/local_nvme",)),
    "zero2_auto": ("auto", "host", ()),
    "zero2_short": ("auto", "host", ()),
    "zero3_bf16_params": ("host", "auto", ()),
    "zero3_offload_auto": ("host", "host", ()),
}


def arguments(folder, **more):
    return TrainingArguments(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **more)


@pytest.mark.parametrize("file", FILES, ids=[f.stem for f in FILES])
def test_what_such_files_say_beside_the_trainer(tmp_path, file):
    options = trainer_options(file, arguments(tmp_path, **ARGS.get(file.stem, {})))
    config = config_of(options)
    assert (config.weights, config.state, config.nvme_path) == PLACES[file.stem]


def test_a_run(tmp_path):
    ds = {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)},
            "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
        },
        "gradient_clipping": "auto",
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "bf16": {"enabled": "auto"},
    }
    args = arguments(tmp_path / "out", max_steps=2, lr_scheduler_type="linear", warmup_steps=1, bf16=True, logging_steps=1)
    data = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 16
    with ZinfTrainer(model=llama(), args=args, train_dataset=data, zinf=trainer_options(ds, args) | {"leaf_bytes": LEAF_BYTES}) as trainer:
        trainer.train()
        report = trainer.engine.report()
    assert set(report["state"][:-1]) == set(report["weights"][:-1]) == {"nvme"}  # all but the root


@pytest.mark.parametrize(
    ("ds", "more", "said"),
    [
        ({"optimizer": {"type": "Lion", "params": {}}}, {}, "optimizer.type is lion in the DeepSpeed config, and TrainingArguments"),
        ({"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10}}}, {}, "set lr_scheduler_type='cosine' and warmup_steps"),
        ({"gradient_clipping": 0.3}, {}, "gradient_clipping is 0.3, but the Trainer's max_grad_norm say 1.0: set it to auto"),
        ({"zero_optimization": {"stag": 3}}, {}, "zero_optimization.stag: unknown key; did you mean zero_optimization.stage"),
    ],
)
def test_refused(tmp_path, ds, more, said):
    with pytest.raises(ConfigError, match=said) as e:
        trainer_options(ds, arguments(tmp_path, **more))
    assert "\n" not in str(e.value)
