"""`zinf train CONFIG.yaml`: plan, progress, and what it cost."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zinf.cli import text
from zinf.config import format_bytes
from zinf.train import Result, Step, TrainConfig, Watch, train

EXAMPLE = """\
The file is YAML or JSON, for instance:

  model: /models/Qwen3-8B
  output: out
  data: {train: [notes/*.txt, chats.jsonl], eval: [held-out.txt], max_length: 2048}
  batch_size: 4
  schedule: {warmup_steps: 20}
  engine: {nvme_path: /mnt/nvme, lr: 1e-5, max_grad_norm: 1.0, host_memory: 48GiB, device_memory: 20GiB}

`zinf train --keys` lists all keys. Any of them can be given on the command line: `zinf train run.yaml steps=100 engine.lr=2e-5`.
A run that was interrupted, in whatever way, goes on from its last commit when the same command is given again.
"""


def add(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "train", parents=parents, help="fine-tune a model as a YAML file says", description="Fine-tune a model as a YAML or JSON file says.", epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="what to train, on what, and how")
    p.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="a key of the file, with dots for sections")
    p.add_argument("--fresh", action="store_true", help="start over: forget what an earlier run of this file has learned")
    p.add_argument("--nvme-path", action="append", metavar="PATH", help="where the store lies, instead of engine.nvme_path; give it again for each drive")
    p.add_argument("--json", metavar="FILE", help="write the results there")
    p.add_argument("--keys", action="store_true", help="list all keys of the file, and stop")
    p.set_defaults(run=run, parser=p)


def run(args: argparse.Namespace) -> int:
    if args.keys:
        print_keys()
        return 0
    if args.config is None:
        args.parser.error("give a CONFIG.yaml (zinf train --help shows one)")
    config = TrainConfig.load(args.config, args.overrides, {"nvme_path": args.nvme_path} if args.nvme_path else None)
    code, result = train_and_tell(config, args.fresh, command=f"zinf {shlex.join(a for a in sys.argv[1:] if a != '--fresh')}")
    if args.json:
        Path(args.json).write_text(json.dumps(as_json(result)) + "\n")
    return code


def print_keys() -> None:
    import dataclasses
    import typing

    def keys(cls: type, prefix: str) -> Iterator[tuple[str, str]]:
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            if dataclasses.is_dataclass(hints[f.name]):
                yield f"{prefix}{f.name}", f.metadata["help"]
                yield from keys(hints[f.name], f"{prefix}{f.name}.")  # type: ignore[arg-type]
            else:
                nothing = f.default is dataclasses.MISSING or f.default in (None, ())
                default = ", ".join(map(str, f.default)) if isinstance(f.default, tuple) else str(f.default)
                yield f"{prefix}{f.name}", f.metadata["help"] + ("" if nothing else f" [{default}]")

    text.rows(list(keys(TrainConfig, "")), indent="")


# --------------------------------------------------------------------------------------------------------- what is shown


class Progress(Watch):
    """A bar on a terminal, a line now and then elsewhere."""

    EVERY = 10.0  # seconds between two lines where there is no terminal

    def __init__(self) -> None:
        self._bar: Any = None
        self._told = 0.0
        self._began = 0.0
        self._tokens = 0

    def note(self, text: str) -> None:
        self._line(text)

    def importing(self, done: int, total: int) -> None:
        from tqdm import tqdm

        if self._bar is None and sys.stderr.isatty():
            look = "  importing the model {bar:16} {n_fmt} of {total_fmt} bytes"
            self._bar = tqdm(total=total, dynamic_ncols=True, bar_format=look, unit_scale=True, leave=False)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            if done >= total:
                self.close()

    def plan(self, lines: list[str]) -> None:
        text.heading("Plan")
        for line in lines:
            print(f"  {line}")
        print(flush=True)

    def begin(self, step: int, steps: int) -> None:
        from tqdm import tqdm

        text.heading(f"Training, step {step + 1} to {steps}" if step < steps else f"All {steps} steps are done already (--fresh starts over)")
        self._began = self._told = time.monotonic()
        if sys.stderr.isatty() and step < steps:
            look = "  {n_fmt}/{total_fmt} {bar:16} {elapsed}<{remaining}  {desc}"
            self._bar = tqdm(total=steps, initial=step, dynamic_ncols=True, bar_format=look)

    def step(self, s: Step) -> None:
        self._tokens += s.tokens
        now = time.monotonic()
        rate = self._tokens / max(now - self._began, 1e-9)
        norm = "not finite: skipped" if s.skipped else f"{s.grad_norm:.2f}"
        traffic = f"{s.bytes_read / 1e9:.1f} GB read, {s.bytes_written / 1e9:.1f} written"
        shown = f"loss {s.loss:.3f}, lr {s.lr:.1e}, norm {norm}, {rate:.0f} tok/s, {traffic}"
        if self._bar is not None:
            self._bar.set_description_str(shown, refresh=False)
            self._bar.update()
            if s.step == s.steps:
                self.close()
        elif now - self._told >= self.EVERY or s.step == s.steps:
            self._told = now
            self._line(f"step {s.step}/{s.steps}: {shown}")

    def evaluated(self, step: int, loss: float) -> None:
        self._line(f"held-out loss after {step} steps: {loss:.4f}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _line(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(f"  {line}")
        else:
            print(f"  {line}", flush=True)


class Interrupt:
    """Turns the first Ctrl-C (or SIGTERM) into a wish to stop after this step; a second one stops at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def wanted(self) -> bool:
        return self.signal is not None

    def _handle(self, signum: int, frame: Any) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signum
        print("\n  stopping after this step (once more: at once)", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        old = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for s, handler in old.items():
                signal.signal(s, handler)


def train_and_tell(config: TrainConfig, fresh: bool, command: str, **options: Any) -> tuple[int, Result]:
    """Train with progress and a final report. Returns the exit code and the result."""
    quiet_transformers()
    progress, interrupt = Progress(), Interrupt()
    began = time.monotonic()
    try:
        with interrupt.watch():
            result = train(config, fresh=fresh, stop=interrupt.wanted, watch=progress, **options)
    except KeyboardInterrupt:
        progress.close()
        print(f"\nStopped at once. What was committed is safe; go on with:  {command}", file=sys.stderr)
        raise
    finally:
        progress.close()
    if not result.finished:
        print(f"\nStopped after step {result.step} of {result.steps}, which is committed. Go on with:\n  {command}", flush=True)
        return 128 + (interrupt.signal or signal.SIGINT), result
    report(result, time.monotonic() - began)
    return 0, result


def report(result: Result, wall: float) -> None:
    """What came out and what it cost."""
    stats = result.stats
    text.heading("Result")
    pairs: list[tuple[str, object]] = []
    if result.evals:
        (_, before), (_, after) = result.evals[0], result.evals[-1]
        pairs.append(("held-out loss", f"{before:.4f} before, {after:.4f} after {result.step} steps"))
    if stats["steps"] and stats["params"]:
        each = stats["steps"] * stats["params"]
        pairs.append(("NVMe traffic", f"{stats['bytes_read'] / each:.1f} bytes read and {stats['bytes_written'] / each:.1f} written, per parameter and step"))
    pairs.append(("peak memory", f"{format_bytes(peak_rss())} resident at most: the whole process, Python and torch included"))
    pairs.append(("wall time", text.seconds(wall)))
    if result.output:
        pairs.append(("saved model", result.output))
    pairs.append(("report", f"zinf report {shlex.quote(result.log)}"))
    text.rows(pairs)
    if stats["seconds"]:
        text.heading("Seconds per verb")
        text.table(["verb", "busy", "waited for"], [[verb, f"{s:.1f}", f"{stats['waited'].get(verb, 0.0):.1f}"] for verb, s in stats["seconds"].items()])


def as_json(result: Result) -> dict[str, Any]:
    return {
        "step": result.step, "steps": result.steps, "finished": result.finished, "evals": result.evals, "output": result.output,
        "peak_rss": peak_rss(), **{key: result.stats[key] for key in ("seconds", "waited", "bytes_read", "bytes_written", "params")},
        "steps_here": result.stats["steps"],
    }  # fmt: skip


def peak_rss() -> int:
    """The largest resident set this process has had, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def quiet_transformers() -> None:
    """No progress bars and advice of transformers and huggingface_hub between our lines; a folder needs no network."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    with contextlib.suppress(ImportError):
        from transformers.utils import logging as hf_logging

        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
