"""Every architecture trains with the bits of plain PyTorch: losses, weights and optimizer state after three steps, in bf16, from NVMe, through
fewer slabs than there are blocks. The first moment after the first step tells each gradient's own bits."""

from __future__ import annotations

import random

import pytest
import torch
from models import LEAF_BYTES
from oracle import Oracle, assert_same, engine_snapshot
from torch import nn
from zoo import GENERATING, ROWS, Row, floats, tokens

from zinf.config import Config
from zinf.discover import discover, layout_of
from zinf.engine import Engine
from zinf.memory import plan_for

STEPS = 3
OPTIONS = dict(lr=1e-3, weight_decay=0.1, leaf_bytes=LEAF_BYTES)
NVME = dict(weights="nvme", state="nvme", chunk_size=2048)


pytestmark = pytest.mark.usefixtures("one_thread")


def tight(model: nn.Module, **options) -> int:
    """The least device memory: two slabs of each size, so that most blocks are evicted between their uses."""
    config = Config(**{**OPTIONS, **NVME, **options}, nvme_path="somewhere")
    units = discover(model, config.blocks, config.leaf_bytes)
    layout = layout_of(units, config.chunk_size)
    plan = plan_for(layout, units, config, True, config.device == "cpu", "deferred")
    return plan.device_nbytes - sum(c.nbytes * max(0, c.count - 2) for c in plan.slabs)


def seeded(row: Row, model, step: int) -> torch.Tensor:
    torch.manual_seed(step)
    random.seed(step)
    return row.loss(model, step)


_wants: dict[str, tuple] = {}


def want(name: str):
    """(losses, snapshot, buffers) of plain PyTorch, computed once."""
    if name not in _wants:
        row = ROWS[name]
        oracle = Oracle(row.build(), lr=1e-3, weight_decay=0.1, leaf_bytes=LEAF_BYTES, blocks=row.blocks)
        losses = []
        for step in range(STEPS):
            loss = seeded(row, oracle.model, step)
            losses.append(loss.item())
            oracle.backward(loss)
            oracle.step()
        _wants[name] = losses, oracle.snapshot(), dict(oracle.model.named_buffers())
    return _wants[name]


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("name", ROWS)
def test_trains_like_plain_pytorch(tmp_path, name, device):
    losses, snapshot, buffers = want(name)
    row, got = ROWS[name], []
    model = row.build()
    options = dict(OPTIONS, **NVME, blocks=row.blocks, device=device)
    with Engine(model, nvme_path=str(tmp_path), device_memory=tight(model, blocks=row.blocks, device=device), **options) as engine:
        for step in range(STEPS):
            loss = seeded(row, engine, step)
            got.append(loss.item())
            engine.backward(loss)
            engine.step()
        assert got == losses
        slabs = engine.report()["slabs"]
        assert not any(c["shards"] > c["count"] > 2 for c in slabs) and any(c["shards"] > c["count"] for c in slabs) == bool(engine.trace.busy["evict"])
        assert_same(engine_snapshot(engine), snapshot)
        for key, value in model.named_buffers():
            assert torch.equal(value, buffers[key]), key


@pytest.mark.parametrize("name", GENERATING)
def test_generates_like_plain_pytorch(tmp_path, name):
    """With the cache of its architecture."""
    plain, model = ROWS[name].build().eval(), ROWS[name].build().eval()
    prompt = dict(input_features=floats(0, 2, 8, 32)) if name == "whisper" else dict(input_ids=tokens(0)[:, :6])
    options = dict(OPTIONS, **NVME, device_memory=tight(model))
    want = plain.generate(**prompt, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=0)
    with Engine(model, nvme_path=str(tmp_path), **options):
        assert torch.equal(model.generate(**prompt, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=0), want)
