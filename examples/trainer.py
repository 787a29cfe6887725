"""Fine-tune a causal language model on a text file with the Hugging Face Trainer, its weights and optimizer state on a drive.

    python examples/trainer.py MODEL FILE.txt --nvme /mnt/nvme --output out

Run it again with the same arguments, and it goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import os

from transformers import AutoTokenizer, TrainingArguments, default_data_collator

import zinf
from zinf.hf import ZinfTrainer


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, or a name on the hub")
    parser.add_argument("text", help="a file of text")
    parser.add_argument("--nvme", required=True, help="a folder on a fast drive")
    parser.add_argument("--output", default="out")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--host-memory", default="16GiB")
    options = parser.parse_args(argv)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    with open(options.text, encoding="utf-8") as f:
        ids = tokenizer(f.read())["input_ids"]
    cut = [ids[i : i + options.length] for i in range(0, len(ids) - options.length + 1, options.length)]
    rows = [{"input_ids": row, "labels": row} for row in cut]

    resume = os.path.isdir(options.output) and any(name.startswith("checkpoint-") for name in os.listdir(options.output))
    model = zinf.from_pretrained(options.model, nvme_path=options.nvme, resume=resume, overwrite=not resume)
    args = TrainingArguments(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        learning_rate=1e-5,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        weight_decay=0.1,
        logging_steps=1,
        save_steps=20,
        save_total_limit=2,
        report_to=[],
    )
    zinf_options = {"host_memory": options.host_memory}
    given = {"train_dataset": rows, "data_collator": default_data_collator, "processing_class": tokenizer}
    with ZinfTrainer(model=model, args=args, **given, zinf=zinf_options) as trainer:
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()


if __name__ == "__main__":
    main()
