"""The effective config of an engine, and DeepSpeed's way to ask for it: a method for each key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from zinf.integrations.deepspeed.config import Translation


@dataclasses.dataclass
class Settings:
    """What DeepSpeed's engine answers about its config, in force; the batch sizes may be changed while it trains."""

    given: dict[str, Any]  # the config as it was read
    dtype: str  # of the weights: fp32, bf16, fp16
    zero_stage: int
    train_batch_size: int
    micro_batch: int
    accumulation: int
    clipping: float  # 0 is none
    drop_last: bool
    managed: bool  # does the engine count micro-batches itself?
    steps_per_print: int | None
    optimizer_name: str | None
    scheduler: dict[str, Any] | None
    profiler: dict[str, Any]  # flops_profiler, with its defaults; empty where it is not enabled

    @classmethod
    def of(cls, given: dict[str, Any], t: Translation, dtype: str) -> Settings:
        training, batch = t.training, t.training["train_micro_batch_size_per_gpu"] or 1
        accumulation = training["gradient_accumulation_steps"] or 1
        steps = given.get("steps_per_print")
        return cls(
            given=given,
            dtype=dtype,
            zero_stage=training["zero_stage"],
            train_batch_size=batch * accumulation,
            micro_batch=batch,
            accumulation=accumulation,
            clipping=t.config.get("max_grad_norm") or 0.0,
            drop_last=training["dataloader_drop_last"],
            managed=given.get("managed_gradient_accumulation", True) is not False,
            steps_per_print=int(steps) if isinstance(steps, (int, float)) and not isinstance(steps, bool) else None,
            optimizer_name=t.config.get("optimizer") if "optimizer" in given else None,
            scheduler=training["scheduler"],
            profiler=training.get("flops_profiler", {}),
        )

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of the config as it was given; empty if it was not."""
        found = self.given.get(name)
        return found if isinstance(found, Mapping) else {}


class Accessors:
    """Questions about the config, named as DeepSpeed's engine names them."""

    settings: Settings

    @property
    def config(self) -> dict[str, Any]:
        """The config as it was given."""
        return self.settings.given

    def train_batch_size(self) -> int:
        return self.settings.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.settings.micro_batch

    def gradient_accumulation_steps(self) -> int:
        return self.settings.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        return self.settings.train_batch_size, self.settings.micro_batch, self.settings.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches of a step; their size stays."""
        if train_batch_size < 1 or train_batch_size % self.settings.micro_batch:
            raise ValueError(f"train_batch_size {train_batch_size} is not a multiple of train_micro_batch_size_per_gpu, {self.settings.micro_batch}")
        self.settings.train_batch_size, self.settings.accumulation = train_batch_size, train_batch_size // self.settings.micro_batch

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the rows of a micro-batch; their number stays."""
        self.settings.micro_batch, self.settings.train_batch_size = micro_batch_size, micro_batch_size * self.settings.accumulation

    def zero_optimization_stage(self) -> int:
        return self.settings.zero_stage

    def zero_optimization(self) -> bool:
        return self.settings.zero_stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        return self.settings.zero_stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """False, whatever the stage: parameters always have their true shape, so nothing need be gathered to look at one."""
        return False

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """True: zinf can always write all weights."""
        return True

    def fp16_enabled(self) -> bool:
        return self.settings.dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self.settings.dtype == "bf16"

    def gradient_clipping(self) -> float:
        return self.settings.clipping

    def dataloader_drop_last(self) -> bool:
        return self.settings.drop_last

    def managed_gradient_accumulation(self) -> bool:
        return self.settings.managed

    def steps_per_print(self) -> int | None:
        return self.settings.steps_per_print

    def optimizer_name(self) -> str | None:
        return self.settings.optimizer_name

    def optimizer_params(self) -> Mapping[str, Any]:
        return self.settings.section("optimizer").get("params") or {}

    def scheduler_name(self) -> str | None:
        return None if self.settings.scheduler is None else self.settings.scheduler["type"]

    def scheduler_params(self) -> Mapping[str, Any]:
        return {} if self.settings.scheduler is None else self.settings.scheduler["params"]

    def wall_clock_breakdown(self) -> bool:
        return bool(self.settings.given.get("wall_clock_breakdown", False))

    def flops_profiler_enabled(self) -> bool:
        return bool(self.settings.profiler)
