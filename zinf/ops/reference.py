"""The CPU kernels once more, in plain torch: slow, obvious, and the definition of correct.

Only operations whose result IEEE 754 fixes are used (add, subtract, multiply, divide, square root, conversions), one rounding
each, never fused: so every instruction set and every number of threads can give the same bits, and must. Where a result is NaN, that
it is NaN is all that is promised; torch's own kernels do not agree on its sign and payload.

Functions and arguments are those of zinf.ops, where shapes, dtypes and errors are documented; `pool` and `isa` are ignored here.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

PIECE = 2048  # elements in one partial sum of squares
LANES = 32  # interleaved sums inside a piece


class Scalars(NamedTuple):
    """What a step multiplies and divides by, computed in double; each is rounded to fp32 once, when it is used."""

    scale: float
    decay: float
    beta1: float
    rise1: float
    beta2: float
    rise2: float
    root: float
    eps: float
    rate: float


def scalars(*, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, grad_scale: float, decoupled: bool) -> Scalars:
    """The constants of step `step` (from 1); see `adam` for where each one goes. Raises ValueError where none are defined."""
    if step < 1:
        raise ValueError(f"step: expected at least 1, got {step}")
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise ValueError(f"beta1, beta2: expected at least 0 and less than 1, got {beta1} and {beta2}")
    return Scalars(
        scale=grad_scale,
        decay=1.0 - lr * weight_decay if decoupled else weight_decay,
        beta1=beta1,
        rise1=1.0 - beta1,
        beta2=beta2,
        rise2=1.0 - beta2,
        root=math.sqrt(1.0 - beta2**step),
        eps=eps,
        rate=lr / (1.0 - beta1**step),
    )


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
    decoupled: bool = True,
    pool: Any = None,
    isa: str | None = None,
) -> None:
    """One step of AdamW (decoupled) or Adam with L2, in place.

    Kingma and Ba 2015 (algorithm 1), Loshchilov and Hutter 2019 (algorithm 2), with torch.optim's placing of eps.
    """
    decoupled = decoupled or weight_decay == 0.0  # the same mathematics; p * 1 is exact, g + 0 * p is not if p is infinite
    values = scalars(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, step=step, grad_scale=grad_scale, decoupled=decoupled)
    c = {name: torch.tensor(value, dtype=torch.float32) for name, value in values._asdict().items()}
    *rest, m, v = state
    if weights.dtype == torch.bfloat16:
        p = torch.empty_like(m)
        join(weights, rest[0], p)
    else:
        p = rest[0] if rest else weights

    g = grads.float() * c["scale"]
    if decoupled:
        p = p * c["decay"]
    else:
        g = g + p * c["decay"]
    m.copy_(m * c["beta1"] + g * c["rise1"])
    v.copy_(v * c["beta2"] + (g * g) * c["rise2"])
    p = p - c["rate"] * (m / (_sqrt(v) / c["root"] + c["eps"]))

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
