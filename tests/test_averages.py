"""The average of the weights: exact in every placement, resumed exactly, written like weights; what it is of a parameter that is not stepped."""

from __future__ import annotations

import pytest
import torch
from models import batches
from oracle import assert_same, engine_snapshot
from test_optimizers import DTYPES, check, engine_of, model, oracle_of, train
from torch import nn
from transformers import AutoModelForCausalLM

from zinf import ConfigError, Engine


def averages_of(oracle):
    """The oracle's averages by parameter."""
    return {
        p.name: oracle.state[shard.name, r][-1][p.offset : p.offset + p.numel].view(p.shape)
        for shard in oracle.layout.shards
        for r, run in enumerate(shard.runs)
        for p in run.params
    }


def assert_averages(got, oracle):
    want = averages_of(oracle)
    assert want.keys() <= got.keys()
    for name, average in want.items():
        assert got[name].dtype == torch.float32 and torch.equal(got[name], average), name


@pytest.mark.parametrize("place", ["memory on cpu", "nvme on sim"])
@pytest.mark.parametrize(("name", "dtype"), [("adamw", "bf16"), ("momentum", "fp16"), ("sgd", "fp32")])
def test_the_bits_of_the_reference(tmp_path, name, dtype, place):
    folder = tmp_path if place.startswith("nvme") else None
    oracle = oracle_of(name, DTYPES[dtype], ema_decay=0.9)
    check(engine_of(name, folder, DTYPES[dtype], ema_decay=0.9, device=place.split()[-1]), oracle)
    with engine_of(name, folder, DTYPES[dtype], ema_decay=0.9, device=place.split()[-1]) as engine:
        before = engine.state_dict(ema=True)
        assert all(torch.equal(before[name], w.float()) for name, w in engine.state_dict().items())  # it starts at the weights
        train(engine, 3)
        assert_averages(engine.state_dict(ema=True), oracle)


@pytest.mark.parametrize("mode", ["backward", "deferred"])
def test_resumed_exactly(tmp_path, mode):
    oracle = oracle_of("lion", ema_decay=0.99)
    train(oracle, 4)
    options = dict(ema_decay=0.99, run_name="run", step_mode=mode, device="sim")
    with engine_of("lion", tmp_path, **options) as engine:
        train(engine, 2)
    with engine_of("lion", tmp_path, resume=True, **options) as engine:
        train(engine, 4, first=2)
        assert_same(engine_snapshot(engine), oracle.snapshot())
        assert_averages(engine.state_dict(ema=True), oracle)


@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_saved_as_a_checkpoint(tmp_path, dtype):
    with engine_of("adamw", tmp_path, ema_decay=0.9) as engine:
        train(engine, 3)
        averages, weights = engine.state_dict(ema=True), engine.state_dict()
        engine.save_pretrained(tmp_path / "out", ema=True, dtype=dtype)
        engine.save_pretrained(tmp_path / "plain")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=DTYPES[dtype or "bf16"]).state_dict()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).state_dict()
    for name, average in averages.items():
        assert torch.equal(loaded[name], average.to(loaded[name].dtype)), name
        assert torch.equal(plain[name], weights[name])
    assert any(not torch.equal(loaded[name].to(torch.bfloat16), weights[name]) for name in averages)


def test_as_averaged_model():
    """torch.optim.swa_utils.AveragedModel beside it, within fp32 rounding: its lerp and ours round elsewhere."""
    net = model(torch.float32)
    theirs = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(net)  # the first time it copies: the start of training
    with engine_of("sgd", dtype=torch.float32, net=model(torch.float32), ema_decay=0.9) as engine:
        for _ in range(4):
            train(engine, 1)
            net.load_state_dict(engine.state_dict(), strict=False)
            theirs.update_parameters(net)
        ours = engine.state_dict(ema=True)
    for name, average in theirs.module.named_parameters():
        torch.testing.assert_close(ours[name], average, rtol=1e-5, atol=1e-6)


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.never = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x, which):
        return (getattr(self, which)(x) * self.scale).square().mean()


def test_a_parameter_that_is_not_stepped_keeps_its_average(tmp_path):
    net = Halves()
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    with Engine(net, optimizer="sgd", lr=0.1, ema_decay=0.5, nvme_path=str(tmp_path), weights="nvme", state="nvme", leaf_bytes=0) as engine:
        for which in ("a", "b", "b", "b"):
            engine.backward(engine(torch.ones(2, 64), which))
            engine.step()
        weights, averages = engine.state_dict(), engine.state_dict(ema=True)
        assert torch.equal(averages["a.weight"], 0.5 * start["a.weight"] + 0.5 * weights["a.weight"])  # one step long
        assert not torch.equal(averages["b.weight"], 0.5 * start["b.weight"] + 0.5 * weights["b.weight"])
        assert torch.equal(averages["never.weight"], start["never.weight"])
        assert averages["scale"] == 2.0


def test_what_is_not_kept_cannot_be_read(tmp_path):
    with Engine(model()) as engine:
        engine.backward(engine(input_ids=batches(1)[0], labels=batches(1)[0]).loss)
        for read in (lambda: engine.state_dict(ema=True), lambda: engine.save_pretrained(tmp_path / "out", ema=True)):
            with pytest.raises(ConfigError, match=r"keeps no average of the weights: give ema_decay"):
                read()
    assert not (tmp_path / "out").exists()
