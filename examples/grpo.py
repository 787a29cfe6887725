"""Reinforcement learning with GRPO, with TRL: the model writes, its words are judged, and it is trained on that, all from a drive.

    python examples/grpo.py MODEL PROMPTS.txt --nvme /mnt/nvme --output out

A prompt a line. The reward here is for answers near 50 characters; put your own in its place.
"""

from __future__ import annotations

import argparse

import torch
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import zinf
from zinf.hf import ZinfTrainerMixin


class Trainer(ZinfTrainerMixin, GRPOTrainer):
    """TRL's, on zinf."""


def reward(completions: list[str], **columns: object) -> list[float]:
    """One number for each completion."""
    return [-abs(50.0 - len(text)) for text in completions]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("prompts", help="a file of prompts")
    parser.add_argument("--nvme", required=True, help="a folder on a fast drive")
    parser.add_argument("--output", default="out")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=64, help="of a completion")
    options = parser.parse_args(argv)

    model = zinf.from_pretrained(options.model, nvme_path=options.nvme, overwrite=True)
    args = GRPOConfig(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=options.tokens,
        learning_rate=1e-6,
        logging_steps=1,
        beta=0.0,  # no reference model; with adapters (peft_config=) there may be one
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    data = load_dataset("text", data_files=options.prompts, split="train").rename_column("text", "prompt")
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    with Trainer(model=model, reward_funcs=reward, args=args, train_dataset=data, processing_class=tokenizer) as trainer:
        trainer.train()
        trainer.save_model()


if __name__ == "__main__":
    main()
