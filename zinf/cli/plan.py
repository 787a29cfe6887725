"""`zinf plan`: what a model would cost to train on a machine, before anything is downloaded or written."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from zinf import measured
from zinf.cli import bench, text
from zinf.config import OPTIMIZERS, format_bytes, parse_bytes
from zinf.errors import BudgetError, ConfigError

if TYPE_CHECKING:
    from zinf.hf.facts import Recipe
    from zinf.planner.advice import Suggestion
    from zinf.planner.cost import Forecast
    from zinf.planner.machine import Machine
    from zinf.planner.model import Facts

BAR = 14  # characters


def add(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "plan", parents=parents, help="what a model would cost on a machine: does it fit, how fast, what limits it",
        description="Reads configs only. Without --machine it plans for this one: what is not measured yet is measured first, in under two minutes, and kept. "
        "Rates of shipped machines are from datasheets, partly assumed (their files say what).",
    )  # fmt: skip
    p.add_argument("model", metavar="MODEL", help="a folder with a config.json, a hub id, or a YAML or JSON file with the keys of a config.json")
    where = p.add_argument_group("the machine")
    where.add_argument("--machine", metavar="NAME|FILE", help="a shipped machine, such as rtx4090, or a YAML file with the same keys; default: this one")
    where.add_argument("--nvme-path", action="append", metavar="PATH", help="a folder on the drive for the store [.]; give it again for each drive")
    where.add_argument("--measure", action="store_true", help="measure this machine again, also what is known")
    where.add_argument("--drives", type=_count, help="as many drives; default: the machine's")
    where.add_argument("--endurance", type=parse_bytes, metavar="SIZE", help="what a drive's maker rates it to take, such as 600TB; default: the machine's")
    where.add_argument("--host-memory", type=parse_bytes, metavar="SIZE", help="budget of host memory; default: nine tenths of the machine's")
    where.add_argument("--device-memory", type=parse_bytes, metavar="SIZE", help="budget of device memory; default: what activations leave of the machine's")
    what = p.add_argument_group("the training")
    what.add_argument("--batch", type=_count, default=8, help="rows of an optimizer step [8]")
    what.add_argument("--seq", type=_count, default=2048, help="tokens of a row [2048]")
    what.add_argument("--micro-batch", type=_count, metavar="ROWS", help="rows that go through a block at once; default: all")
    what.add_argument("--precision", choices=("bf16", "fp16", "fp32"), default="bf16", help="of the weights [bf16]")
    what.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adamw", help="[adamw]")
    what.add_argument("--momentum", type=float, help="of sgd")
    what.add_argument("--ema-decay", type=float, help="keep an average of the weights")
    what.add_argument("--lora", type=_count, metavar="RANK", help="train adapters of this rank, and nothing else")
    what.add_argument("--lora-targets", nargs="+", default=["all-linear"], metavar="NAME", help="layers that get one, such as q_proj v_proj [all-linear]")
    what.add_argument("--clip", action="store_true", help="the norm of the grads is clipped (max_grad_norm)")
    what.add_argument("--activations", choices=("auto", "device", "host", "nvme"), default="auto", help="where the inputs of blocks wait for backward")
    what.add_argument("--weights", choices=("auto", "host", "nvme"), default="auto", help="where the weights rest between uses")
    what.add_argument("--state", choices=("auto", "host", "nvme"), default="auto", help="where the optimizer state rests; nvme: shards step under backward")
    p.add_argument("--json", action="store_true", help="machine-readable")
    p.set_defaults(run=run)


def _count(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a positive whole number")
    return int(value)


def run(args: argparse.Namespace) -> int:
    from zinf.hf import facts as reader
    from zinf.planner.advice import remedies, suggestions
    from zinf.planner.cost import Workload, forecast

    if args.measure and args.machine:
        raise ConfigError("--measure measures this machine, and --machine describes another: give one of them")
    there = _described(args) if args.machine else None  # a name that is mistyped is told before anything else
    recipe = _of(reader.Recipe, args)
    facts = reader.read(args.model, recipe)
    workload = _of(Workload, args)
    there = there.computing(facts.dtype) if there else _this(args, facts)
    try:
        result = forecast(facts, there, workload)
    except BudgetError as e:
        fits_with = remedies(facts, there, workload)
        if args.json:
            told = {"model": facts.name, "parameters": facts.layout.numel, "fits": False, "why": str(e), "fits_with": fits_with}
            print(json.dumps(told, indent=2))
        raise BudgetError(f"{e}; it fits with {', or with '.join(fits_with) if fits_with else 'no one or two changes that were tried'}") from e
    better = suggestions(facts, result)
    if args.json:
        json.dump(as_json(facts, result, better), sys.stdout, indent=2)
        print()
    else:
        show(facts, recipe, result, better)
    return 0


def _of(cls: type, args: argparse.Namespace) -> Any:
    """An instance of the dataclass, of the arguments that are its fields."""
    return cls(**{f.name: getattr(args, f.name) for f in dataclasses.fields(cls) if hasattr(args, f.name)})


# ---------------------------------------------------------------------------------------------------------- the machine


def _described(args: argparse.Namespace) -> Machine:
    from zinf.planner import machine

    there = machine.load(args.machine)
    if args.nvme_path:
        _measure_drives(args.nvme_path, again=False)
        there = there.with_drives(measured.load(), args.nvme_path)
    return _as_asked(there, args)


def _this(args: argparse.Namespace, facts: Facts) -> Machine:
    """This machine: what is not known of it, or not with --measure, is measured now and kept."""
    from zinf.planner import machine

    paths = args.nvme_path or [os.getcwd()]
    _measure_drives(paths, args.measure)
    if args.measure or measured.load().host is None:
        bench.measure_host()
    there = _as_asked(machine.this(measured.load(), paths), args).computing(facts.dtype)
    return _paced(there, facts, args)


def _as_asked(there: Machine, args: argparse.Namespace) -> Machine:
    given = {key: value for key in ("drives", "endurance") if (value := getattr(args, key)) is not None}
    return dataclasses.replace(there, **given)


def _measure_drives(paths: list[str], again: bool) -> None:
    book = measured.load()
    for key, path in {measured.drive_key(path): path for path in paths}.items():
        if again or key not in book.drives:
            bench.measure_drive(path, bench.SECONDS / len(paths))


def _paced(there: Machine, facts: Facts, args: argparse.Namespace) -> Machine:
    """As fast as this machine computes this model, where that is known or quickly measured."""
    from zinf.hf import pace

    rows = args.micro_batch or args.batch
    book = measured.load()
    key = measured.pace_key(facts.layout.fingerprint(), rows, args.seq, facts.dtype)
    known = None if args.measure else book.paces.get(key)
    if known is None and args.lora is None:  # adapters are not in the blocks that would be timed
        known = pace.measure(facts, rows, args.seq, there.flops)
        if known is not None:
            measured.save(dataclasses.replace(book, paces=book.paces | {key: known}))
    if known is None:
        return dataclasses.replace(there, sources=(*there.sources, f"compute: {there.efficiency:.0%} of a large matmul's rate, assumed"))
    return there.paced(sum(facts.flops(rows * args.seq)), known.seconds, f"compute: this model's blocks, measured {known.when}")


# --------------------------------------------------------------------------------------------------------- what is told


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
        "trained_parameters": sum(p.numel for s in facts.layout.shards for r in s.runs if r.trainable for p in r.params),
        "machine": dataclasses.asdict(result.machine),
        "workload": dataclasses.asdict(result.workload),
        "fits": True,
        "placement": placed(facts, result),
        "grads": "nvme" if result.plan.grads_away else "host",
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


def show(facts: Facts, recipe: Recipe, result: Forecast, better: list[Suggestion]) -> None:
    work, machine = result.workload, result.machine
    text.heading(f"{facts.name} on {machine.name}: fits")
    adapters = f"adapters of rank {recipe.lora} trained" if recipe.lora else "all trained"
    micro = f", {work.micro_batch} at once" if work.micro_batch else ""
    text.rows(
        [
            ("model", f"{facts.layout.numel / 1e9:.2f} billion parameters, {adapters} ({facts.dtype}, {recipe.optimizer})"),
            ("step", f"{work.batch} rows of {work.seq} tokens{micro}{', norm clipped' if work.clip else ''}"),
            ("numbers", "\n".join(machine.sources)),
        ]
    )
    show_placement(facts, result)
    show_step(result)
    text.heading("What would help most")
    text.rows([(f"{s.gain:.2f}x", s.change) for s in better] or [("nothing", "no one change brings a hundredth more tokens a second")])


def show_placement(facts: Facts, result: Forecast) -> None:
    plan, machine = result.plan, result.machine
    text.heading("Placement")
    table = placed(facts, result)
    total = {"device": plan.device_nbytes, "host": plan.host_nbytes, "nvme": result.store}
    room = {"device": machine.device_memory, "host": machine.host_memory, "nvme": machine.nvme_size * machine.drives}
    body = []
    for tier, row in table.items():
        rest = total[tier] - row["weights"] - row["state"] if tier != "nvme" else 0
        body.append([tier, *(format_bytes(n) if n else "-" for n in (row["weights"], row["state"], max(rest, 0))), format_bytes(total[tier])])
        body[-1].append(format_bytes(room[tier]))
    text.table(["tier", "weights", "state", "buffers", "in all", "of"], body)
    if machine.direct:
        where = "in host memory, where the cores compute; device is a part of it"
    else:
        where = f"on the {plan.activations.value}"
    grads = "nowhere: each shard is stepped as its grads arrive" if plan.grad_buffers and not plan.grads_away else "in host memory"
    text.rows([("grads wait", "on NVMe" if plan.grads_away else grads), ("inputs wait", where)])


def show_step(result: Forecast) -> None:
    traffic, machine = result.traffic, result.machine
    text.heading("A step")
    moved = {
        "compute": f"{text.number(traffic.flops / 1e12)} TFLOP",
        "optimizer": format_bytes(traffic.stepped),
        "h2d": format_bytes(traffic.h2d),
        "d2h": format_bytes(traffic.d2h),
        "dram": format_bytes(traffic.dram),
        "nvme": f"{format_bytes(traffic.nvme_read)} in, {format_bytes(traffic.nvme_write)} out",
    }
    rates = {"compute": f"{machine.flops * machine.efficiency / 1e12:.3g} TFLOP/s", "optimizer": text.rate(machine.adam or machine.dram)}
    rates |= {"h2d": text.rate(machine.link), "d2h": text.rate(machine.link), "dram": text.rate(machine.dram)}
    seconds = {r: s for r, s in result.seconds.items() if s or r not in ("h2d", "d2h")}
    if result.seconds["nvme"]:
        rates["nvme"] = text.rate((traffic.nvme_read + traffic.nvme_write) / result.seconds["nvme"])
    longest = max(max(seconds.values()), 1e-12)
    bars = {r: "#" * round(BAR * s / longest) if not text.colour() else "█" * round(BAR * s / longest) for r, s in seconds.items()}
    body = [[r, moved[r], rates.get(r, "-"), text.seconds(s), f"{bars[r]:<{BAR}}"] for r, s in seconds.items()]
    text.table(["resource", "moved", "rate", "busy", " " * BAR], body)
    shared = " (the cores compute and step)" if machine.direct and result.limiter == "compute" else ""
    days = result.days_to_endurance
    lasts = f"{days:.0f} days of training to the drives' rated endurance" if days is not None else "--endurance says how long drives last"
    if not traffic.nvme_write:
        lasts = "nothing is written"
    text.rows(
        [
            ("takes", f"{text.seconds(result.step)}, most of it for {result.limiter}{shared}"),
            ("speed", f"{text.number(result.tokens_per_second)} tokens/s, {text.number(result.steps_per_day)} steps a day"),
            ("wear", f"{text.number(result.written_per_1000_steps / 1e12)} TB written in 1000 steps; {lasts}"),
        ]
    )
