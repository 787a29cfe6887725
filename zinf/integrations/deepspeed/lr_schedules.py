"""DeepSpeed's learning-rate schedules, with its curves to the last bit (tests/ds_data/curves.json is what DeepSpeed 0.19.8 gives).

They are moved once a step, after it. A schedule that has not been moved has `last_batch_iteration` -1; where that is its start, building it
sets the learning rates of that point, as DeepSpeed's do: so the first step of WarmupLR is made with warmup_min_lr, and so is the second.

A learning rate or a momentum may be one number, or a list with one for each parameter group.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

log = logging.getLogger("zinf")

Optimizer = Any  # anything with param_groups, or that wraps one as .optimizer


def _plain(optimizer: Optimizer) -> Any:
    inner = optimizer if hasattr(optimizer, "param_groups") else getattr(optimizer, "optimizer", None)
    if not hasattr(inner, "param_groups"):
        raise TypeError(f"{type(optimizer).__name__} has no param_groups: a schedule needs an optimizer")
    return inner


def _for_each(optimizer: Any, value: Any, name: str) -> list[float]:
    """One number for each parameter group."""
    if not isinstance(value, (list, tuple)):
        return [value] * len(optimizer.param_groups)
    if len(value) != len(optimizer.param_groups):
        raise ValueError(f"{name} has {len(value)} values, and the optimizer {len(optimizer.param_groups)} parameter groups: give one for each")
    return list(value)


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} is {value!r}, expected a positive whole number")
    return value


class Schedule:
    """What they have in common. A subclass says `get_lr`."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int):
        self.optimizer = _plain(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None

    def _begin(self) -> None:
        if self.last_batch_iteration == -1:
            self._set(self.get_lr())

    def _set(self, lrs: list[float]) -> None:
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=True):
            if hasattr(group["lr"], "fill_"):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def get_lr(self) -> list[float]:
        """The learning rate of each group at `last_batch_iteration`."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """What was set last."""
        if self._last_lr is None:
            raise RuntimeError("the schedule has set no learning rate yet: call step() first")
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Move by one, or to the given point, and set the learning rates."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        """Go to the point that `sd` says. The learning rates are the optimizer's to restore."""
        self.last_batch_iteration = sd["last_batch_iteration"]
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


class _Warmup:
    """The first part of the schedules that warm up: from 0 to 1 in so many steps."""

    def __init__(self, steps: int, kind: str):
        self.steps = max(2, _whole(steps, "warmup_num_steps"))
        if kind not in ("log", "linear"):
            log.warning("warmup_type is %r; it can be log or linear, and is taken for log", kind)
        self.linear = kind == "linear"
        self._inverse = 1.0 / math.log(self.steps)

    def at(self, i: int) -> float:
        return i / self.steps if self.linear else self._inverse * math.log(i + 1)


class WarmupLR(Schedule):
    """From warmup_min_lr to warmup_max_lr in warmup_num_steps, and stay there. warmup_max_lr None is the optimizer's own."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        super().__init__(optimizer, last_batch_iteration)
        if warmup_max_lr is None:
            warmup_max_lr = [group["lr"] for group in self.optimizer.param_groups]
        self.min_lrs = _for_each(self.optimizer, warmup_min_lr, "warmup_min_lr")
        self.max_lrs = _for_each(self.optimizer, warmup_max_lr, "warmup_max_lr")
        self._warmup = _Warmup(warmup_num_steps, warmup_type)
        self.warmup_num_steps = self._warmup.steps
        self._begin()

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return self.min_lrs
        i = self.last_batch_iteration
        gamma = self._warmup.at(i) if i < self.warmup_num_steps else self._after(i)
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _after(self, i: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As WarmupLR, and then down to warmup_min_lr in a straight line, where total_num_steps are over."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _check_total(total_num_steps, self.warmup_num_steps)

    def _after(self, i: int) -> float:
        return max(0.0, float(self.total_num_steps - i) / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(Schedule):
    """Ratios of the optimizer's own learning rates: from warmup_min_ratio to 1, then along a cosine to cos_min_ratio."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ):
        super().__init__(optimizer, last_batch_iteration)
        self._warmup = _Warmup(warmup_num_steps, warmup_type)
        self.warmup_num_steps, self.total_num_steps = self._warmup.steps, total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        _check_total(total_num_steps, self.warmup_num_steps)
        self.org_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._begin()

    def get_lr_ratio(self) -> float:
        i = self.last_batch_iteration
        if i < 0:
            return 0.0
        if i < self.warmup_num_steps:
            return self.warmup_min_ratio + self._warmup.at(i) * (1.0 - self.warmup_min_ratio)
        progress = min(1.0, (i - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps))
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ((1 + math.cos(math.pi * progress)) / 2))

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]


def _check_total(total: int, warmup: int) -> None:
    if total < warmup:
        log.warning("total_num_steps is %d, less than warmup_num_steps, %d", total, warmup)


class LRRangeTest(Schedule):
    """Up from lr_range_test_min_lr without end, to find the highest rate that trains (Smith, 2018)."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Any = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ):
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = _for_each(self.optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = _whole(lr_range_test_step_size, "lr_range_test_step_size")
        self.step_rate, self.staircase = lr_range_test_step_rate, lr_range_test_staircase
        if last_batch_iteration == -1:
            self._set(self.min_lr)

    def get_lr(self) -> list[float]:
        interval = float(self.last_batch_iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [lr * increase for lr in self.min_lr]


class OneCycle(Schedule):
    """Learning rate up and down once, the first beta of Adam the other way, then both decay (Smith, 2018)."""

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Any,
        cycle_max_lr: Any,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Any = 0.8,
        cycle_max_mom: Any = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ):
        super().__init__(optimizer, last_batch_iteration)
        self._sizes(cycle_first_step_size, cycle_second_step_size)
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.min_lrs = _for_each(self.optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = _for_each(self.optimizer, cycle_max_lr, "cycle_max_lr")
        if last_batch_iteration == -1:
            self._set(self.min_lrs)
        self.cycle_momentum = cycle_momentum and "betas" in self.optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            log.warning("cycle_momentum is off, since %s has no betas", type(self.optimizer).__name__)
        if self.cycle_momentum:
            self.min_moms = _for_each(self.optimizer, cycle_min_mom, "cycle_min_mom")
            self.max_moms = _for_each(self.optimizer, cycle_max_mom, "cycle_max_mom")
            if last_batch_iteration == -1:
                self._set_moms([(mom, 0.99) for mom in self.min_moms])

    def _sizes(self, first: float, second: float | None) -> None:
        first, second = float(first), float(first if second is None else second)
        if first <= 0 or second < 0:
            raise ValueError(f"cycle_first_step_size is {first:g} and cycle_second_step_size {second:g}: give positive numbers")
        self.first_step_size, self.second_step_size, self.total_size = first, second, first + second
        self.step_ratio = first / self.total_size

    def _set_moms(self, betas: list[tuple[float, float]]) -> None:
        for group, pair in zip(self.optimizer.param_groups, betas, strict=True):
            group["betas"] = pair

    def _height(self) -> float:
        """How far up the cycle is, from 0 to 1."""
        i = self.last_batch_iteration + 1
        x = 1.0 + i / self.total_size - math.floor(1 + i / self.total_size)
        rising = x <= self.step_ratio
        height = x / self.step_ratio if rising else (x - 1) / (self.step_ratio - 1)
        stairs = self.first_stair_count if rising else self.second_stair_count
        if stairs > 0:
            at = i % self.total_size
            size = self.first_step_size if at <= self.first_step_size else self.second_step_size
            height = math.floor((at if at <= self.first_step_size else self.total_size - at) * stairs / size) / stairs
        return height

    def _decay(self, rate: float) -> float | None:
        """What decays by now; None: nothing does."""
        if math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0):
            return None
        return 1 + rate * ((self.last_batch_iteration - self.total_size + 1) / self.decay_step_size)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        factor = self._decay(self.decay_lr_rate)
        return self.min_lrs if factor is None else [lr / factor for lr in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group; None where momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            return [(high - (high - low) * height, 0.99) for low, high in zip(self.min_moms, self.max_moms, strict=True)]
        factor = self._decay(self.decay_mom_rate)
        return [(mom if factor is None else mom * factor, 0.99) for mom in self.max_moms]

    def step(self, last_batch_iteration: int | None = None) -> None:
        super().step(last_batch_iteration)
        betas = self.get_mom()
        if betas is not None:
            self._set_moms(betas)


VALID_LR_SCHEDULES = {"LRRangeTest": LRRangeTest, "OneCycle": OneCycle, "WarmupLR": WarmupLR, "WarmupDecayLR": WarmupDecayLR, "WarmupCosineLR": WarmupCosineLR}


def build(kind: str, optimizer: Optimizer, params: dict[str, Any]) -> Any:
    """The schedule that a config names."""
    make: Callable[..., Any] = VALID_LR_SCHEDULES[kind]
    return make(optimizer, **params)
