"""The head and the loss of a language model by tiles, against full logits.

The physics (N tokens, vocabulary V, hidden size H, bf16): three products of 2 N V H operations (logits, gradient of hidden, gradient of weight), the
least that one can do, and here measured alone, in the same round. By tiles, with forward: the same three, and V H more to add for each tile.
By tiles, again: four. Elementwise work on N V logits comes on top: for full logits it goes through memory, for tiles partly through the cache.
Memory: full logits take 2 bytes an element, their fp32 copy, log-probabilities and two gradients 4 each; tiles take the same, of a tile.

    python bench/head.py [--tokens 1024] [--vocab 49152] [--hidden 576] [--rounds 5] [--toy]

Seconds are processor time of all threads divided by their number, nearer to a quiet machine's where others compute too. `over bound` is products /
time, `over plain` is full logits / time: 1 is as fast. Both are ratios inside a round, the median is reported. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.nn import functional as F

from zinf import heads

BOUND, PLAIN = "the three products", "full logits"


def contenders(n: int, vocab: int, hidden: int) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    h = torch.randn(n, hidden).to(torch.bfloat16).requires_grad_()
    w = (torch.randn(vocab, hidden) * hidden**-0.5).to(torch.bfloat16).requires_grad_()
    labels = torch.randint(0, vocab, (n,))
    dx = torch.randn(n, vocab).to(torch.bfloat16)
    h_plain, w_plain = h.detach(), w.detach()

    def products() -> None:
        F.linear(h_plain, w_plain)
        torch.mm(dx, w_plain)
        torch.mm(dx.t(), h_plain)

    def by_tiles(once: bool) -> Tensor:
        return heads.linear_cross_entropy(h, w, labels, once=once)

    losses = {
        PLAIN: lambda: F.cross_entropy(F.linear(h, w).float(), labels),
        "tiles, with forward": lambda: by_tiles(True),
        "tiles, again": lambda: by_tiles(False),
    }

    def step(loss: Callable[[], Tensor]) -> None:
        h.grad = w.grad = None
        loss().backward()

    return {BOUND: products, **{name: (lambda loss=loss: step(loss)) for name, loss in losses.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--toy", action="store_true", help="seconds, not minutes: shows that the bench runs, measures nothing")
    args = parser.parse_args()
    n, vocab, hidden, rounds = (32, 512, 16, 1) if args.toy else (args.tokens, args.vocab, args.hidden, args.rounds)
    torch.set_num_threads(args.threads)
    runs = contenders(n, vocab, hidden)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if i:  # the first round warms up
                seconds[name].append((time.process_time() - start) / args.threads)

    def over(name: str, other: str) -> float:
        return round(statistics.median(b / a for a, b in zip(seconds[name], seconds[other], strict=True)), 3)

    tile = min(n, max(1, heads.TILE // vocab))
    print(f"{n} tokens, vocabulary {vocab}, hidden {hidden}, bf16, tiles of {tile} rows, {args.threads} threads, {rounds} rounds; torch {torch.__version__}")
    print(f"{'':22s} {'ms':>8s} {'over bound':>11s} {'over plain':>11s}")
    for name, times in seconds.items():
        print(f"{name:22s} {statistics.median(times) * 1e3:8.1f} {over(name, BOUND):11.2f} {over(name, PLAIN):11.2f}")
    result = {
        "bench": "head",
        "tokens": n,
        "vocab": vocab,
        "hidden": hidden,
        "threads": args.threads,
        "over_bound": {name: over(name, BOUND) for name in seconds},
        "over_plain": {name: over(name, PLAIN) for name in seconds},
        "ms": {name: round(statistics.median(times) * 1e3, 1) for name, times in seconds.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
