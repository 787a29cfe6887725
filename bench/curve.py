"""The losses of the demo's recipe, by zinf from NVMe and by a plain loop of transformers and torch in memory, side by side.

What bounds the difference: both compute forward and backward with the same kernels on the same bf16 weights, so as long as the weights agree in every
bit, so do losses and gradients. The first step's loss is therefore equal. Then three things round differently, each of the order of one ulp:

    weights     plain torch rounds its fp32 master to bf16, ties to even; zinf splits it into a bf16 and 16 bits more, ties away from zero. The plain
                loop here rounds as zinf does (round_to_bf16), since a tie is no difference in what is learned
    step        torch.optim.AdamW folds its constants differently (lerp, addcdiv, fused multiply-add) than the reference of zinf
    norm        torch sums squares in fp32 (clip_grad_norm_); zinf in double

What they move is the last bits of an fp32 master; a few weights then round to the other bf16, and from there on losses differ in their third or fourth
digit. (That zinf has exactly the bits of its definition is what tests/test_smollm2.py says.)

    python bench/curve.py [--steps 20] [--nvme PATH] [--fused] [--json FILE] [--toy] [KEY=VALUE ...]

The plain loop: bf16 model for forward and backward, bf16 gradients cast to fp32, clip_grad_norm_, AdamW on an fp32 master, the same batches, schedule and
seed; it stands in for the engine in zinf's own loop, so that all else is the same code. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from zinf import ops
from zinf.cli import samples
from zinf.cli.demo import example
from zinf.cli.train import quiet_transformers
from zinf.train import Step, TrainConfig, Watch, train


def round_to_bf16(master: torch.Tensor, target: torch.Tensor) -> None:
    """`target` (bf16) = `master` (fp32, same shape) to the nearest, ties away from zero: what zinf computes with."""
    rest = torch.empty(target.numel(), dtype=torch.int16)
    ops.split(master.view(-1), target.view(-1), rest)


class PlainEngine:
    """Plain torch in memory in the place of zinf.Engine."""

    def __init__(self, config: TrainConfig, fused: bool) -> None:
        e = config.engine
        self.model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.bfloat16)
        self.weights = [p for p in self.model.parameters() if p.requires_grad]
        self.master = [torch.nn.Parameter(p.detach().float()) for p in self.weights]
        how = {"fused": True} if fused else {"foreach": False}
        self.optimizer = torch.optim.AdamW(self.master, **e.optimizer_options(), **how)
        self.max_grad_norm = e.max_grad_norm if e.max_grad_norm is not None else float("inf")
        self.global_step, self.extra = 0, {}  # type: ignore[var-annotated]

    def __call__(self, **batch: Any) -> Any:
        return self.model(**batch, use_cache=False)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    @torch.no_grad()
    def step(self, extra: dict[str, Any]) -> Any:
        for master, weight in zip(self.master, self.weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(self.master, self.max_grad_norm).item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for master, weight in zip(self.master, self.weights, strict=True):
            round_to_bf16(master.data, weight.data)
        self.global_step, self.extra = self.global_step + 1, extra
        return types.SimpleNamespace(grad_norm=norm, skipped=False, step=self.global_step)

    def eval(self) -> None:
        self.model.eval()

    def train(self) -> None:
        self.model.train()

    def synchronize(self) -> None:
        pass

    def restore_rng(self) -> None:
        pass

    def save_pretrained(self, folder: str) -> None:
        pass

    def plan(self) -> list[str]:
        return []

    def stats(self) -> dict[str, Any]:
        return {"seconds": {}, "waited": {}, "bytes_read": 0, "bytes_written": 0, "steps": self.global_step, "params": sum(p.numel() for p in self.master)}

    def __enter__(self) -> PlainEngine:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Tape(Watch):
    """Keeps losses, norms and held-out losses, and says where we are."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.held_out: list[float] = []

    def step(self, step: Step) -> None:
        self.losses.append(step.loss)
        self.norms.append(step.grad_norm)
        if sys.stderr.isatty():
            print(f"\r{self.name}: step {step.step}/{step.steps} ", end="" if step.step < step.steps else "\n", file=sys.stderr, flush=True)

    def evaluated(self, step: int, loss: float) -> None:
        self.held_out.append(loss)


def toy_config(folder: Path, steps: int) -> TrainConfig:
    """A tiny random model with a tokenizer of bytes, on a text made here, with the demo's recipe but for a larger learning rate."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*letters, "<eos>"])}, merges=[]))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<eos>").save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=176, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=300)
    LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).to(torch.bfloat16).save_pretrained(folder / "model")
    (folder / "train.txt").write_text("".join(f"The {i}th line of {i * i % 97} says {i * 7 % 13}.\n" for i in range(300)))
    (folder / "eval.txt").write_text("".join(f"The {i}th line of {i * i % 97} says {i * 7 % 13}.\n" for i in range(300, 330)))
    data = [f"data.train=[{folder / 'train.txt'}]", f"data.eval=[{folder / 'eval.txt'}]", "data.max_length=48"]
    return TrainConfig.load(example(), [f"model={folder / 'model'}", *data, f"steps={steps}", "eval_rows=4", "engine.lr=1e-3", "engine.chunk_size=4096"])


def measure(config: TrainConfig, fused: bool) -> dict[str, Any]:
    ours, plain = Tape("zinf from NVMe"), Tape("plain torch")
    train(config, fresh=True, watch=ours)
    train(config, fresh=True, watch=plain, open_engine=lambda config, fresh, watch: PlainEngine(config, fused))
    apart = [abs(a - b) for a, b in zip(ours.losses, plain.losses, strict=True)]
    return {
        "bench": "curve",
        "steps": len(ours.losses),
        "tokens": config.batch_size * config.data.max_length,
        "zinf": ours.losses,
        "plain": plain.losses,
        "norms": {"zinf": ours.norms, "plain": plain.norms},
        "largest_difference": max(apart),
        "mean_difference": sum(apart) / len(apart),
        "held_out": {"zinf": ours.held_out, "plain": plain.held_out},
        "optimizer": "torch.optim.AdamW, " + ("fused" if fused else "for loop"),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def print_table(r: dict[str, Any]) -> None:
    print(f"{'step':>5} {'zinf, NVMe':>12} {'plain torch':>12} {'difference':>12}   {'norm':>8} {'norm':>8}")
    for i, (a, b) in enumerate(zip(r["zinf"], r["plain"], strict=True)):
        print(f"{i + 1:>5} {a:>12.6f} {b:>12.6f} {a - b:>+12.6f}   {r['norms']['zinf'][i]:>8.4f} {r['norms']['plain'][i]:>8.4f}")
    print(f"largest difference {r['largest_difference']:.6f}, mean {r['mean_difference']:.6f}")
    for name in ("zinf", "plain"):
        before, after = r["held_out"][name][0], r["held_out"][name][-1]
        print(f"held-out loss, {name:<6} {before:.4f} before, {after:.4f} after")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--nvme", default=".")
    parser.add_argument("--fused", action="store_true", help="torch's fused AdamW instead of its plain loop")
    parser.add_argument("--json")
    parser.add_argument("--toy", action="store_true")
    args = parser.parse_args()
    quiet_transformers()
    with tempfile.TemporaryDirectory(dir=args.nvme, prefix="zinf-bench-") as folder:
        if args.toy:
            config = toy_config(Path(folder), steps=4)
        else:
            samples.smollm2(print)
            samples.shakespeare(print)
            config = TrainConfig.load(example(), [f"steps={args.steps}", *args.overrides])
        engine = dataclasses.replace(config.engine, nvme_path=(folder,))
        result = measure(dataclasses.replace(config, output=None, engine=engine), args.fused)
    print_table(result)
    if args.json:
        Path(args.json).write_text(json.dumps(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
