"""Each example runs, at toy size."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from tiny_tokenizer import tiny_tokenizer
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
    tiny_tokenizer().save_pretrained(tmp_path / "hub")
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
