"""DeepSpeedCPUAdam and FusedAdam, with DeepSpeed's arguments: AdamW, or Adam where the flag says so."""

from __future__ import annotations

from typing import Any

from zinf.integrations.deepspeed.optimizers import Described


class DeepSpeedCPUAdam(Described):
    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ):
        if not bias_correction:
            raise ValueError("bias_correction is False; zinf's Adam corrects the bias, always")
        self.adam_w_mode = adamw_mode
        super().__init__(model_params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad))


class FusedAdam(Described):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ):
        if not bias_correction:
            raise ValueError("bias_correction is False; zinf's Adam corrects the bias, always")
        self.adam_w_mode = adam_w_mode
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad))
