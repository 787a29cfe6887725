"""get_accelerator(): the device that engines compute on, by the names that DeepSpeed gives it."""

from __future__ import annotations

from typing import Any

import torch


class Accelerator:
    """A CUDA card if there is one, else the CPU."""

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"

    def __getattr__(self, name: str) -> Any:
        """What torch.cuda (or torch.cpu) calls the same: synchronize, empty_cache, memory_allocated, current_stream, ..."""
        if name.startswith("_"):
            raise AttributeError(name)
        own = getattr(torch, self._name)
        return getattr(own, name) if hasattr(own, name) else getattr(torch.cuda, name)

    def device_name(self, index: int | None = None) -> str:
        return self._name if index is None or self._name == "cpu" else f"{self._name}:{index}"

    def device(self, index: int | None = None) -> Any:
        return torch.device(self.device_name(index))

    def current_device_name(self) -> str:
        return self.device_name(0)

    def current_device(self) -> int | str:
        return torch.cuda.current_device() if self._name == "cuda" else "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, index: int) -> None:
        """One card is one device."""

    def communication_backend_name(self) -> str:
        return "nccl" if self._name == "cuda" else "gloo"

    def is_available(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed = manual_seed_all

    def random(self) -> Any:
        return torch.random


_accelerator: Accelerator | None = None


def get_accelerator() -> Accelerator:
    """The one of this process."""
    global _accelerator
    _accelerator = _accelerator or Accelerator()
    return _accelerator
