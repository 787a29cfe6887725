"""The CPU kernels promise: the bits of zinf/ops/reference.py, on every instruction set, for any number of threads, any cut, any alignment."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zinf import ops
from zinf.ops import reference

ISAS = ops.available_isas()
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FLOATS = (BF16, FP16, FP32)
HYPER: dict[str, Any] = dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=3)
PIECE = 65536  # elements a thread takes at a time
# fp32 bits: zeros, subnormals and their edges, one, the ties of bf16 and of fp16, the edges of fp16, FLT_MAX and what rounds to infinity, infinities, NaNs.
SPECIAL = torch.tensor(
    [
        int(word, 16)
        for word in (
            "0 1 7FFFFF 800000 800001 3F800000 3F808000 3F818000 3F807FFF 3F808001 3F801000 3F803000 3F800FFF 3F801001 33000000 33000001 33800000 387FE000 "
            "387FF000 38800000 477FE000 477FEFFF 477FF000 47800000 7F7F0000 7F7F7FFF 7F7F8000 7F7FFFFF 7F800000 7F800001 7FC00000 7FFF7FFF 7FFF8000 7FFFFFFF"
        ).split()
    ]
)

pools: dict[int, ops.Pool] = {}


@pytest.fixture(scope="module", autouse=True)
def _pools():
    pools.update({threads: ops.Pool(threads) for threads in (1, 2, 3, 4)})
    yield
    for pool in pools.values():
        pool.close()
    pools.clear()


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.itemsize])


def same(got: Tensor, want: Tensor) -> None:
    """Equal bits, except that a NaN may be any NaN."""
    assert got.dtype == want.dtype
    a, b = bits(got), bits(want)
    if got.is_floating_point():
        a, b = a.masked_fill(got.isnan(), 0x7FC0), b.masked_fill(want.isnan(), 0x7FC0)
    if not torch.equal(a, b):
        at = int((a != b).nonzero()[0])
        pytest.fail(f"element {at} of {len(a)}: {got[at]!r} ({int(bits(got)[at]):#x}) is not {want[at]!r} ({int(bits(want)[at]):#x})")


def shifted(x: Tensor, offset: int) -> Tensor:
    """The same elements, starting `offset` elements after an allocation begins."""
    return torch.cat([torch.zeros(offset, dtype=x.dtype), x])[offset:]


def numbers(generator: torch.Generator, n: int, kind: str) -> Tensor:
    """fp32: "normal" values, or "extreme" ones: half of them special, half any bits at all."""
    if kind == "normal":
        return torch.randn(n, generator=generator)
    special = SPECIAL[torch.randint(len(SPECIAL), (n,), generator=generator)] | (torch.randint(2, (n,), generator=generator) << 31)
    anything = torch.randint(1 << 32, (n,), generator=generator)
    chosen = torch.where(torch.rand(n, generator=generator) < 0.5, special, anything)
    return (chosen - ((chosen >> 31) << 32)).to(torch.int32).view(FP32)


def training(generator: torch.Generator, n: int, dtype: torch.dtype, kind: str) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Weights and state in the middle of a training."""
    p, m, v = (numbers(generator, n, kind) for _ in range(3))
    if kind == "normal":
        m, v = 0.1 * m, 0.01 * v * v
    if dtype == BF16:
        hi, lo = torch.empty(n, dtype=BF16), torch.empty(n, dtype=torch.int16)
        reference.split(p, hi, lo)
        return hi, (lo, m, v)
    return p.to(dtype), ((p, m, v) if dtype == FP16 else (m, v))


def clones(weights: Tensor, state: tuple[Tensor, ...], offset: int = 0) -> tuple[Tensor, tuple[Tensor, ...]]:
    return shifted(weights, offset), tuple(shifted(x, offset) for x in state)


cases = given(
    n=st.integers(0, 4099),
    offset=st.integers(0, 40),
    isa=st.sampled_from(ISAS),
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["normal", "extreme"]),
    threads=st.integers(1, 4),
)


@pytest.mark.parametrize(("weights_dtype", "grads_dtype", "decoupled"), list(itertools.product(FLOATS, FLOATS, (True, False))))
@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(0, 4099),
    offset=st.integers(0, 40),
    isa=st.sampled_from(ISAS),
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["normal", "extreme"]),
    hyper=st.fixed_dictionaries(
        {
            "lr": st.floats(0, 10),
            "beta1": st.floats(0, 0.9999),
            "beta2": st.floats(0, 0.99999),
            "eps": st.sampled_from([0.0, 1e-15, 1e-8, 1.0]),
            "weight_decay": st.sampled_from([0.0, 0.01, 3.0]),
            "step": st.integers(1, 10**6),
            "grad_scale": st.sampled_from([1.0, 0.37, 2.0**-16, 1e30]),
        }
    ),
)
def test_adam_has_the_bits_of_the_reference(weights_dtype, grads_dtype, decoupled, n, offset, isa, seed, kind, hyper):
    generator = torch.Generator().manual_seed(seed)
    weights, state = training(generator, n, weights_dtype, kind)
    got_weights, got_state = clones(weights, state, offset)
    for step in range(3):
        grads = numbers(generator, n, kind).to(grads_dtype)
        now = hyper | {"step": hyper["step"] + step}
        reference.adam(weights, state, grads, decoupled=decoupled, **now)
        ops.adam(got_weights, got_state, shifted(grads, (7 * offset) % 13), decoupled=decoupled, isa=isa, **now)
    for got, want in zip((got_weights, *got_state), (weights, *state), strict=True):
        same(got, want)
    if weights_dtype == BF16:  # of the split master NaN has defined bits too
        assert torch.equal(bits(got_weights), bits(weights))
        assert torch.equal(got_state[0], state[0])


@pytest.mark.parametrize("dtype", FLOATS)
def test_adam_has_the_same_bits_for_any_threads_isa_and_cut(dtype):
    n = 4 * PIECE + 4097
    generator = torch.Generator().manual_seed(5)
    weights, state = training(generator, n, dtype, "normal")
    grads = torch.randn(n, generator=generator).to(dtype)
    want = clones(weights, state)
    ops.adam(*want, grads, **HYPER, pool=pools[1], isa="baseline")
    for isa, threads in itertools.product(ISAS, pools):
        got = clones(weights, state)
        ops.adam(*got, grads, **HYPER, pool=pools[threads], isa=isa)
        for a, b in zip((got[0], *got[1]), (want[0], *want[1]), strict=True):
            assert torch.equal(bits(a), bits(b)), (isa, threads)
    for size in (1000, 2048, 65536, 99_999):
        got = clones(weights, state)
        for parts in zip(*(x.split(size) for x in (got[0], grads, *got[1])), strict=True):
            ops.adam(parts[0], parts[2:], parts[1], **HYPER, pool=pools[2])
        for a, b in zip((got[0], *got[1]), (want[0], *want[1]), strict=True):
            assert torch.equal(bits(a), bits(b)), size


def torch_training(optimizer: type[torch.optim.Optimizer], dtype: torch.dtype, weights: Tensor, steps: list[Tensor], **options: Any) -> Tensor:
    parameter = torch.nn.Parameter(weights.to(dtype, copy=True))
    stepper = optimizer([parameter], foreach=False, **options)
    for grads in steps:
        parameter.grad = grads.to(dtype)
        stepper.step()
    return parameter.detach().double()


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_follows_torch_within_rounding(decoupled):
    """100 steps: as near to the exact numbers (torch in double) as torch in fp32 is."""
    n, steps = 4096, 100
    torch.manual_seed(0)
    start = torch.randn(n)
    grads = [torch.randn(n) * 10 ** float(torch.randint(-3, 2, ())) for _ in range(steps)]
    optimizer = torch.optim.AdamW if decoupled else torch.optim.Adam
    options = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    exact = torch_training(optimizer, torch.float64, start, grads, **options)
    theirs = torch_training(optimizer, FP32, start, grads, **options)
    ours, m, v = start.clone(), torch.zeros(n), torch.zeros(n)
    for step, g in enumerate(grads, 1):
        ops.adam(ours, (m, v), g, lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=step, decoupled=decoupled)
    error, their_error = (ours.double() - exact).abs(), (theirs - exact).abs()
    assert their_error.max() > 0  # the comparison can fail
    assert error.mean() <= 1.2 * their_error.mean()
    assert error.max() <= 1.5 * their_error.max()
    assert (ours - theirs).abs().max() <= 1e-6  # a few last bits of numbers of size 1


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_adam_of_16_bits_follows_the_fp32_master(dtype):
    """What the split and the fp16 master hold is what fp32 weights would be, bit for bit."""
    n = 3000
    generator = torch.Generator().manual_seed(1)
    master, m, v = torch.randn(n, generator=generator), torch.zeros(n), torch.zeros(n)
    weights = torch.empty(n, dtype=dtype)
    rest = torch.empty(n, dtype=torch.int16) if dtype == BF16 else master.clone()
    if dtype == BF16:
        ops.split(master, weights, rest)
    state = (rest, m.clone(), v.clone())
    for step in range(1, 11):
        grads = torch.randn(n, generator=generator).to(dtype)
        ops.adam(weights, state, grads, **(HYPER | {"step": step}))
        ops.adam(master, (m, v), grads, **(HYPER | {"step": step}))
    if dtype == BF16:
        joined = torch.empty(n)
        ops.join(weights, state[0], joined)
        assert torch.equal(joined, master)
        assert ((weights.float() - master).abs() <= 2**-9 * 2 ** master.abs().log2().ceil()).all()
    else:
        assert torch.equal(state[0], master)
        assert torch.equal(weights, master.half())
    assert torch.equal(state[1], m)
    assert torch.equal(state[2], v)


def test_a_weight_decay_of_zero_never_touches_infinite_weights():
    weights, m, v = torch.tensor([float("inf")]), torch.zeros(1), torch.zeros(1)
    ops.adam(weights, (m, v), torch.ones(1), **(HYPER | {"weight_decay": 0.0}), decoupled=False)
    assert m.isfinite().all()
    assert weights.isinf().all()


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=40, deadline=None)
@cases
def test_sum_squares_has_the_bits_of_the_reference(dtype, n, offset, isa, seed, kind, threads):
    generator = torch.Generator().manual_seed(seed)
    x = shifted(numbers(generator, n, kind).to(dtype), offset)
    finite = torch.where(x.isfinite(), x, 1.5)
    initial = float(torch.rand((), generator=generator, dtype=torch.float64))
    got = ops.sum_squares(finite, initial, isa=isa, pool=pools[threads])
    assert got == reference.sum_squares(finite, initial)
    assert got < float("inf")
    assert (ops.sum_squares(x, initial, isa=isa) < float("inf")) == bool(x.isfinite().all())


@pytest.mark.parametrize("dtype", FLOATS)
def test_sum_squares_is_the_same_for_any_threads_isa_and_cut(dtype):
    x = (torch.randn(5 * PIECE + 12345, generator=torch.Generator().manual_seed(2)) * 1000).to(dtype)
    want = reference.sum_squares(x, 0.25)
    assert abs(want - float((x.double() ** 2).sum())) < 1e-9 * want
    for isa, threads in itertools.product(ISAS, pools):
        assert ops.sum_squares(x, 0.25, isa=isa, pool=pools[threads]) == want
    for size in (2048, 10 * 2048, PIECE, 3 * PIECE + 2048):
        total = 0.25
        for part in x.split(size):
            total = ops.sum_squares(part, total, pool=pools[3])
        assert total == want


def test_sum_squares_of_the_largest_numbers_is_finite():
    for dtype in FLOATS:
        x = torch.full((5000,), torch.finfo(dtype).max, dtype=dtype)
        assert ops.sum_squares(x) == reference.sum_squares(x) < float("inf")


@pytest.mark.parametrize(("src", "dst"), list(itertools.product(FLOATS, FLOATS)))
@settings(max_examples=15, deadline=None)
@cases
def test_cast_and_accumulate_have_the_bits_of_torch(src, dst, n, offset, isa, seed, kind, threads):
    generator = torch.Generator().manual_seed(seed)
    x = shifted(numbers(generator, n, kind).to(src), offset)
    got = shifted(torch.zeros(n, dtype=dst), offset // 2)
    ops.cast(x, got, isa=isa, pool=pools[threads])
    same(got, x.to(dst))
    start = numbers(generator, n, kind).to(dst)
    for scale in (1.0, 0.3):
        got, want = shifted(start, offset // 3), start.clone()
        ops.accumulate(got, x, scale=scale, isa=isa, pool=pools[threads])
        reference.accumulate(want, x, scale=scale)
        same(got, want)
    if src == dst:
        got = start.clone()
        ops.accumulate(got, x, isa=isa)
        same(got, start + x)


def hard_floats() -> Tensor:
    """fp32 with all of the 2^16 high halves, each with low halves on, beside and between the ties."""
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF])
    high = torch.arange(-(1 << 15), 1 << 15)
    return ((high[:, None] << 16) + low).flatten().to(torch.int32).view(FP32)


@pytest.mark.parametrize("isa", ISAS)
def test_casts_of_all_patterns(isa):
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    sources = {BF16: every.view(BF16), FP16: every.view(FP16), FP32: hard_floats()}
    for src, dst in itertools.product(FLOATS, FLOATS):
        got, plain = (torch.empty(sources[src].shape, dtype=dst) for _ in range(2))
        ops.cast(sources[src], got, isa=isa)
        same(got, sources[src].to(dst))
        ops.cast(sources[src], plain, isa="baseline")
        assert torch.equal(bits(got), bits(plain))  # NaN too


@pytest.mark.parametrize("isa", ISAS)
def test_split_is_lossless(isa):
    anything = torch.randint(-(1 << 31), 1 << 31, (300_000,), generator=torch.Generator().manual_seed(3)).to(torch.int32).view(FP32)
    x = torch.cat([hard_floats(), anything])
    hi, lo, back = torch.empty(len(x), dtype=BF16), torch.empty(len(x), dtype=torch.int16), torch.empty(len(x))
    ops.split(x, hi, lo, isa=isa, pool=pools[2])
    ops.join(hi, lo, back, isa=isa, pool=pools[2])
    want_hi, want_lo, want_back = torch.empty_like(hi), torch.empty_like(lo), torch.empty_like(back)
    reference.split(x, want_hi, want_lo)
    reference.join(want_hi, want_lo, want_back)
    for got, want in ((hi, want_hi), (lo, want_lo), (back, want_back)):
        assert torch.equal(bits(got), bits(want))
    nan = x.isnan()
    assert torch.equal(bits(back)[~nan], bits(x)[~nan])
    assert (bits(back)[nan] == 0x7FC00000).all()
    # hi: nearest, ties away from zero; torch's cast (ties to even) agrees but on ties; beyond the largest bf16 plus half an ulp infinite as there.
    tie = (bits(x) & 0xFFFF) == 0x8000
    assert torch.equal(bits(hi)[~nan & ~tie], bits(x.to(BF16))[~nan & ~tie])
    assert torch.equal(hi.isinf() & ~nan, x.abs() >= torch.tensor(0x7F7F8000, dtype=torch.int32).view(FP32))


# Arguments


def zeros(*dtypes: torch.dtype, n: int = 8) -> list[Tensor]:
    return [torch.zeros(n, dtype=dtype) for dtype in dtypes]


def adam_of(weights: Any, state: Any, grads: Any, **change: Any) -> None:
    ops.adam(weights, state, grads, **(HYPER | change))


def test_wrong_arguments_are_named():
    hi, lo, m, v, g = zeros(BF16, torch.int16, FP32, FP32, BF16)
    wrong: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "weights: expected a tensor, got list", lambda: adam_of([1.0], (lo, m, v), g)),
        (TypeError, "weights: expected dtype bfloat16 or float16 or float32, got float64", lambda: adam_of(m.double(), (m, v), g)),
        (ValueError, r"state: expected \(lo, m, v\)", lambda: adam_of(hi, (m, v), g)),
        (TypeError, "state: lo: expected dtype int16, got float32", lambda: adam_of(hi, (m, m, v), g)),
        (TypeError, "state: m: expected dtype float32, got bfloat16", lambda: adam_of(hi, (lo, hi, v), g)),
        (ValueError, "state: v: expected 8 elements.* got 7", lambda: adam_of(hi, (lo, m, v[:7]), g)),
        (ValueError, "grads: expected 8 elements.* got 9", lambda: adam_of(hi, (lo, m, v), torch.zeros(9))),
        (ValueError, "grads: expected a contiguous tensor", lambda: adam_of(hi, (lo, m, v), torch.zeros(16)[::2])),
        (ValueError, "grads: expected a CPU tensor, got one on meta", lambda: adam_of(hi, (lo, m, v), torch.zeros(8, device="meta"))),
        (ValueError, "weights: shares memory with grads", lambda: adam_of(hi, (lo, m, v), hi)),
        (ValueError, "state: m: shares memory with state: v", lambda: adam_of(m.clone(), (v, v), g)),
        (ValueError, "step: expected at least 1, got 0", lambda: adam_of(hi, (lo, m, v), g, step=0)),
        (ValueError, "beta1, beta2: expected", lambda: adam_of(hi, (lo, m, v), g, beta2=1.0)),
        (ValueError, "isa: this machine cannot run 'neon9', it runs baseline", lambda: adam_of(hi, (lo, m, v), g, isa="neon9")),
        (TypeError, "grads: expected a tensor", lambda: ops.sum_squares(None)),  # type: ignore[arg-type]
        (TypeError, "lo: expected dtype int16", lambda: ops.split(m, hi, g)),
        (ValueError, "dst: expected 8 elements", lambda: ops.join(hi, lo, m[1:])),
        (ValueError, "dst: shares memory with src", lambda: ops.cast(m[:4], m[3:7])),
        (ValueError, "dst: shares memory with src", lambda: ops.accumulate(m, m)),
        (TypeError, "src: expected dtype", lambda: ops.accumulate(m, lo)),
    ]
    for kind, message, call in wrong:
        with pytest.raises(kind, match=message):
            call()
    for x in (hi, lo, m, v, g):
        assert not x.any()


def test_neighbours_are_not_overlap_and_shape_does_not_matter():
    both = torch.arange(8.0)
    ops.cast(both[:4], both[4:])
    assert both.tolist() == [0, 1, 2, 3] * 2
    out = torch.zeros(2, 2)
    ops.cast(both[:4], out)
    assert out.tolist() == [[0, 1], [2, 3]]


def test_zinf_isa_forces_one(monkeypatch):
    try:
        for isa in ISAS:
            monkeypatch.setenv("ZINF_ISA", isa)
            ops.default_isa.cache_clear()
            assert ops.default_isa() == isa
        monkeypatch.setenv("ZINF_ISA", "sse9")
        ops.default_isa.cache_clear()
        with pytest.raises(ValueError, match="ZINF_ISA: this machine cannot run 'sse9'"):
            ops.sum_squares(torch.ones(1))
    finally:
        monkeypatch.undo()
        ops.default_isa.cache_clear()
    assert ISAS[0] == "baseline"


def test_the_copy_of_benches_copies():
    for isa, offset, length in itertools.product(ISAS, (0, 1, 63, 64), (0, 1, 63, 64, 1000, 300_001)):
        src = torch.randint(256, (300_100,), dtype=torch.uint8)
        dst = torch.zeros_like(src)
        ops._ops.copy(isa, None, length, src.data_ptr(), dst.data_ptr() + offset)
        assert torch.equal(dst[offset : offset + length], src[:length])
        assert not dst[:offset].any()
        assert not dst[offset + length :].any()


def test_the_bench_runs():
    bench = Path(__file__).parent.parent / "bench" / "adam.py"
    done = subprocess.run([sys.executable, str(bench), "--toy"], capture_output=True, text=True, cwd=bench.parent.parent, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bench"] == "adam"
    assert result["adam_over_bound"] > 0
