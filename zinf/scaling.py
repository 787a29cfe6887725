"""Loss scaling: fp16 gradients kept away from the ends of their range.

The smallest fp16 is 6e-8, and gradients of a mean over tokens are often smaller. So the loss is multiplied by the *scale* before
its backward, and the step divides by it, in the one factor that also clips. Powers of two cost no rounding.

    overflow    a gradient was infinite or NaN: the step is skipped and changes nothing. The first `hysteresis` - 1 overflows are
                tolerated, each one after that halves the scale, down to `min_loss_scale`
    growth      after `loss_scale_window` good steps in a row the scale doubles, and tolerance is what it was. With
                `consecutive_hysteresis` every good step restores the tolerance

With `hysteresis` 1 that is torch.amp.GradScaler, with the defaults DeepSpeed's DynamicLossScaler (Micikevicius et al., 2018, section 3.2).
A scale is in use where any weights are fp16, frozen ones too, as gradients pass through them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from zinf.errors import EngineError

if TYPE_CHECKING:
    from zinf import layout
    from zinf.config import Config

LARGEST = 2.0**126  # its inverse is still a normal fp32


def scales(config: Config, model: layout.Model) -> bool:
    """Is the loss scaled when `model` is trained as `config` says?"""
    return config.loss_scale != 1 and any(run.dtype == "fp16" for shard in model.shards for run in shard.runs)


class LossScaler:
    """The scale of one engine. `active` False: the scale is 1 for good and nothing is asked of anyone."""

    def __init__(self, config: Config, active: bool = True):
        self.active, self.dynamic = active, active and config.loss_scale in ("dynamic", 0)
        self._window, self._least = config.loss_scale_window, config.min_loss_scale
        self._hysteresis, self._consecutive = config.hysteresis, config.consecutive_hysteresis
        self.scale = 1.0
        if active:
            self.scale = 2.0**config.initial_scale_power if self.dynamic else float(config.loss_scale)
        self._good = 0  # steps in a row, since the scale last changed or a step was skipped
        self._tolerance = config.hysteresis - 1  # overflows that will not lower the scale
        self._graph_task = -1  # the backward that began at a scaled loss

    @property
    def can_fall(self) -> bool:
        """May overflows still be cured by a lower scale?"""
        return self.dynamic and self.scale > self._least

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """The scaled loss, in fp32 at least; its backward is known to be of a scaled loss."""
        if not self.active:
            return loss
        scale = self.scale
        scaled = (loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss) * scale

        def begin(grad: torch.Tensor) -> None:  # before all else in this backward
            if scale != self.scale:
                raise EngineError(f"this loss was scaled by {scale:g}, and the scale is {self.scale:g} since a step: scale a loss after the step before it")
            self._graph_task = torch._C._current_graph_task_id()  # type: ignore[attr-defined]

        if scaled.requires_grad:
            scaled.register_hook(begin)
        return scaled

    def check(self) -> None:
        """Raise EngineError if the backward that runs now is not that of a scaled loss."""
        if self.active and torch._C._current_graph_task_id() != self._graph_task:  # type: ignore[attr-defined]
            raise EngineError(
                "the model has fp16 weights, whose gradients need a scaled loss: call engine.backward(loss), or engine.scale(loss).backward() "
                "(or train in bf16, or set loss_scale=1)"
            )

    def update(self, overflow: bool) -> None:
        """A step was made, or skipped because of an overflow."""
        if not self.dynamic:
            return
        if overflow:
            self._good = 0
            if self._tolerance:
                self._tolerance -= 1
            else:
                self.scale = max(self.scale / 2, self._least)
            return
        self._good += 1
        grow = self._good == self._window
        if grow or self._consecutive:
            self._tolerance = self._hysteresis - 1
        if grow:
            self.scale, self._good = min(self.scale * 2, LARGEST), 0

    def state(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"scale": self.scale, "good": self._good, "tolerance": self._tolerance}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`. A static scale is the config's, whatever was saved."""
        if self.dynamic:
            self.scale, self._good, self._tolerance = state["scale"], state["good"], state["tolerance"]
