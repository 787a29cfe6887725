"""Random weights straight into a store are those that transformers would draw: the same distributions, any seed, whatever the order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig

import zinf
from zinf.hf.loading import from_pretrained

CONFIGS = {
    "llama": LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=256),
    "gpt2": GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=256, n_positions=64),  # c_proj is drawn by its block
    "mixtral": MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=256, num_local_experts=4
    ),
}


def values(folder: Path, nvme: Path, **options: object) -> dict[str, torch.Tensor]:
    nvme.mkdir(exist_ok=True)
    model = from_pretrained(folder, nvme_path=nvme, dtype=torch.float32, **options)  # type: ignore[arg-type]
    with zinf.Engine(model, nvme_path=str(nvme), chunk_size=options.get("chunk_size", 1 << 20)) as engine:
        return {name: t.clone() for name, t in engine.state_dict().items()}


@pytest.mark.parametrize("kind", CONFIGS)
def test_each_parameter_is_drawn_as_transformers_draws_it(kind: str, tmp_path: Path) -> None:
    CONFIGS[kind].save_pretrained(tmp_path)
    torch.manual_seed(1)
    theirs = dict(AutoModelForCausalLM.from_config(CONFIGS[kind]).named_parameters())
    before = torch.random.get_rng_state()
    ours = values(tmp_path, tmp_path / "nvme", initialise=3)
    assert torch.equal(before, torch.random.get_rng_state())
    assert theirs.keys() <= ours.keys()
    for name, p in theirs.items():
        mean, std = float(ours[name].mean()), float(ours[name].std())
        assert abs(std - float(p.std())) <= 0.2 * float(p.std()), name  # of hundreds of values, or all the same
        assert abs(mean - float(p.mean())) <= 0.5 * float(p.std()) + 1e-12, name
        assert p.std() == 0 or not torch.equal(ours[name], p), name


def test_a_seed_says_every_bit_whatever_the_chunks(tmp_path: Path) -> None:
    CONFIGS["llama"].save_pretrained(tmp_path)
    one = values(tmp_path, tmp_path / "a", initialise=3)
    same = values(tmp_path, tmp_path / "b", initialise=3, chunk_size=4096)
    other = values(tmp_path, tmp_path / "c", initialise=4)
    assert all(torch.equal(one[name], same[name]) for name in one)
    weights = [name for name in one if one[name].dim() == 2]
    assert weights and not any(torch.equal(one[name], other[name]) for name in weights)
    layers = [one[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(3)]
    assert not torch.equal(layers[0], layers[1]) and not torch.equal(layers[1], layers[2])


def test_an_import_that_was_stopped_goes_on_with_the_same_values(tmp_path: Path) -> None:
    CONFIGS["llama"].save_pretrained(tmp_path)
    whole = values(tmp_path, tmp_path / "a", initialise=3, chunk_size=4096)

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    (tmp_path / "b").mkdir()
    with pytest.raises(KeyboardInterrupt):
        from_pretrained(tmp_path, nvme_path=tmp_path / "b", dtype=torch.float32, initialise=3, chunk_size=4096, progress=stop)
    again = values(tmp_path, tmp_path / "b", initialise=3, chunk_size=4096)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
