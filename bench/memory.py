"""What the demo's recipe takes of RAM, by zinf and by plain torch: the peak of the resident set, each in a process of its own.

What bounds it: whoever trains with torch on the CPU has Python, torch and transformers in memory, and what autograd keeps of one batch. zinf adds what its
plan says it allocates, and promises no more:

    imports        torch, transformers, zinf; nothing done with them
    activations    forward and backward of the bf16 model with gradient checkpointing; its peak less imports, weights and gradients. The logits and what
                   the loss makes of them are most of it, and the scratch memory of torch and the allocator is in it too
    zinf           `zinf train examples/smollm2.yaml`, all of it: tokeniser, import into the store, training, evaluation, saving
    plain torch    fp32 weights, bf16 autocast, AdamW: at least 16 bytes a parameter

    promises       zinf <= 1.1 * (what the engine reports as allocated + imports + activations)
                   zinf <= 1/2 * plain torch

    python bench/memory.py [--steps 4] [--nvme PATH] [--json FILE] [--toy]

The peak is VmHWM of /proc/self/status (memory-mapped files count where they were touched), set back between stages. The toy shows only that the script
runs: imports are nearly all of it. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

MIB = 1 << 20
SLACK = 1.1


def resident(what: str = "VmHWM") -> int:
    """Bytes: VmHWM is the peak since the last `forget_peak`, VmRSS what is resident now."""
    match = re.search(rf"^{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert match is not None
    return int(match[1]) * 1024


def forget_peak() -> None:
    with contextlib.suppress(OSError):  # not in every container; the peak is then that of all stages up to now
        Path("/proc/self/clear_refs").write_text("5")


class Stages:
    """The peak of each part of a process."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}

    def end(self, name: str) -> None:
        """What was done since the last call was `name`."""
        self.peaks[name] = max(self.peaks.get(name, 0), resident())
        forget_peak()

    def as_json(self) -> dict[str, Any]:
        return {"peak": max(self.peaks.values()), "stages": self.peaks}


# ------------------------------------------------------------------------------------------------- what the processes do


def imports() -> Stages:
    """Everything that `zinf train` imports, and nothing more."""
    stages = Stages()
    import torch  # noqa: F401
    from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: F401

    import zinf.engine
    import zinf.hf.loading
    import zinf.train  # noqa: F401

    stages.end("imports")
    return stages


def batch_of(config: Any) -> Any:
    import torch

    return torch.randint(0, 256, (config.batch_size, config.data.max_length), generator=torch.Generator().manual_seed(1))


def random_model(config: Any, dtype: Any) -> Any:
    """The recipe's model with random weights: a checkpoint that is mapped into memory would count twice."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model), dtype=dtype).train()


def plain(config: Any) -> Stages:
    """The usual recipe in memory."""
    stages = imports()
    import torch

    model, ids = random_model(config, torch.float32), batch_of(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    stages.end("model")
    for _ in range(config.steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        del loss
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        stages.end("steps")
    return stages


def activations(config: Any) -> Stages:
    """Forward and backward alone; `bytes` is what they take beside imports, weights and gradients."""
    stages = imports()
    import torch

    model, ids = random_model(config, torch.bfloat16), batch_of(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in transformers 5, where it has another name
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    stages.end("model")
    for _ in range(config.steps):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)
        stages.end("steps")
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    stages.peaks["weights and gradients"] = 2 * nbytes
    return stages


def ours(config: Any) -> dict[str, Any]:
    """The recipe by zinf, with the peak of each stage, and what the engine says it allocated."""
    stages, said = imports(), {}
    from zinf.train import Step, Watch, open_engine, train

    class Ends(Watch):
        def plan(self, lines: list[str]) -> None:
            stages.end("import")

        def step(self, step: Step) -> None:
            stages.end("steps")

        def evaluated(self, step: int, loss: float) -> None:
            stages.end("evaluation")

    def opened(config: Any, fresh: bool, watch: Watch) -> Any:
        stages.end("tokens")
        engine: Any = open_engine(config, fresh, watch)
        said.update({key: engine.report()[key] for key in ("host_bytes", "device_bytes")})
        return engine

    train(config, fresh=True, watch=Ends(), open_engine=opened)
    stages.end("saving")
    return {**stages.as_json(), **said}


def recipe(folder: Path, steps: int, toy: bool) -> Any:
    """examples/smollm2.yaml, with everything that is written under `folder`: the tokens too, which are made anew."""
    import dataclasses

    from zinf.cli.demo import example
    from zinf.config import cache_dir
    from zinf.train import TrainConfig

    if toy:
        from curve import toy_config

        config = toy_config(folder, steps)
    else:
        config = TrainConfig.load(example(), [f"steps={steps}", "eval_rows=4"])
    cache = folder / "cache"
    cache.mkdir()
    for sample in cache_dir().glob("[!.]*"):
        if sample.name != "tokens":
            (cache / sample.name).symlink_to(sample)
    os.environ["ZINF_CACHE"] = str(cache)
    return dataclasses.replace(config, output=str(folder / "out"), engine=dataclasses.replace(config.engine, nvme_path=(str(folder),)))


def child(name: str, folder: Path, steps: int, toy: bool) -> dict[str, Any]:
    from zinf.cli.train import quiet_transformers

    if name == "imports":
        return imports().as_json()
    quiet_transformers()
    config = recipe(folder, steps, toy)
    if name == "zinf":
        return ours(config)
    return (plain if name == "plain" else activations)(config).as_json()


# ------------------------------------------------------------------------------------------------------------ the parent


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """What the process `name` found."""
    with tempfile.TemporaryDirectory(dir=args.nvme, prefix="zinf-bench-") as folder:
        command = [sys.executable, __file__, "--child", name, "--steps", str(args.steps), "--nvme", folder, *(["--toy"] if args.toy else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
    if done.returncode:
        raise SystemExit(f"{name} failed with exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    processes = {name: run(name, args) for name in ("imports", "plain", "activations", "zinf")}
    base = processes["imports"]["peak"]
    stages = processes["activations"]["stages"]
    active = max(0, stages["steps"] - base - stages["weights and gradients"])
    zinf = processes["zinf"]
    host, device = sum(zinf["host_bytes"].values()), sum(zinf["device_bytes"].values())
    allowed = host + device + base + active
    return {
        "bench": "memory",
        "steps": args.steps,
        "imports": base,
        "activations": active,
        "allocated_host": host,
        "allocated_device": device,
        "zinf": zinf["peak"],
        "plain": processes["plain"]["peak"],
        "over_sum": round(zinf["peak"] / allowed, 3),
        "over_plain": round(zinf["peak"] / processes["plain"]["peak"], 3),
        "within_sum": zinf["peak"] <= SLACK * allowed,
        "under_half_of_plain": zinf["peak"] <= processes["plain"]["peak"] / 2,
        "stages": {name: p["stages"] for name, p in processes.items()},
        "allocated": {key: zinf[key] for key in ("host_bytes", "device_bytes")},
    }


def print_table(r: dict[str, Any]) -> None:
    def row(name: str, nbytes: int, note: str = "") -> None:
        print(f"  {name:<44} {nbytes / MIB:8.0f} MiB   {note}".rstrip())

    row("imports", r["imports"])
    row("activations, logits, scratch", r["activations"])
    for tier in ("host", "device"):
        parts = ", ".join(f"{name} {n / MIB:.0f}" for name, n in r["allocated"][f"{tier}_bytes"].items())
        row(f"zinf allocated, {tier}", r[f"allocated_{tier}"], parts)
    row("sum of these", r["imports"] + r["activations"] + r["allocated_host"] + r["allocated_device"])
    row("zinf, peak", r["zinf"], ", ".join(f"{name} {n / MIB:.0f}" for name, n in r["stages"]["zinf"].items()))
    row("plain torch in memory, peak", r["plain"])
    print(f"  zinf / sum            {r['over_sum']:.2f}   promise: at most {SLACK:.2f}   {'kept' if r['within_sum'] else 'BROKEN'}")
    print(f"  zinf / plain torch    {r['over_plain']:.2f}   promise: at most 0.50   {'kept' if r['under_half_of_plain'] else 'BROKEN'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--nvme", default=".")
    parser.add_argument("--json")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--child", choices=("imports", "plain", "activations", "zinf"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child, Path(args.nvme), args.steps, args.toy)))
        return
    if args.toy:
        args.steps = 2
    else:
        from zinf.cli import samples

        samples.smollm2(print)
        samples.shakespeare(print)
    result = measure(args)
    print_table(result)
    if args.json:
        Path(args.json).write_text(json.dumps(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
