"""Each example runs, at toy size."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from test_trl import tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = pytest.mark.usefixtures("one_thread")


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hub(tmp_path):
    """A folder with a tiny model and its tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=300, eos_token_id=1)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "hub")
    tokenizer().save_pretrained(tmp_path / "hub")
    return tmp_path / "hub"


def test_trainer(tmp_path, hub):
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog and the hat " * 200)
    arguments = [str(hub), str(tmp_path / "text.txt"), "--nvme", str(tmp_path), "--output", str(tmp_path / "out"), "--length", "16", "--host-memory", "1GiB"]
    main = example("trainer").main
    main([*arguments, "--steps", "20"])
    main([*arguments, "--steps", "22"])  # goes on
    assert (tmp_path / "out" / "checkpoint-22" / "zinf_state").is_dir()
    changed = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).state_dict()
    assert any(not torch.equal(changed[n], p) for n, p in AutoModelForCausalLM.from_pretrained(hub, dtype=torch.bfloat16).state_dict().items())


def lines(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_sft_lora(tmp_path, hub):
    chat = {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}]}
    arguments = [str(hub), lines(tmp_path / "chats.jsonl", [chat] * 8), "--nvme", str(tmp_path), "--output", str(tmp_path / "out"), "--steps", "2"]
    example("sft_lora").main(arguments)
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out-merged")


def test_dpo(tmp_path, hub):
    row = {"prompt": "the cat ", "chosen": "sat on the mat", "rejected": "and the dog"}
    example("dpo").main([str(hub), lines(tmp_path / "p.jsonl", [row] * 8), "--nvme", str(tmp_path), "--output", str(tmp_path / "out"), "--steps", "2"])
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_grpo(tmp_path, hub):
    (tmp_path / "prompts.txt").write_text("the cat\nthe dog\n" * 4)
    arguments = [str(hub), str(tmp_path / "prompts.txt"), "--nvme", str(tmp_path), "--output", str(tmp_path / "out"), "--steps", "2", "--tokens", "6"]
    example("grpo").main(arguments)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
