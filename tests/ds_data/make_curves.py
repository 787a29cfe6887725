"""Write curves.json: what the learning-rate schedules of an installed DeepSpeed give. Run with its Python: DS_ACCELERATOR=cpu python make_curves.py"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from deepspeed import __version__
from deepspeed.runtime import lr_schedules

STEPS = 42
WARMUP = [
    {},
    {"warmup_num_steps": 10},
    {"warmup_num_steps": 1},
    {"warmup_min_lr": 1e-5, "warmup_max_lr": 3e-4, "warmup_num_steps": 7, "warmup_type": "linear"},
    {"warmup_min_lr": [1e-6, 2e-6], "warmup_max_lr": [1e-3, 2e-3], "warmup_num_steps": 13},
    {"warmup_max_lr": 5e-5, "warmup_num_steps": 20, "warmup_type": "linear", "last_batch_iteration": 4},
]
COSINE = [
    {"warmup_num_steps": 10},
    {"warmup_num_steps": 5, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05, "warmup_type": "linear"},
    {"warmup_num_steps": 40},
    {"warmup_num_steps": 8, "cos_min_ratio": 0.0},
]
CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}
CASES = {
    "WarmupLR": WARMUP,
    "WarmupDecayLR": [{"total_num_steps": n, **p} for n in (30, 5) for p in WARMUP],
    "WarmupCosineLR": [{"total_num_steps": n, **p} for n in (30, 60) for p in COSINE],
    "LRRangeTest": [
        {},
        {"lr_range_test_min_lr": 1e-5, "lr_range_test_step_size": 7},
        {"lr_range_test_min_lr": [1e-5, 1e-4], "lr_range_test_step_size": 5, "lr_range_test_step_rate": 3.5, "lr_range_test_staircase": True},
    ],
    "OneCycle": [
        CYCLE,
        {**CYCLE, "cycle_first_step_size": 10},
        {**CYCLE, "cycle_first_step_size": 7, "cycle_second_step_size": 12, "decay_lr_rate": 0.3, "decay_step_size": 4},
        {**CYCLE, "cycle_first_step_size": 9, "cycle_first_stair_count": 3, "cycle_second_stair_count": 4, "decay_step_size": 3, "decay_mom_rate": 0.01},
        {**CYCLE, "cycle_first_step_size": 8, "cycle_first_stair_count": 2, "cycle_momentum": False},
        {"cycle_min_lr": [1e-4, 2e-4], "cycle_max_lr": [1e-3, 3e-3], "cycle_first_step_size": 6, "cycle_min_mom": 0.7, "cycle_max_mom": 0.95},
    ],
}


def curve(kind: str, params: dict) -> dict:
    """Learning rates and betas of both groups, before the first step and after each."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (2e-3, 5e-4)]
    optimizer = torch.optim.AdamW(groups)
    schedule = getattr(lr_schedules, kind)(optimizer, **params)
    lrs, betas = [], []
    for _ in range(STEPS):
        lrs.append([g["lr"] for g in optimizer.param_groups])
        betas.append([list(g["betas"]) for g in optimizer.param_groups])
        schedule.step()
    found = {"kind": kind, "params": params, "lrs": lrs}
    return found | ({"betas": betas} if kind == "OneCycle" else {})


if __name__ == "__main__":
    cases = [curve(kind, params) for kind, sets in CASES.items() for params in sets]
    Path(__file__).with_name("curves.json").write_text(json.dumps({"deepspeed": __version__, "cases": cases}) + "\n")
