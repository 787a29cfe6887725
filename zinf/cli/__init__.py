"""The `zinf` command: `zinf demo | train | run | generate | report | plan | bench | env | import | export | inspect | clean |
ds-config | completion`.

Each command is a module with `add(commands)` that declares its arguments and a `run(args) -> exit code`; modules are light, what
is heavy is imported by run. A mistake of the user, or of a disk, is one line on stderr; `--debug` shows where it came from.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from zinf import __version__
from zinf.errors import ZinfError

# The extra that brings a package, where it is not hf.
EXTRA = {"peft": "peft", "trl": "trl", "datasets": "trl", "gguf": "demo", "matplotlib": "report"}


def parser() -> argparse.ArgumentParser:
    from zinf.cli import bench, completion, demo, ds_config, env, generate, models, plan, report, run, store, train

    top = argparse.ArgumentParser(prog="zinf", description="Fine-tune models larger than the GPU, and larger than the RAM, on one card.")
    top.add_argument("--version", action="version", version=f"zinf {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the full traceback of an error, and debug messages")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for module in (demo, train, run, generate, report, plan, bench, env, models, store, ds_config, completion):
        module.add(commands, [common])
    return top


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 done, 1 an error, 2 wrong usage, 130 stopped by Ctrl-C."""
    args = parser().parse_args(argv)
    debug = args.debug or bool(os.environ.get("ZINF_DEBUG"))
    logging.basicConfig(level=logging.WARNING, format="zinf: %(message)s")
    logging.getLogger("zinf").setLevel(logging.DEBUG if debug else logging.WARNING)
    try:
        return args.run(args)
    except BrokenPipeError:  # `zinf env | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        if debug:
            raise
        print("\nzinf: stopped", file=sys.stderr)
        return 130
    except (ZinfError, OSError, ValueError, ImportError, MemoryError) as e:
        if debug:
            raise
        print(f"zinf: error: {describe(e)}", file=sys.stderr)
        return 1


def describe(e: BaseException) -> str:
    """One line that says what went wrong. Errors that are not zinf's own keep their type's name."""
    text = " ".join(str(e).split())
    if isinstance(e, ZinfError):
        return text
    if isinstance(e, OSError) and e.strerror:
        return f"{e.filename}: {e.strerror}" if e.filename else e.strerror
    if isinstance(e, ModuleNotFoundError) and not str(e.name).startswith("zinf"):
        return f'{text}; it comes with `pip install "zinf[{EXTRA.get(str(e.name).partition(".")[0], "hf")}]"`'
    return f"{type(e).__name__}: {text} (--debug shows where)"
