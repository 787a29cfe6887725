"""TRL's trainers on an engine: the losses that they have in memory, with no second copy of a model, whether the head is streamed or not."""

from __future__ import annotations

import functools
import os

import pytest
import torch
from models import LEAF_BYTES
from tiny_tokenizer import CHATML, tiny_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import zinf
from zinf.errors import ConfigError
from zinf.hf.trainer import ZinfTrainerMixin
from zinf.layout import FROZEN

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("one_thread")

BASE = dict(
    per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-3, max_steps=3, logging_steps=1, report_to=[], use_cpu=True,
    save_strategy="no", bf16=False, disable_tqdm=True,
)  # fmt: skip
GENERATION = CHATML.replace("m['content'] + '<|im_end|>\n' }}", "' ' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}")
GENERATION = GENERATION.replace("{% endfor %}", "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}", 1)


class SFT(ZinfTrainerMixin, trl.SFTTrainer):
    pass


class DPO(ZinfTrainerMixin, trl.DPOTrainer):
    pass


class KTO(ZinfTrainerMixin, trl.KTOTrainer):
    pass


class GRPO(ZinfTrainerMixin, trl.GRPOTrainer):
    pass


@functools.cache
def rows(kind: str):
    parts = [("the cat ", "sat on the mat " * (1 + i % 3), "and the dog " * (1 + i % 2), i % 2 == 0) for i in range(12)]
    chat = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b, *_ in parts]
    columns = {
        "text": {"text": [a + b for a, b, *_ in parts]},
        "chat": {"messages": chat},
        "preference": {"prompt": [p[0] for p in parts], "chosen": [p[1] for p in parts], "rejected": [p[2] for p in parts]},
        "judged": {"prompt": [p[0] for p in parts], "completion": [p[1] for p in parts], "label": [p[3] for p in parts]},
    }
    return datasets.Dataset.from_dict(columns[kind])


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hub")
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=300, bos_token_id=0, eos_token_id=1)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer():
    tokenizer = tiny_tokenizer(template=GENERATION)
    tokenizer.pad_token = "</s>"
    return tokenizer


TRAINERS = {
    "sft": (trl.SFTTrainer, SFT, trl.SFTConfig, "text"),
    "dpo": (trl.DPOTrainer, DPO, trl.DPOConfig, "preference"),
    "kto": (trl.KTOTrainer, KTO, trl.KTOConfig, "judged"),
}
LORA = dict(r=2, target_modules="all-linear")


def arguments(kind, hub, folder, lora=False, data=None, eval=False, **more):
    *_, config, rows_of = TRAINERS[kind]
    data = rows(data or rows_of)
    out = dict(args=config(str(folder), **{**BASE, **more}), train_dataset=data, processing_class=tokenizer())
    if lora:
        out["peft_config"] = peft.LoraConfig(**LORA)
    return out | ({"eval_dataset": data.select(range(4))} if eval else {})


def in_memory(hub):
    return LlamaForCausalLM.from_pretrained(hub)


def seen(trainer):
    return [(h["loss"], h["grad_norm"]) for h in trainer.state.log_history if "loss" in h]


def options(folder, **more):
    (folder / "nvme").mkdir(parents=True, exist_ok=True)
    return dict(nvme_path=str(folder / "nvme"), leaf_bytes=LEAF_BYTES, weights="nvme", state="nvme", **more)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", TRAINERS)
def test_the_losses_of_trl_in_memory(tmp_path, hub, kind, lora):
    """In fp32; close, since the norm and accumulated gradients are summed in another order."""
    plain, ours, *_ = TRAINERS[kind]
    theirs = plain(model=in_memory(hub), **arguments(kind, hub, tmp_path / "plain", lora, eval=True))
    theirs.train()
    device = "sim" if kind == "dpo" else "cpu"
    with ours(model=in_memory(hub), **arguments(kind, hub, tmp_path / "ours", lora, eval=True), zinf=options(tmp_path, device=device)) as trainer:
        trainer.train()
        assert getattr(trainer, "ref_model", None) is None
        for a, b in zip(seen(theirs), seen(trainer), strict=True):
            assert b == pytest.approx(a, rel=2e-5)
        a, b = theirs.evaluate(), trainer.evaluate()
        assert b["eval_loss"] == pytest.approx(a["eval_loss"], rel=2e-5)
        heads = [s for s in trainer.engine.shards if s.name.endswith("lm_head")]
        assert len(heads) == 1  # it was streamed


@pytest.mark.parametrize(("kind", "lora"), [("sft", True), ("dpo", True), ("dpo", False)])
def test_a_model_in_a_store(tmp_path, hub, kind, lora):
    """The same losses; of adapters' base there is one copy, and it is linked, not written."""
    plain, ours, *_ = TRAINERS[kind]
    theirs = plain(model=in_memory(hub), **arguments(kind, hub, tmp_path / "plain", lora))
    theirs.train()
    model = zinf.from_pretrained(hub, nvme_path=tmp_path, dtype=torch.float32, trainable=not lora, leaf_bytes=LEAF_BYTES)
    with ours(model=model, **arguments(kind, hub, tmp_path / "ours", lora), zinf={"leaf_bytes": LEAF_BYTES, "weights": "nvme"}) as trainer:
        trainer.train()
        for a, b in zip(seen(theirs), seen(trainer), strict=True):
            assert b == pytest.approx(a, rel=2e-5)
        store = trainer.engine.memory.parts.records.store
        if lora:
            assert os.stat(os.path.join(store.paths[0], FROZEN)).st_nlink == 2


@pytest.mark.parametrize(
    ("data", "more"),
    [("chat", dict(assistant_only_loss=True)), ("text", dict(packing=True, max_length=24, packing_strategy="wrapped")), ("text", dict(loss_type="dft"))],
    ids=["assistant only", "packing", "dft"],
)
def test_what_sft_makes_of_rows(tmp_path, hub, data, more):
    more = dict(data=data, max_steps=2, **more)
    theirs = trl.SFTTrainer(model=in_memory(hub), **arguments("sft", hub, tmp_path / "plain", **more))
    theirs.train()
    with SFT(model=in_memory(hub), **arguments("sft", hub, tmp_path / "ours", **more), zinf=options(tmp_path)) as trainer:
        trainer.train()
        for a, b in zip(seen(theirs), seen(trainer), strict=True):
            assert b == pytest.approx(a, rel=2e-5)
        if data == "chat":
            counts = [(torch.tensor(row["labels"]) != -100).float().mean() for row in trainer.train_dataset]
            assert 0 < min(counts) <= max(counts) < 1


def test_checkpoints_of_adapters(tmp_path, hub):
    """Saved as PEFT does, resumed exactly, and DPO goes on from an adapter with a frozen copy of it as its reference."""
    run = functools.partial(arguments, "sft", hub, lora=True, save_strategy="steps", save_steps=2, max_steps=4)
    with SFT(model=in_memory(hub), **run(folder=tmp_path / "out"), zinf=options(tmp_path)) as trainer:
        trainer.train()
        want, weights = seen(trainer), trainer.engine.state_dict()
    with SFT(model=in_memory(hub), **run(folder=tmp_path / "out"), zinf=options(tmp_path)) as trainer:
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
        assert seen(trainer) == want
        assert all(torch.equal(value, weights[name]) for name, value in trainer.engine.state_dict().items())
    adapted = peft.PeftModel.from_pretrained(in_memory(hub), tmp_path / "out" / "checkpoint-4", is_trainable=True)
    kept = {name: value for name, value in adapted.named_parameters() if "lora" in name}
    assert kept and all(torch.equal(value, weights[name]) for name, value in kept.items())
    theirs = trl.DPOTrainer(
        model=peft.PeftModel.from_pretrained(in_memory(hub), tmp_path / "out" / "checkpoint-4", is_trainable=True),
        **arguments("dpo", hub, tmp_path / "plain"),
    )
    theirs.train()
    with DPO(model=adapted, **arguments("dpo", hub, tmp_path / "dpo"), zinf=options(tmp_path / "dpo")) as trainer:
        trainer.train()
        assert "ref" in adapted.peft_config
        for a, b in zip(seen(theirs), seen(trainer), strict=True):
            assert b == pytest.approx(a, rel=2e-5)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_texts_made_by_the_model_itself(tmp_path, hub, lora):
    """GRPO: generated, judged, trained on; with adapters also against a reference. The same texts, so the same rewards."""

    def ts(completions, **kwargs):
        return [float(text.count("t")) for text in completions]

    def run(cls, folder, **more):
        config = trl.GRPOConfig(
            str(folder),
            **{**BASE, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "gradient_accumulation_steps": 1},
            **dict(num_generations=4, max_completion_length=8, beta=0.04 if lora else 0.0),
        )
        adapters = {"peft_config": peft.LoraConfig(**LORA)} if lora else {}
        data = datasets.Dataset.from_dict({"prompt": ["the cat ", "the dog "] * 4})
        trainer = cls(model=in_memory(hub), reward_funcs=ts, args=config, train_dataset=data, processing_class=tokenizer(), **adapters, **more)
        trainer.train()
        return trainer, [(h["loss"], h["grad_norm"], h["reward"], h.get("kl", 0)) for h in trainer.state.log_history if "loss" in h]

    _, want = run(trl.GRPOTrainer, tmp_path / "plain")
    trainer, got = run(GRPO, tmp_path / "ours", zinf=options(tmp_path))
    trainer.close()
    assert any(norm > 0 for _, norm, *_ in want)
    for a, b in zip(want, got, strict=True):
        assert b == pytest.approx(a, rel=1e-4, abs=1e-6)


def test_a_head_that_cannot_be_followed(tmp_path, hub):
    with SFT(model=in_memory(hub), **arguments("sft", hub, tmp_path), zinf=options(tmp_path, fused_head="off")) as trainer:
        with pytest.raises(ConfigError, match=r"TRL reads the weights of LlamaForCausalLM's head outside .*leaf_bytes"):
            trainer.train()
    with SFT(model=in_memory(hub), **arguments("sft", hub, tmp_path), zinf={"fused_head": "off", "leaf_bytes": "1TiB"}) as trainer:
        trainer.train()


def test_refused(tmp_path, hub):
    with pytest.raises(ConfigError, match=r"would be loaded into memory as a whole: give zinf.from_pretrained\('some/model'"):
        SFT(model="some/model", **arguments("sft", hub, tmp_path))
    with pytest.raises(ConfigError, match="sync_ref_model needs a second model"):
        DPO(model=in_memory(hub), **arguments("dpo", hub, tmp_path, sync_ref_model=True))
    with pytest.raises(ConfigError, match=r"beta=0.1 compares with a second model.*set beta=0.0, or train adapters"):
        GRPO(model=in_memory(hub), reward_funcs=len, args=trl.GRPOConfig(str(tmp_path), beta=0.1, use_cpu=True), train_dataset=rows("preference"))
    with pytest.raises(ConfigError, match=r"DPOTrainer: give args=DPOConfig\(\.\.\.\)"):
        DPO(model=in_memory(hub), train_dataset=rows("preference"))


def test_full_fine_tuning_saves_a_model(tmp_path, hub):
    with SFT(model=in_memory(hub), **arguments("sft", hub, tmp_path / "out", save_strategy="steps", save_steps=3), zinf=options(tmp_path)) as trainer:
        trainer.train()
        weights = trainer.engine.state_dict()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-3")
    assert all(torch.equal(p, weights[name]) for name, p in again.named_parameters())
