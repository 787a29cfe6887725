"""The optimizer step on the CPU against what memory allows, and against what others do.

What bounds it: a step reads and writes every weight, moment and gradient once and computes little, so all cores together wait for DRAM.
Bytes a parameter, each read or written once:

    zinf adam bf16   reads grad 2, hi 2, lo 2, m 4, v 4; writes hi 2, lo 2, m 4, v 4             26
    zinf adam fp16   reads grad 2, master 4, m 4, v 4; writes weights 2, master 4, m 4, v 4      28
    adam fp32        reads grad 4, p 4, m 4, v 4; writes p 4, m 4, v 4                           28
    whole pass       zinf: norm of bf16 grads 2, then adam bf16 with the clip in it              28
                     others: bf16 to fp32 grads 6, norm 4, scale 8, adam fp32 28, fp32 to bf16 6 52

The bound is those bytes at the speed of a copy with non-temporal stores (8 bytes an fp32), measured in the same round on the same pages and threads.
`over bound` is bound / time: 1 is as fast as the copy. More than 1 happens: where two cores do not saturate memory, streams that are updated in
place are faster than a copy. Ratios are taken inside a round, and the median of the rounds is reported, since machines are shared and their memory has
fast and slow hours. `cpu` is the processor time of all threads divided by their number: on a machine that others use too, nearer to the time on a quiet one.

    python bench/adam.py [--n 1e8] [--rounds 9] [--threads N] [--isa NAME] [--toy]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from zinf import _ops, ops

HUGE = 2 << 20  # bytes of a large page
HYPER = dict(beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
COPY = "copy, non-temporal"


def buffer(n: int, dtype: torch.dtype, value: float) -> Tensor:
    """n elements on large pages, all touched."""
    nbytes = n * dtype.itemsize
    memory = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets no large pages
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE
    return whole[start : start + nbytes].view(dtype).fill_(value)


class Contender:
    """Something that is timed: `run` moves `bytes_each` bytes a parameter."""

    def __init__(self, name: str, bytes_each: int, run: Callable[[], object]) -> None:
        self.name, self.bytes_each, self.run = name, bytes_each, run
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []  # of all threads together

    def sample(self) -> None:
        start, cpu_start = time.perf_counter(), time.process_time()
        self.run()
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - cpu_start)


def zinf_contenders(n: int, pool: ops.Pool, isa: str) -> list[Contender]:
    """Ours, and the copy that gives the bound."""
    hi, lo = buffer(n, torch.bfloat16, 0.01), buffer(n, torch.int16, 0)
    half, master = buffer(n, torch.float16, 0.01), buffer(n, torch.float32, 0.01)
    m, v = buffer(n, torch.float32, 0), buffer(n, torch.float32, 0)
    grads, grads32 = buffer(n, torch.bfloat16, 1e-3), buffer(n, torch.float32, 1e-3)
    grads16 = buffer(n, torch.float16, 1e-3)
    step = 0

    def adam(weights: Tensor, state: tuple[Tensor, ...], g: Tensor, scale: float = 1.0) -> None:
        nonlocal step
        step += 1
        ops.adam(weights, state, g, lr=1e-5, step=step, grad_scale=scale, pool=pool, isa=isa, **HYPER)

    def whole_pass() -> None:
        norm = ops.sum_squares(grads, pool=pool, isa=isa) ** 0.5
        adam(hi, (lo, m, v), grads, min(1.0, 1.0 / (norm + 1e-6)))

    return [
        Contender(COPY, 8, lambda: _ops.copy(isa, pool._native, 4 * n, grads32.data_ptr(), v.data_ptr())),
        Contender("zinf adam bf16", 26, lambda: adam(hi, (lo, m, v), grads)),
        Contender("zinf adam fp16", 28, lambda: adam(half, (master, m, v), grads16)),
        Contender("zinf adam fp32", 28, lambda: adam(master, (m, v), grads32)),
        Contender("zinf accumulate fp32", 12, lambda: ops.accumulate(m, grads32, scale=0.0, pool=pool, isa=isa)),
        Contender("zinf norm bf16", 2, lambda: ops.sum_squares(grads, pool=pool, isa=isa)),
        Contender("zinf whole pass", 28, whole_pass),
    ]


def torch_contenders(n: int) -> list[Contender]:
    """torch's fused AdamW, and the chain around it that 16-bit gradients and weights need."""
    parameter = torch.nn.Parameter(buffer(n, torch.float32, 0.01))
    parameter.grad = buffer(n, torch.float32, 1e-3)
    optimizer = torch.optim.AdamW([parameter], lr=1e-5, weight_decay=0.01, fused=True)
    optimizer.step()  # makes its state
    narrow_grads, narrow_weights = buffer(n, torch.bfloat16, 1e-3), buffer(n, torch.bfloat16, 0.01)

    @torch.no_grad()
    def chain() -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(narrow_grads)
        norm = float(parameter.grad.norm())
        parameter.grad.mul_(min(1.0, 1.0 / (norm + 1e-6)))
        optimizer.step()
        narrow_weights.copy_(parameter)

    return [Contender("torch fused fp32", 28, optimizer.step), Contender("torch whole pass", 52, chain)]


def deepspeed_contenders(n: int) -> list[Contender]:
    """DeepSpeed's kernel, where it is installed and builds."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        parameter = torch.nn.Parameter(buffer(n, torch.float32, 0.01))
        parameter.grad = buffer(n, torch.float32, 1e-3)
        optimizer = DeepSpeedCPUAdam([parameter], lr=1e-5, weight_decay=0.01, adamw_mode=True)
        optimizer.step()
    except Exception as error:
        print(f"DeepSpeed: left out ({type(error).__name__})")
        return []
    return [Contender("DeepSpeed fp32", 28, optimizer.step)]


def measure(contenders: list[Contender], rounds: int) -> dict[str, list[float]]:
    """Interleaved samples; of each contender bound / time by round, the bound from the mean of the copies just before and after it."""
    copy, others = contenders[0], contenders[1:]
    ratios: dict[str, list[float]] = {contender.name: [] for contender in others}
    for contender in contenders:
        contender.run()  # pages and threads are warm
    for _ in range(rounds):
        copy.sample()
        for contender in others:
            contender.sample()
            copy.sample()
            bound = contender.bytes_each / copy.bytes_each * statistics.mean(copy.seconds[-2:])
            ratios[contender.name].append(bound / contender.seconds[-1])
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=float, default=1e8, help="parameters")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", default=ops.default_isa(), choices=ops.available_isas())
    parser.add_argument("--toy", action="store_true", help="seconds, not minutes: shows that the bench runs, measures nothing")
    args = parser.parse_args()
    n, rounds = (200_000, 2) if args.toy else (int(args.n), args.rounds)
    torch.set_num_threads(args.threads)

    with ops.Pool(args.threads) as pool:
        contenders = [*zinf_contenders(n, pool, args.isa), *torch_contenders(n), *deepspeed_contenders(n)]
        ratios = measure(contenders, rounds)

    times = {c.name: statistics.median(c.seconds) for c in contenders}
    cpu = {c.name: statistics.median(c.cpu_seconds) / args.threads for c in contenders}
    speed = 8 * n / times[COPY] / 1e9
    print(f"n {n:.3g}, {args.threads} threads, {args.isa}, {rounds} rounds; bound: {COPY} {speed:.1f} GB/s; torch {torch.__version__}")
    print(f"{'':20s} {'ms/1e8':>8s} {'cpu':>7s} {'B/param':>8s} {'GB/s':>7s} {'over bound':>11s}")
    for c in contenders:
        ratio = f"{statistics.median(ratios[c.name]):11.2f}" if c.name in ratios else ""
        rate = c.bytes_each * n / times[c.name] / 1e9
        print(f"{c.name:20s} {times[c.name] / n * 1e11:8.1f} {cpu[c.name] / n * 1e11:7.1f} {c.bytes_each:8d} {rate:7.1f} {ratio}")
    result = {
        "bench": "adam",
        "n": n,
        "threads": args.threads,
        "isa": args.isa,
        "copy_gb_s": round(speed, 2),
        "adam_over_bound": round(statistics.median(ratios["zinf adam bf16"]), 3),
        "adam_fp32_over_bound": round(statistics.median(ratios["zinf adam fp32"]), 3),
        "whole_pass_over_bound": round(statistics.median(ratios["zinf whole pass"]), 3),
        "fp32_vs_torch_fused": round(times["torch fused fp32"] / times["zinf adam fp32"], 3),
        "whole_pass_vs_torch": round(times["torch whole pass"] / times["zinf whole pass"], 3),
        "cpu_ms_per_1e8": {name: round(seconds / n * 1e11, 2) for name, seconds in cpu.items()},
        "ms_per_1e8": {name: round(seconds / n * 1e11, 2) for name, seconds in times.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
