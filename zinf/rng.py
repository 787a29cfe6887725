"""The random number generators of python, numpy and torch, as JSON, so that a resumed run draws what it would have drawn."""

from __future__ import annotations

import base64
import random
import sys
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """The state of every generator, as plain JSON values."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"torch": _encode(torch.get_rng_state()), "python": [version, list(internal), gauss]}
    if "numpy" in sys.modules:
        name, keys, pos, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), int(pos), int(has_gauss), float(cached)]
    return state


def restore(state: dict[str, Any]) -> None:
    """Set every generator to a state from `capture`."""
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state["torch"])), dtype=torch.uint8))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "numpy" in state:
        import numpy

        name, keys, pos, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), pos, has_gauss, cached))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()
