"""`zinf import MODEL STORE` and `zinf export STORE OUT`: between Hugging Face folders and stores, without an engine. Both go on where they were killed."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from zinf.cli import text
from zinf.config import Config, format_bytes, nearest, parse_bytes
from zinf.errors import ConfigError, StoreError

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


IMPORT = """\
Stream the safetensors of a Hugging Face model into a new store, with room for optimizer state. `zinf train`, and
zinf.from_pretrained(..., resume=True), with the same model, path and options then begin at once. An import that was
stopped, in whatever way, goes on when the same command is given again.
"""
EXPORT = """\
Write the weights of a store, or of a checkpoint, as a Hugging Face folder, with config and tokenizer of the model that
it began with. Neither the model's code nor a GPU is needed. An export that was stopped, in whatever way, goes on when
the same command is given again.
"""


def add(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    p = commands.add_parser("import", parents=parents, help="a Hugging Face model into a store, for runs to come", description=IMPORT)
    p.add_argument("model", metavar="MODEL", help="a folder with config.json and safetensors, or a hub id")
    p.add_argument("store", metavar="STORE", help="folder to make: NVME_PATH/RUN_NAME of the runs to come (run_name is `run` by default)")
    p.add_argument("--nvme-path", action="append", default=[], metavar="PATH", help="a further drive to spread the store over; again for each")
    p.add_argument("--dtype", default="bf16", metavar="{bf16,fp16,fp32}", help="of the weights; what they cannot hold stays in the state (default: bf16)")
    p.add_argument("--frozen", action="store_true", help="no room for optimizer state: a base for adapters, which any number of runs share")
    p.add_argument("--optimizer", default=Config.optimizer, metavar="NAME", help="of the runs to come: what there is room for (default: %(default)s)")
    p.add_argument("--momentum", type=float, metavar="M", help="of sgd, as in the runs to come")
    p.add_argument("--ema-decay", type=float, metavar="D", help="room for an average of the weights")
    p.add_argument("--keep-in-fp32", action="append", metavar="PATTERN", help="modules to keep in fp32; again for each (default: what the model asks for)")
    p.add_argument("--chunk-size", type=int, metavar="N", help="elements of a chunk")
    p.add_argument("--no-crash-safe", action="store_true", help="one version of each chunk: half the disk, but a crash of a run loses the store")
    p.add_argument("--ignore-unexpected", action="store_true", help="go on if the files have tensors that the model has not")
    p.add_argument("--from-deepspeed", metavar="DIR", help="weights, moments and step from a checkpoint of DeepSpeed, of this model; go on from there")
    p.add_argument("--tag", metavar="TAG", help="of that checkpoint (default: its last one)")
    p.add_argument("--weights-only", action="store_true", help="of that checkpoint only the weights: moments zero, step 0")
    p.add_argument("--yes", action="store_true", help="replace a store that stands there, without asking")
    p.set_defaults(run=import_model)
    p = commands.add_parser("export", parents=parents, help="a store or a checkpoint as a Hugging Face folder", description=EXPORT)
    p.add_argument("store", nargs="+", metavar="STORE", help="a store (all of its paths), a checkpoint, or a folder of checkpoints (its last one)")
    p.add_argument("out", metavar="OUT", help="folder to write to")
    p.add_argument("--dtype", metavar="{bf16,fp16,fp32}", help="of the weights; fp32 is the full master (default: as they were trained)")
    p.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file, as in save_pretrained: 5GB, 2GiB (default: %(default)s)")
    p.add_argument("--overwrite", action="store_true", help="replace a model that is in OUT")
    p.set_defaults(run=export)


def import_model(args: argparse.Namespace) -> int:
    import torch

    from zinf.cli.train import quiet_transformers
    from zinf.hf.loading import from_pretrained, resolve

    dtype = getattr(torch, DTYPES[_dtype(args.dtype)])
    chunk = {} if args.chunk_size is None else {"chunk_size": args.chunk_size}
    Config(optimizer=args.optimizer, momentum=args.momentum, ema_decay=args.ema_decay, **chunk)  # says what is wrong before anything is looked at
    quiet_transformers()
    folder = resolve(args.model)
    paths = store_paths(args.store, args.nvme_path)
    drive, run_name = os.path.split(paths[0])
    start = time.monotonic()
    replace = _may_replace(paths, folder, args.yes)
    if replace is None:
        return 1
    if args.from_deepspeed is not None:
        return _import_deepspeed(args, folder, paths, dtype, replace)
    try:
        with text.bar("importing") as progress:
            model: Any = from_pretrained(
                folder,
                nvme_path=[os.path.dirname(path) for path in paths],
                run_name=run_name,
                dtype=dtype,
                keep_in_fp32=args.keep_in_fp32,
                overwrite=replace,
                trainable=False if args.frozen else None,
                ignore_unexpected=args.ignore_unexpected,
                chunk_size=args.chunk_size,
                crash_safe=not args.no_crash_safe,
                optimizer=args.optimizer,
                momentum=args.momentum,
                ema_decay=args.ema_decay,
                progress=progress,
            )
    except KeyboardInterrupt:
        print("\nStopped. The same command goes on from here.", file=sys.stderr)
        raise
    numel = sum(p.numel() for p in model.parameters())
    print(f"imported {numel:,} parameters from {folder} in {text.seconds(time.monotonic() - start)} into {' and '.join(paths)}")
    print(f"runs with nvme_path {', '.join(os.path.dirname(path) for path in paths)} and run_name {run_name} open it; {drive} has {_free(drive)} left")
    return 0


def _import_deepspeed(args: argparse.Namespace, folder: str, paths: Sequence[str], dtype: Any, replace: bool) -> int:
    """A store from a checkpoint of DeepSpeed."""
    from zinf.integrations.deepspeed.importing import import_deepspeed

    for option in ("frozen", "ignore_unexpected", "keep_in_fp32", "momentum", "ema_decay"):
        if getattr(args, option):
            raise ConfigError(f"--{option.replace('_', '-')} does not go with --from-deepspeed, which takes what the checkpoint has: leave it out")
    start = time.monotonic()
    with text.bar("importing") as progress:
        step, numel = import_deepspeed(
            args.from_deepspeed,
            folder,
            [os.path.dirname(path) for path in paths],
            tag=args.tag,
            run_name=os.path.basename(paths[0]),
            dtype=dtype,
            optimizer=args.optimizer,
            weights_only=args.weights_only,
            overwrite=replace,
            chunk_size=args.chunk_size,
            crash_safe=not args.no_crash_safe,
            progress=progress,
        )
    print(f"imported {numel:,} parameters from {args.from_deepspeed} at step {step} in {text.seconds(time.monotonic() - start)} into {' and '.join(paths)}")
    return 0


def store_paths(store: str, drives: Sequence[str]) -> list[str]:
    """The directories of a store: STORE, and on each further drive the folder of that name.

    Raises:
        ConfigError: one has files that are no store's: it is not what should be one.
    """
    first = os.path.abspath(store)
    paths = [first, *(os.path.join(os.path.abspath(drive), os.path.basename(first)) for drive in drives)]
    from zinf.tiers import directory, manifest

    for path in paths:
        names = set(os.listdir(path)) if os.path.isdir(path) else set()
        if names - {directory.LOCK, *directory.own_files()} and manifest.MEMBER not in names:
            there = ", ".join(sorted(names)[:3])
            raise ConfigError(f"{path} has other files ({there}): give a folder of its own to the store, such as {os.path.join(path, Config.run_name)}")
    return paths


def _may_replace(paths: Sequence[str], folder: str, yes: bool) -> bool | None:
    """False where no store stands in the way, True where one may be replaced, None where the user said no.

    Raises:
        StoreError: it may not be, and nobody can be asked.
    """
    from zinf.tiers import manifest

    if not os.path.lexists(os.path.join(paths[0], manifest.MANIFEST)):
        return False
    if yes:
        return True
    found = manifest.load(paths[0])
    source = (found.extra.get("origin") or {}).get("source")
    what = f"there is a store at {paths[0]} already, at step {found.step}, that was imported from {source or 'a model in memory'}"
    if not sys.stdin.isatty():
        hint = "go on from it with resume=True or zinf train, " if source and os.path.realpath(source) == os.path.realpath(folder) else ""
        raise StoreError(f"{what}: {hint}choose another STORE, or replace it with --yes")
    return True if input(f"{what}. Replace it? [y/N] ").strip().lower() in ("y", "yes") else None


def export(args: argparse.Namespace) -> int:
    from zinf.hf.exporting import export_checkpoint

    dtype = _dtype(args.dtype) if args.dtype is not None else None
    try:
        limit = parse_bytes(args.max_shard_size)
    except ConfigError as e:
        raise ConfigError(f"--max-shard-size: {e}") from None
    if not limit:
        raise ConfigError("--max-shard-size is 0: give the bytes of a file, such as 5GB")
    for path in args.store:
        if not os.path.isdir(path):
            raise StoreError(f"{path}: no such folder")
    start = time.monotonic()
    try:
        with text.bar("exporting") as progress:
            files = export_checkpoint(args.store, args.out, dtype=dtype, max_shard_size=limit, overwrite=args.overwrite, progress=progress)
    except KeyboardInterrupt:
        print("\nStopped. The same command goes on from here.", file=sys.stderr)
        raise
    for file in files:
        print(f"wrote {file}")
    size = 0
    for file in files:
        with contextlib.suppress(OSError):
            size += os.path.getsize(file)
    print(f"{format_bytes(size)} in {text.seconds(time.monotonic() - start)}")
    return 0


def _dtype(name: str) -> str:
    if name not in DTYPES:
        raise ConfigError(f"--dtype is {name!r}; it must be one of {', '.join(DTYPES)}; {nearest(name, DTYPES)}")
    return name


def _free(path: str) -> str:
    stat = os.statvfs(path)
    return format_bytes(stat.f_bavail * stat.f_frsize)
