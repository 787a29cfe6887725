"""One training of a small Llama from NVMe, by zinf or by DeepSpeed, that bench/faults.py disturbs. Prints a JSON object a line.

{"step": 3, "loss": 5.1}   after each step; step counts from 1
{"at": "pause"}            before a disturbance: goes on when a line comes in
{"at": "saving"}, {"saved": 4}
{"resumed": 4}             the step that a resumed run stands at
{"finite": true}           all weights, at the end
{"error": "...", "at": ""} and then it ends
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from peer_deepspeed import config
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = dict(hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=4096)
out = sys.stdout


def say(**what: Any) -> None:
    print(json.dumps(what), file=out, flush=True)


def model(noncontiguous: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True, use_cache=False)).to(torch.bfloat16)
    if noncontiguous:
        weight = made.model.layers[1].mlp.up_proj.weight
        weight.data = weight.data.t().contiguous().t()
    return made


class Trainee:
    """The loop, which is the same for both."""

    _engine: Any

    def step(self, ids: torch.Tensor, scale: float) -> float:
        loss = self._engine(input_ids=ids, labels=ids).loss
        self._engine.backward(loss * scale)
        self._engine.step()
        return float(loss.detach())


class Zinf(Trainee):
    """The loop of zinf's README."""

    def __init__(self, args: argparse.Namespace):
        import zinf

        options: dict[str, Any] = dict(lr=1e-3, weight_decay=0.0, max_grad_norm=1.0, weights="nvme", state="nvme", chunk_size=1 << 17)
        if args.typo:
            options["max_grad_nrom"] = options.pop("max_grad_norm")
        if args.always:
            options["verify"] = "always"
        resume = args.resume and Path(args.nvme, "run").exists()
        self._engine = zinf.Engine(model(args.noncontiguous), nvme_path=args.nvme, run_name="run", resume=resume, **options)
        if args.tag:
            self._engine.load_checkpoint(args.checkpoints, args.tag)

    @property
    def at(self) -> int:
        return int(self._engine.global_step)

    def save(self, folder: str, tag: str) -> None:
        self._engine.save_checkpoint(folder, tag)
        self._engine.synchronize()

    def finite(self) -> bool:
        return all(bool(t.isfinite().all()) for t in self._engine.state_dict().values())


class DeepSpeed(Trainee):
    """The loop of DeepSpeed's documentation, ZeRO-3 with parameters and optimizer on NVMe."""

    def __init__(self, args: argparse.Namespace):
        import deepspeed

        settings = config(args.nvme)
        settings["optimizer"]["params"]["lr"] = 1e-3
        if args.typo:
            settings["gradient_cliping"] = settings.pop("gradient_clipping")
        deepspeed.init_distributed("gloo")
        net = model(args.noncontiguous)
        self._engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=settings)
        self._engine.train()
        if args.resume:
            path, _ = self._engine.load_checkpoint(args.checkpoints, args.tag or None)
            if path is None:
                raise FileNotFoundError("load_checkpoint found nothing")

    @property
    def at(self) -> int:
        return int(self._engine.global_steps)

    def save(self, folder: str, tag: str) -> None:
        self._engine.save_checkpoint(folder, tag)

    def finite(self) -> bool:
        with torch.no_grad():
            loss = self._engine(input_ids=batch(0), labels=batch(0)).loss
        return bool(loss.isfinite())


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (1, 64), generator=torch.Generator().manual_seed(step))


def train(args: argparse.Namespace) -> None:
    run = (Zinf if args.engine == "zinf" else DeepSpeed)(args)
    if args.resume:
        say(resumed=run.at)
    while run.at < args.steps:
        step, scale = run.at, 1.0
        if step + 1 == args.pause:
            say(at="pause")
            sys.stdin.readline()
        if step + 1 == args.poison:
            scale, args.poison = float("nan"), 0  # once, also where the step does not count
        loss = run.step(batch(step), scale)
        say(step=step + 1, loss=loss)
        if step + 1 in args.save:
            say(at="saving")
            run.save(args.checkpoints, f"step{step + 1}" if args.tags else "last")
            say(saved=step + 1)
    say(finite=run.finite())


def main() -> None:
    global out
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["zinf", "deepspeed"])
    parser.add_argument("--nvme", required=True)
    parser.add_argument("--checkpoints", default="")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save", type=int, nargs="*", default=[])
    parser.add_argument("--tags", action="store_true", help="a tag of its own for each save, instead of `last` for all")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--tag", help="the checkpoint to resume from; default: the last commit (zinf), latest (DeepSpeed)")
    parser.add_argument("--pause", type=int, default=0)
    parser.add_argument("--poison", type=int, default=0, help="the step whose gradients are NaN")
    parser.add_argument("--typo", action="store_true")
    parser.add_argument("--noncontiguous", action="store_true")
    parser.add_argument("--always", action="store_true", help="verify: always")
    args = parser.parse_args()
    torch.set_num_threads(1)
    out, sys.stdout = sys.stdout, sys.stderr  # DeepSpeed logs to stdout
    try:
        train(args)
    except BaseException as error:
        say(error=f"{type(error).__name__}: {error}"[:400])
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(1)  # threads of a peer may never end
    os._exit(0)


if __name__ == "__main__":
    main()
