"""`zinf ds-config FILE`: what zinf makes of a DeepSpeed config, key by key."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from zinf.cli import text
from zinf.errors import ConfigError


def add(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "ds-config", parents=parents, help="what zinf makes of a DeepSpeed config",
        description="What zinf makes of each key of a DeepSpeed config: honoured (to what) or ignored (why). What it refuses is an error that says "
        "what to do instead.",
    )  # fmt: skip
    p.add_argument("file", nargs="?", metavar="FILE", help="ds_config.json; comments and trailing commas may be in it")
    p.add_argument("--json", action="store_true", help="machine-readable")
    p.add_argument("--keys", action="store_true", help="the table of all keys, instead of a file")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from zinf.integrations.deepspeed.config import translate
    from zinf.integrations.deepspeed.keys import KEYS
    from zinf.integrations.deepspeed.reading import read

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
    for kind in ("honoured", "ignored"):
        text.heading(kind)
        text.rows([(f"{line.key}: {json.dumps(line.value)}", line.said) for line in found.report if line.kind == kind])
    text.heading("options of zinf")
    text.rows([(name, json.dumps(value)) for name, value in found.config.items()])
    text.heading("the training loop")
    text.rows([(name, json.dumps(value)) for name, value in found.training.items() if value is not None])
    return 0
