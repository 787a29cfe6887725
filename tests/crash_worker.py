"""A small run that goes on from its store's last commit: what tests/test_crash.py kills. Prints a line for each step.

python crash_worker.py FOLDER STEPS OPTIONS(json)
"""

import json
import os
import sys

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]

import torch  # noqa: E402
from oracle import engine_snapshot  # noqa: E402
from torch import nn  # noqa: E402

from zinf.engine import Engine  # noqa: E402

WIDTH = 96


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def model() -> nn.Module:
    """Small, and without transformers, whose import would take most of the time."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(6)], nn.LayerNorm(WIDTH)).to(torch.bfloat16)


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)


def committed(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, "run", "manifest.json"))


def main(folder: str, steps: int, options: dict) -> None:
    torch.set_num_threads(2)
    resume = committed(folder)
    with Engine(model(), nvme_path=folder, run_name="run", resume=resume, chunk_size=4096, weight_decay=0.1, **options) as engine:
        print(f"start {engine.global_step} {engine.extra.get('sum', 0)}", flush=True)
        total = engine.extra.get("sum", 0)
        for step in range(engine.global_step, steps):
            for group in engine.optimizer.param_groups:
                group["lr"] = 1e-3 * (1 - step / steps)
            engine.backward((engine(batch(step)).float() - batch(step + 1).float()).square().mean())
            total += step
            engine.step(extra={"sum": total})
            print(f"step {step + 1}", flush=True)
        torch.save(engine_snapshot(engine), os.path.join(folder, "end.pt"))
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
