"""The optimizer as a user sees it, and what one step means for each shard.

`Optimizer` is a torch.optim.Optimizer: parameter groups, learning-rate schedules and state_dict work as ever; the moments are
records of the engine and not in `state`. `step` snapshots the groups, so a step that is applied later (under the next forward)
uses the learning rate of its own time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zinf.chunks import Hyper, Segment, StepSpec
from zinf.errors import ConfigError
from zinf.shard import Shard

if TYPE_CHECKING:
    from zinf.engine import Engine

DECOUPLED = {"adamw": True, "adam": False}


class Optimizer(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) or Adam (Kingma and Ba, 2015) on records; made by the engine."""

    def __init__(self, engine: Engine, groups: Iterable[dict[str, Any]], defaults: dict[str, Any]):
        self._engine: Engine | None = None
        self._decoupled = DECOUPLED[engine.config.optimizer]
        super().__init__(list(groups), defaults)
        self._engine = engine
        self._group_of = {id(p): group for group in self.param_groups for p in group["params"]}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """engine.step(); a closure is refused, since it would run the model under a step that is still to come."""
        if closure is not None:
            raise ValueError("zinf's optimizer takes no closure: call engine.backward, then step()")
        assert self._engine is not None
        return self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what was summed since the last step. After a step there is nothing to drop."""
        assert self._engine is not None
        self._engine.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._engine is not None:
            raise ConfigError(
                "parameter groups are fixed once the engine is built, since their records are laid out: pass them to zinf.Engine(param_groups=...)"
            )
        super().add_param_group(param_group)

    def steps(self, p: nn.Parameter) -> bool:
        """Is `p` in a group, so that it may be stepped?"""
        return id(p) in self._group_of

    def hyper(self, p: nn.Parameter) -> Hyper:
        """The hyperparameters of `p` as they are now."""
        g = self._group_of[id(p)]
        return Hyper(float(g["lr"]), float(g["betas"][0]), float(g["betas"][1]), float(g["eps"]), float(g["weight_decay"]), self._decoupled)


def make_groups(model: nn.Module, groups: Sequence[dict[str, Any]] | None, weight_decay: float, trained: Collection[str]) -> list[dict[str, Any]]:
    """Parameter groups over the parameters of `model` that may be trained, which `trained` names.

    None puts them all in one. Given groups (as for torch.optim) must cover them exactly once.

    Raises:
        ConfigError: a trainable parameter is missing or there twice, or one is not the model's or is frozen.
    """
    names = {id(p): name for name, p in model.named_parameters() if name in trained}
    if not names:
        raise ConfigError(f"all parameters of {type(model).__name__} are frozen: there is nothing to train; set requires_grad on some")
    if groups is None:
        return [{"params": [p for name, p in model.named_parameters() if name in trained], "weight_decay": weight_decay}]
    seen: set[int] = set()
    for group in groups:
        group["params"] = list(group["params"])
        for p in group["params"]:
            if id(p) not in names:
                raise ConfigError("param_groups has a parameter that is frozen or not the model's: give trainable parameters of this model")
            if id(p) in seen:
                raise ConfigError(f"param_groups has {names[id(p)]} twice")
            seen.add(id(p))
    missing = [name for i, name in names.items() if i not in seen]
    if missing:
        which = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ConfigError(f"param_groups lacks {which}: add them, or freeze them with requires_grad_(False)")
    return list(groups)


def step_spec(shard: Shard, seen: Sequence[bool], hypers: Sequence[Hyper | None], steps: Sequence[int], scale: float) -> StepSpec:
    """One shard's step: neighbours with the same hyperparameters and step count become one segment.

    Args:
        seen: for each parameter of the shard, whether it got a gradient.
        hypers, steps: for each parameter; `steps` counts this one.
    """
    segments: list[list[Segment]] = [[] for _ in shard.spec.runs]
    for (r, p, _), ok, hyper, step in zip(shard.params, seen, hypers, steps, strict=True):
        if not ok or hyper is None:
            continue
        end = p.offset + p.numel
        last = segments[r][-1] if segments[r] else None
        if last is not None and (last.hyper, last.step) == (hyper, step) and not _unseen_between(shard, r, last.end, p.offset):
            segments[r][-1] = Segment(last.start, end, hyper, step)
        else:
            segments[r].append(Segment(p.offset, end, hyper, step))
    return StepSpec(scale, segments)


def _unseen_between(shard: Shard, run: int, start: int, end: int) -> bool:
    """Is there a parameter in elements [start, end) of a run? (Else it is a gap: zeros, which a step leaves zero.)"""
    return any(start <= p.offset < end for r, p, _ in shard.params if r == run)


def total_norm(sums: Iterable[float]) -> float:
    """The global norm from the shards' sums of squares, in an order that does not matter (math.fsum rounds once)."""
    sums = list(sums)
    return math.sqrt(math.fsum(sums)) if all(map(math.isfinite, sums)) else math.nan


def clip_scale(norm: float, max_norm: float | None) -> float:
    """What multiplies the grads: min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
