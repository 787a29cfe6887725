"""A model that streams writes what it writes in memory, reads its weights once a token for the whole batch, and leaves a run's store as it is."""

from __future__ import annotations

import io
import os
import sys

import pytest
import torch
from models import LEAF_BYTES, batches, llama
from tiny_tokenizer import tiny_tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import zinf
from zinf import cli
from zinf.config import Config
from zinf.errors import ConfigError
from zinf.hf import inference

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = dict(do_sample=False, max_new_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    llama(hidden_size=96).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def plain(folder, prompts: list[str]) -> list[str]:
    """transformers alone."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = "</s>", "left"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    out = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], pad_token_id=tokenizer.pad_token_id, **GREEDY)
    return [tokenizer.decode(row[inputs["input_ids"].shape[1] :], skip_special_tokens=True) for row in out]


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("weights", ["host", "nvme"])
def test_tokens_are_those_of_transformers(folder, tmp_path, device, weights) -> None:
    config = Config(nvme_path=str(tmp_path), device=device, weights=weights, leaf_bytes=LEAF_BYTES)
    prompts = ["the cat", "the dog and the hat sat"]
    with inference.open_model(str(folder), config) as engine:
        assert inference.write(engine, tiny_tokenizer(), prompts, **GREEDY) == plain(folder, prompts)
        assert not engine.layout.moments or not any(run.trainable for shard in engine.layout.shards for run in shard.runs)  # no state on the drive


@pytest.mark.parametrize("rows", [1, 8])
def test_weights_are_read_once_a_token_for_all_rows(folder, tmp_path, rows) -> None:
    """With slabs for a few shards only: what a token more reads is what streams, once, whatever the rows."""
    biggest = 128 << 10
    config = Config(nvme_path=str(tmp_path), device="sim", weights="nvme", leaf_bytes=LEAF_BYTES, device_memory=4 * biggest)
    with inference.open_model(str(folder), config) as engine:
        read = {}
        for tokens in (2, 3, 7):
            before = engine.stats()["bytes_read"]
            engine.generate(batches(1, rows=rows)[0] % 300, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
            read[tokens] = engine.stats()["bytes_read"] - before
        assert engine.stats()["bytes_written"] == 0
    whole = sum(shard.weights_nbytes for shard in engine.layout.shards)
    a_token = (read[7] - read[3]) / 4
    assert 0 < a_token <= whole, read


def test_a_store_that_a_run_left(folder, tmp_path) -> None:
    with zinf.Engine(zinf.from_pretrained(folder, nvme_path=tmp_path, optimizer="lion"), optimizer="lion", lr=1e-2) as engine:
        for ids in batches(2):
            engine.backward(engine(input_ids=ids % 300, labels=ids % 300).loss)
            engine.step()
        engine.save_pretrained(tmp_path / "trained")
    before = (tmp_path / "run/manifest.json").read_bytes()
    with inference.open_store([str(tmp_path / "run")], Config()) as engine:
        assert inference.write(engine, tiny_tokenizer(), ["the cat"], **GREEDY) == plain(tmp_path / "trained", ["the cat"])
        assert engine.stats()["bytes_written"] == 0
    assert (tmp_path / "run/manifest.json").read_bytes() == before
    assert plain(tmp_path / "trained", ["the cat"]) != plain(folder, ["the cat"])


def test_a_model_that_trains_generates_in_eval_mode(tmp_path) -> None:
    model = llama()
    with zinf.Engine(model, leaf_bytes=LEAF_BYTES, nvme_path=str(tmp_path), weights="nvme") as engine:
        out = engine.generate(batches(1)[0], **GREEDY, pad_token_id=0)
        assert engine.module.training
    assert torch.equal(out, llama().eval().generate(batches(1)[0], **GREEDY, pad_token_id=0))


def test_no_groups_are_for_what_is_frozen() -> None:
    with pytest.raises(ConfigError, match="param_groups lacks"):
        zinf.Engine(llama(), param_groups=[])
    with zinf.Engine(llama().requires_grad_(False), param_groups=[]) as engine, pytest.raises(zinf.ZinfError, match="step without grads"):
        engine.step()


def test_the_command(folder, tmp_path, monkeypatch, capsys) -> None:
    """One prompt, several, and lines of stdin; the second time from the store."""
    command = ["generate", str(folder), "--nvme-path", str(tmp_path), "--max-new-tokens", "6"]
    assert cli.main([*command, "--prompt", "the cat"]) == 0
    assert capsys.readouterr().out == f"the cat{plain(folder, ['the cat'])[0]}\n"
    two = "".join(f"{p}{a}\n" for p in ("the cat", "the dog and") for a in [plain(folder, ["the cat", "the dog and"])[p == "the dog and"]])
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n\nthe dog and\n"))
    assert cli.main(command) == 0 and capsys.readouterr().out == two
    store = os.path.join(tmp_path, "tiny-bfloat16")
    assert cli.main(["generate", store, "--max-new-tokens", "6", "--prompt", "the cat", "--prompt", "the dog and"]) == 0
    assert capsys.readouterr().out == two
    assert cli.main(["generate", store, "--chat", "--max-new-tokens", "3", "--temperature", "0.7", "--top-p", "0.9", "--prompt", "the cat"]) == 0
    assert "im_start" not in capsys.readouterr().out
    assert isinstance(AutoModelForCausalLM.from_pretrained(folder), LlamaForCausalLM)
