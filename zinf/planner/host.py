"""What the host and the device that computes do: rates of memory, of the optimizer and of matmul, in some seconds.

    dram     a copy with non-temporal stores, on huge pages, all cores: bytes read plus bytes written
    adam     zinf's AdamW on bf16 weights: its 26 bytes a parameter (bench/adam.py)
    flops    a large square matmul, bf16 and fp32, on the GPU if there is one, else on all cores

Each is the median of several runs: a machine that others use has fast and slow moments.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from zinf import ops
from zinf.measured import Host
from zinf.tiers.host import Arena, available_bytes

ELEMENTS = 1 << 25  # of a copy, and of an optimizer step: 470 MiB of state, far beyond any cache
SIDE = {"cpu": 2048, "cuda": 8192}  # of the matrices
ADAM_BYTES = 26  # a parameter: grad 2, and weights, lo, m, v (12) read and written
PARTS = ("dram", "adam", "flops", "flops_fp32")  # in the order in which they are measured


def measure(
    seconds: float = 6.0, parts: Sequence[str] = PARTS, known: Host | None = None, *, elements: int = ELEMENTS, side: int | None = None,
    done: Callable[[], None] = lambda: None,
) -> Host:  # fmt: skip
    """Measure `parts` for about `seconds`; what else there is to say is as `known`. `done` is called after each part."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    side = side or SIDE[device.type]
    elements = min(elements, max((available_bytes() or 1 << 62) // 64, 1 << 16))
    rates = {part: getattr(known, part) for part in PARTS if part not in parts}
    for part, call in (
        ("dram", lambda each: copy_rate(elements, each)),
        ("adam", lambda each: adam_rate(elements, each)),
        ("flops", lambda each: matmul_rate(device, torch.bfloat16, side, each)),
        ("flops_fp32", lambda each: matmul_rate(device, torch.float32, side, each)),
    ):
        if part in parts:
            rates[part] = call(seconds / len(parts))
            done()
    return Host(
        when=datetime.date.today().isoformat(),
        device=torch.cuda.get_device_name() if cuda else "cpu",
        threads=torch.get_num_threads(),
        device_memory=torch.cuda.mem_get_info()[1] if cuda else None,
        link=known.link if known is not None else None,
        **rates,
    )


def median(call: Callable[[], object], seconds: float) -> float:
    """Seconds of one call: the median of as many as fit into `seconds`, at least three, after one that warms up."""
    call()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < until:
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def copy_rate(n: int, seconds: float) -> float:
    arena = Arena(8 * n)
    try:
        src, out = arena.carve(8 * n, "bench").view(torch.float32).split(n)
        with ops.Pool() as pool:
            return 8 * n / median(lambda: ops.copy(src, out, pool=pool), seconds)
    finally:
        arena.close()


def adam_rate(n: int, seconds: float) -> float:
    arena = Arena(14 * n + 5 * 4096)
    try:
        kinds = (torch.bfloat16, torch.int16, torch.float32, torch.float32, torch.bfloat16)
        weights, lo, m, v, grads = (arena.carve(n * kind.itemsize, "bench").view(kind) for kind in kinds)
        hyper = dict(lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)
        with ops.Pool() as pool:
            return ADAM_BYTES * n / median(lambda: ops.adam(weights, (lo, m, v), grads, pool=pool, **hyper), seconds)  # type: ignore[arg-type]
    finally:
        arena.close()


def matmul_rate(device: torch.device, dtype: torch.dtype, side: int, seconds: float) -> float:
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)

    def run() -> None:
        torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return 2 * side**3 / median(run, seconds)
