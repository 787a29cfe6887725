"""The CPU kernels once more, in plain torch: slow, obvious, and the definition of correct.

Only operations whose result IEEE 754 fixes are used (add, subtract, multiply, divide, square root, conversions), one rounding
each, never fused: so every instruction set and every number of threads can give the same bits, and must. Where a result is NaN, that
it is NaN is all that is promised; torch's own kernels do not agree on its sign and payload.

Functions and arguments are those of zinf.ops, where shapes, dtypes and errors are documented; `pool` and `isa` are ignored here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

PIECE = 2048  # elements in one partial sum of squares
LANES = 32  # interleaved sums inside a piece


class Adam(NamedTuple):
    """What a step of Adam multiplies and divides by, computed in double; each is rounded to fp32 once, when it is used. So for the others."""

    scale: float
    decay: float
    beta1: float
    rise1: float
    beta2: float
    rise2: float
    root: float
    eps: float
    rate: float


class Sgd(NamedTuple):
    """Of SGD without momentum."""

    scale: float
    decay: float
    rate: float


class Momentum(NamedTuple):
    """Of SGD with momentum."""

    scale: float
    decay: float
    momentum: float
    rise: float
    rate: float


class Lion(NamedTuple):
    """Of Lion."""

    scale: float
    decay: float
    beta1: float
    rise1: float
    beta2: float
    rise2: float
    rate: float


class Adagrad(NamedTuple):
    """Of Adagrad."""

    scale: float
    decay: float
    start: float
    eps: float
    rate: float


Average = tuple[Tensor, float] | None  # the plane of an average of the weights, and its decay


def adam_scalars(*, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, grad_scale: float, decoupled: bool) -> Adam:
    """The constants of step `step` (from 1); see `adam` for where each one goes. Raises ValueError where none are defined; so do the others."""
    check_step(step)
    check_betas(beta1, beta2)
    decay = 1.0 - lr * weight_decay if decoupled else weight_decay
    return Adam(grad_scale, decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2, math.sqrt(1.0 - beta2**step), eps, lr / (1.0 - beta1**step))


def sgd_scalars(*, lr: float, momentum: float, dampening: float, nesterov: bool, weight_decay: float, step: int, grad_scale: float) -> Sgd | Momentum:
    """The constants of `sgd`. At a parameter's first step its momentum becomes the whole gradient, as in torch."""
    check_step(step)
    if momentum < 0.0 or (nesterov and (momentum == 0.0 or dampening != 0.0)):
        raise ValueError(f"momentum: expected at least 0, and with nesterov more than 0 and no dampening, got {momentum} and {dampening}")
    if momentum == 0.0:
        return Sgd(grad_scale, weight_decay, lr)
    return Momentum(grad_scale, weight_decay, momentum, 1.0 if step == 1 else 1.0 - dampening, lr)


def lion_scalars(*, lr: float, beta1: float, beta2: float, weight_decay: float, step: int, grad_scale: float) -> Lion:
    """The constants of `lion`."""
    check_step(step)
    check_betas(beta1, beta2)
    return Lion(grad_scale, 1.0 - lr * weight_decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2, lr)


def adagrad_scalars(*, lr: float, lr_decay: float, initial_accumulator_value: float, eps: float, weight_decay: float, step: int, grad_scale: float) -> Adagrad:
    """The constants of `adagrad`. The accumulator's initial value comes in at a parameter's first step, so that state may begin as zeros."""
    check_step(step)
    return Adagrad(grad_scale, weight_decay, initial_accumulator_value if step == 1 else 0.0, eps, lr / (1.0 + (step - 1) * lr_decay))


def check_step(step: int) -> None:
    """Raise ValueError unless `step` counts from 1."""
    if step < 1:
        raise ValueError(f"step: expected at least 1, got {step}")


def check_betas(beta1: float, beta2: float) -> None:
    """Raise ValueError unless both are in [0, 1)."""
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise ValueError(f"beta1, beta2: expected at least 0 and less than 1, got {beta1} and {beta2}")


def adam(
    weights: Tensor,
    state: tuple[Tensor, ...],
    grads: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    max_abs: float = math.inf,
    decoupled: bool = True,
    ema: Average = None,
    pool: Any = None,
    isa: str | None = None,
) -> None:
    """One step of AdamW (decoupled) or Adam with L2, in place.

    Kingma and Ba 2015 (algorithm 1), Loshchilov and Hutter 2019 (algorithm 2), with torch.optim's placing of eps.
    """
    decoupled = decoupled or weight_decay == 0.0  # the same mathematics; p * 1 is exact, g + 0 * p is not if p is infinite
    c = _rounded(adam_scalars(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, step=step, grad_scale=grad_scale, decoupled=decoupled))
    *rest, m, v = state

    def rule(p: Tensor, g: Tensor) -> Tensor:
        if decoupled:
            p = p * c["decay"]
        else:
            g = g + p * c["decay"]
        m.copy_(m * c["beta1"] + g * c["rise1"])
        v.copy_(v * c["beta2"] + (g * g) * c["rise2"])
        return p - c["rate"] * (m / (_sqrt(v) / c["root"] + c["eps"]))

    _apply(rule, weights, rest, _gradient(grads, c, max_abs), ema, step)


def sgd(
    weights: Tensor,
    state: tuple[Tensor, ...],
    grads: Tensor,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    max_abs: float = math.inf,
    ema: Average = None,
    pool: Any = None,
    isa: str | None = None,
) -> None:
    """One step of torch.optim.SGD, in place. With momentum `state` ends in m, without it is only the rest of the master."""
    scalars = sgd_scalars(lr=lr, momentum=momentum, dampening=dampening, nesterov=nesterov, weight_decay=weight_decay, step=step, grad_scale=grad_scale)
    c = _rounded(scalars)

    def plain(p: Tensor, g: Tensor) -> Tensor:
        return p - c["rate"] * (g + p * c["decay"])

    def heavy(p: Tensor, g: Tensor) -> Tensor:
        g = g + p * c["decay"]
        m.copy_(m * c["momentum"] + g * c["rise"])
        return p - c["rate"] * (g + m * c["momentum"] if nesterov else m)

    if isinstance(scalars, Sgd):
        _apply(plain, weights, list(state), _gradient(grads, c, max_abs), ema, step)
    else:
        *rest, m = state
        _apply(heavy, weights, rest, _gradient(grads, c, max_abs), ema, step)


def lion(
    weights: Tensor,
    state: tuple[Tensor, ...],
    grads: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    max_abs: float = math.inf,
    ema: Average = None,
    pool: Any = None,
    isa: str | None = None,
) -> None:
    """One step of Lion (Chen et al. 2023, algorithm 2) with decoupled weight decay, in place."""
    c = _rounded(lion_scalars(lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, step=step, grad_scale=grad_scale))
    *rest, m = state

    def rule(p: Tensor, g: Tensor) -> Tensor:
        p = p * c["decay"]
        blend = m * c["beta1"] + g * c["rise1"]
        sign = torch.where(blend.isnan(), blend, torch.sign(blend))  # torch's sign of NaN is 0
        m.copy_(m * c["beta2"] + g * c["rise2"])
        return p - c["rate"] * sign

    _apply(rule, weights, rest, _gradient(grads, c, max_abs), ema, step)


def adagrad(
    weights: Tensor,
    state: tuple[Tensor, ...],
    grads: Tensor,
    *,
    lr: float,
    lr_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    max_abs: float = math.inf,
    ema: Average = None,
    pool: Any = None,
    isa: str | None = None,
) -> None:
    """One step of Adagrad (Duchi et al. 2011, as torch.optim.Adagrad has it), in place."""
    c = _rounded(
        adagrad_scalars(
            lr=lr, lr_decay=lr_decay, initial_accumulator_value=initial_accumulator_value, eps=eps, weight_decay=weight_decay, step=step, grad_scale=grad_scale
        )
    )
    *rest, s = state

    def rule(p: Tensor, g: Tensor) -> Tensor:
        g = g + p * c["decay"]
        s.copy_((s + c["start"]) + g * g)
        return p - c["rate"] * (g / (_sqrt(s) + c["eps"]))

    _apply(rule, weights, rest, _gradient(grads, c, max_abs), ema, step)


def _rounded(scalars: Any) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float32) for name, value in scalars._asdict().items()}


def _gradient(grads: Tensor, c: dict[str, Tensor], max_abs: float) -> Tensor:
    """What a rule takes as the gradient: scaled, then each element clipped to [-max_abs, max_abs]; NaN stays NaN."""
    most = torch.tensor(max_abs, dtype=torch.float32)
    return (grads.float() * c["scale"]).clamp(-most, most)


def _apply(rule: Callable[[Tensor, Tensor], Tensor], weights: Tensor, rest: list[Tensor], grads: Tensor, ema: Average, step: int) -> None:
    """Step the fp32 master of `weights` and `rest` by `rule`; then the average, which begins at the weights before the first step."""
    if weights.dtype == torch.bfloat16:
        old = torch.empty_like(weights, dtype=torch.float32)
        join(weights, rest[0], old)
    else:
        old = rest[0] if rest else weights
    p = rule(old, grads)
    if ema is not None:
        average, decay = ema
        keep, take = (torch.tensor(x, dtype=torch.float32) for x in (decay, 1.0 - decay))
        average.copy_((old if step == 1 else average) * keep + p * take)
    if weights.dtype == torch.bfloat16:
        split(p, weights, rest[0])
        return
    for target in (*rest, weights):  # fp16: the master, and the weights rounded from it
        target.copy_(p)


def _sqrt(x: Tensor) -> Tensor:
    """The correctly rounded square root of fp32; torch's own, from a vector library, is now and then one ulp off.

    In double, an error of less than 4 ulp cannot reach the other side of a midpoint of two fp32: the square of such a midpoint, 25 bits and odd, and
    an fp32 of 24 bits differ by at least 1 when scaled to integers below 2^50.
    """
    return x.double().sqrt().float()


def sum_squares(grads: Tensor, initial: float = 0.0, *, pool: Any = None, isa: str | None = None) -> float:
    """`initial` plus the sum of squares, in double, in the fixed order of [Note: the order of the sum]."""
    x = grads.flatten().double()
    x = torch.nn.functional.pad(x, (0, -x.numel() % PIECE)).view(-1, PIECE // LANES, LANES)  # adding 0 * 0 changes nothing
    lanes = torch.zeros(x.shape[0], LANES, dtype=torch.float64)
    for row in x.unbind(1):
        lanes = lanes + row * row
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    for partial in lanes[:, 0].tolist():
        initial += partial
    return initial


def split(src: Tensor, hi: Tensor, lo: Tensor, *, pool: Any = None, isa: str | None = None) -> None:
    """hi = (bits + 0x8000) >> 16, lo = bits - (hi << 16), modulo 2^32; NaN becomes hi = 0x7FC0, lo = 0."""
    bits = torch.where(src.isnan(), 0x7FC00000, src.view(torch.int32)).long() & 0xFFFFFFFF
    high = ((bits + 0x8000) & 0xFFFFFFFF) >> 16
    hi.view(torch.int16).copy_(_wrapped(high, 16))
    lo.copy_(_wrapped(bits - (high << 16), 16))


def join(hi: Tensor, lo: Tensor, dst: Tensor, *, pool: Any = None, isa: str | None = None) -> None:
    """bits = (hi << 16) + lo, modulo 2^32."""
    bits = ((hi.view(torch.int16).long() & 0xFFFF) << 16) + lo.long()
    dst.view(torch.int32).copy_(_wrapped(bits, 32))


def _wrapped(x: Tensor, bits: int) -> Tensor:
    """int64 modulo 2^bits, in the range of a signed integer of that many bits."""
    half = 1 << (bits - 1)
    return ((x + half) & ((1 << bits) - 1)) - half


def cast(src: Tensor, dst: Tensor, *, pool: Any = None, isa: str | None = None) -> None:
    """dst = src rounded to nearest even; NaN stays NaN."""
    dst.copy_(src)


def accumulate(dst: Tensor, src: Tensor, *, scale: float = 1.0, pool: Any = None, isa: str | None = None) -> None:
    """dst = round(dst + src * scale), computed in fp32, rounded once to dst's dtype."""
    dst.copy_(dst.float() + src.float() * torch.tensor(scale, dtype=torch.float32))
