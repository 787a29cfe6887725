"""A DeepSpeed config for a job that trains with Hugging Face's Trainer: what `--deepspeed ds_config.json` was, for zinf.hf.ZinfTrainer.

    args = TrainingArguments("out", ...)                               # without deepspeed=
    trainer = ZinfTrainer(model=model, args=args, zinf=trainer_options("ds_config.json", args))

"auto" is filled from TrainingArguments, and what is not "auto" must agree with them, as with DeepSpeed. Optimizer, schedule, clipping and
accumulation are then TrainingArguments' to say; what is left are zinf's options: where things live, and the loss scale.

A script that takes `--deepspeed ds_config.json` takes it off its command line before it parses that: file, argv = take_argument().
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from zinf.errors import ConfigError
from zinf.hf.arguments import OWNED, optimizer
from zinf.integrations.deepspeed.config import translate
from zinf.integrations.deepspeed.keys import FILLS
from zinf.integrations.deepspeed.reading import read

log = logging.getLogger("zinf")

SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}  # DeepSpeed's name -> lr_scheduler_type


def trainer_options(config: str | os.PathLike[str] | Mapping[str, Any], args: Any) -> dict[str, Any]:
    """The options for ZinfTrainer(zinf=...).

    Args:
        config: as DeepSpeed takes it: a path, a mapping.
        args: TrainingArguments.

    Raises:
        ConfigError: what the config says is not what TrainingArguments say, or cannot be had.
    """
    names = {name for names, _ in FILLS.values() for name in names if hasattr(args, name)} - {"warmup_steps"}  # which may be a fraction there
    found = translate(read(config), auto={name: getattr(args, name) for name in names})
    for line in found.report:
        log.log(logging.WARNING if line.warns else logging.DEBUG, "%s", line)
    theirs = found.config.get("optimizer")
    if theirs is not None and theirs != optimizer(args)["optimizer"]:
        raise ConfigError(f"optimizer.type is {theirs} in the DeepSpeed config, and TrainingArguments(optim={str(getattr(args.optim, 'value', args.optim))!r})")
    schedule = found.training["scheduler"]
    if schedule is not None:
        wanted, have = SCHEDULES.get(schedule["type"]), str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
        if wanted != have:
            instead = f"set lr_scheduler_type={wanted!r} and warmup_steps in TrainingArguments" if wanted else "take a schedule that the Trainer has"
            raise ConfigError(f"scheduler.type is {schedule['type']} in the DeepSpeed config, and the Trainer's is {have}: {instead}")
    return {key: value for key, value in found.config.items() if key not in OWNED}


def take_argument(argv: Sequence[str] | None = None) -> tuple[str | None, list[str]]:
    """(the file of `--deepspeed FILE`, the other arguments) of a command line; default: sys.argv. The last one counts, as in argparse."""
    given, rest, file = list(sys.argv[1:] if argv is None else argv), [], None
    while given:
        word = given.pop(0)
        if word == "--deepspeed":
            if not given:
                raise ConfigError("--deepspeed needs a file: --deepspeed ds_config.json")
            file = given.pop(0)
        elif word.startswith("--deepspeed="):
            file = word.partition("=")[2]
        else:
            rest.append(word)
    return file, rest
