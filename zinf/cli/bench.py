"""`zinf bench`: what this machine does, measured once and kept for the planner and the engine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zinf import measured
from zinf.cli import text
from zinf.config import format_bytes, parse_bytes

if TYPE_CHECKING:
    from zinf.measured import Drive, Host
    from zinf.planner.drive import Trial

SECONDS = 40.0  # for all paths together


def add(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "bench", parents=parents, help="measure this machine, for `zinf plan` and for training",
        description="Measures this machine and keeps the result, for `zinf plan` and for every engine that starts. Best while nothing else runs.",
    )  # fmt: skip
    kinds = p.add_subparsers(dest="what", metavar="WHAT", required=True, title="what to measure")
    drive = kinds.add_parser(
        "io", parents=parents, help="drives: block size, depth, and rates for reading, writing and both",
        description="Finds the block size and the depth that suit a drive, and its rates for reading, writing, and both at once. Needs --size of free "
        "space there, and writes at most 20 times that.",
    )  # fmt: skip
    drive.add_argument("--path", action="append", metavar="PATH", help="a folder on the drive (default: this one); give it again for each drive")
    drive.add_argument("--size", type=parse_bytes, default=1 << 30, metavar="SIZE", help="of the file that is read and written [1GiB]")
    drive.add_argument("--seconds", type=_seconds, default=SECONDS, help=f"for all paths together [{SECONDS:.0f}]")
    drive.add_argument("--backend", choices=("auto", "uring", "threads", "python"), default="auto", help="I/O engine")
    drive.add_argument("--json", action="store_true", help="machine-readable")
    drive.set_defaults(run=run_io)
    for name, what in (
        ("adam", "the optimizer: AdamW against a copy"), ("compute", "matmul in bf16 and fp32"), ("machine", "both: all that a plan needs beside drives")
    ):  # fmt: skip
        one = kinds.add_parser(name, parents=parents, help=what, description=f"Measures {what}.")
        one.add_argument("--seconds", type=_seconds, default=8.0, help="to take about [8]")
        one.add_argument("--json", action="store_true", help="machine-readable")
        one.set_defaults(run=run_host, what=name)
    h2d = kinds.add_parser(
        "h2d", parents=parents, help="the link to the card: each way, both at once, beside a busy drive",
        description="Measures copies between host memory (registered, pinned, unpinned) and the card: up, down, both at once, and both beside a drive that "
        "is read and written.",
    )  # fmt: skip
    h2d.add_argument("--path", metavar="PATH", default=".", help="a folder on that drive (default: this one)")
    h2d.add_argument("--device", choices=("cuda", "sim"), default="cuda", help="sim: shows that it runs, measures nothing")
    h2d.add_argument("--size", type=parse_bytes, default=64 << 20, metavar="SIZE", help="of one copy [64MiB]")
    h2d.add_argument("--seconds", type=_seconds, default=10.0, help="to take about [10]")
    h2d.add_argument("--json", action="store_true", help="machine-readable")
    h2d.set_defaults(run=run_link)


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of seconds from 0.1 to 3600")
    return seconds


# --------------------------------------------------------------------------------------------------------------- drives


def run_io(args: argparse.Namespace) -> int:
    paths = args.path or [os.getcwd()]
    found = {path: measure_drive(path, args.seconds / len(paths), args.size, args.backend) for path in paths}
    if args.json:
        json.dump({path: dataclasses.asdict(drive) for path, (drive, _) in found.items()}, sys.stdout, indent=2)
        print()
        return 0
    for path, (drive, trials) in found.items():
        show_drive(path, drive, trials)
    if len(paths) > 1:
        text.heading("Together")
        parts = measured.shares([os.path.abspath(path) for path in paths]) or []
        text.rows([(path, f"{part:.0%} of a store's bytes") for path, part in zip(paths, parts, strict=False)])
    text.rows([("kept", measured.location())])
    return 0


def measure_drive(path: str, seconds: float = SECONDS, size: int = 1 << 30, backend: str = "auto") -> tuple[Drive, list[Trial]]:
    """Measure and keep it."""
    from zinf.planner import drive

    with _bar(f"measuring {path}", drive.trials()) as tick:
        result, trials = drive.search(path, seconds * 0.8, size, backend, tick)  # the rest is laying the file, and setting up
    book = measured.load()
    measured.save(dataclasses.replace(book, drives=book.drives | {measured.drive_key(path): result}))
    return result, trials


def show_drive(path: str, drive: Drive, trials: list[Trial]) -> None:
    text.heading(f"Drive of {path}")
    rates = [[text.rate(r) for r in (t.read, t.write, t.both)] for t in trials]
    body = [[format_bytes(t.block_size), str(t.queue_depth), *r] for t, r in zip(trials, rates, strict=True)]
    body[-1][0] += "  <-"
    text.table(["block", "depth", "read", "write", "both, each way"], body)
    times = drive.both * (1 / drive.read + 1 / drive.write)
    chosen = f"blocks of {format_bytes(drive.block_size)}, {drive.queue_depth} in flight"
    text.rows([("best", chosen), ("mix", f"both at once is {times:.2f}x as fast as one after the other")])


# -------------------------------------------------------------------------------------------------- host and computation


def run_host(args: argparse.Namespace) -> int:
    host = measure_host(args.seconds, args.what)
    if args.json:
        json.dump(dataclasses.asdict(host), sys.stdout, indent=2)
        print()
        return 0
    text.heading(f"{host.device}, {host.threads} threads")
    pairs = [
        ("memory", f"{text.rate(host.dram)}, a copy: read and written"),
        ("AdamW", f"{text.rate(host.adam)}, {host.adam / host.dram:.2f} of that; {host.adam / 26e9:.2f} billion parameters a second"),
    ]
    compute = [("matmul", f"{host.flops / 1e12:.2f} TFLOP/s in bf16, {host.flops_fp32 / 1e12:.2f} in fp32")]
    text.rows({"adam": pairs, "compute": compute}.get(args.what, pairs + compute))
    text.rows([("kept", measured.location())])
    return 0


def measure_host(seconds: float = 8.0, what: str = "machine") -> Host:
    """Measure and keep it; what is asked for anew, what is known already as it is."""
    from zinf.planner import host

    book = measured.load()
    parts = {"adam": ("dram", "adam"), "compute": ("flops", "flops_fp32")}.get(what, host.PARTS)
    if book.host is None:
        parts = host.PARTS
    with _bar("measuring memory and compute", len(parts)) as tick:
        result = host.measure(seconds, parts, book.host, done=tick)
    measured.save(dataclasses.replace(book, host=result))
    return result


def run_link(args: argparse.Namespace) -> int:
    """Measure the link to the card; keep it beside what is known of the host."""
    from zinf.planner import link

    with _bar("measuring the link", link.runs(args.path)) as tick:
        found = link.measure(args.path, args.seconds, args.device, args.size, tick)
    book, where = measured.load(), "nowhere: sim is no card"
    if args.device == "cuda":
        where = "nowhere: run `zinf bench machine` first" if book.host is None else str(measured.location())
    if args.device == "cuda" and book.host is not None:
        measured.save(dataclasses.replace(book, host=dataclasses.replace(book.host, link=found.planned)))
    if args.json:
        json.dump(dataclasses.asdict(found) | {"planned": found.planned}, sys.stdout, indent=2)
        print()
        return 0
    text.heading(f"Link to {found.device}")
    rows = [[r.kind, *(text.rate(rate) if rate is not None else "-" for rate in (r.up, r.down, r.both))] for r in found.rates]
    text.table(["host memory", "up", "down", "both, each way"], rows)
    if found.with_drive is not None and found.drive is not None:
        print(f"\n  beside a drive that moves {text.rate(found.drive)}: both at {text.rate(found.with_drive)} each way")
    text.rows([("planned", f"{text.rate(found.planned)} each way"), ("kept in", where)])
    return 0


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal; a line elsewhere. Yields what makes it advance."""
    if not sys.stderr.isatty():
        print(f"zinf: {what}", file=sys.stderr, flush=True)
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, dynamic_ncols=True, leave=False, bar_format="  {desc} {bar:16} {elapsed}<{remaining}", desc=what) as bar:
        yield lambda: (bar.update(), None)[1]
