"""A whole training step with everything on NVMe, against what bounds it.

The physics (N parameters; all measured in this run, interleaved, medians):

    compute     forward, recompute and backward of the same model in plain PyTorch, in memory, without a step
    I/O         the same bytes to and from the same drive by the same engine, with nothing else to do: 10 N of state each way,
                weights 2 N each way and once more in backward; reads and writes at once
    optimizer   AdamW over N parameters that are in memory, all cores

A step cannot be shorter than the longest of the three where they overlap. On this device compute and optimizer share the cores,
so their sum is a bound too: both ratios are given. Peers: plain PyTorch in memory with a fused AdamW on an fp32 master (bf16
autocast), with and without recompute; DeepSpeed ZeRO-3 with NVMe if it is installed (in a process of its own).

Where the time goes is read from a trace of three more steps: how busy each resource was, and the critical path (zinf/trace/bottleneck.py).

    python bench/step.py [--size 135m|tiny] [--tokens 256] [--rounds 5] [--nvme PATH] [--verify] [--deepspeed PYTHON] [--json FILE] [--toy]
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from zinf import ops
from zinf.aio import open_engine
from zinf.engine import Engine
from zinf.tiers.host import Arena
from zinf.trace.bottleneck import summary
from zinf.trace.reading import read

SIZES = {
    "tiny": dict(hidden_size=128, intermediate_size=384, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, vocab_size=1024),
    "135m": dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, vocab_size=49152),
    "1b": dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4, vocab_size=32000),
}
MIB = 1 << 20


def model(size: str, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES[size], tie_word_embeddings=size != "1b")).to(dtype).train()


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def forward_backward(net: torch.nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        net(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        net.zero_grad(set_to_none=True)

    return run


def plain_step(net: torch.nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    """fp32 master, bf16 autocast, clipping, fused AdamW: the usual recipe in memory."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, fused=True)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def only_io(folder: str, read: int, written: int, block: int) -> Callable[[], None]:
    """Move `read` and `written` bytes at once, in pieces of `block`, through 32 registered slots."""
    io = open_engine()
    arena = Arena(64 * block, io)
    buffer = arena.carve(64 * block, "bench")
    size = max(read, written) // block * block + block
    file = io.open(f"{folder}/io.bin", write=True, create=True)
    for at in range(0, size, 32 * block):
        for t in io.submit([("w", file, at + i * block, buffer.data_ptr() + i * block, block) for i in range(32)], buffer):
            t.wait()

    def run() -> None:
        tickets: list[list[Any]] = [[], []]
        todo = [read // block, written // block]
        done = [0, 0]
        while any(done[k] < todo[k] for k in (0, 1)):
            for k, kind in enumerate("rw"):
                if done[k] < todo[k]:
                    slot = k * 32 + done[k] % 32
                    if len(tickets[k]) == 32:
                        tickets[k].pop(0).wait()
                    tickets[k] += io.submit([(kind, file, done[k] * block, buffer.data_ptr() + slot * block, block)], buffer)
                    done[k] += 1
        for t in (*tickets[0], *tickets[1]):
            t.wait()

    run.keep = (io, arena, file)  # type: ignore[attr-defined]
    return run


def only_adam(n: int) -> Callable[[], None]:
    arena = Arena(14 * n + 8 * 4096)
    part = [
        arena.carve(k * n, "bench").view(t) for k, t in ((2, torch.bfloat16), (2, torch.int16), (4, torch.float32), (4, torch.float32), (2, torch.bfloat16))
    ]
    pool = ops.Pool()

    def run() -> None:
        ops.adam(part[0], (part[1], part[2], part[3]), part[4], lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1, pool=pool)

    return run


def zinf_step(engine: Engine, ids: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    return run


def where_time_goes(size: str, ids: torch.Tensor, folder: str, where: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Of the middle one of three traced steps, as parts of its seconds."""
    path = f"{folder}/trace.json"
    with Engine(model(size, torch.bfloat16), **where, run_name="bench", resume=True, trace=path, **options) as engine:
        run = zinf_step(engine, ids)
        for _ in range(4):
            run()
        engine.synchronize()
    timeline = read(path)
    step = timeline.typical()
    assert step is not None
    found = summary(timeline, step)
    parts = {key: {name: round(s / found.seconds, 3) for name, s in getattr(found, key).items() if s / found.seconds >= 0.0005} for key in ("busy", "path")}
    return {"seconds": round(found.seconds, 4), **parts, "says": found.sentence()}


def deepspeed_step(python: str, size: str, tokens: int, rounds: int, folder: str) -> float | None:
    """Median seconds of a ZeRO-3 step with optimizer and parameters on NVMe, in a process of its own; None if it cannot run."""
    if python == sys.executable and importlib.util.find_spec("deepspeed") is None:
        return None
    script = Path(__file__).with_name("peer_deepspeed.py")
    command = [python, script, "--size", size, "--tokens", str(tokens), "--rounds", str(rounds), "--nvme", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"]) if done.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="135m")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nvme", default=".")
    parser.add_argument("--verify", action="store_true", help="also the same with verify: always, a checksum compared on each fetch")
    parser.add_argument("--deepspeed", default=sys.executable, metavar="PYTHON", help="an interpreter that has DeepSpeed")
    parser.add_argument("--json")
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args()
    if args.toy:
        args.size, args.tokens, args.rounds = "tiny", 64, 2
    vocab = int(SIZES[args.size]["vocab_size"])
    ids = torch.randint(0, vocab, (1, args.tokens), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory(dir=args.nvme, prefix="zinf-bench-") as folder:
        result = measure(args, ids, folder)
    print_table(result)
    if args.json:
        Path(args.json).write_text(json.dumps(result))
    print(json.dumps(result))


def measure(args: argparse.Namespace, ids: torch.Tensor, folder: str) -> dict[str, Any]:
    options = dict(weights="nvme", state="nvme", max_grad_norm=1.0, host_memory=None)
    where: dict[str, Any] = dict(nvme_path=folder, chunk_size=1 << 14 if args.toy else 1 << 19)
    engine = Engine(model(args.size, torch.bfloat16), **where, run_name="bench", **options)
    n = engine.layout.numel
    ours = zinf_step(engine, ids)
    for _ in range(2):
        ours()
    before = engine.stats()
    ours()
    after = engine.stats()
    read, written = (int(after[k] - before[k]) for k in ("bytes_read", "bytes_written"))
    careful = engine if not args.verify else Engine(model(args.size, torch.bfloat16), **where, run_name="verified", verify="always", **options)
    plain = model(args.size, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in transformers 5, where it has another name
        plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    contenders = {
        "zinf, all on NVMe": ours,
        **({"zinf, verify: always": zinf_step(careful, ids)} if args.verify else {}),
        "compute": forward_backward(plain, ids),
        "I/O": only_io(folder, read, written, 64 * 1024 if args.toy else 4 * MIB),
        "optimizer": only_adam(n),
    }
    if args.size != "1b":
        contenders["PyTorch in memory"] = plain_step(model(args.size, torch.float32), ids)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        call()
    waited0, busy0 = engine.stats()["waited"], engine.stats()["seconds"]
    for _ in range(args.rounds):
        for name, call in contenders.items():
            gc.collect()
            times[name].append(timed(call))
    stats = engine.stats()
    engine.close()
    careful.close()
    traced = where_time_goes(args.size, ids, folder, where, options)
    medians = {name: statistics.median(t) for name, t in times.items()}
    rounds = args.rounds + 1
    bound = max(medians["compute"], medians["I/O"], medians["optimizer"])
    shared = max(medians["compute"] + medians["optimizer"], medians["I/O"])
    peer = deepspeed_step(args.deepspeed, args.size, args.tokens, args.rounds, folder)
    if peer is not None:
        medians["DeepSpeed ZeRO-3, all on NVMe"] = peer
    return {
        "bench": "step",
        "size": args.size,
        "parameters": n,
        "tokens": args.tokens,
        "seconds": {k: round(v, 4) for k, v in medians.items()},
        "spread": {k: [round(min(v), 4), round(max(v), 4)] for k, v in times.items()},
        "bytes_per_parameter": [round(read / n, 2), round(written / n, 2)],
        "ratio_to_max": round(medians["zinf, all on NVMe"] / bound, 3),
        "ratio_to_shared_cores": round(medians["zinf, all on NVMe"] / shared, 3),
        "busy": {k: round((v - busy0.get(k, 0)) / rounds, 4) for k, v in stats["seconds"].items()},
        "waited": {k: round((v - waited0.get(k, 0)) / rounds, 4) for k, v in stats["waited"].items()},
        "trace": traced,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def print_table(r: dict[str, Any]) -> None:
    read, written = r["bytes_per_parameter"]
    print(f"{r['size']}: {r['parameters'] / 1e6:.1f} M parameters, {r['tokens']} tokens, {read} B/parameter read and {written} written")
    for name, seconds in r["seconds"].items():
        low, high = r["spread"].get(name, (seconds, seconds))
        print(f"  {name:<32} {seconds:8.3f} s   ({low:.3f} to {high:.3f})")
    print(f"  step / max(compute, I/O, optimizer)       {r['ratio_to_max']:.2f}   target 1.15")
    print(f"  step / max(compute + optimizer, I/O)      {r['ratio_to_shared_cores']:.2f}   (they share the cores here)")
    trace = r["trace"]
    print(f"  of a traced step of {trace['seconds']:.3f} s: {trace['says']}")
    print("    busy           " + ", ".join(f"{k} {100 * v:.0f} %" for k, v in sorted(trace["busy"].items(), key=lambda kv: -kv[1])))
    print("    critical path  " + ", ".join(f"{k} {100 * v:.0f} %" for k, v in sorted(trace["path"].items(), key=lambda kv: -kv[1])))
    print("  a step's seconds by verb, and waited:     " + ", ".join(f"{k} {v:.2f} ({r['waited'].get(k, 0):.2f})" for k, v in r["busy"].items()))


if __name__ == "__main__":
    main()
