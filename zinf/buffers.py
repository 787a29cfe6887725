"""A model's persistent buffers (running averages, counters), as JSON: they are small, belong to a step as its weights do, and go into its commit."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import torch
from torch import nn


def persistent(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, buffer) of all that a state_dict has."""
    for prefix, m in module.named_modules(remove_duplicate=False):
        for name, b in m._buffers.items():
            if b is not None and name not in m._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, b


class Changed:
    """The buffers of a module that are no longer what they were when this was made; the others come with the module."""

    def __init__(self, module: nn.Module):
        self._module = module
        self._first = {name: b.detach().clone() for name, b in persistent(module)}

    def describe(self) -> dict[str, tuple[str, list[int]]]:
        """(dtype, shape) of all persistent buffers."""
        return {name: (str(b.dtype).removeprefix("torch."), list(b.shape)) for name, b in persistent(self._module)}

    def capture(self, all: bool = False) -> dict[str, str]:
        """Their bytes (or those of `all` buffers), as plain JSON values."""
        changed = ((n, b.detach()) for n, b in persistent(self._module) if all or (first := self._first.get(n)) is None or not torch.equal(first, b))
        return {name: base64.b64encode(b.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).decode() for name, b in changed}

    def restore(self, captured: dict[str, str]) -> None:
        """Set the buffers to what they were when `capture` gave this."""
        buffers = dict(persistent(self._module))
        with torch.no_grad():
            for name, first in self._first.items():
                if name not in captured and name in buffers:
                    buffers[name].copy_(first)
            for name, text in captured.items():
                b = buffers[name]
                b.copy_(torch.frombuffer(bytearray(base64.b64decode(text)), dtype=b.dtype).view(b.shape))
