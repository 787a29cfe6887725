"""torch.compile of blocks: one graph for all equal ones, the bits of plain PyTorch where the backend keeps them."""

from __future__ import annotations

import shutil

import pytest
import torch
from models import HYPER, LEAF_BYTES, batches, engine_run, llama, oracle_run, train
from oracle import assert_same
from test_streaming import data, net
from torch._dynamo.utils import counters

from zinf.engine import Engine
from zinf.errors import ConfigError

NVME = dict(weights="nvme", state="nvme", chunk_size=4096)


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("recompute", [True, False])
def test_equal_blocks_share_one_graph_and_train_to_the_same_bits(tmp_path, device, recompute):
    got = engine_run(tmp_path, 4, device=device, recompute=recompute, compile_blocks="aot_eager", **NVME)
    assert graphs() == 1
    want = oracle_run(4)
    assert got[:2] == want[:2]
    assert_same(got[2], want[2])


def test_other_lengths_and_generation_add_few_graphs(tmp_path):
    plain = llama()
    with Engine(llama(), nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, compile_blocks="aot_eager", **NVME, **HYPER) as engine:
        prompt = batches(1)[0][:1, :5]
        engine.eval()
        assert torch.equal(engine.module.generate(prompt, max_new_tokens=4, do_sample=False), plain.generate(prompt, max_new_tokens=4, do_sample=False))
        engine.train()
        assert graphs() == 0
        for length in (24, 20, 16, 12, 8):
            ids = batches(1)[0][:, :length]
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
    assert 1 <= graphs() <= 3  # the first length, and then any
    assert not any("forward" in layer.__dict__ for layer in engine.module.model.layers)


def test_off_unless_asked_for(tmp_path):
    with Engine(llama(), nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, **NVME, **HYPER) as engine:
        train(engine, 1)
    assert graphs() == 0


def test_a_backend_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'inductor'"):
        Engine(net(2), compile_blocks="inducto")


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ for the CPU")
def test_inductor_is_close_to_torch_compile_of_the_whole_model(tmp_path):
    """Inductor fuses and so rounds differently, there and here."""
    model = net(4).float()
    with Engine(net(4).float(), nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, compile_blocks="inductor", **NVME) as engine:
        loss = engine(data(0).float()).square().mean()
        engine.backward(loss)
        norm = engine.step().grad_norm
        assert graphs() == 2  # the first block's input needs no gradient
    want = torch.compile(model)(data(0).float()).square().mean()
    want.backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    assert norm == pytest.approx(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item(), rel=1e-5)
