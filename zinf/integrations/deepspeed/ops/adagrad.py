"""DeepSpeedCPUAdagrad, with DeepSpeed's arguments."""

from __future__ import annotations

from typing import Any

from zinf.integrations.deepspeed.optimizers import Described


class DeepSpeedCPUAdagrad(Described):
    def __init__(self, model_params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0, amsgrad: bool = False, **options: Any):
        super().__init__(model_params, dict(lr=lr, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, lr_decay=0.0, initial_accumulator_value=0.0))
