"""The proof on a card: one command, under eight minutes, a table and one JSON line; the details go to a folder.

The physics, measured in this run:

    link      copies between registered host memory and the card, each way, both at once, and beside a busy drive
    drive     reading, writing and both, by zinf's engine;  memory: a copy, and AdamW;  compute: a large matmul, and the model's own blocks

Then, in this order, as far as the time goes (what was left out is said, with why):

    kernels   zinf's own against their references, where there are any
    parity    ten steps of a Llama in plain torch on the same card, stepped by the same kernel, against zinf in three placements: losses and weights, every bit
    races     an engine that checks the order of all its accesses and poisons what it releases, with much to move for little compute; its bits against one
              that does not
    speed     tokens a second of two sizes, all in RAM, state on NVMe, all on NVMe, against forecast and bound of the planner and against plain torch in memory
              (bf16 weights, recompute, fused AdamW), and DeepSpeed ZeRO-3 with offload if it is installed
    memory    peaks of device and host against the budgets;  timeline: a trace of each placement for ui.perfetto.dev or `zinf report`

    python bench/gpu.py [--device cuda|sim] [--nvme PATH] [--out FOLDER] [--minutes 7.5] [--toy]

Without a card, and with --toy, it runs on `sim`: that shows that it runs, and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import hashlib
import importlib.util
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # matmuls that give the same bits each time
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from zinf import measured, ops
from zinf.cli import card
from zinf.engine import Engine
from zinf.errors import ZinfError
from zinf.hf import facts as reader
from zinf.hf import pace
from zinf.measured import Book
from zinf.planner import cost, drive, host, link, machine
from zinf.planner.cost import Workload
from zinf.tiers.host import allocated_bytes

SIZES = {
    "tiny": dict(hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=512),
    "1b": dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4, vocab_size=32000),
    "3b": dict(hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8, vocab_size=32000),
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all in RAM": dict(weights="host", state="host", commit_every=0),
    "state on NVMe": dict(weights="host", state="nvme"),
    "all on NVMe": dict(weights="nvme", state="nvme"),
}
TARGETS = {"of the bound": 0.90, "of plain torch, all in RAM": 0.95}
HYPER = dict(lr=1e-5, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)


class Run:
    """One run of this bench: where it runs, how long it may, and what it has found."""

    def __init__(self, args: argparse.Namespace, nvme: str, out: Path):
        self.args, self.nvme, self.out = args, nvme, out
        self.end = time.monotonic() + 60 * args.minutes
        self.place = torch.device("cuda" if args.device == "cuda" else "cpu")
        self.chunk = 1 << 12 if args.toy else 1 << 20
        self.result: dict[str, Any] = {"bench": "gpu", "device": args.device, "toy": args.toy, "torch": torch.__version__, "left_out": {}, "seconds": {}}
        self.book = Book()

    def left(self) -> float:
        return self.end - time.monotonic()

    def part(self, name: str, call: Callable[[], Any], need: float = 5.0) -> None:
        """Do one part, if `need` seconds are left; an error of it is a result, and does not end the others."""
        begun = time.monotonic()
        if self.left() < need and not self.args.toy:
            self.result["left_out"][name] = f"{self.left():.0f} s were left, and it needs about {need:.0f}"
            return
        try:
            self.result[name] = call()
        except (ZinfError, OSError, RuntimeError, AssertionError) as error:
            self.result["left_out"][name] = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        finally:
            gc.collect()
            if self.place.type == "cuda":
                torch.cuda.empty_cache()
        self.result["seconds"][name] = round(time.monotonic() - begun, 1)
        print(f"  {name:<10} {self.result['seconds'][name]:7.1f} s   {self.result['left_out'].get(name, '')}", flush=True)
        (self.out / "result.json").write_text(json.dumps(self.result, indent=1))

    def model(self, size: str) -> torch.nn.Module:
        torch.manual_seed(0)
        with self.place:  # random numbers are made where they are made soonest
            config = LlamaConfig(**SIZES[size], tie_word_embeddings=False, use_cache=False)
            default = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)
            try:
                return LlamaForCausalLM(config).train()
            finally:
                torch.set_default_dtype(default)

    def ids(self, size: str, rows: int, seq: int, seed: int = 1) -> torch.Tensor:
        return torch.randint(0, int(SIZES[size]["vocab_size"]), (rows, seq), generator=torch.Generator().manual_seed(seed)).to(self.place)

    def engine(self, size: str, name: str, **options: Any) -> Engine:
        options = {**HYPER, "chunk_size": self.chunk, **options}
        if self.args.toy:
            options.setdefault("leaf_bytes", 4096)
        return Engine(self.model(size), device=self.args.device, nvme_path=self.nvme, run_name=name, crash_safe=False, **options)

    def wait(self) -> None:
        if self.place.type == "cuda":
            torch.cuda.synchronize()


# ---------------------------------------------------------------------------------------------------------------- measuring


def measure(run: Run) -> dict[str, Any]:
    toy = run.args.toy
    found, _ = drive.search(run.nvme, 1.0 if toy else 20.0, 8 << 20 if toy else 1 << 30)
    there = host.measure(0.4, elements=1 << 18, side=128) if toy else host.measure(8.0)
    between = link.measure(run.nvme, 1.0 if toy else 12.0, run.args.device, 1 << 20 if toy else link.COPY)
    run.book = Book({measured.drive_key(run.nvme): found}, dataclasses.replace(there, link=between.planned))
    hbm = None
    if run.place.type == "cuda":
        a, b = (torch.empty(1 << 30, dtype=torch.uint8, device=run.place) for _ in range(2))
        hbm = 2 * a.nbytes / host.median(lambda: (b.copy_(a), torch.cuda.synchronize()), 1.0)
    return {"drive": dataclasses.asdict(found), "host": dataclasses.asdict(there), "link": dataclasses.asdict(between), "hbm": hbm}


def kernels(run: Run) -> dict[str, Any]:
    """zinf.ops.triton.check(device) -> a number or a word for each kernel."""
    if importlib.util.find_spec("zinf.ops.triton") is None or importlib.util.find_spec("triton") is None:
        raise ZinfError("this zinf, or this machine, has no Triton kernels")
    module: Any = importlib.import_module("zinf.ops.triton")
    if not hasattr(module, "check"):
        raise ZinfError("zinf.ops.triton has no check()")
    return dict(module.check(run.place))


# ------------------------------------------------------------------------------------------------------------------- parity


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def digest(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {n: hashlib.blake2b(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), digest_size=8).hexdigest() for n, t in tensors.items()}


def in_memory(run: Run, size: str, steps: int, seq: int) -> tuple[list[float], dict[str, str]]:
    """Plain torch on the card for losses and grads; weights and state stepped on the host by the kernel that equals its reference bit for bit."""
    model = run.model(size)
    state = {n: (torch.zeros(p.numel(), dtype=torch.int16), torch.zeros(p.numel()), torch.zeros(p.numel())) for n, p in model.named_parameters()}
    hyper = dict(lr=HYPER["lr"], beta1=0.9, beta2=0.999, eps=HYPER["eps"], weight_decay=HYPER["weight_decay"])
    losses = []
    with ops.Pool() as pool:
        for step in range(steps):
            batch = run.ids(size, 1, seq, step)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            losses.append(loss.item())
            for n, p in model.named_parameters():
                weights, grads = p.detach().cpu().reshape(-1).contiguous(), p.grad.cpu().reshape(-1).contiguous()  # type: ignore[union-attr]
                ops.adam(weights, state[n], grads, step=step + 1, pool=pool, **hyper)  # type: ignore[arg-type]
                p.data.copy_(weights.view(p.shape))
                p.grad = None
    return losses, digest(dict(model.named_parameters()))


def parity(run: Run) -> dict[str, Any]:
    size, seq, steps = ("tiny", 24, 3) if run.args.toy else ("1b", 512, 10)
    with deterministic():
        losses, weights = in_memory(run, size, steps, seq)
        found: dict[str, Any] = {"size": size, "steps": steps, "losses": losses}
        for name, options in PLACEMENTS.items():
            if run.left() < 30 and not run.args.toy:
                run.result["left_out"][f"parity, {name}"] = "no time was left"
                continue
            with run.engine(size, "parity", **options) as engine:
                got = []
                for step in range(steps):
                    batch = run.ids(size, 1, seq, step)
                    loss = engine(input_ids=batch, labels=batch).loss
                    engine.backward(loss)
                    got.append(loss.item())
                    engine.step()
                here = digest({n: t for n, t in engine.state_dict().items() if n in weights})
            remove(run, "parity")
            found[name] = {"losses": got == losses, "weights": sum(here[n] == w for n, w in weights.items()), "of": len(weights)}
    return found


def races(run: Run) -> dict[str, Any]:
    """Little compute, much to move, few slabs; checked and poisoned against unchecked, for some seconds."""
    until = time.monotonic() + (2.0 if run.args.toy else 30.0)
    rounds, alike, checked = 0, 0, 0
    options = dict(weights="nvme", state="nvme", activations="host", max_grad_norm=1.0, leaf_bytes=4096, chunk_size=4096)
    with deterministic():
        while rounds < 1 or time.monotonic() < until:
            ends = []
            for debug in (True, False):
                with run.engine("tiny", "races", debug=debug, device_memory="600KiB", **options) as engine:
                    for step in range(4):
                        batch = run.ids("tiny", 2, 32, rounds * 4 + step)
                        engine.backward(engine(input_ids=batch, labels=batch).loss)
                        engine.step()
                    ends.append(digest(engine.state_dict()))
                    checked += getattr(getattr(engine.memory.parts.device, "races", None), "checked", 0)
                remove(run, "races")
            rounds, alike = rounds + 1, alike + (ends[0] == ends[1])
    return {"rounds": rounds, "alike": alike, "accesses_checked": checked}


# -------------------------------------------------------------------------------------------------------------------- speed


def timed(run: Run, step: Callable[[], None], seconds: float) -> list[float]:
    """Seconds of each step, after two that warm up."""
    times: list[float] = []
    for _ in range(2):
        step()
    run.wait()
    until = time.monotonic() + seconds
    while len(times) < 3 or time.monotonic() < until:
        begun = time.perf_counter()
        step()
        run.wait()
        times.append(time.perf_counter() - begun)
    return times


def plain(run: Run, size: str, rows: int, seq: int, seconds: float) -> float:
    model = run.model(size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=HYPER["lr"], fused=True)  # type: ignore[arg-type]
    batch = run.ids(size, rows, seq)

    def step() -> None:
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return rows * seq / statistics.median(timed(run, step, seconds))


def deepspeed(run: Run, size: str, tokens: int) -> float | None:
    if importlib.util.find_spec("deepspeed") is None or size not in ("tiny", "1b"):
        return None
    command = [sys.executable, Path(__file__).with_name("peer_deepspeed.py"), "--size", size, "--tokens", str(tokens), "--rounds", "3", "--nvme", run.nvme]
    env = {**os.environ, "DS_ACCELERATOR": "cuda" if run.place.type == "cuda" else "cpu"}
    with contextlib.suppress(subprocess.TimeoutExpired, OSError, ValueError, IndexError, KeyError):
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=max(min(90.0, run.left() - 10), 5))
        if done.returncode == 0:
            return tokens / float(json.loads(done.stdout.splitlines()[-1])["seconds"])
    return None


def speed(run: Run, size: str) -> dict[str, Any]:
    rows, seq = (2, 24) if run.args.toy else (8, 2048)
    seconds = 0.2 if run.args.toy else 6.0
    folder = os.path.join(run.nvme, f"config-{size}")
    os.makedirs(folder)
    LlamaConfig(**SIZES[size], tie_word_embeddings=False).save_pretrained(folder)
    facts = reader.read(folder, reader.Recipe(chunk_size=run.chunk))
    there = machine.this(run.book, [run.nvme])
    known = pace.measure(facts, rows, seq, 1e12 if run.args.toy else there.flops)
    if known is not None:
        there = there.paced(sum(facts.flops(rows * seq)), known.seconds, "timed")
    found: dict[str, Any] = {"size": size, "parameters": facts.layout.numel, "tokens": rows * seq, "placements": {}}
    with contextlib.suppress(torch.OutOfMemoryError):
        found["plain torch"] = plain(run, size, rows, seq, seconds)
    for name, options in PLACEMENTS.items():
        need = 13 * facts.layout.numel + (1 << 30)
        if not run.args.toy and (run.left() < 40 or shutil.disk_usage(run.nvme).free < need):
            run.result["left_out"][f"{size}, {name}"] = f"{run.left():.0f} s and {shutil.disk_usage(run.nvme).free >> 30} GiB of the drive were left"
            continue
        planned = {k: v for k, v in options.items() if k != "commit_every"}
        forecast = cost.forecast(facts, dataclasses.replace(there, host_memory=1 << 50, device_memory=1 << 50), Workload(batch=rows, seq=seq, **planned))
        found["placements"][name] = one(run, size, name, options, rows, seq, seconds, forecast.step, max(forecast.seconds.values()))
    found["DeepSpeed"] = deepspeed(run, size, rows * seq)
    return found


def one(run: Run, size: str, name: str, options: dict[str, Any], rows: int, seq: int, seconds: float, predicted: float, bound: float) -> dict[str, Any]:
    """One size in one placement: tokens a second, peaks, and a trace."""
    if run.place.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    batch = run.ids(size, rows, seq)
    trace = run.out / f"{size}, {name}.trace.json".replace(" ", "-")
    with run.engine(size, "speed", trace=str(trace), **options) as engine:

        def step() -> None:
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()

        times = timed(run, step, seconds)
        report, allocated = engine.report(), allocated_bytes()
    remove(run, "speed")
    took = statistics.median(times)
    planned = {f"{tier}_planned": sum(report[f"{tier}_bytes"].values()) for tier in ("host", "device")}
    memory: dict[str, Any] = {**planned, "host_allocated": allocated}
    if run.place.type == "cuda":
        memory |= {"device_peak": torch.cuda.max_memory_allocated(), "device_reserved": torch.cuda.max_memory_reserved()}
    memory["rss_peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {
        "tokens_per_second": rows * seq / took, "seconds": took, "spread": [min(times), max(times)], "predicted": predicted, "bound": bound,
        "of_bound": bound / took, "of_prediction": predicted / took, "memory": memory, "trace": trace.name,
    }  # fmt: skip


def remove(run: Run, name: str) -> None:
    shutil.rmtree(os.path.join(run.nvme, name), ignore_errors=True)


# --------------------------------------------------------------------------------------------------------------------- main


def table(result: dict[str, Any]) -> None:
    if "measured" in result:
        there, between = result["measured"]["host"], result["measured"]["link"]
        print(f"\nmemory {there['dram'] / 1e9:.1f} GB/s, AdamW {there['adam'] / 1e9:.1f}; matmul {there['flops'] / 1e12:.2f} TFLOP/s")
        for r in between["rates"]:
            print(f"link, {r['kind']:<11}" + "".join(f" {k} {r[k] / 1e9:6.2f}" if r[k] else f" {k} none" for k in ("up", "down", "both")) + "  GB/s")
    for name in PLACEMENTS:
        if name in result.get("parity", {}):
            p = result["parity"][name]
            print(f"parity, {name:<15} losses {'equal' if p['losses'] else 'DIFFER'}, {p['weights']} of {p['of']} weights equal")
    if "races" in result:
        print("races: {rounds} rounds, {alike} alike, {accesses_checked} accesses in order".format(**result["races"]))
    for found in (result[key] for key in result if key.startswith("speed")):
        print(f"\n{found['size']}: {found['parameters'] / 1e6:.2f} M parameters, {found['tokens']} tokens a step")
        for name in ("plain torch", "DeepSpeed"):
            print(f"  {name:<16}" + (f"{found[name]:10.0f} tokens/s" if found.get(name) else "         -"))
        for name, p in found["placements"].items():
            beside = f", {p['tokens_per_second'] / found['plain torch']:.2f} of plain torch" if found.get("plain torch") else ""
            print(f"  {name:<16}{p['tokens_per_second']:10.0f} tokens/s, {p['of_bound']:.2f} of the bound, {p['of_prediction']:.2f} of the forecast{beside}")
    for what, why in result["left_out"].items():
        print(f"left out: {what}: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "sim"), help="default: cuda, and sim with --toy where there is none")
    parser.add_argument("--nvme", default=".")
    parser.add_argument("--out", help="folder for details [gpu-bench, below this one; none with --toy]")
    parser.add_argument("--minutes", type=float, default=7.5, help="for all of it [7.5]")
    parser.add_argument("--toy", action="store_true", help="seconds, not minutes: shows that the bench runs, measures nothing")
    args = parser.parse_args()
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() or not args.toy else "sim"
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no card here; --device sim --toy shows that the bench runs")
    with tempfile.TemporaryDirectory(dir=args.nvme, prefix="zinf-bench-") as nvme:
        out = Path(args.out or (nvme if args.toy else "gpu-bench")) / "details"
        out.mkdir(parents=True, exist_ok=True)
        run = Run(args, nvme, out)
        run.result["card"] = card.cards()
        print("\n".join(card.lines()) or "no card", flush=True)
        run.part("measured", lambda: measure(run), 60)
        run.part("kernels", lambda: kernels(run), 10)
        run.part("parity", lambda: parity(run), 60)
        run.part("races", lambda: races(run), 40)
        for size in ("tiny",) if args.toy else ("1b", "3b"):
            run.part(f"speed {size}", lambda size=size: speed(run, size), 60)  # type: ignore[misc]
        table(run.result)
        print(json.dumps(run.result))


if __name__ == "__main__":
    main()
