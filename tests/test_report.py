"""`zinf report`: the log of a run says what happened, whatever ended it, and the page has its numbers and needs nothing else."""

from __future__ import annotations

import json
import logging
import re

import pytest
import yaml
from models import LEAF_BYTES, batches, llama
from test_train import make, run  # noqa: F401  (make is a fixture)
from tiny_tokenizer import tiny_tokenizer

from zinf import cli
from zinf.engine import Engine
from zinf.trace import page, reading, runlog
from zinf.trace.bottleneck import summary
from zinf.trace.recorder import Recorder

pytestmark = pytest.mark.usefixtures("one_thread")


def data_of(html: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


def check_page(html: str) -> dict:
    """It is whole, and asks for nothing from anywhere."""
    assert html.startswith("<!doctype html>") and html.rstrip().endswith("</html>") and "@" not in re.sub(r"@media", "", html.split("<body>")[0])
    assert not re.search(r"\b(src|href)\s*=|url\(|@import|fetch\(|XMLHttpRequest", html)
    assert set(re.findall(r"https?://[^\"' <]+", html)) <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    data = data_of(html)
    for chart in data["charts"]:
        assert f'id="{chart["id"]}"' in html
        assert all(len(s["y"]) == len(chart["x"]) for s in chart["series"]) and chart["x"] == sorted(chart["x"])
    return data


# ----------------------------------------------------------------------------------------------------------------- the log


def test_training_logs_each_step(make, tmp_path) -> None:  # noqa: F811
    result, tape, _ = run(make(steps=5, eval_every=2))
    told = runlog.read(f"{result.log}/metrics.jsonl")
    assert [s["step"] for s in told.steps] == [1, 2, 3, 4, 5] and told.ended and told.damaged == 0
    for step, line in zip(tape.steps, told.steps, strict=True):
        assert {k: line[k] for k in ("loss", "lr", "grad_norm", "tokens", "skipped")} == {
            k: getattr(step, k) for k in ("loss", "lr", "grad_norm", "tokens", "skipped")
        }
        assert line["seconds"] > 0
    assert told.evals == tape.evals
    assert told.begin["plan"] == ["all in memory"] and told.begin["steps"] == 5 and told.begin["config"]["data"]["max_length"] > 0


def test_a_resumed_run_appends_and_a_new_one_replaces(make) -> None:  # noqa: F811
    config = make(steps=6, engine={"commit_every": 2})
    run(config, kill_at=5)  # steps 1 to 5 are made, 4 is committed
    folder = config.log_folder()
    first = runlog.read(f"{folder}/metrics.jsonl")
    assert [s["step"] for s in first.steps] == [1, 2, 3, 4, 5] and not first.ended
    with open(f"{folder}/metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "st')  # the kill fell into a line
    run(config)
    told = runlog.read(f"{folder}/metrics.jsonl")
    assert [b["step"] for b in told.begins] == [0, 4] and [s["step"] for s in told.steps] == [1, 2, 3, 4, 5, 6]
    assert told.ended and told.damaged == 1
    assert told.steps[3] == first.steps[3] and told.steps[4]["loss"] == first.steps[4]["loss"] and told.steps[4] != first.steps[4]
    run(config, fresh=True)
    assert [b["step"] for b in runlog.read(f"{folder}/metrics.jsonl").begins] == [0]


def test_log_goes_where_it_is_told(make, tmp_path) -> None:  # noqa: F811
    result, *_ = run(make(steps=1, log=str(tmp_path / "here")))
    assert result.log == str(tmp_path / "here") and (tmp_path / "here" / "metrics.jsonl").exists()


def test_a_log_that_cannot_be_written_costs_a_line_and_no_run(make, tmp_path, caplog) -> None:  # noqa: F811
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "zinf"):
        result, *_ = run(make(steps=2, log=str(tmp_path / "file")))
    assert result.finished and [r.getMessage() for r in caplog.records] == [f"the run goes on without its log: {tmp_path}/file/metrics.jsonl: File exists"]


def test_what_is_not_finite_is_no_number(tmp_path) -> None:
    log = runlog.RunLog(str(tmp_path), True)
    log.write("step", step=1, loss=float("inf"), grad_norm=float("nan"), seconds=1.0)
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)["loss"] is None
    assert "null" in page.build(runlog.read(tmp_path / "metrics.jsonl"))


# ---------------------------------------------------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a `zinf train` with a trace on the sim device: steps 1 to 4."""
    folder = tmp_path_factory.mktemp("report")
    tiny_tokenizer().save_pretrained(folder / "model")
    llama(hidden_size=128).save_pretrained(folder / "model")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (folder / "nvme").mkdir()
    engine = {"nvme_path": str(folder / "nvme"), "weights": "nvme", "state": "nvme", "max_grad_norm": 1.0, "trace": True, "device": "sim", "chunk_size": 16384}
    values = {
        "model": str(folder / "model"),
        "data": {"train": [str(folder / "text.txt")], "eval": [str(folder / "text.txt")], "max_length": 32},
        "steps": 4,
        "engine": {**engine, "lr": 1e-3},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    assert cli.main(["train", str(folder / "run.yaml")]) == 0
    return folder


def test_the_page_has_the_numbers_of_the_run(trained, capsys) -> None:
    log = trained / "nvme" / "run-log"
    for where in (log, trained / "nvme" / "run", trained / "run.yaml", log / "trace.json", log / "metrics.jsonl"):
        (log / "report.html").unlink(missing_ok=True)
        assert cli.main(["report", str(where)]) == 0
        assert capsys.readouterr().out == f"wrote {log}/report.html\n"
    html = (log / "report.html").read_text()
    data = check_page(html)
    told, timeline = runlog.read(log / "metrics.jsonl"), reading.read(log / "trace.json")
    found = summary(timeline, timeline.typical())
    assert found.sentence().replace("'", "&#x27;") in html
    assert f"{told.evals[0][1]:.3f} → {told.evals[-1][1]:.3f}" in html and "ended by itself" in html and "step 4 of 4" in html
    for line in told.begin["plan"]:
        assert line in html
    assert "engine.max_grad_norm" in html and "not measured" in html
    charts = {c["id"]: c for c in data["charts"]}
    assert charts["loss"]["series"][0]["y"][1:] == [s["loss"] for s in told.steps]  # before the first step there is only the held-out loss
    assert charts["seconds"]["series"][0]["y"] == [s["seconds"] for s in told.steps]
    bins = charts["bandwidth"]["x"][1] - charts["bandwidth"]["x"][0]
    for series, verb in zip(charts["bandwidth"]["series"], ("fetch", "flush"), strict=False):
        assert sum(series["y"]) * bins == pytest.approx(found.bytes[verb], rel=0.25)  # what crosses the step's ends counts in part
    assert {c["label"] for c in data["charts"]} >= {"device memory over time", "host memory over time"}
    events = [e for e in timeline.within(timeline.typical().start, timeline.typical().end) if e.lane != "import"]
    assert len(data["timeline"]["events"]) == len(events)
    assert all(0 <= e[4] and e[5] >= 0 and e[4] + e[5] <= data["timeline"]["seconds"] * 1e6 + 1 for e in data["timeline"]["events"])


def test_steps_log_bytes_stalls_and_residency(trained) -> None:
    told = runlog.read(trained / "nvme" / "run-log" / "metrics.jsonl")
    for step in told.steps[1:]:
        assert step["bytes"]["fetch"] > 0 and step["bytes"]["flush"] > 0 and step["bytes"]["upload"] > 0 and step["busy"]["step"] > 0
        assert 0 <= sum(step["waited"].values()) <= step["seconds"]
        assert step["resident"]["host"]["state"] > 0 and step["resident"]["device"]["weights"] > 0 and step["rss"] > 0


def test_a_step_is_chosen_and_one_that_is_not_there_is_refused(trained, capsys, tmp_path) -> None:
    log = str(trained / "nvme" / "run-log")
    assert cli.main(["report", log, "--step", "2", "--output", str(tmp_path / "r.html")]) == 0
    assert "<h2>Step 2," in (tmp_path / "r.html").read_text()
    assert cli.main(["report", log, "--step", "9"]) == 1
    assert "step 9 is not in the trace; it has 1, 2, 3, 4" in capsys.readouterr().err


def test_pages_of_runs_without_this_and_that(trained, tmp_path, capsys) -> None:
    log = trained / "nvme" / "run-log"
    lines = (log / "metrics.jsonl").read_text().replace(f'"{log}/trace.json"', '"/gone/trace.json"').splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:3]) + '{"kind": "step", "step": "x"}\n\x00\xff\nnull\n')  # one step, going on, damaged, no trace
    (tmp_path / "odd").mkdir()
    assert cli.main(["report", str(tmp_path)]) == 0
    html = (tmp_path / "report.html").read_text()
    check_page(html)
    assert "not ended when this page was made" in html and "3 damaged lines of the log left out" in html and "trace: true" in html
    assert data_of(html)["timeline"] is None
    (tmp_path / "metrics.jsonl").write_text("")  # nothing yet
    assert cli.main(["report", str(tmp_path)]) == 0
    check_page((tmp_path / "report.html").read_text())
    trace = (log / "trace.json").read_bytes()
    (tmp_path / "odd" / "trace.json").write_bytes(trace[: len(trace) // 2])  # only a trace, of a run that was killed
    assert cli.main(["report", str(tmp_path / "odd" / "trace.json")]) == 0
    assert check_page((tmp_path / "odd" / "report.html").read_text())["timeline"]["events"]
    capsys.readouterr()
    assert cli.main(["report", str(tmp_path / "none")]) == 1 and "no such file or folder" in capsys.readouterr().err
    assert cli.main(["report", str(trained / "model")]) == 1 and "no run was logged here" in capsys.readouterr().err


def test_predicted_stands_beside_achieved(tmp_path) -> None:
    log = runlog.RunLog(str(tmp_path), True)
    log.write("step", step=1, seconds=2.5, loss=1.0, tokens=100)
    assert "Predicted and achieved" not in page.build(runlog.read(tmp_path / "metrics.jsonl"))
    log.write("forecast", step=1, predicted=2.0, achieved=2.5, limiter="nvme", seconds={"nvme": 1.9, "compute": 0.5})
    log.close()
    html = page.build(runlog.read(tmp_path / "metrics.jsonl"))
    assert "<td>seconds a step</td><td>2.00 s</td><td>2.50 s</td><td>1.25</td>" in html and "limited by nvme" in html and "nvme 1.90 s" in html


def test_names_cannot_break_the_page(tmp_path) -> None:
    evil = "</script><script>alert(1)</script>&amp;'\""
    log = runlog.RunLog(str(tmp_path), True)
    log.write("begin", step=0, steps=1, model=evil, plan=[evil], config={"model": evil, "engine": {"run_name": evil}}, params=1)
    log.write("step", step=1, seconds=1.0, loss=1.0, waited={evil: 0.5})
    log.close()
    recorder = Recorder(str(tmp_path / "trace.json"), [evil])
    recorder.computing("forward", 0)
    recorder.stepped(1)
    recorder.close()
    html = page.build(runlog.read(tmp_path / "metrics.jsonl"), reading.read(tmp_path / "trace.json"), evil)
    assert "<script>alert" not in html and html.count("</script>") == 2
    assert data_of(html)["timeline"]["names"] == [f"forward {evil}"]


def test_a_plain_loop_with_a_trace_has_a_report(tmp_path, capsys) -> None:
    with Engine(llama(), nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, weights="nvme", state="nvme", trace=True) as engine:
        for ids in batches(2):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    assert check_page((tmp_path / "run-log" / "report.html").read_text())["timeline"]["events"]
    capsys.readouterr()
    assert cli.main(["inspect", str(tmp_path)]) == 0 and "-log" not in capsys.readouterr().out  # no store, and no leftover
