"""Write losses.json: what a DeepSpeed loop over a tiny fp32 model gives, step by step. Run with its Python: DS_ACCELERATOR=cpu python make_losses.py"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from make_checkpoints import Tiny

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"train_batch_size": 4, "optimizer": ADAMW, "gradient_clipping": 0.0},
    "default clipping": {"train_batch_size": 4, "optimizer": ADAMW},
    "accumulation, clipping, warmup": {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "optimizer": ADAMW, "gradient_clipping": 0.05,
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 8, "warmup_max_lr": 2e-2, "warmup_num_steps": 3}},
    },
    "one cycle": {
        "train_batch_size": 2, "optimizer": ADAMW,
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 2e-2, "cycle_first_step_size": 3}},
    },
}  # fmt: skip
STEPS = 6


def run(deepspeed: Any, config: dict[str, Any], **options: Any) -> dict[str, list[Any]]:
    """Losses of micro-batches; norms and learning rates of steps."""
    torch.manual_seed(0)
    model = Tiny()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config, **options)
    found: dict[str, list[Any]] = {"losses": [], "norms": [], "lrs": [], "boundaries": []}
    generator = torch.Generator().manual_seed(1)
    while len(found["norms"]) < STEPS:
        ids = torch.randint(0, 17, (engine.train_micro_batch_size_per_gpu(), 6), generator=generator)
        loss = engine(ids)
        engine.backward(loss)
        found["boundaries"].append(engine.is_gradient_accumulation_boundary())
        if found["boundaries"][-1]:
            found["lrs"].append(float(engine.get_lr()[0]))
        engine.step()
        found["losses"].append(loss.item())
        if engine.was_step_applied():
            found["norms"].append(float(engine.get_global_grad_norm()))
    return found


if __name__ == "__main__":
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29613")
    import deepspeed

    found = {name: run(deepspeed, {**config, "zero_optimization": {"stage": 3}}) for name, config in CONFIGS.items()}
    Path(__file__).with_name("losses.json").write_text(json.dumps({"deepspeed": deepspeed.__version__, "runs": found}) + "\n")
