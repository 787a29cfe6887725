"""`zinf generate MODEL`: let a model write that need not fit in memory."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from zinf.cli import text
from zinf.cli.models import DTYPES
from zinf.config import Config
from zinf.errors import ConfigError

EXAMPLE = """\
examples:
  zinf generate Qwen/Qwen3-32B --nvme-path /mnt/nvme --chat --prompt "Why is the sky blue?"
  zinf generate /mnt/nvme/run --prompt "To be" --prompt "Or not"      a store that a run left; two prompts are one batch
  zinf generate MODEL --nvme-path /mnt/nvme --batch 16 < prompts.txt  a prompt on each line

The weights are imported to NVME_PATH once, and read once for a token of a whole batch; what the budgets hold is not read again.
Texts go to stdout, all else to stderr.
"""


def add(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "generate", parents=parents, help="let a model write that need not fit in memory", description="Stream a model, and print what it writes.",
        epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument("model", metavar="MODEL", help="a folder with config.json and safetensors, a hub id, or a store")
    p.add_argument("--prompt", action="append", metavar="TEXT", help="what to go on from; again for each (default: each line of stdin)")
    p.add_argument("--chat", action="store_true", help="each prompt is a message to answer (the model's chat template)")
    p.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="[%(default)s]")
    p.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: always the likeliest token [0]")
    p.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest tokens that have this probability together [1]")
    p.add_argument("--seed", type=int, default=0, help="of the draws [0]")
    p.add_argument("--batch", type=int, default=0, metavar="N", help="prompts that are written at once (default: all)")
    p.add_argument("--nvme-path", action="append", metavar="PATH", help="where the weights go, or further drives of a store; again for each drive")
    p.add_argument("--host-memory", metavar="SIZE", help="limit on host memory, such as 16GiB: what it holds is not read again")
    p.add_argument("--device-memory", metavar="SIZE", help="limit on device memory")
    p.add_argument("--device", default="auto", help="auto, cuda or cpu [auto]")
    p.add_argument("--dtype", default="bf16", choices=sorted(DTYPES), help="of the weights of a model that is imported [bf16]")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    how = _sampling(args)
    prompts = args.prompt or _from_stdin()
    config = Config(**{k: v for k in ("host_memory", "device_memory", "device") if (v := getattr(args, k)) is not None})
    import torch
    from transformers import TextStreamer

    from zinf.cli.train import quiet_transformers
    from zinf.hf import inference
    from zinf.train import load_tokenizer

    quiet_transformers()
    if not all(prompt.strip() for prompt in prompts):
        raise ConfigError("a --prompt is empty: give at least one word")
    tokenizer = None if inference.is_store(args.model) or not args.nvme_path else load_tokenizer(args.model)  # before an import that takes long
    engine = _open(args, config)
    try:
        assert engine.origin is not None
        tokenizer = tokenizer or load_tokenizer(engine.origin.folder)
        torch.manual_seed(args.seed)
        size, start, read = args.batch or len(prompts), time.monotonic(), engine.stats()["bytes_read"]
        for i in range(0, len(prompts), size):
            streamer = TextStreamer(tokenizer, skip_prompt=args.chat, skip_special_tokens=True) if len(prompts) == 1 else None  # it knows one row
            written = inference.write(engine, tokenizer, prompts[i : i + size], chat=args.chat, streamer=streamer, **how)
            if streamer is None:
                for prompt, answer in zip(prompts[i : i + size], written, strict=True):
                    print(f"{'' if args.chat else prompt}{answer}", flush=True)
        seconds = time.monotonic() - start
        if sys.stderr.isatty():
            print(f"\n{text.seconds(seconds)}, {(engine.stats()['bytes_read'] - read) / 1e9:.2f} GB read", file=sys.stderr)
    finally:
        engine.close(commit=False)
    return 0


def _open(args: argparse.Namespace, config: Config) -> Any:
    """The engine on the store that MODEL is, or that it is imported into."""
    import dataclasses

    import torch

    from zinf.cli.models import store_paths
    from zinf.hf import inference

    if inference.is_store(args.model):
        return inference.open_store(store_paths(args.model, args.nvme_path or []), config)
    if not args.nvme_path:
        raise ConfigError(f"{args.model} is not a store, so its weights have to go to one: give --nvme-path PATH, a folder on the drive")
    for path in args.nvme_path:
        if not os.path.isdir(path):
            raise ConfigError(f"--nvme-path {path}: no such folder: make it first (mkdir -p {path})")
    config = dataclasses.replace(config, nvme_path=tuple(os.path.abspath(path) for path in args.nvme_path))
    with text.bar("importing") as progress:
        return inference.open_model(args.model, config, getattr(torch, DTYPES[args.dtype]), progress)


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The options as transformers' generate has them."""
    for ok, name, value, expected in (
        (args.max_new_tokens > 0, "--max-new-tokens", args.max_new_tokens, "1 or more"),
        (args.temperature >= 0, "--temperature", args.temperature, "0 or more"),
        (0 < args.top_p <= 1, "--top-p", args.top_p, "a fraction above 0, up to 1"),
        (args.batch >= 0, "--batch", args.batch, "1 or more"),
    ):
        if not ok:
            raise ConfigError(f"{name} is {value}: give {expected}")
    how: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0}
    if args.temperature > 0:
        how |= {"temperature": args.temperature, "top_p": args.top_p}
    else:
        how |= {"temperature": None, "top_p": None, "top_k": None}  # whatever the model's own generation_config says
    return how


def _from_stdin() -> list[str]:
    if sys.stdin.isatty():
        print("(a prompt on each line, then Ctrl-D)", file=sys.stderr)
    prompts = [line for line in sys.stdin.read().splitlines() if line.strip()]
    if not prompts:
        raise ConfigError('no prompt: give --prompt "TEXT", or a prompt on each line of stdin')
    return prompts
