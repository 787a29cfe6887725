"""What a step does to a piece of a run, by optimizer: one small frozen class for each, filled from a parameter group as it is at that step.

    name      class      keeps (fp32 planes of state, beside what the dtype of the weights needs for the fp32 master)
    adamw     AdamW      m, v
    adam      Adam       m, v
    sgd       Sgd        m where some group has momentum, else nothing
    lion      Lion       m
    adagrad   Adagrad    s

With `ema_decay` every one of them keeps `ema`, an average of the weights, beside that. The arithmetic is zinf.ops'; the options and their defaults stand
in config.OPTIMIZERS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol

from torch import Tensor

from zinf import ops
from zinf.config import Config, check_options

Planes = Mapping[str, Tensor]  # the planes of state of a piece, by name, in their order: the rest of the master first


class Algorithm(Protocol):
    """The hyperparameters of one group, as of one step, and what to do with them. Equal ones step alike."""

    def keeps(self) -> tuple[str, ...]:
        """The planes of state that a step needs."""

    def step(self, weights: Tensor, planes: Planes, grads: Tensor, **how: Any) -> None:
        """Step flat weights and planes in place. `how`: step (from 1), grad_scale, max_abs, ema and pool, as the functions of zinf.ops take them."""


@dataclasses.dataclass(frozen=True)
class Adam:
    """Kingma and Ba 2015, weight decay as L2 in the gradient."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    decoupled: ClassVar[bool] = False

    def keeps(self) -> tuple[str, ...]:
        return ("m", "v")

    def step(self, weights: Tensor, planes: Planes, grads: Tensor, **how: Any) -> None:
        hyper: dict[str, Any] = dict(
            lr=self.lr, beta1=self.betas[0], beta2=self.betas[1], eps=self.eps, weight_decay=self.weight_decay, decoupled=self.decoupled
        )
        ops.adam(weights, _of(planes, self), grads, **hyper, **how)


class AdamW(Adam):
    """Loshchilov and Hutter 2019, weight decay decoupled from the gradient."""

    decoupled = True


@dataclasses.dataclass(frozen=True)
class Sgd:
    """As torch.optim.SGD. A group without momentum leaves the plane that another group needs alone."""

    lr: float
    weight_decay: float
    momentum: float
    dampening: float
    nesterov: bool

    def keeps(self) -> tuple[str, ...]:
        return ("m",) if self.momentum else ()

    def step(self, weights: Tensor, planes: Planes, grads: Tensor, **how: Any) -> None:
        hyper: dict[str, Any] = dict(lr=self.lr, momentum=self.momentum, dampening=self.dampening, nesterov=self.nesterov, weight_decay=self.weight_decay)
        ops.sgd(weights, _of(planes, self), grads, **hyper, **how)


@dataclasses.dataclass(frozen=True)
class Lion:
    """Chen et al. 2023, weight decay decoupled."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]

    def keeps(self) -> tuple[str, ...]:
        return ("m",)

    def step(self, weights: Tensor, planes: Planes, grads: Tensor, **how: Any) -> None:
        ops.lion(weights, _of(planes, self), grads, lr=self.lr, beta1=self.betas[0], beta2=self.betas[1], weight_decay=self.weight_decay, **how)


@dataclasses.dataclass(frozen=True)
class Adagrad:
    """Duchi et al. 2011, as torch.optim.Adagrad."""

    lr: float
    weight_decay: float
    lr_decay: float
    initial_accumulator_value: float
    eps: float

    def keeps(self) -> tuple[str, ...]:
        return ("s",)

    def step(self, weights: Tensor, planes: Planes, grads: Tensor, **how: Any) -> None:
        ops.adagrad(weights, _of(planes, self), grads, **dataclasses.asdict(self), **how)


ALGORITHMS: dict[str, type] = {"adamw": AdamW, "adam": Adam, "sgd": Sgd, "lion": Lion, "adagrad": Adagrad}


def _of(planes: Planes, algorithm: Algorithm) -> tuple[Tensor, ...]:
    """What the algorithm's kernel takes as state."""
    return tuple(plane for name, plane in planes.items() if name in ("lo", "master", *algorithm.keeps()))


def algorithm(name: str, group: Mapping[str, Any]) -> Algorithm:
    """The algorithm of optimizer `name` with the options of a parameter group, which must be there in full.

    Raises:
        ConfigError: an option that the optimizer does not have, or a value that the option cannot have.
    """
    check_options(name, group)
    kind = ALGORITHMS[name]
    return kind(**{f.name: _plain(group[f.name]) for f in dataclasses.fields(kind)})


def _plain(value: Any) -> Any:
    """Numbers as floats (a scheduler may have put a tensor there), so that equal hyperparameters compare equal."""
    if isinstance(value, bool):
        return value
    return tuple(map(float, value)) if isinstance(value, (tuple, list)) else float(value)


def moments(config: Config, groups: Iterable[Mapping[str, Any]] = ({},)) -> tuple[str, ...]:
    """The planes of state that the layout must have room for, beside the master's. `groups` may leave options to the config."""
    keeps = [algorithm(config.optimizer, config.optimizer_options() | dict(group)).keeps() for group in groups]
    return max(keeps, key=len) + (("ema",) if config.ema_decay is not None else ())
