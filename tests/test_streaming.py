"""Streaming any module: losses and gradients of plain PyTorch for the shapes of graphs that models really have."""

from __future__ import annotations

import copy

import pytest
import torch
from models import LEAF_BYTES, llama
from oracle import Oracle, train_alike
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM, T5Config, T5ForConditionalGeneration

from zinf.engine import Engine

NVME = dict(weights="nvme", state="nvme", chunk_size=4096)


def same_as_oracle(tmp_path, model: nn.Module, losses, steps: int = 3, blocks=None, **options):
    """Train a copy of `model` in memory and the model through an engine; `losses(model, step)` gives the loss."""
    oracle = Oracle(copy.deepcopy(model), lr=1e-3, weight_decay=0.1, leaf_bytes=LEAF_BYTES, blocks=blocks)
    options = {**NVME, **options}
    with Engine(model, nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, blocks=blocks, lr=1e-3, weight_decay=0.1, **options) as engine:
        train_alike(oracle, engine, losses, steps)
        return engine


def ids(step: int, rows: int = 2, length: int = 16, vocab: int = 128) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(100 + step))


ROUTER = dict(num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5)
SMALL = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, vocab_size=128)


def lm(model, step):
    return model(input_ids=ids(step), labels=ids(step), use_cache=False).loss


ARCHITECTURES = {
    "mixtral with router loss": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, **ROUTER, intermediate_size=64, num_key_value_heads=1)),
    "gpt2 with dropout": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=128, n_positions=32)),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_decoders(tmp_path, name, device):
    torch.manual_seed(0)
    same_as_oracle(tmp_path, ARCHITECTURES[name]().to(torch.bfloat16).train(), lm, device=device)


def test_bert_with_tied_decoder_and_unused_pooler(tmp_path):
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**SMALL, intermediate_size=64, max_position_embeddings=32)).to(torch.bfloat16).train()
    same_as_oracle(tmp_path, model, lambda m, step: m(input_ids=ids(step), labels=ids(step)).loss)


def test_t5_whose_first_layer_feeds_all_others(tmp_path):
    torch.manual_seed(0)
    config = T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=3, num_heads=2, vocab_size=128, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).to(torch.bfloat16).train()
    same_as_oracle(tmp_path, model, lambda m, step: m(input_ids=ids(step), labels=ids(step + 50), use_cache=False).loss)


class Mlp(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    """Blocks called in the order that `plan` says."""

    def __init__(self, blocks: int, width: int = 64, dropout: float = 0.0):
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(width, dropout) for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(width))
        self.plan = list(range(blocks))

    def forward(self, x):
        for i in self.plan:
            x = self.blocks[i](x)
        return x * self.scale


def net(blocks: int = 4, **kw) -> Net:
    torch.manual_seed(0)
    return Net(blocks, **kw).to(torch.bfloat16)


def data(step: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)


def square(model, step):
    return model(data(step)).float().square().mean()


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("mode", ["backward", "deferred"])
@pytest.mark.parametrize("plan", [[0, 0, 1, 2, 3, 0], [3, 1, 2], [2]], ids=["reused", "another order", "most unused"])
def test_blocks_used_in_any_way(tmp_path, plan, device, mode):
    model = net()
    model.plan = plan
    same_as_oracle(tmp_path, model, square, device=device, step_mode=mode)


def test_the_order_may_change_between_steps(tmp_path):
    def changing(model, step):
        inner = model.module if isinstance(model, Engine) else model
        inner.plan = [[0, 1, 2, 3], [3, 0], [1, 1, 2, 0]][step % 3]
        return square(model, step)

    same_as_oracle(tmp_path, net(), changing, steps=6)


def test_dropout_is_recomputed_with_its_own_noise(tmp_path):
    same_as_oracle(tmp_path, net(dropout=0.5).train(), square)


@pytest.mark.parametrize("frozen", [[0, 1], [2], [3]])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_frozen_blocks(tmp_path, frozen, device):
    model = net()
    for i in frozen:
        model.blocks[i].requires_grad_(False)
    same_as_oracle(tmp_path, model, square, device=device)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_adapters_on_frozen_weights_in_the_same_block(tmp_path, device):
    """As LoRA: the base's input gradients are computed after the adapter's own gradient has come."""
    model = net()
    for block in model.blocks:
        block.down.requires_grad_(False)
        block.up.bias.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    same_as_oracle(tmp_path, model, square, device=device)


def test_mixed_dtypes_in_a_block(tmp_path):
    class Mixed(Mlp):
        def __init__(self, width):
            super().__init__(width)
            self.norm = nn.LayerNorm(width, dtype=torch.float32)

        def forward(self, x):
            return super().forward(self.norm(x.float()).to(x.dtype))

    model = net()
    model.blocks = nn.ModuleList(Mixed(64) for _ in range(3))
    model.plan = [0, 1, 2]
    for block in model.blocks:
        block.up.to(torch.bfloat16)
        block.down.to(torch.bfloat16)
    same_as_oracle(tmp_path, model, square)


def test_several_outputs_keywords_and_other_values(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x, *, side=None, scale=1.0, names=("x",)):
            y = self.a(x) * scale
            return {"x": x + y, "side": self.b(y) + (side if side is not None else 0), "n": len(names)}

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Two() for _ in range(3))

        def forward(self, x):
            side = None
            for block in self.blocks:
                out = block(x, side=side, scale=0.5, names=["p", "q"])
                x, side = out["x"], out["side"]
            return x + side

    torch.manual_seed(0)
    same_as_oracle(tmp_path, Chain().to(torch.bfloat16), square)


def test_an_output_that_the_loss_does_not_use(tmp_path):
    class Half(Mlp):
        def forward(self, x):
            return super().forward(x), self.up(x).sum()

    class Chain(Net):
        def forward(self, x):
            for block in self.blocks:
                x, _ = block(x)
            return x * self.scale

    torch.manual_seed(0)
    model = Chain(3)
    model.blocks = nn.ModuleList(Half(64) for _ in range(3))
    same_as_oracle(tmp_path, model.to(torch.bfloat16), square)


def test_two_forwards_then_one_backward(tmp_path):
    same_as_oracle(tmp_path, net(), lambda m, step: square(m, step) + square(m, step + 40))


def test_a_forward_without_backward_leaves_no_trace(tmp_path):
    def losses(model, step):
        square(model, step + 40)  # with a graph that dies unused
        return square(model, step)

    same_as_oracle(tmp_path, net(), losses)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_evaluation_between_forward_and_backward(tmp_path, device):
    def losses(model, step):
        loss = square(model, step)
        with torch.no_grad():
            square(model, step + 40)
        return loss

    same_as_oracle(tmp_path, net(), losses, device=device)


def test_autocast(tmp_path):
    torch.manual_seed(0)
    model = Net(3)

    def losses(m, step):
        with torch.autocast("cpu", torch.bfloat16):
            return m(data(step).float()).float().square().mean()

    same_as_oracle(tmp_path, model, losses)


def test_blocks_by_class_name(tmp_path):
    engine = same_as_oracle(tmp_path, net(), square, blocks=("Mlp",))
    assert [s.name for s in engine.shards] == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "root"]


@pytest.mark.parametrize("seed", range(3))
def test_races_on_the_sim_device(tmp_path, seed, monkeypatch):
    """Copies ten times slower than compute, slabs and slots poisoned as they are released."""
    from zinf.tiers import device

    real = device.SimDevice
    monkeypatch.setattr(device, "SimDevice", lambda _seed: real(seed, delay=0.02))
    same_as_oracle(tmp_path, llama(num_hidden_layers=3).to(torch.bfloat16), lambda m, s: m(input_ids=ids(s), labels=ids(s), use_cache=False).loss, device="sim")
