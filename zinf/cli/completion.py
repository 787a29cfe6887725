"""`zinf completion bash|zsh|fish`: what a shell needs to complete zinf's commands and options, from the parsers themselves (shtab)."""

from __future__ import annotations

import argparse
from typing import Any

EXAMPLE = """\
examples:
  zinf completion bash > ~/.local/share/bash-completion/completions/zinf
  zinf completion zsh > ~/.zfunc/_zinf                    with fpath+=~/.zfunc before compinit in ~/.zshrc
  zinf completion fish > ~/.config/fish/completions/zinf.fish
"""


def add(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "completion", parents=parents, help="a shell's completion of zinf's commands and options", description="Print the completion script of a shell.",
        epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument("shell", choices=("bash", "zsh", "fish"))
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import shtab

    from zinf.cli import parser

    print(shtab.complete(parser(), args.shell))
    return 0
