"""Grads on NVMe: where host memory cannot hold them until their step they wait on the drive, with the same bits, and it is said."""

from __future__ import annotations

import errno
import gc
import os

import pytest
import torch
from models import HYPER, LEAF_BYTES, batches, engine_run, llama, oracle_run, train
from oracle import assert_same, engine_snapshot

from zinf import placement
from zinf.aio.faults import Rule
from zinf.engine import Engine
from zinf.errors import BudgetError, EngineError, StoreError
from zinf.tiers import device as devices
from zinf.tiers import directory, host

NVME = dict(weights="nvme", state="nvme", chunk_size=4096)
SMALL = {1: "1MiB", 2: "2MiB"}  # of host memory, by backwards in a step: holds the ring and a few buffers, not the grads of 16 layers


def check(got, want):
    assert got[0] == want[0]
    assert got[1] == want[1]
    assert_same(got[2], want[2])


def begin(folder, resume=False, layers=4, **options):
    return Engine(llama(num_hidden_layers=layers), nvme_path=str(folder), resume=resume, leaf_bytes=LEAF_BYTES, **{**NVME, **HYPER, **options})


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("mode", ["backward", "deferred"])
@pytest.mark.parametrize("accumulation", [1, 3, 4], ids=["one", "two of three", "four"])  # 4 rows are cut into 1, 2 and 4 parts
def test_the_same_bits(tmp_path, device, mode, accumulation):
    got = engine_run(tmp_path, 4, accumulation=accumulation, device=device, step_mode=mode, grads="nvme", **NVME)
    check(got, oracle_run(4, accumulation=accumulation))


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("options", [dict(weights="host", state="host"), dict(weights=0.5, state=0.5), dict(chunk_size=1 << 20), dict(paths=2),
                                     dict(backend="python")], ids=["host", "half", "large chunks", "two paths", "python"])  # fmt: skip
def test_wherever_the_records_are(tmp_path, device, options):
    got = engine_run(tmp_path, 3, accumulation=2, device=device, max_grad_norm=0.25, grads="nvme", **{**NVME, **options})
    check(got, oracle_run(3, accumulation=2, max_grad_norm=0.25))


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize(
    "options",
    [
        dict(micro_batch_size=1),
        dict(micro_batch_size=1, accumulation=2),
        dict(grad_accum_dtype="bf16", accumulation=2),
        dict(dtype=torch.float16),
        dict(dtype=torch.float32),
    ],
    ids=["micro", "micro, accumulated", "bf16", "fp16", "fp32"],
)
def test_as_with_grads_on_the_host(tmp_path, device, options):
    runs = [engine_run(tmp_path, 3, device=device, grads=grads, max_grad_norm=1.0, **NVME, **options) for grads in ("host", "nvme")]
    check(runs[1], runs[0])


@pytest.mark.parametrize("mode", ["backward", "deferred"])
def test_races_on_the_sim_device(tmp_path, mode, monkeypatch):
    """Copies ten times slower than compute: grads leave, come back and are added to in the right order."""
    real = devices.SimDevice
    monkeypatch.setattr(devices, "SimDevice", lambda seed: real(seed, delay=0.02))
    check(engine_run(tmp_path, 2, accumulation=4, device="sim", step_mode=mode, grads="nvme", **NVME), oracle_run(2, accumulation=4))


def test_several_backwards_without_saying_so(tmp_path):
    def run(grads):
        with begin(tmp_path / grads, grads=grads, max_grad_norm=1.0, device="sim") as engine:
            for ids in batches(3):
                for part in ids.chunk(2):
                    engine.backward(engine(input_ids=part, labels=part).loss)
                engine.step()
            return engine_snapshot(engine)

    for grads in ("host", "nvme"):
        os.mkdir(tmp_path / grads)
    assert_same(run("nvme"), run("host"))


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_they_go_there_when_the_budget_forces_it(tmp_path, device, accumulation):
    """Allocations are the plan's and within the budget; a budget that would do for grads on the host is refused where they must stay there."""
    gc.collect()
    before = host.allocated_bytes()
    budget = dict(layers=16, host_memory=SMALL[accumulation], device_memory="1MiB", device=device, max_grad_norm=1.0, gradient_accumulation_steps=accumulation)
    with pytest.raises(BudgetError, match="host memory: zinf needs"):
        begin(tmp_path, grads="host", **budget)
    with begin(tmp_path, **{**budget, "host_memory": "8MiB"}, grads="auto") as engine:
        assert engine.report()["grads"] == "host"
        want = train(engine, 2, accumulation)
        snapshot = engine_snapshot(engine)
    with begin(tmp_path, run_name="forced", **budget) as engine:
        plan = engine.memory.plan
        assert engine.report()["grads"] == "nvme"
        assert any(line.startswith("grads    wait on NVMe, as host_memory cannot hold them") for line in engine.plan())
        shared = [s.grads_nbytes(accumulation > 1) for s, g in zip(engine.layout.shards, engine.memory.grads.of, strict=True) if g.away is not None]
        own = [s.grads_nbytes(accumulation > 1) for s, g in zip(engine.layout.shards, engine.memory.grads.of, strict=True) if g.away is None]
        assert len(shared) == 16 and plan.host["grads"] == 3 * max(shared) + sum(own)
        assert plan.host_nbytes <= engine.config.host_memory
        allocated = host.allocated_bytes() - before
        assert allocated == plan.host_nbytes + (plan.device_nbytes if device == "cpu" else 0)
        assert train(engine, 2, accumulation) == want
        assert_same(engine_snapshot(engine), snapshot)
        assert host.allocated_bytes() - before == allocated
        assert engine.stats()["counts"].get("grad buffers beyond the plan", 0) == 0


def test_the_bytes_they_move(tmp_path):
    """Accumulated k times: written k times; read k - 1 times to be added to, once to be stepped with."""
    moved = {}
    for grads in ("host", "nvme"):
        for accumulation in (1, 2, 4):
            options = dict(
                run_name=f"{grads}{accumulation}", grads=grads, max_grad_norm=1.0, gradient_accumulation_steps=accumulation, weights="host", commit_every=0
            )
            with begin(tmp_path, **options) as engine:
                train(engine, 2, accumulation)
                engine.synchronize()
                before = engine.stats()
                train(engine, 2, accumulation)
                engine.synchronize()
                after = engine.stats()
                away = sum(g.away.nbytes for g in engine.memory.grads.of if g.away is not None)
                moved[grads, accumulation] = [after[k] - before[k] for k in ("bytes_read", "bytes_written")]
                if grads == "nvme":
                    assert f"{placement.human(away * accumulation)} written" in "\n".join(engine.plan())
                    for mine, other in zip(moved[grads, accumulation], moved["host", accumulation], strict=True):
                        assert mine - other == 2 * accumulation * away


def test_the_minimum_is_a_few_buffers():
    from test_memory import MIB, big

    model = big(40)
    asked = placement.Request(host_memory=41 * MIB, weights="nvme", state="nvme", grads_wait=True, grads_wide=True)
    plan = placement.plan(model, asked, root=40)
    assert plan.grads_away and plan.host["grads"] == 3 * 4 * MIB + 8192
    assert plan.host["grads in flight"] == 8 * (1 << 20)
    with pytest.raises(BudgetError, match="grads in flight"):
        placement.plan(model, placement.Request(host_memory=20 * MIB, weights="nvme", state="nvme", grads_wide=True), root=40)
    with pytest.raises(BudgetError, match="nvme_path"):
        placement.plan(model, placement.Request(on_nvme=False, grads="nvme"), root=40)
    assert not placement.plan(model, placement.Request(host_memory=1 << 30), root=40).grads_away


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_dropped_and_skipped(tmp_path, device):
    """zero_grad forgets what is on NVMe; a step with a gradient that is not finite changes nothing."""
    with begin(tmp_path, device=device, grads="nvme", gradient_accumulation_steps=2, max_grad_norm=1.0) as engine:
        ids = batches(3)
        for step, batch in enumerate(ids):
            if step == 1:
                loss = engine(input_ids=ids[2], labels=ids[2]).loss
                engine.backward(loss)
                engine.zero_grad()
                for part, factor in zip(batch.chunk(2), (1.0, float("nan")), strict=True):
                    engine.backward(engine(input_ids=part, labels=part).loss * factor)
                assert engine.step().skipped
            for part in batch.chunk(2):
                engine.backward(engine(input_ids=part, labels=part).loss / 2)
            engine.step()
        assert_same(engine_snapshot(engine), oracle_run(3, 2, 1.0)[2])


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize(("kind", "error"), [("r", errno.EIO), ("w", errno.ENOSPC)])
@pytest.mark.parametrize(("nth", "again"), [(2, "resume"), (7, "resume"), (7, "recover")])
def test_an_error_of_the_disk(tmp_path, monkeypatch, device, kind, error, nth, again):
    """It surfaces as OSError, nothing hangs, and the run goes on from its last commit with the same bits."""
    monkeypatch.setenv("ZINF_IO_BACKEND", "faults:uring")
    options = dict(device=device, grads="nvme", gradient_accumulation_steps=2, max_grad_norm=1.0)
    engine = begin(tmp_path, **options)
    engine.memory.io.disarm()
    train(engine, 2, 2)
    engine.synchronize()
    engine.memory.io.arm([Rule(kind, "grads", nth=nth, error=error)])
    with pytest.raises(OSError) as raised:
        train(engine, 6, 2, first=2)
    assert raised.value.errno == error and "grads" in str(raised.value.filename)
    with pytest.raises(EngineError, match=r"stopped at an error|ended in an exception"):
        engine.backward(engine(input_ids=batches(1)[0], labels=batches(1)[0]).loss)
    if again == "recover":
        engine.memory.io.disarm()
        engine.recover()
    else:
        engine.close()
        engine = begin(tmp_path, resume=True, **options)
    with engine:
        engine.memory.io.disarm()
        first = engine.global_step
        assert first >= 2
        train(engine, 6, 2, first=first)
        assert_same(engine_snapshot(engine), oracle_run(6, 2, 1.0)[2])


def test_a_storm_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("ZINF_IO_BACKEND", "faults:threads")
    check(engine_run(tmp_path, 3, accumulation=2, device="sim", grads="nvme", **NVME), oracle_run(3, accumulation=2))


def test_a_full_disk_is_found_before_any_work(tmp_path, monkeypatch):
    real = directory.check_space

    def full(needs, freed=None, what="the store", **more):
        if what != "the store":
            monkeypatch.setattr(directory, "_SLACK", 1 << 60)
        real(needs, freed, what, **more)

    monkeypatch.setattr(directory, "check_space", full)
    with pytest.raises(StoreError, match=r"bytes of grads needs .* are free there .*raise host_memory"):
        begin(tmp_path, grads="nvme", max_grad_norm=1.0)
    monkeypatch.undo()
    with begin(tmp_path, grads="nvme", max_grad_norm=1.0) as engine:
        train(engine, 1)
    assert not any(path.name in directory.SCRATCH for path in tmp_path.rglob("*"))
