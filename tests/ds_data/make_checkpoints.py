"""Write real DeepSpeed checkpoints of a tiny model, and what they hold, as the plain tensors that DeepSpeed itself gives. Run with its Python, once a rank:

    DS_ACCELERATOR=cpu python make_checkpoints.py OUT STAGE RANK WORLD

A universal one is made of it: python -m deepspeed.checkpoint.ds_to_universal --input_folder OUT/global_step3 --output_folder OUT/universal
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

HIDDEN = 10  # the frozen parameter has 7 elements: no multiple of two ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(3 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, HIDDEN)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, 17, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x) * self.scale[0] + self.frozen.sum()
        return nn.functional.cross_entropy(self.head(x).float().view(-1, 17), ids.roll(1, 1).reshape(-1))


def main(out: str, stage: int, rank: int, world: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="29611")
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    torch.manual_seed(0)
    model = Tiny()
    groups = [
        {"params": [p for n, p in model.named_parameters() if p.requires_grad and p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if p.requires_grad and p.dim() == 1], "weight_decay": 0.0},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "bf16": {"enabled": True}, "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}, "zero_optimization": {"stage": stage, "sub_group_size": 700},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    ids = torch.randint(0, 17, (2 * world, 6), generator=torch.Generator().manual_seed(1))[2 * rank : 2 * rank + 2]
    for _ in range(3):
        engine.backward(engine(ids.to(engine.device)))
        engine.step()
    engine.save_checkpoint(out, tag="global_step3", client_state={"epoch": 1})
    expected = {}
    for name, p in engine.module.named_parameters() if stage == 3 else ():
        values = [safe_get_full_fp32_param(p), safe_get_full_optimizer_state(p, "exp_avg"), safe_get_full_optimizer_state(p, "exp_avg_sq")]
        if p.requires_grad:
            expected[name] = [v.detach().float().clone().view(-1) for v in values]
    if stage < 3:  # where those find no moments of torch's Adam: from the flat groups of one rank
        names = {id(p): name for name, p in engine.module.named_parameters()}
        for params, flat in zip(engine.optimizer.bit16_groups, engine.optimizer.single_partition_of_fp32_groups, strict=True):
            state, at = engine.optimizer.optimizer.state[flat], 0
            for p in params:
                here = slice(at, at + p.numel())
                expected[names[id(p)]] = [t[here].detach().clone() for t in (flat, state["exp_avg"], state["exp_avg_sq"])]
                at += p.numel()
    if rank == 0:
        from safetensors.torch import save_file

        save_file(
            {f"{name}.{kind}": v for name, vs in expected.items() for kind, v in zip(("master", "m", "v"), vs, strict=True)}, f"{out}/expected.safetensors"
        )


if __name__ == "__main__":
    out, stage, rank, world = sys.argv[1:5]
    main(out, int(stage), int(rank), int(world))
