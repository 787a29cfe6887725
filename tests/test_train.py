"""The training loop, on a plain in-memory engine: what it does at which step, and that a run which was stopped or killed goes on
as if nothing had happened. (The real engine's own resume is tested with the engine.)"""

from __future__ import annotations

import json
import math
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_tokenizer import tiny_tokenizer
from torch import nn

from zinf.config import Config
from zinf.data import DataConfig
from zinf.errors import ConfigError
from zinf.train import Result, ScheduleConfig, Step, TrainConfig, Watch, train

TOKENIZER = tiny_tokenizer()


class MemoryEngine:
    """What zinf.Engine promises the loop, in memory; commits go to a file."""

    def __init__(self, config: TrainConfig, fresh: bool, kill_at: int | None = None) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Embedding(300, 16), nn.Linear(16, 300))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.engine.lr)
        self.every, self.kill_at = config.engine.commit_every or 1, kill_at
        self.file = Path(config.engine.nvme_path[0], "commit.pt")
        self.global_step, self.extra, self.log = 0, {}, []  # type: ignore[var-annotated]
        self.closed = False
        if self.file.exists() and not fresh:
            saved = torch.load(self.file, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.global_step, self.extra = saved["step"], saved["extra"]

    def __call__(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        logits = self.model(input_ids)
        if not torch.is_grad_enabled():
            assert not self.model.training
            self.log.append("eval")
        return types.SimpleNamespace(loss=nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))

    def backward(self, loss: torch.Tensor) -> None:
        assert self.model.training
        self.log.append("backward")
        loss.backward()

    def step(self, extra: dict[str, Any]) -> Any:
        self.extra = extra
        if self.kill_at == self.global_step:
            raise Killed
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.global_step += 1
        self.log.append(f"step {self.optimizer.param_groups[0]['lr']:.6g}")
        if self.global_step % self.every == 0:
            self.commit()
        return types.SimpleNamespace(grad_norm=norm, skipped=False, step=self.global_step)

    def commit(self) -> None:
        self.log.append(f"commit {self.global_step}")
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.global_step, "extra": self.extra}, self.file)

    def synchronize(self) -> None:
        pass

    def restore_rng(self) -> None:
        self.log.append("rng")

    def eval(self) -> None:
        self.model.eval()

    def train(self) -> None:
        self.model.train()

    def plan(self) -> list[str]:
        return ["all in memory"]

    def stats(self) -> dict[str, Any]:
        return {"seconds": {}, "waited": {}, "bytes_read": 0, "bytes_written": 0, "steps": self.global_step, "params": 1}

    def save_pretrained(self, folder: str) -> None:
        self.log.append("save")
        Path(folder).mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> MemoryEngine:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.closed = True
        if error is None:
            self.commit()


class Killed(Exception):
    pass


class Tape(Watch):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.evals: list[tuple[int, float]] = []
        self.notes: list[str] = []
        self.began: list[tuple[int, int]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def begin(self, step: int, steps: int) -> None:
        self.began.append((step, steps))

    def step(self, step: Step) -> None:
        self.steps.append(step)

    def evaluated(self, step: int, loss: float) -> None:
        self.evals.append((step, loss))


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A config in tmp_path, with changes."""
    monkeypatch.setenv("ZINF_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train.txt").write_text("the cat sat on the mat and the dog and the hat; " * 12)
    (tmp_path / "eval.txt").write_text("the dog sat on the hat and the cat and the mat; " * 3)
    (tmp_path / "model").mkdir()

    def make(name: str = "a", engine: dict | None = None, **changes: Any) -> TrainConfig:
        (tmp_path / name).mkdir(exist_ok=True)
        values: dict[str, Any] = {
            "model": str(tmp_path / "model"),
            "data": {"train": [str(tmp_path / "train.txt")], "eval": [str(tmp_path / "eval.txt")], "max_length": 16},
            "steps": 6,
            "batch_size": 2,
            "eval_rows": 3,
            "schedule": {"warmup_steps": 2},
            "engine": {"nvme_path": str(tmp_path / name), "lr": 0.02, **(engine or {})},
        }
        return TrainConfig(**{**values, **changes})

    return make


def run(config: TrainConfig, *, kill_at: int | None = None, stop_after: int | None = None, fresh: bool = False) -> tuple[Result | None, Tape, MemoryEngine]:
    tape, engines = Tape(), []

    def open_engine(config: TrainConfig, fresh: bool, watch: Watch) -> MemoryEngine:
        engines.append(MemoryEngine(config, fresh, kill_at))
        return engines[0]

    def stop() -> bool:
        return stop_after is not None and engines[0].global_step >= stop_after

    try:
        result = train(config, fresh=fresh, stop=stop, watch=tape, open_engine=open_engine, tokenizer=TOKENIZER)
    except Killed:
        result = None
    assert engines[0].closed
    return result, tape, engines[0]


def weights(engine: MemoryEngine) -> list[torch.Tensor]:
    return [p.detach().clone() for p in engine.model.parameters()]


def test_what_happens_at_which_step(make, tmp_path) -> None:
    result, tape, engine = run(make(steps=3, eval_every=2, eval_rows=2, output=str(tmp_path / "out"), engine={"gradient_accumulation_steps": 2}))
    evaluation = ["eval"]
    assert engine.log == [
        *evaluation,
        "backward", "backward", "step 0.00666667", "commit 1",
        "backward", "backward", "step 0.0133333", "commit 2",
        *evaluation,
        "backward", "backward", "step 0.02", "commit 3",
        *evaluation, "save", "commit 3",
    ]  # fmt: skip
    assert result is not None and result.finished and result.step == 3 and result.output == str(tmp_path / "out")
    assert [step for step, _ in tape.evals] == [0, 2, 3] and result.evals == tape.evals
    assert [(s.step, s.steps, s.tokens) for s in tape.steps] == [(1, 3, 64), (2, 3, 64), (3, 3, 64)]
    assert tape.evals[-1][1] < tape.evals[0][1]


@pytest.mark.parametrize("commit_every", [1, 2, 4])
@pytest.mark.parametrize("kill_at", [0, 1, 3, 5])
def test_a_killed_run_goes_on_with_the_same_bits(make, kill_at: int, commit_every: int) -> None:
    _, straight, reference = run(make("straight", engine={"commit_every": commit_every}))
    config = make("killed", engine={"commit_every": commit_every})
    result, before, _ = run(config, kill_at=kill_at)
    assert result is None
    result, after, engine = run(config)
    begun = kill_at // commit_every * commit_every
    assert after.began == [(begun, 6)]
    assert before.steps + after.steps[kill_at - begun :] == straight.steps
    assert result is not None and result.evals == straight.evals
    assert all(torch.equal(a, b) for a, b in zip(weights(engine), weights(reference), strict=True))


def test_a_stop_commits_and_the_next_run_goes_on(make) -> None:
    _, straight, reference = run(make("straight"))
    config = make("stopped", engine={"commit_every": 100})
    result, first, engine = run(config, stop_after=2)
    assert result is not None and not result.finished and result.step == 2 and engine.log[-1] == "commit 2" and result.output is None
    result, second, engine = run(config)
    assert result is not None and result.finished and first.steps + second.steps == straight.steps
    assert all(torch.equal(a, b) for a, b in zip(weights(engine), weights(reference), strict=True))


def test_a_finished_run_trains_no_more_and_fresh_starts_over(make) -> None:
    config = make()
    first, straight, _ = run(config)
    again, tape, _ = run(config)
    assert tape.steps == [] and again is not None and again.finished and first is not None and again.evals == first.evals
    _, tape, _ = run(config, fresh=True)
    assert tape.steps == straight.steps


def test_other_settings_on_resume_are_told_and_other_data_is_refused(make, tmp_path) -> None:
    run(make(), stop_after=2)
    _, tape, _ = run(make(steps=8, engine={"weight_decay": 0.1}), stop_after=3)
    assert tape.notes == ["not the run that was interrupted: weight_decay 0.0 -> 0.1, steps 6 -> 8"]
    with pytest.raises(ConfigError, match=r"data\.seed changed since"):
        run(make(data=DataConfig(train=(str(tmp_path / "train.txt"),), max_length=16, seed=1)))


def test_steps_follow_from_epochs(make) -> None:
    _, tape, _ = run(make(steps=None, epochs=0.5))
    rows = len(TOKENIZER("the cat sat on the mat and the dog and the hat; " * 12).input_ids) // 16  # + EOS does not make a row more
    assert tape.began == [(0, math.ceil(0.5 * rows / 2))]


def test_two_backwards_of_half_a_batch_make_the_step_of_the_whole(make) -> None:
    _, whole, _ = run(make("whole", batch_size=4, steps=2))
    _, halves, _ = run(make("halves", batch_size=2, steps=2, engine={"gradient_accumulation_steps": 2}))
    for a, b in zip(whole.steps, halves.steps, strict=True):  # the same rows, summed in another order
        assert (a.loss, a.grad_norm) == pytest.approx((b.loss, b.grad_norm), rel=1e-5) and a.tokens == b.tokens


def test_backwards_weigh_by_the_tokens_that_they_learn_from(make, tmp_path) -> None:
    """Rows of 3 to 14 tokens: the mean is over all tokens of a step, not over the means of its backwards."""
    lines = [json.dumps({"text": "the cat sat on the mat and the dog and the hat"[: 11 * k]}) for k in (1, 4, 2, 3, 1, 4, 3, 2)]
    (tmp_path / "uneven.jsonl").write_text("\n".join(lines))
    data = DataConfig(train=(str(tmp_path / "uneven.jsonl"),), max_length=16, packing=False)
    _, whole, _ = run(make("whole", batch_size=4, steps=2, data=data))
    _, quarters, _ = run(make("quarters", batch_size=1, steps=2, data=data, engine={"gradient_accumulation_steps": 4}))
    for a, b in zip(whole.steps, quarters.steps, strict=True):  # the same rows, summed in another order
        assert (a.loss, a.grad_norm) == pytest.approx((b.loss, b.grad_norm), rel=1e-5)


def test_schedules() -> None:
    def factors(steps: int, **values: Any) -> list[float]:
        return [round(ScheduleConfig(**values).factor(s, steps), 6) for s in range(steps)]

    assert factors(5) == [1.0, 0.853553, 0.5, 0.146447, 0.0]
    assert factors(5, final=0.1) == [1.0, 0.868198, 0.55, 0.231802, 0.1]
    assert factors(6, warmup_steps=3, kind="linear") == [0.25, 0.5, 0.75, 1.0, 0.5, 0.0]
    assert factors(3, kind="constant", warmup_steps=1) == [0.5, 1.0, 1.0]
    assert factors(1) == [1.0] and factors(2, warmup_steps=5) == [0.166667, 0.333333]


def test_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ZINF_CACHE", str(tmp_path))
    monkeypatch.setenv("ZINF_QUEUE_DEPTH", "8")
    file = tmp_path / "run.yaml"
    file.write_text(
        yaml.safe_dump({"model": "Qwen/Qwen3-8B", "output": "$ZINF_CACHE/out", "data": {"train": "a.txt"}, "engine": {"nvme_path": "~/n", "lr": 1}})
    )
    monkeypatch.setenv("HOME", "/home/u")
    c = TrainConfig.load(file, ["steps=3", "engine.lr=2e-5", "data.max_length=64", "schedule.kind=linear"], {"queue_depth": 4})
    assert c.steps == 3 and c.data.max_length == 64 and c.schedule.kind == "linear" and c.model == "Qwen/Qwen3-8B"
    assert c.output == f"{tmp_path}/out"
    assert c.engine == Config(nvme_path=("/home/u/n",), lr=2e-5, queue_depth=4)
    assert TrainConfig.load(file).engine.queue_depth == 8


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data.max_lenght=5", "data: unknown key 'max_lenght'; did you mean 'max_length'?"),
        ("engine.optimiser=adam", "engine: unknown key 'optimiser'; did you mean 'optimizer'?"),
        ("step=5", "unknown key 'step'; did you mean 'steps'?"),
        ("model=/no/such", "model is '/no/such', expected a folder with a Hugging Face model"),
        ("steps=0", "steps is 0, expected a positive number"),
        ("steps", "'steps': write KEY=VALUE"),
        ("steps.x=1", "steps is not a section"),
        ("data.train=[]", "data: train is [], expected at least one file"),
        ("data=5", "data: expected keys and values, found int"),
    ],
)
def test_mistakes_in_files(tmp_path, change: str, said: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: a/b\nsteps: 1\ndata: {train: a.txt}\n")
    with pytest.raises(ConfigError) as e:
        TrainConfig.load(file, [change])
    assert said in str(e.value) and "\n" not in str(e.value)
    file.write_text("steps: 1\n")
    with pytest.raises(ConfigError, match="model and data must be given"):
        TrainConfig.load(file)


def test_the_example_is_valid(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ZINF_CACHE", str(tmp_path))
    (tmp_path / "smollm2-135m-instruct").mkdir()
    c = TrainConfig.load(Path(__file__).parents[1] / "examples/smollm2.yaml")
    assert c.engine.host_memory == c.engine.device_memory == 512 << 20 and c.engine.max_grad_norm == 1.0 and c.engine.state == "nvme"
    (tmp_path / "smollm2-135m-instruct").rmdir()
    with pytest.raises(ConfigError, match="`zinf demo --prepare` makes it"):
        TrainConfig.load(Path(__file__).parents[1] / "examples/smollm2.yaml")


def test_an_output_that_cannot_be_is_refused_before_training(tmp_path):
    from zinf.train import check_output

    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output: .*file cannot be made \(File exists\)"):
        check_output(str(tmp_path / "file"))
    check_output(str(tmp_path / "new" / "folder"))
    assert not (tmp_path / "new" / "folder").exists()
    check_output(None)


def test_a_budget_that_is_too_small_is_refused_before_the_import(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    from zinf.errors import BudgetError
    from zinf.train import open_engine

    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=64)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("text")
    values = {
        "model": str(tmp_path / "model"),
        "data": {"train": [str(tmp_path / "text.txt")]},
        "engine": {"nvme_path": str(tmp_path), "host_memory": "64KiB", "weights": "nvme", "state": "nvme"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(BudgetError, match=r"host memory: zinf needs .* but host_memory is 64\.0 KiB"):
        open_engine(TrainConfig.load(tmp_path / "run.yaml"), False, Watch())
    assert not (tmp_path / "run").exists()
