"""Memory: what zinf allocates is what the plan says, and the plan keeps the budgets; too small a budget is refused with numbers."""

from __future__ import annotations

import gc

import pytest
from models import HYPER, LEAF_BYTES, llama, train

from zinf import layout, placement
from zinf.engine import Engine
from zinf.errors import BudgetError
from zinf.tiers import host

MIB = 1 << 20
NVME = dict(weights="nvme", state="nvme")


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("options", [dict(), dict(max_grad_norm=1.0), dict(gradient_accumulation_steps=2), dict(micro_batch_size=1)])
def test_allocations_are_the_plan_and_within_budget(tmp_path, device, options):
    gc.collect()
    before = host.allocated_bytes()
    budgets = dict(host_memory=3 * MIB, device_memory=2 * MIB)
    with Engine(llama(), nvme_path=str(tmp_path), device=device, leaf_bytes=LEAF_BYTES, chunk_size=2048, **NVME, **budgets, **HYPER, **options) as engine:
        plan = engine.memory.plan
        allocated = host.allocated_bytes() - before
        assert allocated == plan.host_nbytes + (plan.device_nbytes if device == "cpu" else 0)
        assert plan.host_nbytes <= 3 * MIB and plan.device_nbytes <= 2 * MIB
        train(engine, 2, options.get("gradient_accumulation_steps", 1))
        assert host.allocated_bytes() - before == allocated
        assert engine.stats()["counts"].get("grad buffers beyond the plan", 0) == 0
    assert host.allocated_bytes() == before


@pytest.mark.parametrize("tier", ["host", "device"])
def test_a_budget_below_the_minimum_is_refused_with_numbers(tmp_path, tier):
    with pytest.raises(BudgetError, match=rf"{tier} memory: zinf needs .* but {tier}_memory is 64.0 KiB: raise {tier}_memory"):
        Engine(llama(), nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, **{f"{tier}_memory": 65536}, **NVME, **HYPER)
    assert not any(tmp_path.rglob("state"))  # before any work


def big(layers: int = 10) -> layout.Model:
    block = layout.make_shard("block", [("w", (1024, 1024), "bf16", True)])
    root = layout.make_shard("root", [("norm", (1024,), "bf16", True)])
    return layout.Model((block,) * layers + (root,), 1 << 18)


def test_more_budget_never_moves_less_to_memory():
    resident = []
    for budget in range(41 * MIB, 200 * MIB, 4 * MIB):
        plan = placement.plan(big(), placement.Request(host_memory=budget), root=10)
        assert plan.host_nbytes <= budget
        resident.append((plan.host.get("weights", 0), plan.host.get("state", 0)))
    assert resident == sorted(resident)
    assert resident[0] == (0, resident[0][1]) and resident[-1][0] == 20 * MIB


def test_weights_come_to_memory_before_state():
    plan = placement.plan(big(), placement.Request(host_memory=75 * MIB), root=10)
    assert all(t is placement.Tier.HOST for t in plan.weights[:10])
    assert placement.Tier.NVME in plan.state


def test_slabs_grow_with_the_device_budget_and_share_sizes():
    small = placement.plan(big(), placement.Request(device_memory=5 * MIB, weights="nvme"), root=10)
    assert [(c.nbytes, c.count, len(c.members)) for c in small.slabs] == [(2 * MIB, 2, 10)]
    large = placement.plan(big(), placement.Request(weights="nvme"), root=10)
    assert large.slabs[0].count == 4  # the one that computes, two ahead, one that drains
