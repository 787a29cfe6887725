"""DeepSpeedCPULion and FusedLion, with DeepSpeed's arguments."""

from __future__ import annotations

from typing import Any

from zinf.integrations.deepspeed.optimizers import Described


class DeepSpeedCPULion(Described):
    def __init__(self, model_params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0, **options: Any):
        super().__init__(model_params, dict(lr=lr, betas=betas, weight_decay=weight_decay))


class FusedLion(DeepSpeedCPULion):
    pass
