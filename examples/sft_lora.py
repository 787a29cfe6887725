"""Supervised fine-tuning of LoRA adapters on chats, with TRL: the base model is streamed from a drive and never written.

    python examples/sft_lora.py MODEL CHATS.jsonl --nvme /mnt/nvme --output out

CHATS.jsonl has {"messages": [{"role": ..., "content": ...}, ...]} in each line. The loss is that of the assistant's words alone, so the
tokenizer's chat template must mark them with {% generation %}.
"""

from __future__ import annotations

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

import zinf
from zinf.hf import ZinfTrainerMixin


class Trainer(ZinfTrainerMixin, SFTTrainer):
    """TRL's, on zinf."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("chats", help="a file of chats")
    parser.add_argument("--nvme", required=True, help="a folder on a fast drive")
    parser.add_argument("--output", default="out")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(argv)

    model = zinf.from_pretrained(options.model, nvme_path=options.nvme, trainable=False, resume=True)  # imported once; any number of runs share it
    args = SFTConfig(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        learning_rate=2e-4,
        logging_steps=1,
        assistant_only_loss=True,
        max_length=2048,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    with Trainer(
        model=model,
        args=args,
        train_dataset=load_dataset("json", data_files=options.chats, split="train"),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    ) as trainer:
        trainer.train()
        trainer.save_model()  # the adapter, as PEFT saves it
        trainer.engine.merge_and_save(f"{options.output}-merged")  # and the model with the adapter in it


if __name__ == "__main__":
    main()
