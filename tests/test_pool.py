"""The pool's promises: named and bound threads, all joined; callers at once; forks; the GIL released; bits that do not depend on who computes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from zinf import ops
from zinf.ops import reference

PIECE = 65536  # elements a thread takes at a time


def test_flushing_subnormals_in_the_process_changes_nothing():
    n = 3 * PIECE
    x = (torch.rand(n, generator=torch.Generator().manual_seed(4)) * 1e-38).bfloat16()
    start = torch.full((n,), 1e-39)
    want = start.clone()
    reference.accumulate(want, x, scale=0.125)
    outcome: dict[str, Any] = {}

    def run() -> None:  # in a thread of its own, since the flag belongs to a thread, and is handed on to those it starts
        assert torch.set_flush_denormal(True)
        with ops.Pool(3) as pool:
            got = start.clone()
            ops.accumulate(got, x, scale=0.125, pool=pool)
        outcome["got"] = got
        outcome["still flushing"] = float(torch.tensor([1e-38]) * torch.tensor([0.1])) == 0.0

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert torch.equal(outcome["got"].view(torch.int32), want.view(torch.int32))
    assert outcome["still flushing"]


def thread_names() -> dict[str, str]:
    """Thread ids and names of this process."""
    return {task.name: (task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}


def test_pool_names_binds_and_joins_its_threads():
    before = set(thread_names())
    cpus = sorted(os.sched_getaffinity(0))
    pool = ops.Pool(3, affinity=[cpus[0], cpus[-1], cpus[0]])
    started = {tid: name for tid, name in thread_names().items() if tid not in before}
    assert sorted(started.values()) == ["zinf-cpu-1", "zinf-cpu-2"]
    for tid, name in started.items():
        assert os.sched_getaffinity(int(tid)) == {cpus[-1] if name == "zinf-cpu-1" else cpus[0]}
    assert pool.threads == 3
    pool.close()
    pool.close()
    assert not set(started) & set(thread_names())
    with pytest.raises(ValueError, match="pool: it is closed"):
        ops.sum_squares(torch.ones(3), pool=pool)
    with pytest.raises(ValueError, match="threads: expected at least 1"):
        ops.Pool(0)
    with pytest.raises(ValueError, match="affinity"):
        ops.Pool(2, affinity=[1000])
    assert not set(started) & set(thread_names())


def test_pool_serves_several_callers_at_once():
    x = torch.randn(4 * PIECE + 5, generator=torch.Generator().manual_seed(6))
    want = reference.sum_squares(x)
    wrong: list[object] = []

    def call(pool: ops.Pool) -> None:
        try:
            mine = torch.zeros_like(x)
            for k in range(25):
                if ops.sum_squares(x, pool=pool) != want:
                    wrong.append("sum")
                ops.accumulate(mine, x, pool=pool)
                if k == 0 and not torch.equal(mine, x):
                    wrong.append("accumulate")
        except Exception as error:
            wrong.append(error)

    with ops.Pool(3) as pool:
        callers = [threading.Thread(target=call, args=(pool,)) for _ in range(5)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60)
            assert not caller.is_alive()
    assert not wrong


def test_pool_closed_during_a_call_lets_it_complete():
    x = torch.ones(64 * PIECE)
    for delay in (0.0, 0.0005, 0.002):
        pool = ops.Pool(4)
        closer = threading.Timer(delay, pool.close)
        closer.start()
        try:
            while True:
                assert ops.sum_squares(x, pool=pool) == x.numel()
        except ValueError:  # closed
            pass
        closer.join()


def exit_code(child: int, seconds: float) -> int | None:
    """Of a forked child; None if it had to be killed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def test_a_forked_child_computes():
    """Forked while others use the pool, so that its mutex may be held, and its queue full, by threads that the child does not have."""
    x = torch.ones(2 * PIECE)
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            ops.sum_squares(x, pool=pool)

    with ops.Pool(4) as pool:
        assert ops.sum_squares(x, pool=pool) == ops.sum_squares(x) == x.numel()
        busy = [threading.Thread(target=keep_busy) for _ in range(2)]
        for thread in busy:
            thread.start()
        try:
            for _ in range(20):
                child = os.fork()
                if child == 0:
                    try:
                        fine = ops.sum_squares(x, pool=pool) == x.numel() and ops.sum_squares(x) == x.numel()
                        pool.close()
                        ops.default_pool().close()
                        os._exit(0 if fine else 1)
                    finally:
                        os._exit(2)
                assert exit_code(child, 30) == 0  # None: it hung
        finally:
            stop.set()
            for thread in busy:
                thread.join()
        assert ops.sum_squares(x, pool=pool) == x.numel()


def test_every_kernel_releases_the_gil():
    n = 1 << 23
    hi, lo, x, y, z = (torch.ones(n, dtype=dtype) for dtype in (torch.bfloat16, torch.int16, torch.float32, torch.float32, torch.float32))
    hyper: dict[str, Any] = dict(lr=0.1, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.1, step=1)
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.0005):
            ticks.append(time.perf_counter())

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        with ops.Pool(1) as pool:
            calls = {
                "adam": lambda: ops.adam(x, (y, z), hi, pool=pool, isa="baseline", **hyper),
                "sum_squares": lambda: ops.sum_squares(x, pool=pool, isa="baseline"),
                "split": lambda: ops.split(x, hi, lo, pool=pool, isa="baseline"),
                "join": lambda: ops.join(hi, lo, x, pool=pool, isa="baseline"),
                "cast": lambda: ops.cast(x, hi, pool=pool, isa="baseline"),
                "accumulate": lambda: ops.accumulate(x, hi, pool=pool, isa="baseline"),
            }
            for name, call in calls.items():
                for _ in range(50):
                    start = time.perf_counter()
                    call()
                    end = time.perf_counter()
                    third = (end - start) / 3
                    if any(start + third < t < end - third for t in ticks):
                        break
                else:
                    pytest.fail(f"no other thread ran in the middle of {name}")
    finally:
        stop.set()
        ticker.join()
