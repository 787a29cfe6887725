"""What the crash and fault tests train: small, and with everything that a resume must bring back (dropout, running averages, learning rates, a frozen part)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from oracle import assert_same, engine_snapshot
from torch import nn

from zinf import rng
from zinf.engine import Engine
from zinf.errors import CommitError

WIDTH = 64
NVME = dict(weights="nvme", state="nvme", chunk_size=4096, leaf_bytes=4096, weight_decay=0.1)
TWO_SLABS = {"cpu": "80KiB", "sim": "160KiB"}  # device memory in which weights must come and go
MODES = {"deferred": dict(max_grad_norm=1.0), "backward": dict(step_mode="backward")}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.drop, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.average = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.blocks[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.average(x)
        for block in self.blocks:
            x = block(x)
        return x


def net() -> nn.Module:
    """The same every time; resets the generator, which dropout draws from."""
    torch.manual_seed(0)
    return Net().to(torch.bfloat16).train()


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)


def begin(folder: Any, **options: Any) -> Engine:
    options = {**NVME, "device_memory": TWO_SLABS[options.get("device", "cpu")], **options}
    return Engine(net(), nvme_path=str(folder), run_name="run", **options)


def one_step(engine: Engine, *, between: Callable[[str], None] = lambda phase: None) -> None:
    """The step after engine.global_step. `between` is told what comes next: forward, backward, step."""
    step = engine.global_step
    for group in engine.optimizer.param_groups:
        group["lr"] = 1e-2 * 0.9**step
    between("forward")
    loss = (engine(batch(step)).float() - batch(step + 1).float()).square().mean()
    between("backward")
    engine.backward(loss)
    between("step")
    engine.step(extra={"sum": sum(range(step + 1))})


def train(engine: Engine, steps: int) -> None:
    while engine.global_step < steps:
        one_step(engine)


def end(engine: Engine) -> tuple[Any, Any, dict[str, Any]]:
    """All that a run has to show: weights, optimizer state, and what else its commits hold."""
    weights, state = engine_snapshot(engine)
    rest = {k: v for k, v in engine.state_dict().items() if k not in weights}
    return (
        weights | rest,
        state,
        {"torch": rng.capture()["torch"], "extra": engine.extra, "step": engine.global_step, "lr": engine.optimizer.param_groups[0]["lr"]},
    )


def same_end(a: Any, b: Any) -> None:
    assert_same(a[:2], b[:2])
    assert a[2] == b[2]


def stubborn(engine: Engine, steps: int, repair: Callable[[], None]) -> list[BaseException]:
    """Train in spite of errors: repair, recover, go on. Returns them."""
    errors: list[BaseException] = []
    while engine.global_step < steps:
        try:
            one_step(engine)
        except OSError as e:
            errors.append(e)
            assert len(errors) < 20, errors
            repair()
            engine.recover()
    try:
        engine.synchronize()
    except OSError as e:
        errors.append(e)
        repair()
        engine.recover()
        train(engine, steps)
    return errors


def threads() -> list[str]:
    """zinf's own that run."""
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("zinf"))


__all__ = ["MODES", "NVME", "CommitError", "batch", "begin", "end", "net", "one_step", "same_end", "stubborn", "threads", "train"]
