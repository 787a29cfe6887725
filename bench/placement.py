"""One training under every budget, from all on NVMe to all in memory: more memory may never be slower.

What bounds it: a step with the fraction f of its state in memory moves (1 - f) of it to and from the drive, so its time falls on a line with f until compute
(on a machine without a GPU, compute and the optimizer) is longer than the drive's; from there on it is flat. Host memory goes to weights first, as they
are read twice a step, then to state.

The budgets are spread evenly from the least with which the model trains at all to all that it can use; a step of each in turn, the median of the rounds.
`worst step back` is the largest ratio of a point's time to the best of any smaller budget: 1 or less where more memory never costs. Commits of what is in
memory are left out (commit_every 0), but for the smallest budget, where a commit is the step's own write.

    python bench/placement.py [--size 20m|135m|tiny] [--points 7] [--tokens 128] [--rounds 5] [--nvme PATH] [--plot FILE.png] [--json FILE] [--toy]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from plan import SIZES, WARM, engine_of, one_step, settled

from zinf import placement
from zinf.engine import Engine
from zinf.errors import BudgetError
from zinf.placement import Tier

MIB = 1 << 20


def budgets(size: str, folder: str, points: int, chunk: int) -> list[int]:
    """Bytes of host memory: from the least that an engine takes to all that it can use, evenly."""
    with engine_of(size, folder, "sizes", dict(clip=True), chunk) as engine:
        model, plan = engine.layout, engine.memory.plan
        most = plan.host_nbytes
        least = most - plan.host.get("weights", 0) - plan.host.get("state", 0) + 4 * MIB
        root = engine.memory.root
        least += root.spec.state_nbytes if root is not None else 0
    assert least < most, f"{model.numel} parameters leave nothing to place"
    return [round(least + (most - least) * i / (points - 1)) for i in range(points)]


def resident(engine: Engine) -> float:
    """The fraction of weights and state that is in memory."""
    plan, shards = engine.memory.plan, engine.layout.shards
    total = sum(s.weights_nbytes + s.state_nbytes for s in shards)
    here = sum(s.weights_nbytes * (plan.weights[i] is not Tier.NVME) + s.state_nbytes * (plan.state[i] is not Tier.NVME) for i, s in enumerate(shards))
    return here / total


def measure(args: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    chunk = 1 << 14 if args.toy else 1 << 18
    ids = torch.randint(0, int(SIZES[args.size]["vocab_size"]), (1, args.tokens), generator=torch.Generator().manual_seed(1))
    points: list[dict[str, Any]] = []
    with ExitStack() as stack:
        engines = []
        for i, budget in enumerate(budgets(args.size, folder, args.points, chunk)):
            options = dict(clip=True, host_memory=budget, commit_every=None if i == 0 else 0)
            try:
                engines.append(stack.enter_context(engine_of(args.size, folder, f"point-{i}", options, chunk)))
            except BudgetError as e:
                print(f"{placement.human(budget)}: {e}")
                continue
            points.append({"host_memory": budget, "resident": resident(engines[-1]), "grads": engines[-1].report()["grads"], "times": []})
        for engine in engines:
            for _ in range(WARM):
                one_step(engine, ids)
        before = [settled(engine) for engine in engines]
        for _ in range(args.rounds):
            for point, engine in zip(points, engines, strict=True):
                gc.collect()
                point["times"].append(one_step(engine, ids))
        for point, engine, was in zip(points, engines, before, strict=True):
            now = settled(engine)
            point["bytes"] = [(now[key] - was[key]) / args.rounds / engine.layout.numel for key in ("bytes_read", "bytes_written")]
            point["seconds"] = statistics.median(point["times"])
    return points


def step_back(points: list[dict[str, Any]]) -> float:
    """The largest time of a point over the best of any smaller budget."""
    return max((p["seconds"] / min(q["seconds"] for q in points[:i]) for i, p in enumerate(points) if i), default=1.0)


def plot(points: list[dict[str, Any]], file: str, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    x = [p["host_memory"] / MIB for p in points]
    y = [p["seconds"] for p in points]
    low, high = ([abs(limit(p["times"]) - p["seconds"]) for p in points] for limit in (min, max))
    axes.errorbar(x, y, yerr=[low, high], marker="o", capsize=3, color="#1f5fa8", ecolor="#9db8d6", label="a step, its fastest and slowest")
    for p, at_x, at_y in zip(points, x, y, strict=True):
        axes.annotate(f"{p['resident']:.0%}", (at_x, at_y), textcoords="offset points", xytext=(6, 6), fontsize=8, color="#444444")
    axes.set(xlabel="host_memory, MiB (at each point: the fraction of weights and state in memory)", ylabel="seconds a step", title=title, ylim=(0, None))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=140)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="20m")
    parser.add_argument("--points", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nvme", default=".")
    parser.add_argument("--plot", metavar="FILE.png")
    parser.add_argument("--json")
    parser.add_argument("--toy", action="store_true", help="seconds, not minutes: shows that the bench runs, measures nothing")
    args = parser.parse_args()
    if args.toy:
        args.size, args.points, args.tokens, args.rounds = "tiny", 3, 32, 2
    with tempfile.TemporaryDirectory(dir=args.nvme, prefix="zinf-bench-") as folder:
        points = measure(args, folder)
        if args.toy:
            plot(points, f"{folder}/toy.png", "toy")
    back = step_back(points)
    print(f"{'host_memory':>12s} {'in memory':>10s} {'grads':>6s} {'read':>6s} {'written':>8s} {'seconds':>8s}   (bytes a parameter)")
    for p in points:
        read, written = p["bytes"]
        memory, spread = placement.human(p["host_memory"]), f"({min(p['times']):.3f} to {max(p['times']):.3f})"
        print(f"{memory:>12s} {p['resident']:10.0%} {p['grads']:>6s} {read:6.1f} {written:8.1f} {p['seconds']:8.3f}   {spread}")
    print(f"worst step back {back:.2f}; all in memory is {points[0]['seconds'] / points[-1]['seconds']:.2f}x as fast as the least")
    if args.plot:
        plot(points, args.plot, f"{args.size}, {args.tokens} tokens a step")
    result = {"bench": "placement", "size": args.size, "tokens": args.tokens, "rounds": args.rounds, "points": points, "worst_step_back": round(back, 3)}
    if args.json:
        Path(args.json).write_text(json.dumps(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
