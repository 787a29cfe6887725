"""`zinf inspect PATH` and `zinf clean PATH`: what runs have left on a drive."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import sys
import time
from typing import Any

from zinf.cli import text
from zinf.config import Config, format_bytes
from zinf.errors import StoreError


def add(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "inspect", parents=parents, help="list the stores below a path",
        description="List the stores below a path: what model, which step, how many bytes, in use or not.",
    )  # fmt: skip
    p.add_argument("paths", nargs="+", metavar="PATH", help="a store, or a folder that holds some")
    p.add_argument("--json", action="store_true", help="machine-readable")
    p.add_argument("--verify", action="store_true", help="read every chunk and compare its checksum; exit status 1 if one is not what was written")
    p.set_defaults(run=inspect)
    p = commands.add_parser(
        "clean", parents=parents, help="remove stores",
        description="Remove the stores below a path: at once those that never came to a first commit, others after you said yes. What is in use is kept.",
    )  # fmt: skip
    p.add_argument("paths", nargs="+", metavar="PATH", help="a store, or a folder that holds some")
    p.add_argument("--yes", action="store_true", help="remove committed stores too, without asking")
    p.set_defaults(run=clean)


def inspect(args: argparse.Namespace) -> int:
    from zinf.tiers import nvme

    _must_exist(args.paths)
    found = nvme.inspect(args.paths)
    good = True
    for store in found["stores"]:
        if args.verify and store["state"] != "uncommitted":  # nothing is promised of what was never committed
            store["verified"] = verify(store["paths"])
            good = good and not store["verified"]["errors"]
        if not args.json:
            show(store)
    if args.json:
        json.dump(found, sys.stdout, indent=2, default=str)
        print()
    elif not found["stores"]:
        print(f"no store in {' or '.join(args.paths)}")
    return 0 if good else 1


def verify(paths: list[str]) -> dict[str, Any]:
    """Read a whole store: {"bytes": compared, "seconds", "errors": [a line for each chunk that is not what was written, or why none could be read]}."""
    from zinf.aio import open_engine
    from zinf.tiers import nvme

    compared, errors, start = 0, [], time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal compared
        compared = done

    try:
        with contextlib.closing(open_engine()) as io, nvme.Store.open(paths, io, verify="off", writable=False) as store:
            store.verify(progress, lambda e: errors.append(str(e)))
    except (StoreError, OSError) as e:
        errors.append(str(e))
    return {"bytes": compared, "seconds": round(time.monotonic() - start, 3), "errors": errors}


def clean(args: argparse.Namespace) -> int:
    from zinf.tiers import nvme

    _must_exist(args.paths)
    done = nvme.clean(args.paths, yes=args.yes)
    for path in done["removed"]:
        print(f"removed {path}")
    for paths, why in done["kept"]:
        print(f"kept {' + '.join(paths)}: {why}")
    if done["kept"] and not args.yes and sys.stdin.isatty():
        total = sum(store["bytes"] for store in nvme.inspect(args.paths)["stores"])
        if input(f"Remove these too ({format_bytes(total)})? [y/N] ").strip().lower() in ("y", "yes"):
            args.yes = True
            return clean(args)
    elif done["kept"] and not args.yes:
        print("(zinf clean --yes removes committed stores too)")
    elif not done["removed"] and not done["kept"]:
        print(f"no store in {' or '.join(args.paths)}")
    return 1 if done["kept"] and args.yes else 0


def show(store: dict[str, Any]) -> None:
    """One store as nvme.inspect describes it."""
    text.heading(" + ".join(store["paths"]))
    state = store["state"]
    if store.get("locked_by") is not None:
        state += f", in use by process {store['locked_by'] or 'unknown'}"
    pairs: list[tuple[str, object]] = [("state", state)]
    if "error" in store:
        pairs.append(("problem", store["error"]))
    if "step" in store:
        model = f"{store['parameters']:,} parameters in {store['shards']} shards, fingerprint {store['fingerprint']}"
        kind = "two versions, crash-safe" if store["crash_safe"] else "one version, not crash-safe"
        pairs += [("step", store["step"]), ("model", model)]
        pairs += [("chunks", kind)] if store["checkpoint"] is None else _checkpoint(store["checkpoint"])
    pairs.append(("size", format_bytes(store["bytes"])))
    if (verified := store.get("verified")) is not None:
        errors, read = verified["errors"], f"{format_bytes(verified['bytes'])} read in {text.seconds(verified['seconds'])}"
        pairs.append(("checksums", "\n".join([f"{len(errors)} errors, {read}", *errors]) if errors else f"all good, {read}"))
    text.rows(pairs)


def _checkpoint(made: dict[str, Any]) -> list[tuple[str, object]]:
    """What a checkpoint says of how it was made; of the config, what is not the default."""
    plain = Config().to_dict()
    config = ", ".join(f"{key}={value}" for key, value in made["config"].items() if key in plain and value != plain[key])
    when = datetime.datetime.fromtimestamp(made["saved"] / 1e9).isoformat(" ", "seconds")
    return [("checkpoint", f"{made['tag']}, saved {when} by zinf {made['zinf']}, torch {made['torch']}"), ("config", config or "the defaults")]


def _must_exist(paths: list[str]) -> None:
    for path in paths:
        if not os.path.isdir(path):
            raise StoreError(f"{path}: no such folder")
