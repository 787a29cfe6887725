"""The planner: each row of the cost model against numbers worked out by hand, what can only help never hurts, every refusal says what to change."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from models import HYPER, LEAF_BYTES, llama, train

from zinf import cli, layout, memory, placement
from zinf.engine import Engine
from zinf.errors import BudgetError, ConfigError
from zinf.placement import Tier
from zinf.planner import advice, cost, machine
from zinf.planner.cost import Traffic, Workload
from zinf.planner.machine import Machine
from zinf.planner.model import Facts, active_parameters

N = 1 << 20  # parameters of a block
BLOCKS = 8
HIDDEN = 512
GB = 10**9
BOX = Machine(
    name="box", device_memory=8 * GB, host_memory=8 * GB, flops=2e12, efficiency=0.5, link=2e9, dram=4e9,
    nvme_read=4e9, nvme_write=1e9, nvme_size=1000 * GB, endurance=600 * 1000 * GB,
)  # fmt: skip
LLAMA_70B = """
model_type: llama
hidden_size: 8192
intermediate_size: 28672
num_hidden_layers: 80
num_attention_heads: 64
num_key_value_heads: 8
vocab_size: 128256
tie_word_embeddings: false
"""


def facts(blocks: int = BLOCKS, n: int = N, trainable: bool = True) -> Facts:
    model = layout.Model(tuple(layout.make_shard(f"block{i}", [("w", (n,), "bf16", trainable)]) for i in range(blocks)), 1 << 18)
    return Facts("toy", model, None, (), blocks, HIDDEN, model.numel)


def placed(weights: Tier, state: Tier, slabs: int = 1, **more: object) -> placement.Plan:
    """A plan that streams all blocks through `slabs` slabs."""
    plan = placement.plan(facts().layout, placement.Request(direct=False), None)
    one = placement.SlabClass(2 * N, tuple(range(BLOCKS)), slabs)
    return dataclasses.replace(plan, weights=(weights,) * BLOCKS, state=(state,) * BLOCKS, slabs=(one,), **more)  # type: ignore[arg-type]


NARROW = placement.Request(direct=False)


def step_of(plan: placement.Plan, deferred: bool = True, tokens: int = 1000) -> Traffic:
    forward, backward = cost.phases(facts(), plan, Workload(batch=1, seq=tokens), deferred, NARROW)
    return forward + backward


# ------------------------------------------------------------------------------------------------------ bytes, by hand


def test_compute_is_eight_flop_a_parameter_and_token() -> None:
    assert step_of(placed(Tier.NVME, Tier.NVME)).flops == 8 * BLOCKS * N * 1000


def test_everything_on_nvme_reads_14_and_writes_12_bytes() -> None:
    t = step_of(placed(Tier.NVME, Tier.NVME, slabs=0))
    assert (t.nvme_read, t.nvme_write) == (14 * BLOCKS * N, 12 * BLOCKS * N)
    assert t.dram == 58 * BLOCKS * N  # 32 as in memory, and each of those 26 crosses once more


def test_weights_and_grads_in_memory_read_10_and_write_10() -> None:
    t = step_of(placed(Tier.HOST, Tier.NVME, slabs=0))
    assert (t.nvme_read, t.nvme_write) == (10 * BLOCKS * N, 10 * BLOCKS * N)


def test_state_in_memory_costs_dram_alone() -> None:
    t = step_of(placed(Tier.HOST, Tier.HOST, slabs=0))
    assert (t.nvme_read, t.nvme_write, t.dram) == (0, 0, 32 * BLOCKS * N)
    assert cost.commit(facts(), placed(Tier.HOST, Tier.HOST), 50).nvme_write == 12 * BLOCKS * N / 50


def test_a_fraction_of_the_state_in_memory_saves_that_fraction() -> None:
    plan = placed(Tier.HOST, Tier.NVME)
    t = step_of(dataclasses.replace(plan, state=(Tier.HOST,) * 2 + (Tier.NVME,) * 6))
    assert (t.nvme_read, t.nvme_write) == (10 * 6 * N, 10 * 6 * N)


def test_links_carry_weights_twice_grads_once_and_boundaries() -> None:
    t = step_of(placed(Tier.HOST, Tier.HOST, slabs=0))
    assert (t.h2d, t.d2h) == (4 * BLOCKS * N, 2 * BLOCKS * N)  # activations on the device
    t = step_of(placed(Tier.HOST, Tier.HOST, slabs=0, activations=Tier.HOST, activations_nbytes=1 << 40))
    kept = 2 * BLOCKS * HIDDEN * 1000
    assert (t.h2d, t.d2h, t.nvme_write) == (4 * BLOCKS * N + kept, 2 * BLOCKS * N + kept, 0)


def test_activations_beyond_their_memory_go_to_nvme_and_back() -> None:
    t = step_of(placed(Tier.HOST, Tier.HOST, activations=Tier.HOST, activations_nbytes=192_000))
    assert (t.nvme_read, t.nvme_write) == (8_000_000, 8_000_000)  # 2 x 8 x 512 x 1000 is 8,192,000


def test_what_slabs_keep_is_not_uploaded_again() -> None:
    assert step_of(placed(Tier.NVME, Tier.NVME, slabs=3)).h2d == (8 + 5) * 2 * N
    assert step_of(placed(Tier.NVME, Tier.NVME, slabs=3)).nvme_read == (10 * 8 + 2 * (8 + 5)) * N
    assert step_of(placed(Tier.NVME, Tier.NVME, slabs=8)).h2d == 8 * 2 * N


def test_grads_that_wait_on_nvme_are_written_and_read() -> None:
    t = step_of(placed(Tier.HOST, Tier.NVME, grads_away=True))
    assert (t.nvme_read, t.nvme_write) == (12 * BLOCKS * N, 12 * BLOCKS * N)


def test_frozen_weights_are_read_and_never_written() -> None:
    still = facts(trainable=False)
    forward, backward = cost.phases(still, placed(Tier.NVME, Tier.NVME, slabs=0), Workload(batch=1, seq=1), True, NARROW)
    t = forward + backward
    assert (t.nvme_read, t.nvme_write, t.d2h) == (4 * BLOCKS * N, 0, 0)
    assert cost.store_nbytes(still) == 2 * BLOCKS * N and cost.store_nbytes(facts()) == 24 * BLOCKS * N


def test_stepping_under_backward_moves_the_optimizer_there() -> None:
    plan = placed(Tier.HOST, Tier.NVME)
    for deferred, forward, backward in ((True, 10 * BLOCKS * N, 0), (False, 0, 10 * BLOCKS * N)):
        phases = cost.phases(facts(), plan, Workload(batch=1, seq=1), deferred, NARROW)
        assert tuple(p.nvme_write for p in phases) == (forward, backward)


def test_experts_count_by_how_many_are_chosen() -> None:
    shard = layout.make_shard("b", [("b.mlp.experts.0.w", (8000,), "bf16", True), ("b.attn", (1000,), "bf16", True)])
    model = layout.Model((shard,), 2048)
    assert active_parameters(model, {"num_local_experts": 8, "num_experts_per_tok": 2}) == 3000
    assert active_parameters(model, {}) == 9000


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "nvme", "state": "nvme", "max_grad_norm": 1.0},
        {"weights": "nvme", "state": "nvme"},  # steps under backward
        {"weights": "host", "state": 0.5, "commit_every": 2},
        {"weights": "nvme", "state": "nvme", "max_grad_norm": 1.0, "grads": "nvme"},
    ],
)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_an_engine_moves_the_bytes_that_are_forecast(tmp_path: Path, device: str, options: dict[str, Any]) -> None:
    tiny = llama(tied=False, num_hidden_layers=8)
    with Engine(tiny, nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, chunk_size=16384, device=device, **HYPER, **options) as engine:
        moved = []
        for first in (0, 2, 4):
            train(engine, first + 2, first=first)
            engine.memory.parts.fetcher.drain()
            engine.memory.parts.stepper.drain()
            moved.append(engine.stats())
        root = next((i for i, s in enumerate(engine.shards) if s is engine.memory.root), None)
        there = Facts("tiny", engine.layout, root, (), 8, 1, engine.layout.numel)
        asked, plan = memory.request(engine.config, True, device == "cpu", engine.step_mode), engine.memory.plan
        forward, backward = cost.phases(there, plan, Workload(batch=4, seq=24), engine.step_mode == "deferred", asked)
        said = forward + backward + cost.commit(there, plan, engine._commit_every)
    for key, bytes_ in (("bytes_read", said.nvme_read), ("bytes_written", said.nvme_write)):
        assert (moved[2][key] - moved[1][key]) / 2 == pytest.approx(bytes_, rel=0.01)  # grads of the root never leave; it is small


# ------------------------------------------------------------------------------------------------------------ seconds


def test_seconds_are_bytes_over_rates_and_reads_and_writes_share_the_drives() -> None:
    t = Traffic(flops=3e12, h2d=4e9, d2h=1e9, dram=8e9, nvme_read=8e9, nvme_write=3e9, stepped=6e9)
    assert cost.times(t, BOX) == {"compute": 3.0, "optimizer": 1.5, "h2d": 2.0, "d2h": 0.5, "dram": 2.0, "nvme": 5.0}
    assert cost.times(t, dataclasses.replace(BOX, drives=2))["nvme"] == 2.5


def test_a_step_is_the_slowest_of_each_phase_and_what_nothing_hides() -> None:
    forward, backward = Traffic(flops=1e12, nvme_read=16e9), Traffic(flops=3e12, h2d=2e9)
    seconds, limiter = cost.step_time((forward, backward), Traffic(h2d=1e9), BOX)
    assert (seconds, limiter) == (4.0 + 3.0 + 0.5, "nvme")


def test_endurance() -> None:
    f = cost.forecast(facts(), BOX, Workload(batch=1, seq=1000))
    f = dataclasses.replace(f, traffic=Traffic(nvme_write=100e9), step=86.4)
    assert (f.steps_per_day, f.written_per_1000_steps, f.days_to_endurance) == pytest.approx((1000, 100e12, 6.0), rel=1e-12)
    assert dataclasses.replace(f, traffic=Traffic()).days_to_endurance is None


@pytest.mark.parametrize("what", ["flops", "link", "dram", "nvme_read", "nvme_write", "drives", "device_memory"])
def test_a_better_machine_is_never_slower(what: str) -> None:
    small = dataclasses.replace(BOX, host_memory=100 * 10**6)
    for work in (Workload(batch=1, seq=100), Workload(batch=4, seq=4096), Workload(batch=1, seq=512, clip=True), Workload(batch=1, seq=512, state="nvme")):
        steps = [cost.forecast(facts(), dataclasses.replace(small, **{what: getattr(small, what) * k}), work).step for k in (1, 2, 4, 8)]
        assert steps == sorted(steps, reverse=True)


def test_more_host_memory_moves_less() -> None:
    """But where compute hides all of NVMe a step may take longer by what nothing hides: the commit of what is now in memory."""
    for work in (Workload(batch=1, seq=100), Workload(batch=4, seq=4096), Workload(batch=1, seq=512, clip=True)):
        found = [cost.forecast(facts(), dataclasses.replace(BOX, host_memory=k * 10**8), work) for k in (1, 2, 4)]
        for less, more in itertools.pairwise(found):
            assert more.traffic.nvme_read + more.traffic.nvme_write <= less.traffic.nvme_read + less.traffic.nvme_write
            assert more.step <= less.step + sum(cost.times(cost.commit(facts(), more.plan, 50), BOX).values())
        assert found[1].traffic.nvme_read == 0 < found[0].traffic.nvme_read


def test_suggestions_are_the_best_and_help() -> None:
    small = dataclasses.replace(BOX, host_memory=100 * 10**6, dram=40e9)
    now = cost.forecast(facts(), small, Workload(batch=1, seq=100))
    found = advice.suggestions(facts(), now)
    assert 1 <= len(found) <= 3 and [s.gain for s in found] == sorted((s.gain for s in found), reverse=True)
    assert now.limiter == "nvme" and found[-1].gain >= 1.01
    tried = {text: (m, w) for text, m, w in advice.changes(small, now.workload)}
    for s in found:
        assert cost.forecast(facts(), *tried[s.change]).tokens_per_second == s.gain * now.tokens_per_second


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("there", "work", "said"),
    [
        ({"device_memory": 1 << 30}, {}, "lower --micro-batch, --batch or --seq, or put activations on the host"),
        ({"host_memory": 1 << 20}, {}, r"host.*host_memory"),
        ({}, {"device_memory": 1 << 20}, r"device.*device_memory"),
        ({}, {"host_memory": 9 * GB}, "--host-memory is 8.4 GiB, the machine has 7.5 GiB: ask for less"),
        ({"nvme_size": 1 << 20}, {}, "the store needs 192 MiB of NVMe .* more --drives, or crash_safe: false"),
    ],
)
def test_what_does_not_fit_says_what_to_change(there: dict[str, int], work: dict[str, int], said: str) -> None:
    with pytest.raises(BudgetError, match=said):
        cost.forecast(facts(), dataclasses.replace(BOX, **there), Workload(batch=1, seq=100, **work))  # type: ignore[arg-type]


def test_machines() -> None:
    assert machine.names() == ["a100", "h100", "h200", "rtx3090", "rtx4090", "rtx5090"]
    assert all(machine.load(name).flops > 1e12 for name in machine.names())
    assert machine.load("rtx4090.yaml") == machine.load("rtx4090")
    with pytest.raises(ConfigError, match="no such file, and no machine that is shipped; did you mean 'rtx4090'"):
        machine.load("rtx409")


def test_a_machine_of_ones_own(tmp_path: Path) -> None:
    text = (machine.SHIPPED / "rtx4090.yaml").read_text()
    own = tmp_path / "own.yaml"
    own.write_text(text.replace("drives: 1", "drives: 0"))
    with pytest.raises(ConfigError, match="drives is 0, expected a positive number"):
        machine.load(str(own))
    own.write_text(text.replace("link:", "lnk:"))
    with pytest.raises(ConfigError, match="unknown key 'lnk'; did you mean 'link'"):
        machine.load(str(own))


# ------------------------------------------------------------------------------------------------------- the command


def test_a_typed_in_70b_in_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "l70.yaml"
    file.write_text(LLAMA_70B)
    begun = time.monotonic()
    assert cli.main(["plan", str(file), "--machine", "rtx4090", "--json"]) == 0
    assert time.monotonic() - begun < 30  # 3 s on a quiet machine
    told = json.loads(capsys.readouterr().out)
    assert told["parameters"] == 70_553_706_496 and told["fits"] is True and told["limiter"] == "nvme"
    assert set(told["seconds"]) == set(cost.RESOURCES) and told["step_seconds"] >= max(told["seconds"].values())
    assert told["step"]["flops"] == 8 * 70_553_706_496 * 8 * 2048
    assert 1 <= len(told["suggestions"]) <= 3 and set(told["suggestions"][0]) == {"change", "gain"}
    assert told["host_bytes"] and sum(told["host_bytes"].values()) <= told["machine"]["host_memory"]


def test_a_folder_with_nothing_but_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["plan", str(tmp_path), "--machine", "h100"]) == 0
    out = capsys.readouterr().out
    for part in ("fits", "Placement", "nvme", "tokens/s", "written in 1000 steps", "What would help most"):
        assert part in out


@pytest.mark.parametrize(
    ("config", "args", "said"),
    [
        ("hidden_size: 64", ["--machine", "a100"], "has no model_type: write the keys"),
        ("model_type: lama", ["--machine", "a100"], "no usable config.json"),
        (LLAMA_70B, ["--machine", "rtx3090", "--host-memory", "1GiB"], "host_memory"),
    ],
)
def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: str, args: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.yaml").write_text(config)
    assert cli.main(["plan", "m.yaml", *args]) == 1
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and "zinf-plan-" not in err
