"""What optimizer a script has asked for, in zinf's words: options of zinf.Config, and parameter groups.

The steps are the engine's, on its records. An optimizer that the script has built says what they are to be. Its groups become the engine's, the
same dicts: a schedule that was built on it moves the engine's learning rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zinf.config import OPTIMIZERS
from zinf.errors import ConfigError

# Classes by name, as of torch.optim, DeepSpeed, apex and transformers; subclasses of torch's are what they derive from.
_NAMES = {
    "AdamW": "adamw", "Adam": "adam", "SGD": "sgd", "Adagrad": "adagrad", "Lion": "lion", "DeepSpeedCPUAdam": "adam", "FusedAdam": "adam",
    "DeepSpeedCPULion": "lion", "FusedLion": "lion", "DeepSpeedCPUAdagrad": "adagrad",
}  # fmt: skip
_OFF = ("amsgrad", "maximize")  # options of a group that zinf does not have


class Described(torch.optim.Optimizer):
    """An optimizer that only says what is wanted: give it to `initialize`, which makes the engine step so."""

    def step(self, closure: Any = None) -> Any:
        raise ConfigError(f"{type(self).__name__} describes the steps of an engine: pass it to deepspeed.initialize(optimizer=...), and call engine.step()")


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer of zinf that does what this one does. Raises ConfigError if none does."""
    for cls in type(optimizer).__mro__:
        name = _NAMES.get(cls.__name__)
        if name == "adam":
            decoupled = [_decoupled(optimizer, group) for group in optimizer.param_groups]
            if len(set(decoupled)) > 1:
                raise ConfigError(f"{cls.__name__} has groups with decoupled weight decay and others without it: use one of the two")
            return "adamw" if decoupled[0] else "adam"
        if name is not None:
            return name
    raise ConfigError(
        f"zinf does not step as {type(optimizer).__name__} does: it has {', '.join(OPTIMIZERS)}; name one of them in the config, or pass it to initialize"
    )


def _decoupled(optimizer: Any, group: Mapping[str, Any]) -> bool:
    own = getattr(optimizer, "adam_w_mode", getattr(optimizer, "adamw_mode", False))
    return bool(own or group.get("decoupled_weight_decay", False))


def take_over(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(options of zinf.Config, parameter groups) of an optimizer that the script has built.

    Raises:
        ConfigError: one that zinf has not, options that zinf has not, or one that has made steps.
    """
    kind = kind_of(optimizer)
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):  # Adagrad has one from the start
        raise ConfigError(f"this {type(optimizer).__name__} has made steps, and its moments would be lost: build a new one before initialize")
    groups = [group for group in optimizer.param_groups if group["params"]]
    for group in groups:
        wrong = [name for name in _OFF if group.get(name)]
        if wrong:
            raise ConfigError(f"{wrong[0]} of {type(optimizer).__name__} is on, and zinf's {kind} has no such thing: leave it out")
    if not groups:
        raise ConfigError(f"this {type(optimizer).__name__} has no parameters")
    first = groups[0]
    options = {name: first[name] for name in ("lr", "weight_decay", *OPTIMIZERS[kind]) if name in first}
    return {"optimizer": kind, **options, "lr": float(options["lr"])}, groups


def groups_of(model: nn.Module, wanted: Iterable[Any] | None) -> list[dict[str, Any]] | None:
    """`model_parameters` of initialize as parameter groups over those that want a gradient; None: all of the model's."""
    given = None if wanted is None else list(wanted)
    if not given:
        return None
    if not isinstance(given[0], dict):
        if isinstance(given[0], tuple):  # model.named_parameters()
            given = [p for _, p in given]
        given = [{"params": given}]
    return trained(model, given)


def trained(model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups without their frozen parameters, in place; those of the model that no group has are frozen, as DeepSpeed never steps them."""
    for group in groups:
        params = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        group["params"] = [p for p in params if p.requires_grad]
    groups = [group for group in groups if group["params"]]
    there = {id(p) for group in groups for p in group["params"]}
    for p in model.parameters():
        if p.requires_grad and id(p) not in there:
            p.requires_grad_(False)
    return groups
