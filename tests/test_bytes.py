"""NVMe bytes of a step: what the schedule says, what the engine counts, what the kernel counts."""

from __future__ import annotations

import pytest
from models import HYPER, LEAF_BYTES, batches, llama, train

from zinf.engine import Engine
from zinf.schedule import moves

LAYERS = 16
STEPS = 4


def kernel_bytes() -> tuple[int, int]:
    """(read, written) of this process at the block layer, from /proc/self/io."""
    with open("/proc/self/io") as f:
        fields = dict(line.strip().split(": ") for line in f)
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def settle(engine: Engine) -> None:
    """Let what is moving come to its end. Steps that are pending stay so: the same at both ends of a measurement."""
    engine.memory.parts.fetcher.drain()
    engine.memory.parts.stepper.drain()


def bytes_of_a_step(folder, **options):
    """Steady state, per parameter and step: ((read, written) counted by the engine, the same by the kernel, fetches of weights)."""
    model = llama(tied=False, num_hidden_layers=LAYERS, hidden_size=128, intermediate_size=384)
    with Engine(model, nvme_path=str(folder), leaf_bytes=LEAF_BYTES, chunk_size=65536, max_grad_norm=1.0, **HYPER, **options) as engine:
        train(engine, 2)
        settle(engine)
        engine_before, kernel_before = engine.stats(), kernel_bytes()
        for ids in batches(STEPS):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        settle(engine)
        engine_after, kernel_after = engine.stats(), kernel_bytes()
        per = engine.layout.numel * STEPS
        counted = tuple((engine_after[k] - engine_before[k]) / per for k in ("bytes_read", "bytes_written"))
        seen = tuple((b - a) / per for a, b in zip(kernel_before, kernel_after, strict=True))
        classes = {s: k for k, c in enumerate(engine.memory.plan.slabs) for s in c.members}
        plan = moves(engine.conductor.train.uses, classes, [c.count for c in engine.memory.plan.slabs], engine.memory.lookahead, steps=3) if classes else []
        fetched = sum(engine.layout.shards[m.shard].numel for m in plan if m.verb == "fetch") / engine.layout.numel
        return counted, seen, fetched


def test_all_on_nvme(tmp_path):
    """State is read and written once (10 + 10), weights are written once (2) and read as often as the schedule fetches them."""
    counted, seen, fetched = bytes_of_a_step(tmp_path, weights="nvme", state="nvme")
    assert 1.4 < fetched < 1.5  # forward and backward, less the four slabs at each turn: 2 (16 - 4) / 16, embedding and head apart
    assert counted[0] == pytest.approx(10 + 2 * fetched, rel=0.03)
    assert counted[1] == pytest.approx(12, rel=0.03)
    assert seen == pytest.approx(counted, rel=0.03)


def test_weights_in_memory(tmp_path):
    counted, seen, _ = bytes_of_a_step(tmp_path, weights="host", state="nvme", commit_every=0)
    assert counted == pytest.approx((10, 10), rel=0.03)
    assert seen == pytest.approx(counted, rel=0.03)


def test_half_of_the_state_in_memory(tmp_path):
    counted, _, _ = bytes_of_a_step(tmp_path, weights="host", state=0.5, commit_every=0)
    assert counted[0] == pytest.approx(counted[1], rel=0.01)
    assert 4.5 < counted[0] < 6


def test_all_in_memory_moves_nothing(tmp_path):
    counted, _, _ = bytes_of_a_step(tmp_path, weights="host", state="host", commit_every=0)
    assert counted == (0, 0)


def test_frozen_weights_are_never_written(tmp_path):
    model = llama(tied=False)
    for layer in model.model.layers:
        layer.requires_grad_(False)
    with Engine(model, nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, weights="nvme", state="nvme", **HYPER) as engine:
        train(engine, 2)
        engine.synchronize()
        trained = sum(r.padded for s in engine.layout.shards for r in s.runs if r.trainable)
        before = engine.stats()["bytes_written"]
        train(engine, 2)
        engine.synchronize()
        assert engine.stats()["bytes_written"] - before <= 2 * 12 * trained
