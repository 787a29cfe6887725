"""One life of a run, and what the storm is told of it: import, steps with their commits, save, export, clean. It goes on where the one before was killed.

Runs in a child that storm.py forks. Told over a pipe, a line each:

    phase NAME          the thread that computes has come to a phase; `+NAME` and `-NAME`: a commit, a manifest, beside it
    opened STEP DIGEST  what the store was found at: a digest of every chunk's checksum and of all that the commit holds beside them
    done STEP DIGEST    a commit came back
    end DIGEST          all steps are made and committed, and everything is saved; the digest is of all weights and state
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from typing import Any

import numpy
import torch
from oracle import engine_snapshot

import zinf
from zinf import memory
from zinf.aio import open_engine
from zinf.checkpoint import resuming, staging
from zinf.hf import loading
from zinf.hf.exporting import export_checkpoint
from zinf.tiers import manifest, nvme
from zinf.tiers.nvme import Store

from .disk import Journal, Recorder, watch_files

STEPS = 12
MODES: dict[str, dict[str, Any]] = {"deferred": dict(max_grad_norm=1.0), "backward": dict(step_mode="backward"), "sim": dict(device="sim", max_grad_norm=1.0)}

Tell = Callable[[str], None]


def digest(store: Store) -> str:
    """Of every byte, by the checksums that opening has compared, and of all else that a commit holds."""
    return hashlib.sha256(store._committed.sums.tobytes() + json.dumps(store.extra, sort_keys=True).encode()).hexdigest()[:16]


def digest_of_files(folder: str) -> str:
    """Of the names and bytes below a folder."""
    found = hashlib.sha256()
    for root, _, names in sorted(os.walk(folder)):
        for name in sorted(names):
            with open(os.path.join(root, name), "rb") as f:
                found.update(os.path.relpath(os.path.join(root, name), folder).encode() + hashlib.sha256(f.read()).digest())
    return found.hexdigest()[:16]


def make_source(folder: str) -> None:
    """The checkpoint that every life begins with."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=256)
    LlamaForCausalLM(LlamaConfig(**sizes, attention_dropout=0.1, tie_word_embeddings=True)).to(torch.bfloat16).save_pretrained(folder)


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(step))


def watch_commits(store: Store, tell: Tell) -> None:
    commit, publish = store.commit, manifest.publish

    def told_commit(step: int, extra: dict[str, Any]) -> None:
        tell("+commit")
        commit(step, extra)
        tell("-commit")
        tell(f"done {step} {digest(store)}")

    def told_publish(*args: Any) -> None:
        tell("+manifest")
        publish(*args)
        tell("-manifest")

    store.commit = told_commit  # type: ignore[method-assign]
    manifest.publish = told_publish


def life(folder: str, source: str, journal: str | None, mode: str, tell: Tell) -> None:
    """Everything, from wherever the run stands. `folder` is on the drive; `journal` records what is sent to it."""
    torch.set_num_threads(1)
    run = os.path.join(folder, "run")
    resumed = os.path.exists(os.path.join(run, "manifest.json"))
    resuming.SECONDS = 0.0  # the model is small: everything is noted at once
    staging.SLOTS = (3, 3)
    if journal is not None:
        sink = Journal(journal)
        for module in (memory, loading):
            module.open_engine = lambda *args, **options: Recorder(open_engine(*args, **options), sink)  # type: ignore[assignment, return-value]
        watch_files(sink)
    tell("phase resume" if resumed else "phase import")
    model = zinf.from_pretrained(source, nvme_path=folder, run_name="run", resume=True, chunk_size=4096).train()
    if not resumed:
        tell("phase resume")
    engine = zinf.Engine(model, nvme_path=folder, run_name="run", chunk_size=4096, lr=1e-2, state="nvme", weights="nvme", **MODES[mode])
    if engine.global_step == 0:  # no commit has the generators yet
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
    engine.restore_rng()
    store = engine.memory.parts.records.store
    assert store is not None
    tell(f"opened {store.step} {digest(store)}")
    watch_commits(store, tell)
    while engine.global_step < STEPS:
        step = engine.global_step
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-2 * 0.9**step
        tell("phase forward")
        loss = engine(input_ids=batch(step), labels=batch(step)).loss
        tell("phase backward")
        engine.backward(loss)
        tell("phase step")
        engine.step(extra={"sum": sum(range(step + 1))})
    tell("phase commit all")
    engine.synchronize()
    tell("phase save")
    engine.save_pretrained(os.path.join(folder, "out"))
    tell("phase checkpoint")
    engine.save_checkpoint(os.path.join(folder, "checkpoints"), "last")
    tell("phase end")
    weights, state = engine_snapshot(engine)
    flat = [*weights.values(), *(t for planes in state.values() for t in planes)]
    found = hashlib.sha256(b"".join(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in flat)).hexdigest()[:16]
    engine.close()
    tell("phase export")
    export_checkpoint(os.path.join(folder, "checkpoints"), os.path.join(folder, "exported"), dtype="fp32", max_shard_size=100_000)
    tell(f"end {found}")


def clean(folder: str, tell: Tell) -> None:
    """The end of a life: nothing is left."""
    tell("phase clean")
    nvme.clean([folder, os.path.join(folder, "checkpoints")], yes=True)
    for name in ("out", "exported", "checkpoints"):
        shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
