"""`zinf plan`: what a model would cost to train on a machine, before anything is downloaded or written."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from zinf.cli import text
from zinf.config import format_bytes, parse_bytes

if TYPE_CHECKING:
    from zinf.planner.cost import Forecast, Suggestion
    from zinf.planner.model import Facts


def add(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "plan", parents=parents, help="what a model would cost on a machine: does it fit, how fast, what limits it",
        description="Reads configs only. Rates of shipped machines are from datasheets, partly assumed (their files say what): no measurement.",
    )  # fmt: skip
    p.add_argument("model", metavar="MODEL", help="a folder with a config.json, a hub id, or a YAML or JSON file with the keys of a config.json")
    p.add_argument("--machine", metavar="NAME|FILE", help="a shipped machine, such as rtx4090, or a YAML file with the same keys")
    p.add_argument("--batch", type=_count, default=8, help="rows of an optimizer step [8]")
    p.add_argument("--seq", type=_count, default=2048, help="tokens of a row [2048]")
    p.add_argument("--micro-batch", type=_count, metavar="ROWS", help="rows that go through a block at once; default: all")
    p.add_argument("--clip", action="store_true", help="the norm of the grads is clipped (max_grad_norm)")
    p.add_argument("--host-memory", type=parse_bytes, metavar="SIZE", help="budget of host memory; default: nine tenths of the machine's")
    p.add_argument("--device-memory", type=parse_bytes, metavar="SIZE", help="budget of device memory; default: what activations leave of the machine's")
    p.add_argument("--activations", choices=("auto", "device", "host"), default="auto", help="where the inputs of blocks wait for backward")
    p.add_argument("--state", choices=("auto", "host", "nvme"), default="auto", help="where the optimizer state rests; nvme: shards step under backward")
    p.add_argument("--drives", type=_count, help="as many drives; default: the machine's")
    p.add_argument("--json", action="store_true", help="machine-readable")
    p.set_defaults(run=run)


def _count(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a positive whole number")
    return int(value)


def run(args: argparse.Namespace) -> int:
    from zinf.planner import machine, model
    from zinf.planner.cost import Workload, forecast, suggestions

    there = machine.load(args.machine)
    if args.drives:
        there = dataclasses.replace(there, drives=args.drives)
    facts = model.read(args.model)
    asked = {f.name: getattr(args, f.name) for f in dataclasses.fields(Workload)}
    result = forecast(facts, there, Workload(**asked))
    better = suggestions(facts, result)
    if args.json:
        json.dump(as_json(facts, result, better), sys.stdout, indent=2)
        print()
    else:
        show(facts, result, better)
    return 0


def placed(facts: Facts, result: Forecast) -> dict[str, dict[str, int]]:
    """Bytes of weights and of state that live in each tier."""
    plan, shards = result.plan, facts.layout.shards
    table = {tier: {"weights": 0, "state": 0} for tier in ("device", "host", "nvme")}
    for i, shard in enumerate(shards):
        table[plan.weights[i].value]["weights"] += shard.weights_nbytes
        table[plan.state[i].value]["state"] += shard.state_nbytes
    return table


def as_json(facts: Facts, result: Forecast, better: list[Suggestion]) -> dict[str, Any]:
    """Plain values: bytes, seconds."""
    return {
        "model": facts.name,
        "parameters": facts.layout.numel,
        "active_parameters": facts.active,
        "machine": dataclasses.asdict(result.machine),
        "workload": dataclasses.asdict(result.workload),
        "fits": True,
        "placement": placed(facts, result),
        "activations": result.plan.activations.value,
        "host_bytes": result.plan.host,
        "device_bytes": result.plan.device,
        "store_bytes": result.store,
        "step": dataclasses.asdict(result.traffic),
        "seconds": result.seconds,
        "step_seconds": result.step,
        "limiter": result.limiter,
        "tokens_per_second": result.tokens_per_second,
        "steps_per_day": result.steps_per_day,
        "nvme_bytes_written_per_1000_steps": result.written_per_1000_steps,
        "days_to_endurance": result.days_to_endurance,
        "suggestions": [dataclasses.asdict(s) for s in better],
    }


def show(facts: Facts, result: Forecast, better: list[Suggestion]) -> None:
    plan, traffic, machine = result.plan, result.traffic, result.machine
    text.heading(f"{facts.name} on {machine.name}: fits")
    text.rows([("parameters", f"{facts.layout.numel / 1e9:.2f} billion"), ("step", f"{result.workload.batch} rows of {result.workload.seq} tokens")])
    text.heading("Placement")
    body = [[tier, format_bytes(row["weights"]), format_bytes(row["state"])] for tier, row in placed(facts, result).items()]
    text.table(["tier", "weights", "state"], body)
    text.rows(
        [
            ("allocated", f"host {format_bytes(plan.host_nbytes)}, device {format_bytes(plan.device_nbytes)}, store {format_bytes(result.store)}"),
            ("grads wait", "on NVMe" if plan.grads_away else "in host memory"),
            ("activations", f"on the {plan.activations.value}"),
        ]
    )
    text.heading("A step")
    moved = {
        "compute": f"{traffic.flops / 1e12:.0f} TFLOP",
        "h2d": format_bytes(traffic.h2d),
        "d2h": format_bytes(traffic.d2h),
        "dram": format_bytes(traffic.dram),
        "nvme": f"{format_bytes(traffic.nvme_read)} read, {format_bytes(traffic.nvme_write)} written",
    }
    text.table(["resource", "moved", "busy"], [[r, moved[r], text.seconds(s)] for r, s in result.seconds.items()])
    lasts = "no writes" if result.days_to_endurance is None else f"{result.days_to_endurance:.0f} days of training to the drives' rated endurance"
    text.rows(
        [
            ("takes", f"{text.seconds(result.step)}, most of it for {result.limiter}"),
            ("speed", f"{result.tokens_per_second:.0f} tokens/s, {result.steps_per_day:.0f} steps a day"),
            ("wear", f"{result.written_per_1000_steps / 1e12:.1f} TB written in 1000 steps; {lasts}"),
        ]
    )
    text.heading("What would help most")
    text.rows([(s.change, f"{s.gain:.2f}x tokens/s") for s in better] or [("nothing tried", "no one change brings a hundredth more")])
