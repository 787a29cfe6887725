"""What the planner says of a step before it is made, against what the step then takes.

The physics, measured in this run, in which all forecasts and all steps are made (the planner's own measurements, see zinf/planner):

    drive      reading, writing, and both at once, by zinf's engine with the best block and depth
    memory     a copy, and AdamW, on all cores
    compute    of each model: forward, recompute and backward of its own blocks, in memory, extrapolated from one and three of them

A forecast is made of the config alone and of those numbers: nothing of an engine goes into it. Then the engine trains in each placement, interleaved, and
the median step is compared. `achieved / predicted` is 1 where the planner is right; more, where steps are slower than it says. Bytes are compared too: they
are arithmetic, and must be equal.

    python bench/plan.py [--sizes 20m,135m] [--tokens 256] [--rounds 5] [--nvme PATH] [--json FILE] [--toy]

Target: within 15 % on a machine that nobody else uses. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from zinf import measured
from zinf.engine import Engine
from zinf.hf import facts as reader
from zinf.hf import pace
from zinf.measured import Book
from zinf.planner import cost, drive, host, machine
from zinf.planner.cost import Forecast, Workload
from zinf.planner.machine import Machine
from zinf.planner.model import Facts

SIZES = {
    "tiny": dict(hidden_size=128, intermediate_size=384, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, vocab_size=1024),
    "20m": dict(hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2, vocab_size=16384),
    "135m": dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, vocab_size=49152),
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all on NVMe, stepped under backward": dict(weights="nvme", state="nvme"),
    "all on NVMe, norm clipped": dict(weights="nvme", state="nvme", clip=True),
    "weights in memory, state on NVMe": dict(weights="host", state="nvme", clip=True),
    "half of the state in memory": dict(weights="host", state=0.5, clip=True, commit_every=0),
    "all in memory": dict(weights="host", state="host", clip=True, commit_every=0),
}
WARM = 2


def folder_of(size: str, parent: str) -> str:
    """A model's folder with nothing but a config."""
    folder = os.path.join(parent, size)
    os.makedirs(folder)
    LlamaConfig(**SIZES[size], tie_word_embeddings=True).save_pretrained(folder)
    return folder


def measure_machine(path: str, toy: bool) -> Book:
    found, _ = drive.search(path, 2.0 if toy else 25.0, 8 << 20 if toy else 1 << 30)
    there = host.measure(0.4, elements=1 << 18, side=128) if toy else host.measure(12.0)
    return Book({measured.drive_key(path): found}, there)


def engine_of(size: str, nvme: str, name: str, placement: dict[str, Any], chunk: int) -> Engine:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES[size], tie_word_embeddings=True)).to(torch.bfloat16).train()
    options = {key: value for key, value in placement.items() if key != "clip"}
    return Engine(model, nvme_path=nvme, run_name=name, max_grad_norm=1.0 if placement.get("clip") else None, chunk_size=chunk, **options)


def one_step(engine: Engine, ids: torch.Tensor) -> float:
    begun = time.perf_counter()
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    return time.perf_counter() - begun


class Case:
    """A model in a placement: what is forecast of it, and what it takes."""

    def __init__(self, size: str, placement: str, facts: Facts, there: Machine, tokens: int) -> None:
        self.size, self.placement, self.facts = size, placement, facts
        options = PLACEMENTS[placement]
        # No budgets: as the engine below has none.
        free = dataclasses.replace(there, host_memory=1 << 50, device_memory=1 << 50)
        self.forecast: Forecast = cost.forecast(facts, free, Workload(batch=1, seq=tokens, **options))
        self.times: list[float] = []
        self.moved: dict[str, float] = {}

    @property
    def achieved(self) -> float:
        return statistics.median(self.times)

    def as_json(self) -> dict[str, Any]:
        f = self.forecast
        said = {"read": f.traffic.nvme_read, "written": f.traffic.nvme_write}
        return {
            "size": self.size, "placement": self.placement, "predicted": f.step, "achieved": self.achieved, "ratio": self.achieved / f.step,
            "limiter": f.limiter, "spread": [min(self.times), max(self.times)], "seconds": f.seconds, "bytes_predicted": said, "bytes_moved": self.moved,
        }  # fmt: skip


def run_size(size: str, nvme: str, book: Book, args: argparse.Namespace) -> Iterator[Case]:
    """All placements of one model, a step of each in turn."""
    chunk = 1 << 14 if args.toy else 1 << 19
    facts = reader.read(folder_of(size, nvme), reader.Recipe(chunk_size=chunk))
    there = machine.this(book, [nvme])
    known = pace.measure(facts, 1, args.tokens, 1e12 if args.toy else there.flops)
    if known is not None:
        there = there.paced(sum(facts.flops(args.tokens)), known.seconds, "timed")
    ids = torch.randint(0, int(SIZES[size]["vocab_size"]), (1, args.tokens), generator=torch.Generator().manual_seed(1))
    cases = [Case(size, placement, facts, there, args.tokens) for placement in PLACEMENTS]
    with ExitStack() as stack:
        engines = [stack.enter_context(engine_of(size, nvme, f"{size}-{i}", PLACEMENTS[c.placement], chunk)) for i, c in enumerate(cases)]
        for engine in engines:
            for _ in range(WARM):
                one_step(engine, ids)
        before = [settled(engine) for engine in engines]
        for _ in range(args.rounds):
            for case, engine in zip(cases, engines, strict=True):
                gc.collect()
                case.times.append(one_step(engine, ids))
        for case, engine, was in zip(cases, engines, before, strict=True):
            now = settled(engine)
            case.moved = {name: (now[key] - was[key]) / args.rounds for name, key in (("read", "bytes_read"), ("written", "bytes_written"))}
    yield from cases


def settled(engine: Engine) -> dict[str, Any]:
    """The engine's totals once nothing is in flight; what is pending stays so."""
    engine.memory.parts.fetcher.drain()
    engine.memory.parts.stepper.drain()
    return engine.stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="20m,135m", help="of " + ", ".join(SIZES))
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nvme", default=".")
    parser.add_argument("--json")
    parser.add_argument("--toy", action="store_true", help="seconds, not minutes: shows that the bench runs, measures nothing")
    args = parser.parse_args()
    if args.toy:
        args.sizes, args.tokens, args.rounds = "tiny", 32, 2
    with tempfile.TemporaryDirectory(dir=args.nvme, prefix="zinf-bench-") as nvme:
        book = measure_machine(nvme, args.toy)
        cases = [case for size in args.sizes.split(",") for case in run_size(size, nvme, book, args)]
    print_table(book, cases)
    ratios = [case.achieved / case.forecast.step for case in cases]
    result = {
        "bench": "plan", "tokens": args.tokens, "rounds": args.rounds, "machine": dataclasses.asdict(book), "cases": [case.as_json() for case in cases],
        "within_15_percent": sum(abs(r - 1) <= 0.15 for r in ratios), "of": len(ratios), "worst": max(ratios, key=lambda r: abs(r - 1)),
        "torch": torch.__version__,
    }  # fmt: skip
    if args.json:
        Path(args.json).write_text(json.dumps(result))
    print(json.dumps(result))


def print_table(book: Book, cases: list[Case]) -> None:
    (there,) = book.drives.values()
    assert book.host is not None
    print(f"drive: read {there.read / 1e9:.2f}, write {there.write / 1e9:.2f}, both {there.both / 1e9:.2f} GB/s each way")
    print(
        f"memory: {book.host.dram / 1e9:.1f} GB/s, AdamW {book.host.adam / 1e9:.1f}; matmul {book.host.flops / 1e12:.3f} TFLOP/s; {book.host.threads} threads"
    )
    print(f"\n{'model':6s} {'placement':38s} {'predicted':>9s} {'achieved':>9s} {'ratio':>6s}  {'limiter':9s} {'read, written MB':>18s}  as forecast")
    for case in cases:
        f, moved = case.forecast, case.moved
        same = all(abs(a - b) <= 0.02 * max(a, b) for a, b in ((moved["read"], f.traffic.nvme_read), (moved["written"], f.traffic.nvme_write)))
        mb = f"{moved['read'] / 1e6:.1f}, {moved['written'] / 1e6:.1f}"
        ratio = case.achieved / f.step
        print(f"{case.size:6s} {case.placement:38s} {f.step:9.3f} {case.achieved:9.3f} {ratio:6.2f}  {f.limiter:9s} {mb:>18s}  {'yes' if same else 'NO'}")


if __name__ == "__main__":
    main()
