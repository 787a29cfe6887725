"""The kernels of the other optimizers promise what Adam's does: the bits of the reference, everywhere; and they follow torch.optim.

Adam's own tests stand in test_ops.py; here it is what the average of the weights is tried with.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ops import BF16, FLOATS, FP32, ISAS, PIECE, bits, clones, numbers, same, shifted, training
from torch import Tensor

from zinf import ops
from zinf.ops import reference

ADAM = dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
LION = dict(lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.01)
# name: (function, its options, how many moments it keeps)
STEPS: dict[str, tuple[str, dict[str, Any], int]] = {
    "adamw": ("adam", ADAM, 2),
    "sgd": ("sgd", dict(lr=1e-2, weight_decay=0.01), 0),
    "momentum": ("sgd", dict(lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=0.01), 1),
    "nesterov": ("sgd", dict(lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01), 1),
    "lion": ("lion", LION, 1),
    "adagrad": ("adagrad", dict(lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1, eps=1e-10, weight_decay=0.01), 1),
}


def state_of(name: str, dtype: torch.dtype, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The planes that a step of `name` needs, of those that Adam's training has; Adagrad's are of squares."""
    *rest, m, v = state
    return (*rest, *((m, v), (), (m,), (v,))[{"adamw": 0, "sgd": 1, "adagrad": 3}.get(name, 2)])


@pytest.mark.parametrize(("name", "weights_dtype", "grads_dtype"), list(itertools.product(STEPS, FLOATS, FLOATS)))
@settings(max_examples=5, deadline=None)
@given(
    n=st.integers(0, 2100),
    offset=st.integers(0, 40),
    isa=st.sampled_from(ISAS),
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["normal", "extreme"]),
    average=st.booleans(),
    first=st.sampled_from([1, 1000]),
    scale=st.sampled_from([1.0, 0.37, 1e30]),
    most=st.sampled_from([math.inf, 0.1, 1e-40]),
)
def test_steps_have_the_bits_of_the_reference(name, weights_dtype, grads_dtype, n, offset, isa, seed, kind, average, first, scale, most):
    function, options, _ = STEPS[name]
    generator = torch.Generator().manual_seed(seed)
    weights, state = training(generator, n, weights_dtype, kind)
    state = (*state_of(name, weights_dtype, state), numbers(generator, n, kind))
    got_weights, got_state = clones(weights, state, offset)
    for step in range(first, first + 2):
        grads = numbers(generator, n, kind).to(grads_dtype)
        for ops_of, w, (*planes, ema), g in ((reference, weights, state, grads), (ops, got_weights, got_state, shifted(grads, (7 * offset) % 13))):
            how = dict(step=step, grad_scale=scale, max_abs=most, ema=(ema, 0.9) if average else None, isa=isa)
            getattr(ops_of, function)(w, tuple(planes), g, **options, **how)
    for got, want in zip((got_weights, *got_state), (weights, *state), strict=True):
        same(got, want)


@pytest.mark.parametrize("name", STEPS)
def test_steps_have_the_same_bits_for_any_threads_isa_and_cut(name):
    function, options, _ = STEPS[name]
    step = getattr(ops, function)
    n = 2 * PIECE + 4097
    generator = torch.Generator().manual_seed(5)
    weights, state = training(generator, n, BF16, "normal")
    state = (*state_of(name, BF16, state), torch.zeros(n))
    grads = torch.randn(n, generator=generator).to(BF16)

    def run(weights, state, grads, **how):
        *planes, ema = state
        step(weights, tuple(planes), grads, step=3, ema=(ema, 0.99), **options, **how)

    want = clones(weights, state)
    with ops.Pool(1) as alone, ops.Pool(3) as three:
        run(*want, grads, pool=alone, isa="baseline")
        for isa, pool in itertools.product(ISAS, (alone, three)):
            got = clones(weights, state)
            run(*got, grads, pool=pool, isa=isa)
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip((got[0], *got[1]), (want[0], *want[1]), strict=True)), (isa, pool.threads)
        got = clones(weights, state)
        for w, g, *planes in zip(*(x.split(99_999) for x in (got[0], grads, *got[1])), strict=True):
            run(w, planes, g, pool=three)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip((got[0], *got[1]), (want[0], *want[1]), strict=True))


TORCH = {
    "sgd": (torch.optim.SGD, dict(lr=1e-2, weight_decay=0.01)),
    "momentum": (torch.optim.SGD, dict(lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=0.01)),
    "nesterov": (torch.optim.SGD, dict(lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "adagrad": (torch.optim.Adagrad, dict(lr=1e-2, lr_decay=0.1, initial_accumulator_value=0.1, eps=1e-10, weight_decay=0.01)),
}


def torch_training(kind: Any, dtype: torch.dtype, start: Tensor, grads: list[Tensor], options: dict[str, Any]) -> Tensor:
    p = torch.nn.Parameter(start.to(dtype, copy=True))
    optimizer = kind([p], foreach=False, **options)
    for g in grads:
        p.grad = g.to(dtype)
        optimizer.step()
    return p.detach()


def our_training(name: str, start: Tensor, grads: list[Tensor], ema: Any = None) -> Tensor:
    function, options, moments = STEPS[name]
    p, state = start.clone(), tuple(torch.zeros_like(start) for _ in range(moments))
    for step, g in enumerate(grads, 1):
        getattr(ops, function)(p, state, g, step=step, ema=ema, **options)
    return p


@pytest.mark.parametrize("name", TORCH)
def test_steps_follow_torch_within_rounding(name):
    """50 steps, the first of them among them: as near to the exact numbers (torch in double) as torch in fp32 is. Not its bits: torch
    fuses multiply and add, and multiplies by the learning rate before it divides."""
    torch.manual_seed(0)
    start, grads = torch.randn(4096), [torch.randn(4096) for _ in range(50)]
    exact, theirs = (torch_training(TORCH[name][0], dtype, start, grads, TORCH[name][1]).double() for dtype in (torch.float64, FP32))
    ours = our_training(name, start, grads).double()
    error, their_error = (ours - exact).abs(), (theirs - exact).abs()
    assert their_error.max() > 0  # the comparison can fail
    assert error.mean() <= 1.5 * their_error.mean()
    assert error.max() <= 2.0 * their_error.max()


def test_lion_follows_its_paper():
    """Algorithm 2 of Chen et al. in double, written out; where the sign of a sum is that of fp32's rounding, none here are."""
    torch.manual_seed(0)
    start, grads = torch.randn(4096), [torch.randn(4096) for _ in range(50)]
    p, m = start.double(), torch.zeros(4096, dtype=torch.float64)
    for g in map(Tensor.double, grads):
        c = LION["beta1"] * m + (1 - LION["beta1"]) * g
        p = p - LION["lr"] * (c.sign() + LION["weight_decay"] * p)
        m = LION["beta2"] * m + (1 - LION["beta2"]) * g
    assert (our_training("lion", start, grads) - p).abs().max() < 50 * 2**-22  # two roundings a step of numbers below 4


def test_lion_leaves_a_zero_alone_and_keeps_nan():
    p, m = torch.tensor([1.0, 1.0]), torch.zeros(2)
    ops.lion(p, (m,), torch.tensor([0.0, float("nan")]), **{**LION, "weight_decay": 0.0}, step=1)
    assert p[0] == 1.0 and p[1].isnan()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_average_is_that_of_swa_utils(name):
    """torch.optim.swa_utils.AveragedModel's exponential average of the same weights, within fp32 rounding: it starts at the weights, too."""
    torch.manual_seed(0)
    start, grads = torch.randn(4096), [torch.randn(4096) for _ in range(20)]
    plane = torch.full((4096,), float("nan"))  # what was there does not count
    averaged = start.double()
    p = start
    function, options, moments = STEPS[name]
    state = tuple(torch.zeros(4096) for _ in range(moments))
    for step, g in enumerate(grads, 1):
        getattr(ops, function)(p, state, g, step=step, ema=(plane, 0.9), **options)
        averaged = torch.lerp(averaged, p.double(), 0.1)
    assert (plane.double() - averaged).abs().max() < 20 * 2**-22  # two roundings a step of numbers below 4


@pytest.mark.parametrize("name", STEPS)
def test_clipping_by_value_is_clip_grad_value(name):
    """Of the scaled gradient: the same bits as a step with gradients that torch.nn.utils.clip_grad_value_ has clipped. NaN stays NaN."""
    function, options, _ = STEPS[name]
    generator = torch.Generator().manual_seed(6)
    weights, state = training(generator, 3000, FP32, "normal")
    state = state_of(name, FP32, state)
    grads = torch.randn(3000, generator=generator)
    grads[7], grads[8], grads[9], grads[10] = math.nan, math.inf, -math.inf, -0.0
    p = torch.nn.Parameter(weights.clone())
    p.grad = grads / 4
    torch.nn.utils.clip_grad_value_([p], 0.3, foreach=False)
    ours, theirs = clones(weights, state), clones(weights, state)
    getattr(ops, function)(*ours, grads, step=2, grad_scale=0.25, max_abs=0.3, **options)
    getattr(ops, function)(*theirs, p.grad, step=2, **options)
    for got, want in zip((ours[0], *ours[1]), (theirs[0], *theirs[1]), strict=True):
        same(got, want)
    with pytest.raises(ValueError, match="max_abs: expected more than 0, got 0"):
        getattr(ops, function)(*ours, grads, step=2, max_abs=0.0, **options)


def test_wrong_arguments_are_named():
    lo, m, g, e = torch.zeros(8, dtype=torch.int16), torch.zeros(8), torch.zeros(8), torch.zeros(8)
    w = torch.zeros(8, dtype=BF16)
    sgd = dict(lr=1e-2, weight_decay=0.0, step=1)
    wrong: list[tuple[type[Exception], str, Any]] = [
        (ValueError, r"state: expected \(lo\)", lambda: ops.sgd(w, (lo, m), g, **sgd)),
        (ValueError, r"state: expected \(lo, m\)", lambda: ops.sgd(w, (lo,), g, momentum=0.9, **sgd)),
        (ValueError, r"state: expected \(\) beside torch.float32", lambda: ops.sgd(m, (e,), g, **sgd)),
        (ValueError, r"state: expected \(s\)", lambda: ops.adagrad(m, (), g, eps=1e-10, **sgd)),
        (ValueError, "momentum: expected at least 0, and with nesterov more", lambda: ops.sgd(m, (), g, nesterov=True, **sgd)),
        (ValueError, "ema: expected 8 elements", lambda: ops.sgd(m, (), g, ema=(e[1:], 0.9), **sgd)),
        (ValueError, "ema: expected a decay of at least 0 and less than 1", lambda: ops.sgd(m, (), g, ema=(e, 1.0), **sgd)),
        (ValueError, "weights: shares memory with ema", lambda: ops.sgd(m, (), g, ema=(m, 0.9), **sgd)),
        (ValueError, "state: s: shares memory with ema", lambda: ops.adagrad(m, (e,), g, eps=1e-10, ema=(e, 0.9), **sgd)),
        (ValueError, "step: expected at least 1", lambda: ops.lion(m, (e,), g, **{**LION, "step": 0})),
        (ValueError, "beta1, beta2", lambda: ops.lion(m, (e,), g, **{**LION, "beta2": 1.0, "step": 1})),
    ]
    for kind, message, call in wrong:
        with pytest.raises(kind, match=message):
            call()
    assert not any(x.any() for x in (lo, m, g, e, w))
