"""`zinf ds-config FILE`: what zinf makes of a DeepSpeed config, key by key."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from zinf.cli import text
from zinf.errors import ConfigError

if TYPE_CHECKING:
    from zinf.integrations.deepspeed.keys import Entry


def add(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "ds-config", parents=parents, help="what zinf makes of a DeepSpeed config",
        description="What zinf makes of each key of a DeepSpeed config: honoured (to what) or ignored (why). What it refuses is an error that says "
        "what to do instead.",
    )  # fmt: skip
    p.add_argument("file", nargs="?", metavar="FILE", help="ds_config.json; comments and trailing commas may be in it")
    p.add_argument("--json", action="store_true", help="machine-readable")
    p.add_argument("--keys", action="store_true", help="the table of all keys, instead of a file")
    p.add_argument("--markdown", action="store_true", help="with --keys: as docs/deepspeed-keys.md has it")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from zinf.integrations.deepspeed.config import translate
    from zinf.integrations.deepspeed.keys import KEYS
    from zinf.integrations.deepspeed.reading import read

    if args.keys and args.markdown:
        print("\n".join(_markdown(KEYS)))
        return 0
    if args.keys:
        text.rows([(key, f"{entry.kind}: {entry.said}") for key, entry in sorted(KEYS.items())], indent="")
        return 0
    if args.file is None:
        raise ConfigError("ds-config: give a FILE, or --keys")
    try:
        found = translate(read(args.file))
    except ConfigError as e:
        raise ConfigError(str(e) if str(e).startswith(f"{args.file}:") else f"{args.file}: {e}") from None
    if args.json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
        return 0
    for heading, lines in (
        ("may be a mistake", [line for line in found.report if line.warns]),
        ("honoured", [line for line in found.report if line.kind == "honoured"]),
        ("ignored", [line for line in found.report if line.kind == "ignored" and not line.warns]),
    ):
        if lines:
            text.heading(heading)
            text.rows([(f"{line.key}: {json.dumps(line.value)}", line.said) for line in lines])
    text.heading("options of zinf")
    text.rows([(name, json.dumps(value)) for name, value in found.config.items()])
    text.heading("the training loop")
    text.rows([(name, json.dumps(value)) for name, value in found.training.items() if value is not None])
    return 0


def _markdown(keys: Mapping[str, Entry]) -> Iterator[str]:
    """The table as a page."""
    yield "# DeepSpeed's keys\n"
    yield "What zinf makes of each key of a DeepSpeed config (0.19.8): honoured (to what), ignored (why), refused (what instead)."
    yield "`zinf ds-config FILE` prints it for a file. A key in a section without rows of its own is as the section. `auto` is filled as Hugging Face's"
    yield "Trainer fills it.\n"
    yield "| key | | |\n|---|---|---|"
    for key, entry in sorted(keys.items()):
        said = entry.said.replace("|", "\\|")
        yield f"| `{key}` | {entry.kind} | {f'`{said}`' if entry.option else said} |"
