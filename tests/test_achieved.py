"""After ten steps a run says what it achieves against the plan: the same plan as `zinf plan`'s, from what is known, and nothing where nothing is."""

from __future__ import annotations

import dataclasses
import logging
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from models import HYPER, llama, train

from zinf import measured
from zinf.engine import Engine
from zinf.measured import Book, Drive, Host, Pace
from zinf.planner import achieved, cost, machine
from zinf.planner.achieved import STEPS, WARM, Achieved, of_engine, of_model

HERE = Host(when="2026-01-02", device="cpu", threads=2, dram=20e9, adam=10e9, flops=1e11, flops_fp32=5e10)
DRIVE = Drive(path="/a", when="2026-01-02", block_size=1 << 20, queue_depth=24, read=4e9, write=2e9, both=1e9)
OPTIONS: dict[str, Any] = dict(device="cpu", weights="nvme", state="nvme", max_grad_norm=1.0, chunk_size=16384, **HYPER)


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Book:
    monkeypatch.setenv("ZINF_MEASURED", str(tmp_path / "machine.json"))
    book = Book({measured.drive_key(tmp_path): DRIVE}, HERE)
    measured.save(book)
    return book


def test_ten_steps_then_one_line(known: Book, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="zinf"), Engine(llama(), nvme_path=str(tmp_path), **OPTIONS) as engine:
        train(engine, STEPS - 1)
        assert engine.stats()["forecast"] is None and "forecast" not in caplog.text
        train(engine, STEPS + 2, first=STEPS - 1)
        told = engine.stats()["forecast"]
        said, timed = of_engine(engine, 4, 24)
        assert said is not None and not timed
        assert told["predicted"] == said.step and told["limiter"] == said.limiter and told["achieved"] > 0
        facts = of_model(engine)
        assert (facts.blocks, facts.hidden, facts.dtype, facts.layout) == (4, 64, "bf16", engine.layout)
        there = machine.this(known, [str(tmp_path)])
        assert said.seconds["compute"] == pytest.approx(8 * facts.active * 4 * 24 / (there.flops * there.efficiency))
        blocks = sum(s.state_nbytes for i, s in enumerate(engine.layout.shards) if i != engine.memory.root.index)
        assert said.traffic.nvme_read == blocks  # 4 blocks in 4 slabs: only state is read
    lines = [r.message for r in caplog.records if "forecast" in r.message]
    assert lines == [f"after 10 steps: {told['text']}"] and "`zinf plan MODEL` with this batch times it" in told["text"]


def test_the_model_s_own_pace_counts_where_it_was_measured(known: Book, tmp_path: Path) -> None:
    with Engine(llama(), nvme_path=str(tmp_path), **OPTIONS) as engine:
        key = measured.pace_key(engine.layout.fingerprint(), 4, 24, "bf16")
        said, timed = of_engine(engine, 4, 24, dataclasses.replace(known, paces={key: Pace(when="2026-01-03", seconds=9.0)}))
        assert said is not None and timed and said.seconds["compute"] == pytest.approx(9.0)
        other, timed = of_engine(engine, 8, 24, dataclasses.replace(known, paces={key: Pace(when="2026-01-03", seconds=9.0)}))
        assert other is not None and not timed


@pytest.mark.parametrize(
    ("book", "options", "said"),
    [
        (Book(), {}, "no forecast to compare with: this machine is not measured yet: run `zinf bench machine`"),
        (Book(host=HERE), {}, "no forecast to compare with: the drive of"),
        (None, {"device": "sim"}, None),
        (None, {"gradient_accumulation_steps": 2}, None),
    ],
)
def test_where_nothing_is_known_nothing_is_claimed(
    known: Book, tmp_path: Path, caplog: pytest.LogCaptureFixture, book: Book | None, options: dict[str, Any], said: str | None
) -> None:
    measured.save(book or known)
    with caplog.at_level(logging.INFO, logger="zinf"), Engine(llama(num_hidden_layers=1), nvme_path=str(tmp_path), **{**OPTIONS, **options}) as engine:
        train(engine, STEPS, accumulation=options.get("gradient_accumulation_steps", 1))
        assert engine.stats()["forecast"] is None
    told = [r.message for r in caplog.records if "forecast" in r.message]
    assert told == [] if said is None else len(told) == 1 and told[0].startswith(said)


def test_a_model_of_no_known_kind_has_no_forecast_but_trains(known: Book, tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    with Engine(model, nvme_path=str(tmp_path), device="cpu", leaf_bytes=4096) as engine:
        for _ in range(STEPS):
            engine.backward(engine(torch.randn(2, 64)).square().mean())
            engine.step()
        assert engine.stats()["forecast"] is None


def test_all_in_memory_needs_no_drive(known: Book) -> None:
    measured.save(Book(host=HERE))
    with Engine(llama(), device="cpu", **HYPER) as engine:
        said, _ = of_engine(engine, 4, 24)
        assert said is not None and said.traffic.nvme_read == said.traffic.nvme_write == 0 and said.limiter == "compute"


def test_the_median_of_the_steps_after_the_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([0.0, 50.0, 51.0, 52.0, 53.0, 54.0, 1054.0, 1055.0, 1056.0, 1057.0])  # one with an evaluation in it
    monkeypatch.setattr(achieved, "time", types.SimpleNamespace(perf_counter=lambda: next(ends)))
    asked = []
    forecast = cost.Forecast(None, None, None, cost.Traffic(), {"compute": 0.5}, 0.5, "compute", 0)  # type: ignore[arg-type]
    monkeypatch.setattr(achieved, "of_engine", lambda engine, rows, seq: (asked.append((rows, seq)), (forecast, True))[1])
    watch = Achieved()
    for i in range(STEPS + 3):
        watch.forward([torch.zeros(2, 100 + 10 * (i % 2), dtype=torch.int64)])
        if i < STEPS:
            watch.stepped(None)  # type: ignore[arg-type]
    assert asked == [(2, 105)] and WARM == 2
    assert watch.comparison is not None and watch.comparison.seconds == 1.0
    assert watch.comparison.text == "1 s a step, forecast 0.5 s (2.00x), most of it for compute: compute 0.5 s"
