"""Direct preference optimisation of a whole model, with TRL, and no second model in memory.

    python examples/dpo.py MODEL PREFERENCES.jsonl --nvme /mnt/nvme --output out

PREFERENCES.jsonl has {"prompt": ..., "chosen": ..., "rejected": ...} in each line. What the reference model thinks of them is computed before the
first step, by the same engine.
"""

from __future__ import annotations

import argparse

import torch
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

import zinf
from zinf.hf import ZinfTrainerMixin


class Trainer(ZinfTrainerMixin, DPOTrainer):
    """TRL's, on zinf."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("preferences", help="a file of preferences")
    parser.add_argument("--nvme", required=True, help="a folder on a fast drive")
    parser.add_argument("--output", default="out")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(argv)

    model = zinf.from_pretrained(options.model, nvme_path=options.nvme, overwrite=True)
    args = DPOConfig(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        learning_rate=5e-7,
        beta=0.1,
        logging_steps=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    data = load_dataset("json", data_files=options.preferences, split="train")
    with Trainer(model=model, args=args, train_dataset=data, processing_class=AutoTokenizer.from_pretrained(options.model)) as trainer:
        trainer.train()
        trainer.save_model()


if __name__ == "__main__":
    main()
