"""How long this machine computes for one model: its own blocks are timed, since no peak rate says what small matrices, attention and norms take.

The model with one block and with three, random weights, in plain PyTorch and in memory, recomputed as zinf does: the difference is two blocks, and what
is left is embedding, head and loss. The fastest of several runs counts: what else the machine does only adds. Only where that is cheap; else the planner
takes the rate of a large matmul.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import logging
import time
import warnings
from typing import Any

import torch

from zinf.errors import ZinfError
from zinf.hf.facts import DTYPES, config_folder
from zinf.measured import Pace
from zinf.planner.model import Facts
from zinf.tiers.host import available_bytes

log = logging.getLogger("zinf")

RUNS = 3  # of each; a first one warms up
LIMIT = 30.0  # seconds that measuring may take, as estimated
ALLOWANCE = 2.0  # how much slower than a large matmul that estimate takes the model to be


def measure(facts: Facts, rows: int, seq: int, flops: float) -> Pace | None:
    """Of `rows` rows at once, on a machine that does `flops` FLOP/s; None where it would take too long, or too much memory, or cannot be."""
    per_block = sum(facts.flops(rows * seq)) / max(facts.blocks, 1)
    largest = max(s.numel for s in facts.layout.shards)
    seconds = (RUNS + 1) * ALLOWANCE * (4 * per_block + 16.0 * largest * rows * seq) / flops
    room = (available_bytes() or 1 << 62) // 2
    if facts.blocks < 3 or seconds > LIMIT or 40 * largest > room:
        return None
    try:
        with config_folder(facts.name) as folder:
            one, three = (_seconds(folder, blocks, facts, rows, seq) for blocks in (1, 3))
    except (ValueError, RuntimeError, TypeError, AttributeError, KeyError, IndexError, ZinfError) as e:
        log.info("%s is not timed by itself (%s: %s)", facts.name, type(e).__name__, " ".join(str(e).split()))
        return None
    block = max(three - one, 0.0) / 2
    return Pace(when=datetime.date.today().isoformat(), seconds=max(one - block, 0.0) + block * facts.blocks)


def _seconds(folder: str, blocks: int, facts: Facts, rows: int, seq: int) -> float:
    """Forward, recomputation and backward of the model with so many blocks."""
    import transformers

    config = copy.deepcopy(transformers.AutoConfig.from_pretrained(folder))
    text = config.get_text_config()
    text.num_hidden_layers = blocks
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:blocks]
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[facts.dtype]).to(device).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(0, text.vocab_size, (rows, seq), device=device)
    times = []
    for _ in range(RUNS + 1):
        begun = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        with contextlib.suppress(RuntimeError, AssertionError):
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
        model.zero_grad(set_to_none=True)
    return min(times[1:])
