"""DeepSpeed's learning-rate schedules give DeepSpeed's numbers, to the last bit, from its config and as classes."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from zinf.integrations.deepspeed import lr_schedules
from zinf.integrations.deepspeed.config import translate
from zinf.integrations.deepspeed.keys import REQUIRED, SCHEDULERS

CASES = json.loads((Path(__file__).parent / "ds_data" / "curves.json").read_text())["cases"]  # made by make_curves.py there


def two_groups(kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    return kind([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (2e-3, 5e-4)])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['kind']}-{len(str(case['params']))}")
def test_every_curve_is_deepspeeds(case: dict[str, Any]) -> None:
    optimizer = two_groups()
    schedule = getattr(lr_schedules, case["kind"])(optimizer, **case["params"])
    for i, lrs in enumerate(case["lrs"]):
        assert [g["lr"] for g in optimizer.param_groups] == lrs, i
        if "betas" in case:
            assert [list(g["betas"]) for g in optimizer.param_groups] == case["betas"][i], i
        schedule.step()
    assert schedule.get_last_lr() == [g["lr"] for g in optimizer.param_groups]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["kind"])
def test_the_config_gives_the_same_curve(case: dict[str, Any]) -> None:
    scheduler = translate({"scheduler": {"type": case["kind"], "params": case["params"]}}).training["scheduler"]
    optimizer = two_groups()
    schedule = lr_schedules.build(scheduler["type"], optimizer, scheduler["params"])
    for lrs in case["lrs"][:12]:
        assert [g["lr"] for g in optimizer.param_groups] == lrs
        schedule.step()


@pytest.mark.parametrize("case", CASES[::2], ids=lambda case: case["kind"])
def test_it_goes_on_from_its_state(case: dict[str, Any]) -> None:
    optimizer = two_groups()
    schedule = getattr(lr_schedules, case["kind"])(optimizer, **case["params"])
    for _ in range(9):
        schedule.step()
    again = two_groups()
    resumed = getattr(lr_schedules, case["kind"])(again, **case["params"])
    resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    for lrs in case["lrs"][10:14]:
        resumed.step()
        assert [g["lr"] for g in again.param_groups] == lrs


def test_the_tables_defaults_are_those_of_the_classes() -> None:
    for kind, own in SCHEDULERS.items():
        parameters = inspect.signature(lr_schedules.VALID_LR_SCHEDULES[kind].__init__).parameters
        assert set(own) == set(parameters) - {"self", "optimizer"}
        for name, default in own.items():
            assert parameters[name].default == (inspect.Parameter.empty if default is REQUIRED else default), (kind, name)


def test_wrong_values_are_named() -> None:
    with pytest.raises(ValueError, match=r"warmup_num_steps is 2\.5, expected a positive whole number"):
        lr_schedules.WarmupLR(two_groups(), warmup_num_steps=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="warmup_min_lr has 3 values, and the optimizer 2 parameter groups"):
        lr_schedules.WarmupLR(two_groups(), warmup_min_lr=[1, 2, 3])
    with pytest.raises(ValueError, match="cycle_first_step_size is 0"):
        lr_schedules.OneCycle(two_groups(), 1e-4, 1e-3, cycle_first_step_size=0)
    with pytest.raises(TypeError, match="has no param_groups"):
        lr_schedules.WarmupLR(3)


def test_momentum_is_not_cycled_where_there_are_no_betas(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = two_groups(torch.optim.SGD)
    schedule = lr_schedules.OneCycle(optimizer, 1e-4, 1e-3)
    schedule.step()
    assert "SGD has no betas" in caplog.text and "betas" not in optimizer.param_groups[0] and schedule.get_mom() is None
