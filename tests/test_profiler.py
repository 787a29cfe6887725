"""zinf.profile counts what a step computes, the same whether a model is in memory, streamed, or recomputed; and changes nothing."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import LEAF_BYTES, batches, llama
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import zinf
from zinf.engine import Engine
from zinf.errors import EngineError
from zinf.integrations import deepspeed

ROWS, LENGTH, HIDDEN, INNER, VOCAB = 4, 24, 64, 176, 512  # of models.py
TOKENS = ROWS * LENGTH


def batch() -> dict[str, torch.Tensor]:
    ids = batches(1)[0]
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def model(**options: Any) -> nn.Module:
    return llama(num_hidden_layers=2, **options)


def counts(found: Any) -> dict[str, tuple[int, int]]:
    return {row.name: (row.forward, row.backward) for row in found.rows}


def test_the_numbers_are_those_of_paper() -> None:
    """A linear layer of n x m over t tokens: 2ntm forward, twice that backward; recomputed never."""
    found = in_memory()
    up = found["model.layers.1.mlp.up_proj"]
    assert (up.params, up.macs, up.forward) == (HIDDEN * INNER, TOKENS * HIDDEN * INNER, 2 * TOKENS * HIDDEN * INNER)
    assert up.backward == 2 * up.forward and up.recompute == 0 and up.calls == 1 and up.seconds > 0
    head = found["lm_head"]
    assert head.forward == 2 * TOKENS * HIDDEN * VOCAB and found["model.embed_tokens"].forward == 0
    attention = found["model.layers.0.self_attn"]
    linear = sum(found[f"model.layers.0.self_attn.{n}_proj"].forward for n in "qkvo")
    assert attention.forward - linear == 2 * 2 * ROWS * 4 * LENGTH * LENGTH * (HIDDEN // 4)  # QK and PV, 4 heads
    assert found.total.params == sum(p.numel() for p in model().parameters())
    layers = [found[f"model.layers.{i}"] for i in range(2)]
    assert found.total.forward == sum(row.forward for row in layers) + head.forward and found.total.backward == sum(r.backward for r in layers) + head.backward


def test_the_sums_are_those_of_torchs_counter() -> None:
    """Of operations that torch has formulas for itself (eager attention is made of them)."""
    one, other = model(), model()
    for m in (one, other):
        m.set_attn_implementation("eager")  # type: ignore[operator]
    with FlopCounterMode(display=False) as counter:
        forward = one(**batch()).loss
        before = counter.get_total_flops()
        forward.backward()
    found = zinf.profile(other, batch()).total
    assert (found.forward, found.backward) == (before, counter.get_total_flops() - before)


@functools.cache
def in_memory() -> Any:
    return zinf.profile(model(), batch())


@pytest.mark.parametrize(
    ("device", "options"),
    [("cpu", {"recompute": False}), ("cpu", {"step_mode": "backward"}), ("sim", {"max_grad_norm": 1.0}), ("sim", {"micro_batch_size": 2})],
    ids=str,
)
def test_streaming_counts_the_same(tmp_path: Path, device: str, options: dict[str, Any]) -> None:
    plain = in_memory()
    with Engine(model(), nvme_path=str(tmp_path), weights="nvme", state="nvme", leaf_bytes=LEAF_BYTES, device=device, fused_head="off", **options) as engine:
        found = zinf.profile(engine, batch())
        assert counts(found) == counts(plain)
        recomputed = {row.name for row in found.rows if row.recompute}
        if options.get("recompute") is False:
            assert recomputed == set()
        else:
            assert all(row.recompute == row.forward for row in found.rows if row.name.startswith("model.layers.")) and "lm_head" not in recomputed


def test_it_changes_nothing(tmp_path: Path) -> None:
    """A run with a profile in it has the bits of one without, also where shards are stepped under backward."""

    def run(folder: str, profiled: bool) -> tuple[float, dict[str, torch.Tensor]]:
        torch.manual_seed(1)
        (tmp_path / folder).mkdir()
        with Engine(model(attention_dropout=0.1), nvme_path=str(tmp_path / folder), lr=1e-3, leaf_bytes=LEAF_BYTES, step_mode="backward") as engine:
            for i in range(2):
                if profiled and i == 1:
                    zinf.profile(engine, batch())
                loss = engine(**batch()).loss
                engine.backward(loss)
                engine.step()
            return loss.item(), engine.state_dict()

    (loss, weights), (other, others) = run("a", False), run("b", True)
    assert loss == other and all(torch.equal(weights[name], others[name]) for name in weights)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    plain[0].weight.grad = grad = torch.ones(4, 3)
    before = plain[1].running_mean.clone()
    assert zinf.profile(plain, torch.randn(5, 3)).total.forward == 2 * 5 * 3 * 4
    assert plain[0].weight.grad is grad and plain[0].bias.grad is None and torch.equal(plain[1].running_mean, before)


def test_grads_that_wait_are_not_mixed() -> None:
    with Engine(model(), leaf_bytes=LEAF_BYTES, max_grad_norm=1.0) as engine:
        engine.backward(engine(**batch()).loss)
        with pytest.raises(EngineError, match="profile between a backward and its step"):
            zinf.profile(engine, batch())


def test_batches_and_losses_of_all_kinds() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(5, 3)
    for given in (x, (x,), {"input": x}):
        assert zinf.profile(layer, given).total.backward > 0
    found = zinf.profile(layer, x, backward=False).total
    assert (found.forward, found.backward) == (60, 0)
    assert zinf.profile(layer, x, loss=lambda out: out[0, 0]).total.backward > 0


def test_the_table(tmp_path: Path) -> None:
    found = in_memory()
    whole = found.table().splitlines()
    assert any("up_proj: Linear" in line and "11.3 k" in line and "1.08 M" in line for line in whole)
    assert whole[0].startswith("parameters ") and "FLOPs forward" in whole[0]
    short = found.table(module_depth=1, top_modules=2).splitlines()
    assert "depth 1  top 2 in MACs: Linear 3.15 M" not in short and not any("up_proj" in line for line in short)
    assert any(line.startswith("depth 1  top 2 in MACs: LlamaModel") and "Linear" in line for line in short)
    assert len(found.table(detailed=False).splitlines()) < len(short) + 10
    found.write(tmp_path / "out.txt", module_depth=0)
    assert (tmp_path / "out.txt").read_text() == found.table(module_depth=0)


@pytest.mark.parametrize("by_file", [True, False])
def test_the_key_of_deepspeed(tmp_path: Path, caplog: pytest.LogCaptureFixture, by_file: bool) -> None:
    """One step is profiled, the loop goes on as ever."""
    out = tmp_path / "profile.txt"
    section = {"enabled": True, "profile_step": 1, "module_depth": 2, "output_file": str(out) if by_file else None}
    config = {"train_batch_size": 4, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "flops_profiler": section}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    caplog.set_level("INFO", logger="zinf")
    engine, *_ = deepspeed.initialize(model=model(), config=str(tmp_path / "ds.json"), leaf_bytes=LEAF_BYTES, fused_head="off")
    with engine:
        for i in range(3):
            assert (out.exists() if by_file else "FLOPs forward" in caplog.text) is (i > 1)
            engine.backward(engine(**batch()).loss)
            engine.step()
    text = out.read_text() if by_file else caplog.text
    first = in_memory().table().splitlines()[0].split("  ")
    assert all(part in text for part in first[:2]) and "LlamaModel" in text and "up_proj" not in text
