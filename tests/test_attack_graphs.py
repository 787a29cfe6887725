"""Models that do more with a block than call it on its inputs: the numbers of plain PyTorch, or an error, never other numbers."""

from __future__ import annotations

import pytest
import torch
from models import LEAF_BYTES
from oracle import Oracle, assert_same, engine_snapshot
from test_streaming import NVME, Mlp, data, net, same_as_oracle, square
from torch import nn

from zinf.engine import Engine
from zinf.errors import EngineError

DEVICES = pytest.mark.parametrize("device", ["cpu", "sim"])
MODES = pytest.mark.parametrize("mode", ["deferred", "backward"])


def begin(folder, model, **options) -> Engine:
    return Engine(model, nvme_path=str(folder), **{**NVME, "leaf_bytes": LEAF_BYTES, "lr": 1e-3, "weight_decay": 0.1, **options})


class Chain(nn.Module):
    def __init__(self, block: type[nn.Module], count: int = 6, forward=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block(64) for _ in range(count))
        self.scale = nn.Parameter(torch.ones(64))
        self.plan = forward or (lambda self, x: nn.Sequential(*self.blocks)(x))
        self.to(torch.bfloat16)

    def forward(self, x):
        return self.plan(self, x * self.scale)


class Normed(nn.Module):
    """Its running averages and its counter change in every forward, but not in the recompute of one."""

    def __init__(self, width):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.register_buffer("noise", torch.zeros(()))

    def forward(self, x):
        self.noise += 0.25
        return torch.relu(self.norm(self.linear(x))) * self.noise


@DEVICES
def test_buffers_are_changed_once_and_resumed(tmp_path, device):
    oracle = Oracle(Chain(Normed), lr=1e-3, weight_decay=0.1, leaf_bytes=LEAF_BYTES)
    for first in range(2):
        with begin(tmp_path, Chain(Normed), resume=first > 0, device=device) as engine:
            for step in range(2 * first, 2 * first + 2):
                oracle.backward(square(oracle.model, step))
                oracle.step()
                engine.backward(square(engine, step))
                engine.step()
            state = engine.state_dict()
            assert_same(engine_snapshot(engine), oracle.snapshot())
    for name, value in oracle.model.state_dict().items():
        assert torch.equal(state[name], value), name


class Aside(Mlp):
    def forward(self, first, x):
        return super().forward(x)


@DEVICES
@MODES
def test_blocks_whose_first_input_gets_no_gradient_do_not_pile_up(tmp_path, device, mode):
    def plan(model, x):
        first = x
        for block in model.blocks:
            x = block(first, x)
        return x

    same_as_oracle(tmp_path, Chain(Aside, 8, plan), square, device=device, step_mode=mode, device_memory="256KiB")


class Showing(Mlp):
    """Returns a view of its own weights."""

    def __init__(self, width):
        super().__init__(width)
        self.shown = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return super().forward(x), self.shown[:], self.shown


@DEVICES
def test_weights_that_a_block_returns_stay_what_they_were(tmp_path, device):
    def plan(model, x):
        shown = []
        for block in model.blocks:
            x, *more = block(x)
            shown += more
        return x * sum(s * 0.1 * (i + 1) for i, s in enumerate(shown))

    same_as_oracle(tmp_path / "", Chain(Showing, 8, plan), square, device=device)
    want = Chain(Showing, 8, plan)
    (tmp_path / "eval").mkdir()
    with begin(tmp_path / "eval", Chain(Showing, 8, plan), device=device) as engine, torch.no_grad():
        assert torch.equal(engine(data(0)), want(data(0)))


class Adding(nn.Module):
    """Changes its input, in a way that plain autograd allows."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        x += torch.tanh(self.linear(x * 1.0))
        return x


class Copying(Adding):
    def forward(self, x):
        return torch.tanh(self.linear(x * 1.0))


def add_outside(model, x):
    for block in model.blocks:
        x += block(x)
    return x


@pytest.mark.parametrize("make", [lambda: Chain(Adding), lambda: Chain(Copying, 6, add_outside)], ids=["inside", "outside"])
def test_inputs_changed_in_place_are_refused_unless_nothing_is_recomputed(tmp_path, make):
    with begin(tmp_path, make(), run_name="recompute") as engine, pytest.raises(EngineError, match="in place"):
        engine.backward(square(engine, 0))
    same_as_oracle(tmp_path, make(), square, recompute=False)


@MODES
def test_a_graph_from_before_the_step_is_refused(tmp_path, mode):
    model = net()
    model.scale.requires_grad_(False)
    with begin(tmp_path, model, step_mode=mode) as engine:
        a, b = square(engine, 0), square(engine, 1)
        engine.backward(a)
        engine.step()
        with pytest.raises(EngineError, match=r"before step|gradient_accumulation_steps"):
            engine.backward(b)


@MODES
def test_gradients_of_inputs_alone_are_no_backward_of_the_step(tmp_path, mode):
    oracle = Oracle(net(), lr=1e-3, weight_decay=0.1, leaf_bytes=LEAF_BYTES, wide=True)
    with begin(tmp_path, net(), step_mode=mode, gradient_accumulation_steps=2) as engine:
        for step in range(4):
            got, want = (torch.autograd.grad(m(x).float().sum(), x)[0] for m in (engine, oracle.model) for x in [data(step).requires_grad_()])
            assert torch.equal(got, want)
            for m in (engine, oracle):
                m.backward(square(oracle.model if m is oracle else m, step) / 2)
            if step % 2:
                engine.step()
                oracle.step()
        assert_same(engine_snapshot(engine), oracle.snapshot())


@MODES
def test_a_shard_of_the_first_backward_alone_is_stepped_before_the_next_step(tmp_path, mode):
    """And is in the commit to which a step that is skipped goes back."""
    plans = [[0, 1, 2, 3], [0, 1], [0, 1], [1, 0]]
    oracle = Oracle(net(), lr=1e-3, weight_decay=0.1, leaf_bytes=LEAF_BYTES, wide=True)
    with begin(tmp_path, net(), step_mode=mode, gradient_accumulation_steps=2) as engine:
        for i, plan in enumerate(plans):
            engine.module.plan = oracle.model.plan = plan
            engine.backward(square(engine, i) / 2 * (float("nan") if i == 3 else 1))
            if i < 2:
                oracle.backward(square(oracle.model, i) / 2)
            if i % 2:
                assert engine.step().skipped == (i == 3)
        oracle.step()
        assert_same(engine_snapshot(engine), oracle.snapshot())
