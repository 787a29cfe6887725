"""`zinf run -- COMMAND ARGS`: a command that trains with transformers' Trainer, unchanged, on zinf."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from zinf.errors import ConfigError

EXAMPLE = """\
examples:
  zinf run --zinf zinf.yaml -- python train.py --epochs 3
  zinf run --zinf zinf.yaml -- llamafactory-cli train sft.yaml
  ZINF_NVME_PATH=/mnt/nvme zinf run -- trl sft --model_name_or_path ...

zinf.yaml has the options of the engine, such as `nvme_path: /mnt/nvme` and `host_memory: 48GiB`. Every Trainer that the command builds, of whatever
subclass, gets zinf.hf.ZinfTrainerMixin as its first base: see docs/trainer.md for what it makes of TrainingArguments. The command loads the model
itself, so that has to fit in host memory while it is loaded (one that does not: zinf.from_pretrained in the script, or zinf train).
"""


def add(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "run", parents=parents, help="a command that uses the Hugging Face Trainer, unchanged, on zinf", epilog=EXAMPLE,
        description="Run a command whose Trainers train on zinf.", formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument("--zinf", metavar="FILE.yaml", help="the engine's options (default: $ZINF_CONFIG)")
    p.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND ARGS", help="what to run")
    p.set_defaults(run=run, parser=p)


def run(args: argparse.Namespace) -> int:
    """Does not return: this process becomes the command, so its exit code, terminal and signals are the command's."""
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not argv:
        args.parser.error("give a COMMAND, such as: zinf run --zinf zinf.yaml -- python train.py")
    from zinf.hf.arguments import config_of

    file = args.zinf or os.environ.get("ZINF_CONFIG")
    config_of(file)  # says what is wrong before anything runs
    if argv[0].endswith(".py") and not os.access(argv[0], os.X_OK):
        argv = [sys.executable, *argv]
    program = shutil.which(argv[0])
    if program is None:
        raise ConfigError(f"{argv[0]}: no such command; is its environment active?")
    environ = {**os.environ, "ZINF_RUN": "1", "PYTHONPATH": os.pathsep.join([_hook(), *filter(None, [os.environ.get("PYTHONPATH")])])}
    if file is not None:
        environ["ZINF_CONFIG"] = os.path.abspath(file)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(program, argv, environ)


def _hook() -> str:
    """The folder of the sitecustomize.py that the command's Python imports."""
    spec = importlib.util.find_spec("zinf.integrations")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent / "hook")
