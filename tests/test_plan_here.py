"""Plans for this machine, and for trainings that are not all of a model under AdamW: what is measured once is used, and an engine does what was planned."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from models import HYPER, LEAF_BYTES, llama, train

from zinf import cli, measured, memory
from zinf.engine import Engine
from zinf.errors import BudgetError, ConfigError
from zinf.hf import facts as reader
from zinf.hf import pace
from zinf.hf.facts import Recipe
from zinf.measured import Book, Drive, Host, Pace
from zinf.placement import Request, Tier
from zinf.planner import advice, cost, drive, host, machine
from zinf.planner.cost import Traffic, Workload
from zinf.planner.machine import Machine

GB, MIB = 10**9, 1 << 20
TINY = dict(
    model_type="llama", hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
    tie_word_embeddings=True,
)  # fmt: skip
HERE = Host(when="2026-01-02", device="cpu", threads=2, dram=20e9, adam=10e9, flops=1e11, flops_fp32=5e10)
DRIVE = Drive(path="/a", when="2026-01-02", block_size=1 << 20, queue_depth=24, read=4e9, write=2e9, both=1e9)
BOX = Machine(
    name="box", device_memory=8 * GB, host_memory=8 * GB, flops=2e12, efficiency=0.5, link=2e9, dram=4e9, nvme_read=4e9, nvme_write=1e9, nvme_size=1000 * GB,
)  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Book:
    """This machine as if it had been measured; in a folder of its own, which is the one for the store too."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("ZINF_MEASURED", str(tmp_path / "machine.json"))
    book = Book({measured.drive_key("."): dataclasses.replace(DRIVE, path=str(tmp_path / "work"))}, HERE)
    measured.save(book)
    return book


# ------------------------------------------------------------------------------------------------ machines, by hand


def test_a_machine_without_a_gpu_computes_and_steps_on_the_same_cores() -> None:
    phase = Traffic(flops=2e12, stepped=4e9, nvme_read=4e9)
    assert cost.step_time((phase,), Traffic(), dataclasses.replace(BOX, adam=2e9)) == (2.0, "compute")
    assert cost.step_time((phase,), Traffic(), dataclasses.replace(BOX, adam=2e9, direct=True)) == (4.0, "compute")
    assert cost.step_time((phase,), Traffic(), dataclasses.replace(BOX, adam=0.5e9))[1] == "optimizer"


@pytest.mark.parametrize(
    ("read", "written", "seconds"),
    [(4e9, 0, 1.0), (0, 3e9, 3.0), (2e9, 2e9, 1.0), (6e9, 2e9, 2.0), (2e9, 4e9, 3.0), (0, 0, 0.0)],  # alone 4 and 1 GB/s, both at once 2 GB/s each way
)
def test_what_was_measured_of_both_at_once_counts(read: float, written: float, seconds: float) -> None:
    both = dataclasses.replace(BOX, nvme_both=2e9)
    assert both.nvme_seconds(read, written) == pytest.approx(seconds)
    assert BOX.nvme_seconds(read, written) == pytest.approx(read / 4e9 + written / 1e9)  # not measured: times add
    assert dataclasses.replace(both, drives=2).nvme_seconds(read, written) == pytest.approx(seconds / 2)


def test_two_drives_are_done_when_the_slower_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measured, "drive_key", lambda path: Path(path).name)
    monkeypatch.setattr(machine, "_free_bytes", lambda path: {"a": 300, "b": 100}[Path(path).name] * GB)
    other = dataclasses.replace(DRIVE, read=1e9, write=1e9, both=0.25e9)
    there = BOX.with_drives(Book({"a": DRIVE, "b": other}), ["/a", "/b", "/x/a"])
    assert (there.drives, there.nvme_size, there.nvme_both, there.endurance) == (2, 200 * GB, 1.25e9 / 2, None)
    # a has 4/5 of the bytes: reading 10 GB alone takes 8 / 4 there, and 2 / 1 on b; writing 8 / 2 and 2 / 1
    assert there.nvme_seconds(10e9, 0) == pytest.approx(2.0) and there.nvme_seconds(0, 10e9) == pytest.approx(4.0)
    with pytest.raises(ConfigError, match=r"the drive of /c is not measured yet: run `zinf bench io --path /c`"):
        BOX.with_drives(Book(), ["/c"])


def test_this_machine_is_what_was_measured(known: Book) -> None:
    there = machine.this(known, ["."])
    assert (there.dram, there.adam, there.flops, there.direct, there.drives) == (20e9, 10e9, 1e11, True, 1)
    assert (there.nvme_read, there.nvme_write, there.nvme_both) == pytest.approx((4e9, 2e9, 1e9), rel=1e-12)
    assert there.computing("fp32").flops == 5e10 and there.computing("bf16") == there
    gpu = dataclasses.replace(HERE, device="H200", device_memory=100 * GB, link=50e9)
    there = machine.this(dataclasses.replace(known, host=gpu), ["."])
    assert (there.direct, there.device_memory, there.link) == (False, 100 * GB, 50e9)
    with pytest.raises(ConfigError, match="not measured yet: run `zinf bench machine`, or give --machine"):
        machine.this(Book(known.drives), ["."])
    with pytest.raises(ConfigError, match="box does not say its flops_fp32"):
        BOX.computing("fp32")


def test_a_pace_that_was_measured_is_the_rate_of_compute() -> None:
    there = BOX.paced(6e12, 2.0, "measured")
    assert cost.times(Traffic(flops=6e12), there)["compute"] == 2.0 and there.sources[-1] == "measured"


# ------------------------------------------------------------------------------------------- what is trained, by hand


def test_lora_streams_the_base_read_only(tiny: str) -> None:
    full, lora = reader.read(tiny), reader.read(tiny, Recipe(lora=4, lora_targets=["q_proj"]))
    adapters = 4 * 2 * 4 * 64  # blocks, A and B, rank, 64 x 64
    assert lora.layout.numel == full.layout.numel + adapters and lora.trained == adapters
    assert lora.flops(10) == (2 * lora.active * 10, (4 * lora.active + 2 * adapters) * 10)
    assert full.flops(10) == (2 * full.active * 10, 6 * full.active * 10)
    assert lora.root is not None
    base = sum(s.weights_nbytes for i, s in enumerate(lora.layout.shards) if i != lora.root)
    plan = cost.forecast(lora, BOX, Workload(batch=1, seq=8, weights="nvme", state="nvme")).plan
    plan = dataclasses.replace(plan, slabs=tuple(dataclasses.replace(c, count=0) for c in plan.slabs))
    forward, backward = cost.phases(lora, plan, Workload(batch=1, seq=8), True, Request(direct=False))
    assert (forward + backward).nvme_read == 2 * base and (forward + backward).nvme_write == 0
    assert cost.store_nbytes(lora) == base + sum((1 + r.trainable) * (r.weights_nbytes + r.state_nbytes) for r in lora.layout.shards[lora.root].runs)


@pytest.mark.parametrize(
    ("recipe", "weights", "state"),
    [
        (Recipe(), 2, 10),
        (Recipe(precision="fp16"), 2, 12),
        (Recipe(precision="fp32"), 4, 8),
        (Recipe(optimizer="lion"), 2, 6),
        (Recipe(optimizer="adagrad"), 2, 6),
        (Recipe(optimizer="sgd"), 2, 2),
        (Recipe(optimizer="sgd", momentum=0.9), 2, 6),
        (Recipe(ema_decay=0.9), 2, 14),
    ],
)
def test_bytes_of_every_recipe(tiny: str, recipe: Recipe, weights: int, state: int) -> None:
    facts = reader.read(tiny, recipe)
    padded = sum(r.padded for s in facts.layout.shards for r in s.runs)
    assert sum(s.weights_nbytes for s in facts.layout.shards) == weights * padded
    assert sum(s.state_nbytes for s in facts.layout.shards) == state * padded
    assert facts.dtype == recipe.precision and facts.boundary(10) == {"fp32": 4}.get(recipe.precision, 2) * 4 * 64 * 10


def test_fp16_is_deferred_as_in_the_engine(tiny: str) -> None:
    """An overflow must be found before anything is stepped, so its state is written under the next forward."""
    work = Workload(batch=1, seq=8, weights="nvme", state="nvme")
    for precision, early in (("bf16", True), ("fp16", False)):
        facts = reader.read(tiny, Recipe(precision=precision))
        assert (cost.forecast(facts, BOX, work).plan.grad_buffers > 0) == early


# -------------------------------------------------------------------------------------------- one planner, one engine


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, {}),
        ({"max_grad_norm": 1.0}, {"clip": True}),
        ({"state": "nvme"}, {"state": "nvme"}),
        ({"weights": "nvme", "state": "nvme", "max_grad_norm": 1.0}, {"weights": "nvme", "state": "nvme", "clip": True}),
        ({"micro_batch_size": 2}, {"micro_batch": 2}),
        ({"optimizer": "lion"}, {"optimizer": "lion"}),
    ],
)
def test_an_engine_places_and_moves_what_was_planned(tiny: str, tmp_path: Path, options: dict[str, Any], asked: dict[str, Any]) -> None:
    """From the config alone, before there are weights: the plan is the engine's, and so are the bytes of its steps."""
    recipe = Recipe(optimizer=options.get("optimizer", "adamw"), chunk_size=16384)
    facts = reader.read(tiny, recipe)
    work = Workload(batch=4, seq=24, host_memory=4 * MIB, device_memory=4 * MIB, **asked)
    said = cost.forecast(facts, dataclasses.replace(BOX, direct=True), work)
    sizes = dict(host_memory=4 * MIB, device_memory=4 * MIB, chunk_size=16384)
    with Engine(llama(), nvme_path=str(tmp_path), device="cpu", commit_every=None, **HYPER, **sizes, **options) as engine:
        assert engine.memory.plan == said.plan and engine.layout == facts.layout
        moved = []
        for first in (0, 2, 4):
            train(engine, first + 2, first=first)
            engine.memory.parts.fetcher.drain()
            engine.memory.parts.stepper.drain()
            moved.append(engine.stats())
        resident = memory.commit_every(engine.config, engine.memory.plan, facts.root) > 1  # then two steps have no commit in them
    written = said.traffic.nvme_write - cost.commit(facts, said.plan, 50).nvme_write * resident
    for key, bytes_ in (("bytes_read", said.traffic.nvme_read), ("bytes_written", written)):
        assert (moved[2][key] - moved[1][key]) / 2 == pytest.approx(bytes_, rel=0.01, abs=1)
    assert {Tier.NVME, Tier.HOST} & set(said.plan.state)


# ------------------------------------------------------------------------------------------------------- the command


def never(*args: object, **options: object) -> Any:
    raise AssertionError("measured")


def test_what_is_known_is_not_measured_again(known: Book, tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(drive, "search", never)
    monkeypatch.setattr(host, "measure", never)
    facts = reader.read(tiny)
    paces = {measured.pace_key(facts.layout.fingerprint(), 2, 16, "bf16"): Pace(when="2026-01-03", seconds=7.0)}
    measured.save(dataclasses.replace(known, paces=paces))
    assert cli.main(["plan", tiny, "--batch", "2", "--seq", "16", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["seconds"]["compute"] == pytest.approx(7.0) and told["step_seconds"] >= 7.0 and told["days_to_endurance"] is None
    assert cli.main(["plan", tiny, "--batch", "4", "--micro-batch", "2", "--seq", "16", "--endurance", "600TB"]) == 0
    out = capsys.readouterr().out
    for part in ("this machine (no GPU, 2 cores): fits", "measured 2026-01-02", "this model's blocks, measured 2026-01-03", "14.0 s", "rated endurance"):
        assert part in out
    assert max(map(len, out.replace(tiny, "M").replace(str(Path.cwd()), "W").splitlines())) <= 100


def test_what_is_not_known_is_measured_and_kept(known: Book, tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls = []
    monkeypatch.setattr(drive, "search", lambda path, *rest: (calls.append(("drive", path)), (dataclasses.replace(DRIVE, both=0.5e9), []))[1])
    monkeypatch.setattr(host, "measure", lambda *rest, **more: (calls.append(("host", None)), HERE)[1])
    monkeypatch.setattr(pace, "measure", lambda *rest: (calls.append(("pace", None)), Pace(when="2026-01-04", seconds=1.0))[1])
    plan = ["plan", tiny, "--batch", "2", "--seq", "16"]
    assert cli.main(plan) == 0 and calls == [("pace", None)]
    assert cli.main(plan) == 0 and len(calls) == 1
    measured.save(Book())
    assert cli.main([*plan, "--nvme-path", "."]) == 0 and [what for what, _ in calls[1:]] == ["drive", "host", "pace"]
    assert cli.main([*plan, "--measure"]) == 0 and len(calls) == 7
    assert measured.load().drive(".") == dataclasses.replace(DRIVE, both=0.5e9)
    measured.save(Book())
    assert cli.main([*plan, "--machine", "rtx4090", "--nvme-path", "."]) == 0 and len(calls) == 8  # a described machine with this drive
    capsys.readouterr()


def test_a_pace_is_measured_of_the_model_itself(tiny: str) -> None:
    found = pace.measure(reader.read(tiny), 2, 16, 1e11)
    assert found is not None and found.seconds > 0
    assert pace.measure(reader.read(tiny), 2, 16, 1.0) is None  # it would take a while
    shallow = dataclasses.replace(reader.read(tiny), blocks=1)
    assert pace.measure(shallow, 2, 16, 1e11) is None


def test_a_refusal_is_json_too(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", tiny, "--machine", "rtx4090", "--host-memory", "1KiB", "--json"]) == 1
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert told["fits"] is False and "raise host_memory" in told["why"] and said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("there", "work", "fits_with"),
    [
        ({"device_memory": cost.CONTEXT + 4 * MIB}, {"batch": 64, "seq": 64}, ["--micro-batch 16", "--batch 16"]),
        ({}, {"host_memory": MIB}, ["no --host-memory, but all that the machine has"]),
        ({"nvme_size": 3 * MIB}, {}, ["2 drives"]),
        ({"device_memory": cost.CONTEXT}, {}, ["2 GiB of device memory"]),
        ({"nvme_size": 3 * MIB, "device_memory": cost.CONTEXT}, {}, ["2 GiB of device memory and 2 drives"]),
        ({"nvme_size": 1}, {}, []),
    ],
)
def test_a_refusal_says_what_would_fit(tiny: str, there: dict[str, int], work: dict[str, int], fits_with: list[str]) -> None:
    facts = reader.read(tiny)
    box, asked = dataclasses.replace(BOX, **there), Workload(**{"batch": 1, "seq": 8, **work})  # type: ignore[arg-type]
    with pytest.raises(BudgetError):
        cost.forecast(facts, box, asked)
    assert advice.remedies(facts, box, asked) == fits_with


def test_activations_go_to_nvme_where_neither_device_nor_host_holds_them(tiny: str) -> None:
    facts, work = reader.read(tiny), Workload(batch=64, seq=2048, micro_batch=1)
    kept = facts.boundary(work.tokens)
    small = dataclasses.replace(BOX, device_memory=cost.CONTEXT + kept // 2, host_memory=kept)
    there = cost.forecast(facts, small, work)
    assert there.plan.activations is Tier.NVME
    roomy = cost.forecast(facts, dataclasses.replace(small, device_memory=8 * GB), work)
    assert roomy.plan.activations is Tier.DEVICE and there.traffic.nvme_write - roomy.traffic.nvme_write == pytest.approx(kept, rel=0.05)


def test_advice_counts_in_what_the_machine_has(tiny: str) -> None:
    facts = reader.read(tiny)
    now = cost.forecast(facts, dataclasses.replace(BOX, dram=100e9, nvme_write=1e6), Workload(batch=1, seq=8, host_memory=12 * MIB))
    texts = [text for text, _, _ in advice.changes(now.machine, now.workload)]
    assert texts[0] == "host_memory 24 MiB, which the machine has"
    assert "a link to the device of twice the rate" in texts
    direct = [text for text, _, _ in advice.changes(dataclasses.replace(BOX, direct=True), Workload(batch=1, seq=8))]
    assert "cores of twice the rate" in direct and not any("link" in text for text in direct)


def test_advice_to_commit_less_counts_the_weights_that_are_in_memory(tiny: str) -> None:
    """12 bytes a parameter are written with state on NVMe and weights in memory, of which a commit's 2 need not be written every step."""
    facts = reader.read(tiny)
    work = Workload(batch=1, seq=8, weights="host", state="nvme", clip=True)
    often, seldom = (cost.forecast(facts, BOX, dataclasses.replace(work, commit_every=every)).traffic.nvme_write for every in (None, 50))
    root = facts.layout.shards[facts.root] if facts.root is not None else None
    assert root is not None
    weights = sum(s.weights_nbytes for s in facts.layout.shards)
    assert often - seldom == pytest.approx((weights + root.state_nbytes) * 49 / 50)
    now = cost.forecast(facts, dataclasses.replace(BOX, nvme_write=1e6), work)
    assert any(s.change.startswith("commit_every: 50") and s.gain > 1.1 for s in advice.suggestions(facts, now, 10))


def test_an_engine_says_where_stepping_under_backward_may_be_better(tmp_path: Path) -> None:
    def said(name: str, **options: Any) -> tuple[str, int]:
        with Engine(llama(), nvme_path=str(tmp_path), run_name=name, device="cpu", chunk_size=16384, leaf_bytes=LEAF_BYTES, **options) as engine:
            return next(line for line in engine.plan() if line.startswith("step")), engine.memory.plan.host_nbytes

    _, least = said("a", state="nvme", step_mode="deferred")
    line, _ = said("b", host_memory=least)
    assert "under the next forward (state: nvme steps under backward, and most of" in line
    for name, options in {
        "c": {}, "d": {"host_memory": least, "max_grad_norm": 1.0}, "e": {"host_memory": least, "step_mode": "deferred"}, "f": {"state": "nvme"},
        "g": {"host_memory": least, "commit_every": 5},
    }.items():  # fmt: skip
        assert "state: nvme" not in said(name, **options)[0]


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--machine", "rtx409"], 1, "did you mean 'rtx4090'"),
        (["--machine", "rtx4090", "--measure"], 1, "--measure measures this machine"),
        (["--machine", "rtx4090", "--lora", "0"], 2, "'0' is not a positive whole number"),
        (["--machine", "rtx4090", "--lora", "4", "--lora-targets", "q_prj"], 1, "--lora-targets q_prj: Target modules"),
        (["--machine", "rtx4090", "--momentum", "0.9"], 1, "adamw has no momentum"),
        (["--machine", "rtx4090", "--ema-decay", "2"], 1, "ema_decay is 2.0, expected"),
        (["--machine", "rtx4090", "--optimizer", "adan"], 2, "invalid choice: 'adan'"),
        (["--nvme-path", "nowhere/at/all"], 1, "does not exist"),
    ],
)
def test_wrong_turns(known: Book, tiny: str, capsys: pytest.CaptureFixture[str], args: list[str], code: int, said: str) -> None:
    measured.save(Book(host=known.host))
    try:
        assert cli.main(["plan", tiny, *args]) == code
    except SystemExit as e:
        assert e.code == code
    err = capsys.readouterr().err
    assert said in err and (code == 2 or err.count("\n") <= 2)
