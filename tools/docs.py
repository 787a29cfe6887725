"""The generated pages of docs/: what an option does is said once, in the code, and what a plan says is what `zinf plan` prints.

python tools/docs.py            # writes docs/configuration.md and docs/hardware.md anew
python tools/docs.py --check    # exit status 1 if one of them is stale (tests/test_docs.py)
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import os
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zinf import cli
from zinf.config import Config, format_bytes
from zinf.data import DataConfig
from zinf.planner import machine
from zinf.train import ScheduleConfig, TrainConfig

DOCS = Path(__file__).resolve().parent.parent / "docs"
SHAPES = {"qwen3-8b": "Qwen3-8B", "qwen3-32b": "Qwen3-32B", "llama-70b": "Llama-3.3-70B"}
MACHINES = ("rtx3090", "rtx4090", "rtx5090", "a100", "h100")

# ------------------------------------------------------------------------------------------------------- configuration

CONFIGURATION = """# Configuration

<!-- Made by tools/docs.py from the dataclasses; edit the help there. -->

Every option has one name, given in any of these ways; the first that has it counts:

| way | looks like |
|---|---|
| keyword | `zinf.Engine(model, host_memory="48GiB")` |
| command line | `zinf train run.yaml engine.host_memory=48GiB steps=100` |
| environment | `ZINF_HOST_MEMORY=48GiB`: options of the engine, read by `zinf train` and `zinf.Config.load()` |
| file | `host_memory: 48GiB`, in the `engine` section of a run's file; `zinf.Config.load("engine.yaml")` |

Sizes are bytes, or text: `512MiB` and `20G` are binary, `20GB` is decimal. An unknown key, or a value that its key cannot have, is an error before any work,
with the nearest key. `zinf train --keys` prints this page's lists. [Optimizers](optimizers.md) says which options belong to which optimizer.
"""


def written(hint: Any) -> str:
    """A type as a user writes its values: `auto`, `host` or a number."""
    if typing.get_origin(hint) is typing.Annotated:
        return "size"
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{v}`" for v in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(written(a) for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)
        return f"list of {written(inner[0])}" if inner[-1] is ... else f"{len(inner)} numbers"
    names = {bool: "`true`, `false`", int: "whole number", float: "number", str: "text"}
    return names[hint]


def default(field: dataclasses.Field[Any], hint: Any) -> str:
    value = field.default
    if value is dataclasses.MISSING:
        return "must be given"
    if value is None or value == ():
        return ""
    if typing.get_origin(hint) is typing.Annotated:
        return f"`{format_bytes(value).replace(' ', '')}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def sections(cls: type) -> Iterator[tuple[str, list[str]]]:
    """(the comment above them, names) of the fields of `cls`."""
    known, title, names = {f.name for f in dataclasses.fields(cls)}, "", []
    for line in inspect.getsource(cls).splitlines():
        if comment := re.fullmatch(r"    # (.*)", line):
            if names:
                yield title, names
            title, names = comment[1], []
        elif (name := re.match(r"    (\w+):", line)) and name[1] in known:
            names.append(name[1])
    yield title, names


def table(cls: type, names: list[str]) -> str:
    hints, fields = typing.get_type_hints(cls, include_extras=True), {f.name: f for f in dataclasses.fields(cls)}
    rows = ["| option | is | default | |", "|---|---|---|---|"]
    for name in names:
        if dataclasses.is_dataclass(hints[name]):
            continue
        help = fields[name].metadata["help"].replace("|", "\\|").replace("*", "\\*")
        rows.append(f"| `{name}` | {written(hints[name])} | {default(fields[name], hints[name])} | {help} |")
    return "\n".join(rows) + "\n"


def configuration() -> str:
    parts = [CONFIGURATION, "## The engine\n", "Of `zinf.Engine(...)`, `ZinfTrainer(zinf=...)` and the `engine` section of a run's file.\n"]
    for title, names in sections(Config):
        parts += [f"### {title[0].upper()}{title[1:]}\n", table(Config, names)]
    parts.append("## A run's file\n\nOf `zinf train FILE`. The sections are `engine` (above), `data` and `schedule`.\n")
    for title, cls in (("Top level", TrainConfig), ("data", DataConfig), ("schedule", ScheduleConfig)):
        parts += [f"### {title}\n", table(cls, [f.name for f in dataclasses.fields(cls)])]
    return "\n".join(parts)


# ------------------------------------------------------------------------------------------------------------ hardware

HARDWARE = """# Choosing hardware

<!-- Made by tools/docs.py: these are the words of `zinf plan`. -->

`zinf plan` says before anything is bought or downloaded whether a model fits on a machine, what would go where, how long a step takes and why. Here it
speaks of three shapes on five machines that are shipped with it ([how it counts](planner.md)): full fine-tuning in bf16 with AdamW, 8 rows of 2048 tokens.

**These are forecasts, from datasheets that are partly assumed, not measurements of zinf on these cards.** Put your own machine's numbers in
(`--machine FILE.yaml`), or run `zinf plan` on it, which measures it first. Where the drive limits, larger batches are the cheapest speed: a step moves the
same bytes for twice the tokens.

"""

READING = """
## What to read from it

- **Host memory first.** What rests in host memory is not read and written each step. Where it holds all, the drive has nothing to do but commits.
- **Then drives.** Where nvme limits, a second drive nearly halves a step (`nvme_path: [/mnt/a, /mnt/b]`). The sustained write rate counts, not the one on
  the box; and so does endurance: see what 1000 steps write. Drives made for servers take several times as many writes.
- **The card last.** A faster card helps only where compute limits.
- **LoRA** (`--lora 16`) never writes the base: the drive is read, and wears hundreds of times less.
"""


def plan(model: str, name: str, *more: str) -> str:
    """What `zinf plan` prints, or its error."""
    out, err = io.StringIO(), io.StringIO()
    path = DOCS / "shapes" / f"{model}.yaml"
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        cli.main(["plan", str(path), "--machine", name, *more])
    return (out.getvalue() or err.getvalue()).strip("\n").replace(str(path), f"docs/shapes/{model}.yaml")


def found(text: str, pattern: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def row(model: str, name: str) -> str:
    text = plan(model, name)
    what = f"| {SHAPES[model]} | {machine.load(name).name} "
    if ": fits" not in text:
        return f"{what}| does not fit: {found(text, 'it fits with (.*)') or 'see below'} | | | |"
    takes, limit = found(text, r"takes +(.*?), most"), found(text, r"most of it for (\w+)")
    wear, best = found(text, r"wear +(\S+ TB)") or "nothing", found(text, r"What would help most\n +(.*)")
    return f"{what}| {takes} | {limit} | {found(text, r'speed +(.*?) tokens')} | {wear} | {' '.join(best.split())} |"


def hardware() -> str:
    rows = [row(model, name) for model in SHAPES for name in MACHINES]
    head = "| model | machine | a step | limited by | tokens/s | written in 1000 steps | what would help most |\n|---|---|---|---|---|---|---|\n"
    examples = [("qwen3-8b", "rtx4090"), ("llama-70b", "h100"), ("llama-70b", "rtx4090", "--lora", "16")]
    shown = [f"    $ zinf plan docs/shapes/{m}.yaml --machine {' '.join([n, *more])}\n\n```text\n{plan(m, n, *more)}\n```\n" for m, n, *more in examples]
    return HARDWARE + head + "\n".join(rows) + "\n" + READING + "\n## In full\n\n" + "\n".join(shown)


PAGES = {"configuration.md": configuration, "hardware.md": hardware}


def main(argv: list[str]) -> int:
    os.environ |= {"COLUMNS": "120", "NO_COLOR": "1"}
    stale = [name for name, make in PAGES.items() if not (DOCS / name).is_file() or (DOCS / name).read_text() != make()]
    if "--check" in argv:
        print("\n".join(f"docs/{name} is stale: run python tools/docs.py" for name in stale), end="\n" if stale else "")
        return bool(stale)
    for name in stale:
        (DOCS / name).write_text(PAGES[name]())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
