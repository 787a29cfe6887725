"""Bits: every placement, chunk size, backend, device, thread count and instruction set trains like the in-memory reference."""

from __future__ import annotations

import pytest
import torch
from models import batches, engine_run, llama, oracle_run
from oracle import assert_same

from zinf import ops
from zinf.engine import Engine

NVME = dict(weights="nvme", state="nvme")


def check(got, want):
    losses, norms, snapshot = got
    assert losses == want[0]
    assert norms == want[1]
    assert_same(snapshot, want[2])


PLACEMENTS = {
    "memory": dict(paths=0),
    "host": dict(weights="host", state="host"),
    "device": dict(weights="device", state="host"),
    "state on nvme": dict(weights="host", state="nvme"),
    "nvme": dict(**NVME),
    "half": dict(weights=0.5, state=0.5),
    "auto within a budget": dict(host_memory="2MiB", chunk_size=4096),
}


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_twenty_steps_in_every_placement(tmp_path, placement, device):
    check(engine_run(tmp_path, 20, device=device, **{"chunk_size": 8192, **PLACEMENTS[placement]}), oracle_run(20))


@pytest.mark.parametrize("chunk_size", [2048, 6144, 1 << 20])
@pytest.mark.parametrize("paths", [1, 2, 3])
def test_chunk_sizes_and_paths(tmp_path, chunk_size, paths):
    check(engine_run(tmp_path, 5, paths=paths, chunk_size=chunk_size, **NVME), oracle_run(5))


@pytest.mark.parametrize("backend", ["uring", "threads", "python"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_backends(tmp_path, backend, device):
    check(engine_run(tmp_path, 4, backend=backend, device=device, chunk_size=4096, **NVME), oracle_run(4))


@pytest.mark.parametrize("isa", ops.available_isas())
def test_instruction_sets(tmp_path, isa, monkeypatch):
    monkeypatch.setenv("ZINF_ISA", isa)
    check(engine_run(tmp_path, 4, chunk_size=8192, **NVME), oracle_run(4))


@pytest.mark.parametrize("threads", [1, 2])
def test_threads(tmp_path, threads):
    check(engine_run(tmp_path, 4, cpu_threads=threads, **NVME), oracle_run(4))


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("mode", ["backward", "deferred"])
def test_step_modes_agree_when_clipping_does_not_bite(tmp_path, mode, device):
    check(engine_run(tmp_path, 5, step_mode=mode, device=device, chunk_size=4096, **NVME), oracle_run(5))


@pytest.mark.parametrize("placement", ["memory", "nvme"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_clipping_that_bites(tmp_path, placement, device):
    want = oracle_run(5, max_grad_norm=0.25)
    assert min(want[1]) > 0.25
    check(engine_run(tmp_path, 5, max_grad_norm=0.25, device=device, chunk_size=4096, **PLACEMENTS[placement]), want)


@pytest.mark.parametrize("accumulation", [2, 4])
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("mode", ["backward", "deferred"])
def test_accumulation(tmp_path, accumulation, device, mode):
    check(engine_run(tmp_path, 4, accumulation=accumulation, device=device, step_mode=mode, chunk_size=4096, **NVME), oracle_run(4, accumulation=accumulation))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("placement", ["memory", "nvme"])
def test_other_precisions(tmp_path, dtype, placement):
    check(engine_run(tmp_path, 4, dtype=dtype, chunk_size=4096, loss_scale=1, **PLACEMENTS[placement]), oracle_run(4, dtype=dtype))


def test_adam_with_l2(tmp_path):
    check(engine_run(tmp_path, 4, optimizer="adam", **NVME), oracle_run(4, decoupled=False))


def test_untied_head(tmp_path):
    check(engine_run(tmp_path, 4, tied=False, **NVME), oracle_run(4, tied=False))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_micro_batches_have_the_same_bits_everywhere(tmp_path, accumulation):
    options = dict(accumulation=accumulation, micro_batch_size=1)
    places = (dict(paths=0), dict(device="sim", chunk_size=4096, **NVME), dict(step_mode="backward", **NVME))
    runs = [engine_run(tmp_path, 3, **options, **place) for place in places]
    for run in runs[1:]:
        check(run, runs[0])
    whole = oracle_run(3, accumulation=accumulation)
    assert runs[0][0] == pytest.approx(whole[0], rel=1e-2)  # other shapes in matmul: same numbers up to bf16 rounding


def test_micro_batches_equal_a_sum_over_rows(tmp_path):
    """One row at a time in fp32: the gradient norm is that of the whole batch, up to fp32 summation."""
    a = engine_run(tmp_path, 1, dtype=torch.float32, micro_batch_size=1, paths=0)
    b = engine_run(tmp_path, 1, dtype=torch.float32, paths=0)
    assert a[0] == pytest.approx(b[0], rel=1e-5)
    assert a[1] == pytest.approx(b[1], rel=1e-5)


def test_gradients_are_those_of_plain_pytorch(tmp_path):
    """With lr 0 and no decay nothing moves, and the first moment is (1 - beta1) times the gradient."""
    plain = llama()
    ids = batches(1)[0]
    plain(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    _, _, (_, state) = engine_run(tmp_path, 1, lr=0.0, weight_decay=0.0, betas=(0.5, 0.5), **NVME)
    grads = {name: p.grad for name, p in plain.named_parameters()}
    with Engine(llama(), leaf_bytes=4096) as engine:
        for shard in engine.layout.shards:
            for r, run in enumerate(shard.runs):
                moment = state[shard.name, r][1]
                for p in run.params:
                    assert torch.equal(moment[p.offset : p.offset + p.numel], grads[p.name].float().reshape(-1) * 0.5), p.name
