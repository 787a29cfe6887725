"""The CPU kernels: one optimizer step, norms, casts and sums on flat tensors, in one pass over memory each.

This module checks; the compiled zinf._ops computes; zinf/ops/reference.py defines what is correct, bit for bit, on every instruction set
and for every number of threads (NaN is NaN: its payload is not promised).

All tensors are contiguous CPU tensors, taken as flat arrays; those of one call have the same number of elements and share no memory.
Every function takes `pool` (a Pool; None: one shared pool of all cores, started when it is first needed) and `isa` (a name of
available_isas(); None: the value of ZINF_ISA, else the best). TypeError (wrong kind or dtype) and ValueError (wrong size, layout, device
or value) name the argument. Calls release the GIL and may come from several threads at once, also with one pool; tensors that are
passed must not be freed, resized or written by others until the call returns. Fewer than 65,536 elements are done on the calling thread.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import threading
from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from zinf import _ops
from zinf.ops import reference

__all__ = [
    "Pool", "accumulate", "adagrad", "adam", "available_isas", "cast", "copy", "default_isa", "default_pool", "join", "lion", "sgd", "split", "sum_squares",
]  # fmt: skip

_CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # the numbers of csrc/ops/dispatch.h
_FLOATS = tuple(_CODES)
_BF16, _FP32, _INT16 = (torch.bfloat16,), (torch.float32,), (torch.int16,)
# What each dtype of weights needs beside them, so that both together are an fp32 master.
_RESTS: dict[torch.dtype, tuple[tuple[str, tuple[torch.dtype, ...]], ...]] = {
    torch.bfloat16: (("state: lo", _INT16),),
    torch.float16: (("state: master", _FP32),),
    torch.float32: (),
}
_ADAM, _ADAMW, _SGD, _MOMENTUM, _NESTEROV, _LION, _ADAGRAD = range(7)  # the rules of csrc/ops/dispatch.h
Average = reference.Average


class Pool:
    """Threads that share the work of the kernels with the thread that calls them.

    threads: how many work on a call, the caller among them, so threads - 1 are started, named zinf-cpu-1, zinf-cpu-2, ...; None: as many as the
    cores this process may run on. 1: the caller does everything. affinity: thread k is bound to cpu affinity[k % len(affinity)]; the caller is not
    bound. Several threads may use one pool at once; they share its workers. A forked child has no workers and computes on the caller.

    Raises ValueError for fewer than 1 thread or a cpu that does not exist, and on use after close().
    """

    def __init__(self, threads: int | None = None, *, affinity: Sequence[int] | None = None) -> None:
        self.threads = len(os.sched_getaffinity(0)) if threads is None else threads
        self._native: _ops.Pool | None = _ops.Pool(self.threads, list(affinity or ()))

    def close(self) -> None:
        """Joins the threads. Idempotent. A call in progress is completed by its caller."""
        native, self._native = self._native, None
        if native is not None:
            native.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


_default: Pool | None = None
_default_lock = threading.Lock()


def default_pool() -> Pool:
    """The shared pool that `pool=None` means: all cores, started now if it was not, joined when the interpreter exits."""
    global _default
    with _default_lock:
        if _default is None or _default._native is None:
            _default = Pool()
        return _default


def _close_default() -> None:
    if _default is not None:
        _default.close()


def _forget_default() -> None:
    """In a forked child the shared pool has no threads: the next call makes another."""
    global _default, _default_lock
    _default, _default_lock = None, threading.Lock()


atexit.register(_close_default)
os.register_at_fork(after_in_child=_forget_default)


def available_isas() -> list[str]:
    """The instruction sets this machine runs, from plain to best: "baseline", "avx2", "avx512"."""
    return _ops.available_isas()


@functools.cache
def default_isa() -> str:
    """What ZINF_ISA says (read once), else the best. Raises ValueError if this machine cannot run it."""
    names = _ops.available_isas()
    forced = os.environ.get("ZINF_ISA")
    if forced and forced not in names:
        raise ValueError(f"ZINF_ISA: this machine cannot run '{forced}', it runs {', '.join(names)}")
    return forced or names[-1]


def _address(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], n: int | None = None) -> int:
    """The address of a tensor that is what every kernel needs, with n elements if n is given. That arrays share no memory is checked in C++."""
    if isinstance(x, Tensor) and x.dtype in dtypes and x.is_cpu and x.layout is torch.strided and x.is_contiguous() and (n is None or x.numel() == n):
        return x.data_ptr()
    raise _complaint(name, x, dtypes, n)


def _complaint(name: str, x: object, dtypes: tuple[torch.dtype, ...], n: int | None) -> Exception:
    """What is wrong with an argument."""
    if not isinstance(x, Tensor):
        return TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if x.dtype not in dtypes:
        return TypeError(f"{name}: expected dtype {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}, got {str(x.dtype).removeprefix('torch.')}")
    if not x.is_cpu:
        return ValueError(f"{name}: expected a CPU tensor, got one on {x.device}")
    if x.layout is not torch.strided or not x.is_contiguous():
        return ValueError(f"{name}: expected a contiguous tensor, got shape {tuple(x.shape)}, layout {x.layout}, not contiguous")
    return ValueError(f"{name}: expected {n} elements, as many as the others have, got {x.numel()}")


def _workers(pool: Pool | None, n: int) -> _ops.Pool | None:
    """The native pool for n elements; None: the calling thread alone."""
    if pool is None:
        return None if n <= _ops.PIECE else default_pool()._native
    if pool._native is None:
        raise ValueError("pool: it is closed")
    return pool._native


def _step(
    rule: int, moments: str, weights: Tensor, state: tuple[Tensor, ...], grads: Tensor, scalars: tuple[float, ...], max_abs: float, ema: Average,
    fresh: bool, pool: Pool | None, isa: str | None,
) -> None:  # fmt: skip
    """One step of an optimizer that keeps `moments`, a plane for each letter."""
    at_weights = _address("weights", weights, _FLOATS)
    n = weights.numel()
    at_grads = _address("grads", grads, _FLOATS, n)
    planes = (*_RESTS[weights.dtype], *((f"state: {name}", _FP32) for name in moments))
    if len(state) != len(planes):
        names = ", ".join(name.removeprefix("state: ") for name, _ in planes)
        raise ValueError(f"state: expected ({names}) beside {weights.dtype} weights, got {len(state)} tensors")
    places = [_address(name, x, dtypes, n) for x, (name, dtypes) in zip(state, planes, strict=True)]
    first = len(places) - len(moments)
    at_ema = 0
    average: tuple[float, ...] = ()
    if ema is not None:
        at_ema, average = _address("ema", ema[0], _FP32, n), (ema[1], 1.0 - ema[1], float(fresh))
        if not 0.0 <= ema[1] < 1.0:
            raise ValueError(f"ema: expected a decay of at least 0 and less than 1, got {ema[1]}")
    if not max_abs > 0.0:
        raise ValueError(f"max_abs: expected more than 0, got {max_abs}")
    codes = rule, _CODES[weights.dtype], _CODES[grads.dtype]
    at_rest = places[0] if first else 0
    _ops.step(isa or default_isa(), _workers(pool, n), n, *codes, at_weights, at_rest, places[first:], at_ema if n else 0, at_grads, scalars, max_abs, average)


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
    pool: Pool | None = None,
    isa: str | None = None,
) -> None:
    """One step of AdamW (decoupled) or of Adam with L2 regularisation, in place, in fp32 arithmetic.

        g = clamp(grads * grad_scale, -max_abs, max_abs)
        p = p * (1 - lr * weight_decay)         if decoupled, else g = g + weight_decay * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        p = p - lr / (1 - beta1^step) * (m / (sqrt(v) / sqrt(1 - beta2^step) + eps))

    weights: (n,) bf16, fp16 or fp32. state, by the dtype of weights:
        bf16: (lo int16, m fp32, v fp32); p is the fp32 master split losslessly into weights and lo, see `split`
        fp16: (master fp32, m fp32, v fp32); p is the master, weights become its rounding
        fp32: (m fp32, v fp32); p is weights
    grads: (n,) bf16, fp16 or fp32; only read. step: from 1. grad_scale: unscaling and clipping by norm in one factor. max_abs: clipping
        by value, after that; more than 0.
    ema: (plane, decay): an average of the weights, (n,) fp32, kept in the same pass: plane = decay * plane + (1 - decay) * p, of the p after the
        step; at step 1 the plane is first set to the p before it.

    Kingma and Ba 2015 (algorithm 1), Loshchilov and Hutter 2019 (algorithm 2); eps stands where torch.optim has it.
    """
    decoupled = decoupled or weight_decay == 0.0
    scalars = reference.adam_scalars(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, step=step, grad_scale=grad_scale, decoupled=decoupled)
    _step(_ADAMW if decoupled else _ADAM, "mv", weights, state, grads, scalars, max_abs, ema, step == 1, pool, isa)


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
    pool: Pool | None = None,
    isa: str | None = None,
) -> None:
    """One step of torch.optim.SGD, in place, in fp32 arithmetic.

        g = clamp(grads * grad_scale, -max_abs, max_abs) + weight_decay * p
        m = momentum * m + (1 - dampening) * g              at step 1: m = g
        p = p - lr * m                                      with nesterov: p - lr * (g + momentum * m); without momentum: p - lr * g

    state ends in m (n,) fp32 if there is momentum; else it is only what the dtype of weights needs, nothing for fp32. All else as for `adam`.
    """
    scalars = reference.sgd_scalars(
        lr=lr, momentum=momentum, dampening=dampening, nesterov=nesterov, weight_decay=weight_decay, step=step, grad_scale=grad_scale
    )
    rule = _SGD if momentum == 0.0 else _NESTEROV if nesterov else _MOMENTUM
    _step(rule, "" if rule == _SGD else "m", weights, state, grads, scalars, max_abs, ema, step == 1, pool, isa)


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
    pool: Pool | None = None,
    isa: str | None = None,
) -> None:
    """One step of Lion, in place, in fp32 arithmetic.

        g = clamp(grads * grad_scale, -max_abs, max_abs)
        p = p * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g

    state ends in m (n,) fp32. All else as for `adam`. Chen et al. 2023, algorithm 2.
    """
    scalars = reference.lion_scalars(lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, step=step, grad_scale=grad_scale)
    _step(_LION, "m", weights, state, grads, scalars, max_abs, ema, step == 1, pool, isa)


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
    pool: Pool | None = None,
    isa: str | None = None,
) -> None:
    """One step of Adagrad, in place, in fp32 arithmetic.

        g = clamp(grads * grad_scale, -max_abs, max_abs) + weight_decay * p
        s = s + g * g                                       at step 1: s = initial_accumulator_value + g * g, of a plane of zeros
        p = p - lr / (1 + (step - 1) * lr_decay) * (g / (sqrt(s) + eps))

    state ends in s (n,) fp32. All else as for `adam`. Duchi et al. 2011, as torch.optim.Adagrad has it.
    """
    scalars = reference.adagrad_scalars(
        lr=lr, lr_decay=lr_decay, initial_accumulator_value=initial_accumulator_value, eps=eps, weight_decay=weight_decay, step=step, grad_scale=grad_scale
    )
    _step(_ADAGRAD, "s", weights, state, grads, scalars, max_abs, ema, step == 1, pool, isa)


def sum_squares(grads: Tensor, initial: float = 0.0, *, pool: Pool | None = None, isa: str | None = None) -> float:
    """`initial` plus the sum of the squares of grads (bf16, fp16 or fp32), in double.

    Pieces of 2048 elements are summed in a fixed order, and added to `initial` one after the other: cutting a tensor at multiples of 2048
    and passing each result on as `initial` gives the same bits as one call. Finite exactly if initial and all elements are.
    """
    address = _address("grads", grads, _FLOATS)
    n = grads.numel()
    return _ops.sum_squares(isa or default_isa(), _workers(pool, n), n, _CODES[grads.dtype], address, initial)


def copy(src: Tensor, out: Tensor, *, pool: Pool | None = None, isa: str | None = None) -> None:
    """fp32 src into fp32 out, by stores that bypass the caches: the speed of memory, which every other kernel is held against."""
    n = src.numel()
    at_src, at_out = _address("src", src, _FP32), _address("out", out, _FP32, n)
    _ops.copy(isa or default_isa(), _workers(pool, n), 4 * n, at_src, at_out)


def split(src: Tensor, hi: Tensor, lo: Tensor, *, pool: Pool | None = None, isa: str | None = None) -> None:
    """fp32 src into bf16 hi and int16 lo, losslessly: of its bits, hi = (bits + 0x8000) >> 16 and lo = bits - (hi << 16), modulo 2^32.

    hi is src rounded to nearest, ties away from zero; so infinite for infinities and for what is beyond the largest bf16 plus half its ulp.
    join gives back the bits of src, whatever they are, except that any NaN becomes the canonical one (hi = 0x7FC0, lo = 0).
    """
    at_src = _address("src", src, _FP32)
    n = src.numel()
    at_hi, at_lo = _address("hi", hi, _BF16, n), _address("lo", lo, _INT16, n)
    _ops.split(isa or default_isa(), _workers(pool, n), n, at_src, at_hi, at_lo)


def join(hi: Tensor, lo: Tensor, dst: Tensor, *, pool: Pool | None = None, isa: str | None = None) -> None:
    """The fp32 master whose halves are bf16 hi and int16 lo: the inverse of `split`."""
    at_hi = _address("hi", hi, _BF16)
    n = hi.numel()
    at_lo, at_dst = _address("lo", lo, _INT16, n), _address("dst", dst, _FP32, n)
    _ops.join(isa or default_isa(), _workers(pool, n), n, at_hi, at_lo, at_dst)


def cast(src: Tensor, dst: Tensor, *, pool: Pool | None = None, isa: str | None = None) -> None:
    """dst = src, between bf16, fp16 and fp32: rounded to nearest even, as torch does; NaN stays NaN."""
    at_src = _address("src", src, _FLOATS)
    n = src.numel()
    at_dst = _address("dst", dst, _FLOATS, n)
    _ops.cast(isa or default_isa(), _workers(pool, n), n, _CODES[src.dtype], _CODES[dst.dtype], at_src, at_dst)


def accumulate(dst: Tensor, src: Tensor, *, scale: float = 1.0, pool: Pool | None = None, isa: str | None = None) -> None:
    """dst = dst + src * scale in place, each bf16, fp16 or fp32: computed in fp32 and rounded once to dst's dtype, to nearest even."""
    at_dst = _address("dst", dst, _FLOATS)
    n = dst.numel()
    at_src = _address("src", src, _FLOATS, n)
    _ops.accumulate(isa or default_isa(), _workers(pool, n), n, _CODES[dst.dtype], _CODES[src.dtype], at_dst, at_src, scale)
