"""The optimizer as a user sees it, and what one step means for each shard.

`Optimizer` is a torch.optim.Optimizer: parameter groups, learning-rate schedules and state_dict work as ever; the moments are
records of the engine and not in `state`. `step` snapshots the groups, so a step that is applied later (under the next forward)
uses the learning rate of its own time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zinf.algorithms import Algorithm, algorithm
from zinf.chunks import Segment, StepSpec
from zinf.config import Config
from zinf.errors import ConfigError
from zinf.shard import Shard

if TYPE_CHECKING:
    from zinf.engine import Engine


class Optimizer(torch.optim.Optimizer):
    """One of the optimizers of algorithms.py, on records; made by the engine."""

    def __init__(self, engine: Engine, groups: Iterable[dict[str, Any]]):
        self._engine: Engine | None = None
        self._config = engine.config
        self._room = engine.layout.moments
        super().__init__(list(groups) or [{"params": []}], engine.config.optimizer_options())  # none: an engine for inference
        self._engine = engine
        self._index()

    def _index(self) -> None:
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the options of the groups (learning rates and all that schedulers put beside them). Moments stay as they are in the records.

        Raises:
            ConfigError: there are moments in it, so it is another optimizer's.
            ValueError: its groups are not these.
        """
        if state_dict.get("state"):
            raise ConfigError("this optimizer state has moments, which zinf keeps in its store: it was saved by another optimizer; start with fresh moments")
        super().load_state_dict(state_dict)
        self._index()

    def algorithm(self, p: nn.Parameter) -> Algorithm:
        """What a step does to `p`, with the hyperparameters as they are now."""
        return self._of_group(self._group_of[id(p)])

    def check(self) -> None:
        """Raise ConfigError if some group has a value now that its option cannot have."""
        for group in self.param_groups:
            self._of_group(group)

    def _of_group(self, group: dict[str, Any]) -> Algorithm:
        found = algorithm(self._config.optimizer, group)
        if not set(found.keeps()) <= set(self._room):
            raise ConfigError(f"momentum was set to {group['momentum']} after the engine was built without room for one: give some momentum to zinf.Engine")
        return found


def decay_groups(model: nn.Module, weight_decay: float, trained: Collection[str] | None = None) -> list[dict[str, Any]]:
    """Parameter groups for zinf.Engine(param_groups=...): `weight_decay` for all trainable parameters but norms and biases, which get none.

    `trained` names them where they are not those that want a gradient now. What counts as a norm or a bias
    is what Hugging Face's Trainer takes for one (Trainer.get_decay_parameter_names).
    """
    norms = {id(p) for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters(recurse=False)}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if p.requires_grad if trained is None else name in trained:
            (plain if id(p) in norms or _NORM_OR_BIAS.search(name.lower()) else decayed).append(p)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


_NORM_OR_BIAS = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def make_groups(model: nn.Module, groups: Sequence[dict[str, Any]] | None, config: Config, trained: Collection[str]) -> list[dict[str, Any]]:
    """Parameter groups over the parameters of `model` that may be trained, which `trained` names.

    None puts them all in one (or in two, see decay_groups, with config.decay_norms_and_biases off). Given groups (as for torch.optim) must
    cover them exactly once; where nothing is trained, no group says that this is meant.

    Raises:
        ConfigError: a trainable parameter is missing or there twice, or one is not the model's or is frozen.
    """
    names = {id(p): name for name, p in model.named_parameters() if name in trained}
    if not names and groups is not None and not groups:
        return []
    if not names:
        raise ConfigError(
            f"all parameters of {type(model).__name__} are frozen: there is nothing to train; set requires_grad on some, or for inference give param_groups=[]"
        )
    if groups is None:
        if not config.decay_norms_and_biases:
            return decay_groups(model, config.weight_decay, trained)
        return [{"params": [p for name, p in model.named_parameters() if name in trained]}]
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


def step_spec(shard: Shard, seen: Sequence[bool], algorithms: Sequence[Algorithm | None], steps: Sequence[int], scale: float, max_abs: float) -> StepSpec:
    """One shard's step: neighbours with the same algorithm, hyperparameters and step count become one segment.

    A gap between parameters ends a segment: it stays zero, whatever the algorithm makes of zeros.

    Args:
        seen: for each parameter of the shard, whether it got a gradient.
        algorithms, steps: for each parameter; `steps` counts this one.
    """
    segments: list[list[Segment]] = [[] for _ in shard.spec.runs]
    for (r, p, _), ok, how, step in zip(shard.params, seen, algorithms, steps, strict=True):
        if not ok or how is None:
            continue
        end = p.offset + p.numel
        last = segments[r][-1] if segments[r] else None
        if last is not None and (last.algorithm, last.step, last.end) == (how, step, p.offset):
            segments[r][-1] = Segment(last.start, end, how, step)
        else:
            segments[r].append(Segment(p.offset, end, how, step))
    return StepSpec(scale, segments, max_abs)


def total_norm(sums: Iterable[float]) -> float:
    """The global norm from the shards' sums of squares, in an order that does not matter (math.fsum rounds once)."""
    sums = list(sums)
    return math.sqrt(math.fsum(sums)) if all(map(math.isfinite, sums)) else math.nan


def clip_scale(norm: float, max_norm: float | None) -> float:
    """What multiplies the grads: min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
