"""DeepSpeed ZeRO-3 with optimizer and parameters on NVMe, on the model of bench/step.py; bench/step.py runs it as a peer.

The settings are the fastest that were found by trial on a small model on two cores: the documented defaults of pipelining and of
prefetch fail there ("Not enough buffers"). Prints one JSON object: median seconds of a step, losses.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")
for key, value in dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511").items():
    os.environ.setdefault(key, value)  # else it looks for MPI
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # ninja, for what DeepSpeed compiles at first use

SIZES = {
    "tiny": dict(hidden_size=128, intermediate_size=384, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, vocab_size=1024),
    "135m": dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, vocab_size=49152),
    "1b": dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4, vocab_size=32000),
}


def config(folder: str) -> dict:
    param = {"device": "nvme", "nvme_path": folder, "pin_memory": False, "buffer_size": 30_000_000, "buffer_count": 8, "max_in_cpu": 0}
    optimizer = {"device": "nvme", "nvme_path": folder, "pin_memory": False, "pipeline_read": True, "pipeline_write": True, "buffer_count": 16}
    limits = {"stage3_max_live_parameters": 1_000_000, "stage3_max_reuse_distance": 1_000_000, "stage3_prefetch_bucket_size": 1_000_000}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.0}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "sub_group_size": 20_000_000,
            "offload_param": param,
            "offload_optimizer": optimizer,
            **limits,
        },
        "aio": {"block_size": 8 << 20, "queue_depth": 32, "intra_op_parallelism": 2, "single_submit": False, "overlap_events": True},
        "steps_per_print": 10**9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nvme", required=True)
    args = parser.parse_args()
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = os.path.join(args.nvme, "deepspeed")
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES[args.size], tie_word_embeddings=args.size != "1b", use_cache=False))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(folder))
    engine.train()
    ids = torch.randint(0, SIZES[args.size]["vocab_size"], (1, args.tokens), generator=torch.Generator().manual_seed(1))
    seconds, losses = [], []
    for _ in range(args.rounds + 2):
        start = time.perf_counter()
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
    shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"seconds": round(statistics.median(seconds[2:]), 3), "losses": losses}))


if __name__ == "__main__":
    main()
