"""transformers' Trainer on an engine: vanilla's losses, the bits of zinf's own loop, checkpoints and resumes, and what is refused."""

from __future__ import annotations

import json
import logging
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from models import LEAF_BYTES, llama
from oracle import assert_same, engine_snapshot
from torch import nn
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput

import zinf
from zinf.engine import Engine
from zinf.errors import ConfigError, EngineError, StoreError
from zinf.hf.trainer import STATE, ZinfSeq2SeqTrainer, ZinfTrainer, last_whole

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICES = pytest.mark.parametrize("device", ["cpu", "sim"])
BASE = dict(
    per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2,
    lr_scheduler_type="cosine", max_steps=6, logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no", seed=3,
)  # fmt: skip


def rows(count=32, ragged=True):
    """Rows of ids whose labels are partly masked, so that batches have different numbers of tokens that count."""
    ids = torch.randint(0, 512, (count, 16), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for i in range(count if ragged else 0):
        labels[i, : i % 9] = -100
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


def targs(folder, **more) -> TrainingArguments:
    return TrainingArguments(str(folder), **{**BASE, **more})


def options(folder, **more):
    path = folder / "nvme"
    path.mkdir(parents=True, exist_ok=True)
    return dict(nvme_path=str(path), leaf_bytes=LEAF_BYTES, weights="nvme", state="nvme", **more)


def trainer(folder, model=None, zinf=None, data=None, cls=ZinfTrainer, more=None, **args):
    return cls(
        model=model or llama(torch.float32), args=targs(folder / "out", **args), train_dataset=data or rows(), zinf=zinf or options(folder), **more or {}
    )


def history(trainer, *keys):
    return [tuple(h[k] for k in keys or ("loss", "grad_norm", "learning_rate")) for h in trainer.state.log_history if "loss" in h]


class Watching:
    """Records what a trainer's collator gives out."""

    def __init__(self):
        self.batches = []

    def __call__(self, rows):
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        self.batches.append(batch)
        return {key: value.clone() for key, value in batch.items()}


# -- the same numbers ---------------------------------------------------------------------------------------------------------------


@DEVICES
def test_vanilla_in_memory_and_zinf_on_nvme(tmp_path, device):
    """Close, not equal: vanilla sums the norm and the accumulated gradients in another order."""
    plain = Trainer(model=llama(torch.float32), args=targs(tmp_path / "plain"), train_dataset=rows())
    plain.train()
    with trainer(tmp_path, zinf=options(tmp_path, device=device)) as ours:
        ours.train()
        for a, b in zip(history(plain), history(ours), strict=True):
            assert b == pytest.approx(a, rel=1e-5)
        weights = ours.engine.state_dict()
    for name, p in plain.model.named_parameters():
        torch.testing.assert_close(weights[name], p.detach(), rtol=1e-5, atol=1e-6)


@DEVICES
@pytest.mark.parametrize("clip", [0.5, 0.0], ids=["deferred", "backward"])
def test_the_bits_of_a_plain_loop(tmp_path, device, clip):
    """And with 5 batches in an epoch and 2 in a step, the last step of an epoch has one."""
    watch = Watching()
    with trainer(
        tmp_path, llama(), options(tmp_path, device=device), rows(10), max_grad_norm=clip, max_steps=-1, num_train_epochs=2, more={"data_collator": watch}
    ) as ours:
        ours.train()
        assert ours.engine.report()["step_mode"] == ("deferred" if clip else "backward")
        got, snapshot = history(ours), engine_snapshot(ours.engine)
    want = []
    model = llama()
    groups = zinf.decay_groups(model, 0.1)
    with Engine(model, leaf_bytes=LEAF_BYTES, max_grad_norm=clip or None, param_groups=groups, gradient_accumulation_steps=2, device="cpu") as engine:
        assert [len(g["params"]) for g in engine.optimizer.param_groups] == [29, 9]
        for step, parts in enumerate([watch.batches[i : i + 2] for i in (0, 2, 4, 5, 7, 9)]):
            parts = parts[:1] if step in (2, 5) else parts
            items = sum((batch["labels"][:, 1:] != -100).sum() for batch in parts)
            for group in engine.optimizer.param_groups:
                group["lr"] = got[step][2]
            total = torch.tensor(0.0)
            for batch in parts:
                loss = engine(**batch, num_items_in_batch=items).loss
                total += loss.detach()
                engine.backward(loss)
            want.append((total.item(), engine.step().grad_norm, got[step][2]))
        assert_same(engine_snapshot(engine), snapshot)
    assert got == want


def test_tokens_count_once_however_they_are_accumulated(tmp_path):
    """One batch of 4 rows and four of 1, of different numbers of tokens: the same losses. Close: sums in another order."""
    losses = []
    for batch, accumulation in ((4, 1), (1, 4)):
        folder = tmp_path / str(batch)
        with trainer(folder, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=3, lr_scheduler_type="constant") as ours:
            ours.train()
            losses.append(history(ours, "loss", "grad_norm"))
    for a, b in zip(*losses, strict=True):
        assert b == pytest.approx(a, rel=1e-5)


@pytest.mark.parametrize(
    ("optim", "more"), [("sgd", dict(optim_args="momentum=0.9", learning_rate=0.1)), ("adagrad", {}), ("adamw_torch", dict(adam_beta2=0.9, adam_epsilon=1e-4))]
)
def test_optimizers(tmp_path, optim, more):
    args = dict(optim=optim, max_steps=4, **more)
    plain = Trainer(model=llama(torch.float32), args=targs(tmp_path / "plain", **args), train_dataset=rows())
    plain.train()
    with trainer(tmp_path, **args) as ours:
        ours.train()
        for a, b in zip(history(plain), history(ours), strict=True):
            assert b == pytest.approx(a, rel=1e-5)


def test_bf16_flag_on_fp32_weights_is_autocast(tmp_path):
    """Losses of vanilla under bf16=True: fp32 weights, computation in bf16. Close, as gradients of autocast matmuls are summed differently."""
    plain = Trainer(model=llama(torch.float32), args=targs(tmp_path / "plain", bf16=True), train_dataset=rows())
    plain.train()
    with trainer(tmp_path, bf16=True) as ours:
        ours.train()
        for a, b in zip(history(plain), history(ours), strict=True):
            assert b == pytest.approx(a, rel=2e-3)


def test_an_overflow_of_fp16_makes_the_schedule_wait(tmp_path):
    zinf_options = options(tmp_path, initial_scale_power=30, hysteresis=1, min_loss_scale=1)
    with trainer(tmp_path, llama(torch.float16), zinf_options, fp16=True, warmup_steps=0, lr_scheduler_type="linear", max_steps=3) as ours:
        ours.train()
        assert ours.engine.skipped_steps == 3 and ours.engine.global_step == 0
        assert [lr for *_, lr in history(ours)] == [1e-3] * 3
        ours.args.max_steps = 26
        ours.train()
        assert ours.engine.global_step > 5 and history(ours)[-1][2] < 1e-3


# -- checkpoints --------------------------------------------------------------------------------------------------------------------


def dropping() -> nn.Module:
    """A Llama whose random numbers matter."""
    return llama(torch.bfloat16, attention_dropout=0.2)


@DEVICES
def test_resume_is_exact(tmp_path, device):
    run = partial(trainer, save_strategy="steps", save_steps=2, data=rows(12), max_steps=7, dataloader_num_workers=0)
    with run(tmp_path / "whole", dropping(), options(tmp_path / "whole", device=device)) as whole:
        whole.train()
        want, snapshot = history(whole), engine_snapshot(whole.engine)
    with run(tmp_path / "killed", dropping(), options(tmp_path / "killed", device=device), save_total_limit=2, more={"callbacks": [StopAt(5)]}) as killed:
        killed.train()
        assert sorted(n for n in os.listdir(tmp_path / "killed" / "out") if "checkpoint" in n) == ["checkpoint-2", "checkpoint-4"]
        (tmp_path / "killed" / "out" / "checkpoint-6").mkdir()  # that was being written when the process was killed
    with run(tmp_path / "killed", dropping(), options(tmp_path / "killed", device=device)) as again:
        again.train(resume_from_checkpoint=True)
        assert history(again) == want
        assert again.engine.global_step == 7
        assert_same(engine_snapshot(again.engine), snapshot)


class StopAt(TrainerCallback):
    """Ends training after a step, or with an error in the middle of the one after it."""

    def __init__(self, step, error=None, event="on_substep_end"):
        self.step, self.error = step, error
        setattr(self, event, self.fail)

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_training_stop or (state.global_step == self.step and self.error is None)

    def fail(self, args, state, control, **kwargs):
        if self.error and state.global_step == self.step:
            raise self.error


def test_a_checkpoint_is_a_model(tmp_path):
    with trainer(tmp_path, llama(), save_strategy="steps", save_steps=3) as ours:
        ours.train()
        ours.save_model(str(tmp_path / "final"))
        weights = ours.engine.state_dict()
    for folder in (tmp_path / "out" / "checkpoint-6", tmp_path / "final"):
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        for name, p in again.named_parameters():
            assert torch.equal(p, weights[name]), name
    assert {"config.json", "generation_config.json", "trainer_state.json", "rng_state.pth", "scheduler.pt", STATE} <= set(
        os.listdir(tmp_path / "out" / "checkpoint-6")
    )
    assert os.path.getsize(tmp_path / "out" / "checkpoint-6" / "optimizer.pt") < 10_000  # the moments are in the engine's part


def test_a_model_streamed_into_a_store(tmp_path):
    """Evaluated before it was trained, trained, saved and read again."""
    llama().save_pretrained(tmp_path / "hub")
    model = zinf.from_pretrained(tmp_path / "hub", nvme_path=tmp_path)
    with ZinfTrainer(model=model, args=targs(tmp_path / "out"), train_dataset=rows(), eval_dataset=rows(4), zinf={"host_memory": "64MiB"}) as ours:
        before = ours.evaluate()["eval_loss"]
        ours.train()
        after = ours.evaluate()["eval_loss"]
        ours.save_model()
        assert ours.engine.memory.parts.records.store.paths == [str(tmp_path / "run")]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    plain = Trainer(model=again, args=targs(tmp_path / "plain"), eval_dataset=rows(4))
    assert after < before and plain.evaluate()["eval_loss"] == pytest.approx(after, rel=1e-6)


def test_a_new_head_for_another_task(tmp_path):
    """With the class first; the checkpoint has no such head, which is made as transformers makes it."""
    from transformers import AutoModelForSequenceClassification

    llama().save_pretrained(tmp_path / "hub")
    model = zinf.hf.from_pretrained(AutoModelForSequenceClassification, tmp_path / "hub", nvme_path=tmp_path, dtype=torch.float32, num_labels=3, pad_token_id=0)
    data = [{"input_ids": row["input_ids"], "labels": i % 3} for i, row in enumerate(rows(12))]
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hub", num_labels=3, pad_token_id=0, dtype=torch.float32)
    with torch.no_grad():
        plain.score.weight.copy_(model.score.weight)
    theirs = Trainer(model=plain, args=targs(tmp_path / "plain"), train_dataset=data)
    theirs.train()
    with ZinfTrainer(model=model, args=targs(tmp_path / "out"), train_dataset=data) as ours:
        ours.train()
        for a, b in zip(history(theirs), history(ours), strict=True):
            assert b == pytest.approx(a, rel=1e-5)


def test_the_best_model_is_loaded_and_training_stops_early(tmp_path):
    """With a learning rate that ruins the model, the first evaluation is the best."""
    args = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_loss")
    more = {"eval_dataset": rows(4), "callbacks": [EarlyStoppingCallback(early_stopping_patience=2)]}
    with trainer(tmp_path, llama(), more=more, **args, learning_rate=0.5, warmup_steps=0, save_total_limit=1, max_steps=20) as ours:
        ours.train()
        assert ours.state.global_step < 20
        losses = [h["eval_loss"] for h in ours.state.log_history if "eval_loss" in h]
        assert ours.evaluate()["eval_loss"] == min(losses) < losses[-1]
        assert os.path.samefile(ours.state.best_model_checkpoint, last_whole(str(tmp_path / "out")))


def test_save_only_model_and_its_best(tmp_path):
    args = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True, save_only_model=True)
    with trainer(tmp_path, llama(), more={"eval_dataset": rows(4)}, **args, learning_rate=0.5, warmup_steps=0, max_steps=3) as ours:
        ours.train()
        assert ours.evaluate()["eval_loss"] == min(h["eval_loss"] for h in ours.state.log_history if "eval_loss" in h)
        saved = tmp_path / "out" / "checkpoint-3"
        assert not os.path.exists(saved / STATE) and not os.path.exists(saved / "training_args.bin")
        assert json.loads((saved / "training_args.json").read_text())["learning_rate"] == 0.5
        with pytest.raises(EngineError, match="no checkpoint to go on from, nor has the store"):
            ours.train(resume_from_checkpoint=True)


def test_a_checkpoint_of_another_trainer(tmp_path):
    plain = Trainer(model=llama(), args=targs(tmp_path / "out", save_strategy="steps", save_steps=3, max_steps=3), train_dataset=rows())
    plain.train()
    with trainer(tmp_path) as ours, pytest.raises(ConfigError, match="has no zinf_state: it was saved by another trainer"):
        ours.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))


@pytest.mark.parametrize(("device", "saves"), [("cpu", "no"), ("sim", "steps")])
def test_a_run_killed_between_checkpoints_loses_no_step(tmp_path, device, saves):
    """It goes on from the store's last commit, bit for bit: with random numbers in the model, and an evaluation between."""
    args = dict(save_strategy=saves, save_steps=4, max_steps=8, eval_strategy="steps", eval_steps=3)

    def draw(predictions):
        return {"drawn": torch.rand(()).item()}

    more = {"eval_dataset": rows(4), "compute_metrics": draw}
    with trainer(tmp_path / "whole", dropping(), options(tmp_path / "whole", device=device), more=more, **args) as whole:
        whole.train()
        want, snapshot = history(whole), engine_snapshot(whole.engine)
    stop = {"callbacks": [StopAt(6, RuntimeError("killed"))]}
    killed = trainer(tmp_path / "killed", dropping(), options(tmp_path / "killed", device=device), more=more | stop, **args)
    with pytest.raises(RuntimeError, match="killed"):
        killed.train()
    killed.engine._release()  # nothing is committed any more
    with trainer(tmp_path / "killed", dropping(), options(tmp_path / "killed", device=device), more=more, **args) as again:
        again.train(resume_from_checkpoint=True)
        assert again._initial_global_step == 6
        assert history(again)[-2:] == want[-2:]
        assert len(history(again)) == (2 if saves == "no" else 6)
        assert_same(engine_snapshot(again.engine), snapshot)


# -- the life of a run --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", ["on_substep_end", "on_optimizer_step"])
def test_ctrl_c_leaves_whole_steps(tmp_path, event):
    """In a backward it drops that step; between the engine's step and the schedule's it goes on from the checkpoint."""
    run = partial(trainer, save_strategy="steps", save_steps=2)
    with run(tmp_path / "whole", llama()) as whole:
        whole.train()
        want = history(whole)
    with run(tmp_path, llama(), more={"callbacks": [StopAt(3, KeyboardInterrupt(), event)]}) as ours:
        with pytest.raises(KeyboardInterrupt):
            ours.train()
        made = 3 if event == "on_substep_end" else 4
        assert ours.engine.global_step == made and not ours.engine.stepper.summed
        assert ours.engine.memory.parts.records.store.step == made
        ours.callback_handler.remove_callback(StopAt)
        ours.train(resume_from_checkpoint=True)
        assert ours._initial_global_step == (3 if made == 3 else 2)
        assert history(ours) == want[:2] + want[ours._initial_global_step :]  # the history is the checkpoint's
    with pytest.raises(StoreError, match=r"an earlier run has its store at .*train\(resume_from_checkpoint=True\)"):
        trainer(tmp_path, llama()).train()


def test_train_goes_on_where_it_was(tmp_path):
    """train() twice, as in a notebook, and a trainer of its own after close()."""
    model = llama()
    with trainer(tmp_path, model) as ours:
        ours.train()
        ours.train()
        assert ours.engine.global_step == 12
        with pytest.raises(EngineError, match="already has an engine: close it first"):
            _ = trainer(tmp_path / "other", model).engine
    folder = tmp_path / "memory"
    with ZinfTrainer(model=llama(), args=targs(folder), train_dataset=rows(), zinf={"leaf_bytes": LEAF_BYTES}) as ours:  # without a store
        ours.train()
    assert torch.isfinite(ours.model.lm_head.weight).all()


class Net(nn.Module):
    """No transformers model: other names of inputs and labels, a running average."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x, target=None):
        logits = self.layers(x)
        return SequenceClassifierOutput(loss=nn.functional.cross_entropy(logits, target) if target is not None else None, logits=logits)


def test_any_module_and_label_names(tmp_path):
    data = [{"x": torch.randn(8, generator=torch.Generator().manual_seed(i)), "target": torch.tensor(i % 3)} for i in range(24)]
    args = dict(label_names=["target"], eval_strategy="steps", eval_steps=3, per_device_train_batch_size=4)
    more = dict(eval_dataset=data[:8], compute_metrics=lambda p: {"right": float((p.predictions.argmax(-1) == p.label_ids).mean())})
    plain = Trainer(model=Net(), args=targs(tmp_path / "plain", **args), train_dataset=data, **more)
    plain.train()
    with trainer(tmp_path, Net(), data=data, more=more, **args) as ours:
        ours.train()
        keys = ("eval_loss", "eval_right")
        a, b = ([tuple(h[k] for k in keys) for h in t.state.log_history if "eval_loss" in h] for t in (plain, ours))
        assert len(a) == 2 and b == [pytest.approx(x, rel=1e-5) for x in a]
        ours.save_model()
        want = ours.engine.state_dict()
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == plain.model.state_dict().keys() == want.keys()
    assert all(torch.equal(saved[name], want[name]) for name in want)


def test_predict_with_generate(tmp_path):
    from transformers import T5Config, T5ForConditionalGeneration

    def t5():
        torch.manual_seed(0)
        config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, dropout_rate=0.0)
        return T5ForConditionalGeneration(config)

    ids = torch.randint(2, 64, (8, 6), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": i, "labels": i} for i in ids]
    args = dict(predict_with_generate=True, generation_max_length=8, max_steps=4, learning_rate=1e-2)
    plain = Seq2SeqTrainer(model=t5(), args=Seq2SeqTrainingArguments(str(tmp_path / "plain"), **{**BASE, **args}), train_dataset=data)
    plain.train()
    ours = ZinfSeq2SeqTrainer(model=t5(), args=Seq2SeqTrainingArguments(str(tmp_path / "ours"), **{**BASE, **args}), train_dataset=data, zinf=options(tmp_path))
    with ours:
        ours.train()
        a, b = plain.predict(data), ours.predict(data)
    assert (a.predictions == b.predictions).all() and b.metrics["test_loss"] == pytest.approx(a.metrics["test_loss"], rel=1e-4)


def test_what_is_logged(tmp_path, monkeypatch):
    kept = []

    class Keep(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            kept.append(dict(logs))

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    with trainer(tmp_path, llama(), more={"callbacks": [Keep]}, include_num_input_tokens_seen="all", report_to="tensorboard") as ours:
        ours.train()
    board = b"".join(file.read_bytes() for file in (tmp_path / "board").rglob("events*"))
    assert b"train/zinf/tok_per_s" in board and b"train/grad_norm" in board
    steps = [log for log in kept if "loss" in log]
    assert len(steps) == 6 and all(log["zinf/tok_per_s"] > 0 and log["grad_norm"] > 0 for log in steps)
    assert all(log["zinf/nvme_write_gbs"] > 0 for log in steps[1:])  # the first step is made under the second forward
    assert steps[-1]["zinf/nvme_written_total_tb"] > steps[0]["zinf/nvme_written_total_tb"] > 0
    assert steps[-1]["num_input_tokens_seen"] == 6 * 2 * 2 * 16


# -- flags --------------------------------------------------------------------------------------------------------------------------


def test_checkpointing_flags_are_taken_over(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "zinf"), trainer(tmp_path, llama(), activation_checkpointing=True, neftune_noise_alpha=5.0) as ours:
        ours.train()
        assert len([r for r in caplog.records if "is taken over" in r.message]) == 1
        assert ours.engine.trace.counts["calls in backward"] == 0


def test_torch_compile_compiles_blocks(tmp_path):
    with trainer(tmp_path, llama(), torch_compile=True, torch_compile_backend="eager", max_steps=1) as ours:
        ours.train()
        assert ours.engine.config.compile_blocks == "eager" and not hasattr(ours.model, "_orig_mod")


REFUSED = [
    (dict(auto_find_batch_size=True), "auto_find_batch_size.*set per_device_train_batch_size"),
    (dict(optim="adamw_bnb_8bit"), "adamw_bnb_8bit.*states are approximate.*adamw_torch"),
    (dict(optim="adafactor"), "adafactor.*has not got it"),
    (dict(torch_compile=True, torch_compile_mode="max-autotune"), "torch_compile_mode.*takes a backend alone"),
    (dict(debug="underflow_overflow"), "debug.*reads weights that are not in memory"),
    (dict(optim_target_modules="all-linear"), "optim_target_modules"),
]


@pytest.mark.parametrize(("args", "said"), REFUSED, ids=[next(iter(a)) + str(i) for i, (a, _) in enumerate(REFUSED)])
def test_refused_before_any_work(tmp_path, args, said):
    with pytest.raises(ConfigError, match=said) as e:
        trainer(tmp_path, **args)
    assert "\n" not in str(e.value) and not os.listdir(tmp_path / "nvme")


def test_refused_for_other_reasons(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"zinf: lr is said by TrainingArguments \(learning_rate\)"):
        trainer(tmp_path, zinf=options(tmp_path, lr=1e-4))
    with pytest.raises(ConfigError, match="unknown key 'nvme_pth'; did you mean 'nvme_path'"):
        trainer(tmp_path, zinf={"nvme_pth": "x"})
    with pytest.raises(ConfigError, match="optimizers: the engine has the optimizer"):
        trainer(tmp_path, more={"optimizers": (torch.optim.AdamW(llama().parameters()), None)})
    with pytest.raises(ConfigError, match="model_init"):
        ZinfTrainer(model_init=llama, args=targs(tmp_path))
    with pytest.raises(ConfigError, match=r"fp16=True\), but .* is torch.float32: load the model with dtype=torch.float16"):
        trainer(tmp_path, fp16=True).train()
    with pytest.raises(ConfigError, match=r"bf16_full_eval=True\), but"):
        trainer(tmp_path, bf16_full_eval=True).evaluate(rows(2))
    with pytest.raises(ConfigError, match="hyperparameter_search"):
        trainer(tmp_path).hyperparameter_search()
    args = targs(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"2 processes were started .* one process on one device"):
        ZinfTrainer(model=llama(), args=args)
    assert not os.listdir(tmp_path / "nvme")


def test_options_from_a_file_and_the_environment(tmp_path, monkeypatch):
    (tmp_path / "zinf.yaml").write_text(f"nvme_path: {tmp_path}\nhost_memory: 1GiB\nleaf_bytes: {LEAF_BYTES}\n")
    monkeypatch.setenv("ZINF_RUN_NAME", "other")
    with trainer(tmp_path, llama(), tmp_path / "zinf.yaml", max_steps=1) as ours:
        ours.train()
        assert ours.engine.config.host_memory == 1 << 30 and ours.engine.memory.parts.records.store.paths == [str(tmp_path / "other")]


def test_the_docs_have_every_argument():
    import dataclasses
    import re

    from zinf.hf import arguments

    text = (Path(__file__).parents[1] / "docs" / "trainer.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", text, re.M))
    kinds = arguments.kinds([f.name for f in dataclasses.fields(TrainingArguments)])
    assert {k: v for k, v in kinds.items() if v in ("mapped", "refused")} == rows
    listed = set(re.findall(r"`(\w+)`", text))
    assert not [name for name in kinds if name not in listed]


def test_importing_is_lazy():
    import subprocess
    import sys

    code = "import sys, zinf.hf; print('transformers' in sys.modules, 'ZinfTrainer' in dir(zinf.hf))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False", "True"]
