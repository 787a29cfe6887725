"""Small models, batches and training loops that the tests share."""

from __future__ import annotations

import functools
import itertools
import os
from pathlib import Path

import torch
from oracle import Oracle, engine_snapshot
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from zinf.engine import Engine

LLAMA = dict(hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=512)
HYPER = dict(lr=1e-3, weight_decay=0.1)
LEAF_BYTES = 4096  # so small that embeddings and heads of tiny models are shards of their own
_unique = itertools.count()


def llama(dtype=torch.bfloat16, tied=True, **sizes) -> nn.Module:
    """A tiny Llama with the same weights every time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, **sizes}, tie_word_embeddings=tied)).to(dtype).train()


@functools.cache
def batches(count: int, rows: int = 4, length: int = 24, vocab: int = 512) -> torch.Tensor:
    """(count, rows, length) token ids."""
    return torch.randint(0, vocab, (count, rows, length), generator=torch.Generator().manual_seed(1))


def micro_steps(ids: torch.Tensor, accumulation: int):
    return ids.chunk(accumulation) if accumulation > 1 else (ids,)


@functools.cache
def oracle_run(
    steps: int, accumulation: int = 1, max_grad_norm: float | None = None, dtype=torch.bfloat16, tied: bool = True, decoupled: bool = True, **options
):
    """(losses, norms, snapshot) of the in-memory reference."""
    options = {**HYPER, "decoupled": decoupled, "leaf_bytes": LEAF_BYTES, **options}
    oracle = Oracle(llama(dtype, tied), max_grad_norm=max_grad_norm, wide=accumulation > 1, **options)
    losses, norms = [], []
    for ids in batches(steps):
        for part in micro_steps(ids, accumulation):
            loss = oracle.model(input_ids=part, labels=part, use_cache=False).loss / accumulation
            oracle.backward(loss)
            losses.append(loss.item())
        norms.append(oracle.step())
    return losses, norms, oracle.snapshot()


def train(engine: Engine, steps: int, accumulation: int = 1, first: int = 0):
    """(losses, norms) of steps [first, steps)."""
    losses, norms = [], []
    for ids in batches(steps)[first:]:
        for part in micro_steps(ids, accumulation):
            loss = engine(input_ids=part, labels=part).loss / accumulation
            engine.backward(loss)
            losses.append(loss.item())
        norms.append(engine.step().grad_norm)
    return losses, norms


def engine_run(folder: Path, steps: int, accumulation: int = 1, dtype=torch.bfloat16, tied: bool = True, paths: int = 1, **options):
    """The same of an engine; paths=0 keeps everything in memory."""
    name = f"run{next(_unique)}"
    nvme = [str(folder / f"{name}-path{i}") for i in range(paths)]
    for path in nvme:
        os.mkdir(path)
    options = {"leaf_bytes": LEAF_BYTES, **HYPER, **options}
    with Engine(llama(dtype, tied), nvme_path=nvme, run_name=name, gradient_accumulation_steps=accumulation, **options) as engine:
        losses, norms = train(engine, steps, accumulation)
        return losses, norms, engine_snapshot(engine)
