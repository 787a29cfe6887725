"""Out of device memory within a step: what was asked, who has the rest, and what to lower.

The frames of the error hold activations; they are cleared, so that whoever catches it can go on with less at once.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator

import torch

from zinf.config import Config
from zinf.errors import BudgetError
from zinf.placement import Plan, human


@contextlib.contextmanager
def explained(where: str, plan: Plan, config: Config) -> Iterator[None]:
    """Raise torch's OutOfMemoryError within the block as a BudgetError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)
        raise BudgetError(message(where, str(error), plan, config)) from error


def message(where: str, said: str, plan: Plan, config: Config) -> str:
    """One line. `said` is torch's own message, of which the sizes are kept."""
    asked = re.search(r"[Tt]ried to allocate ([0-9.]+ \w+)", said)
    free = re.search(r"of which ([0-9.]+ \w+) is free", said)
    parts = ", ".join(f"{k} {human(v)}" for k, v in sorted(plan.device.items(), key=lambda kv: -kv[1]))
    lower = []
    if config.micro_batch_size != 1:
        lower.append("micro_batch_size" if config.micro_batch_size is not None else "the batch (or set micro_batch_size)")
    if config.device_memory is None or plan.device.get("slabs", 0) > 0:
        lower.append("device_memory")
    if not plan.activations_nbytes:
        lower.append("or set activations: host")
    if config.recompute is not True or config.keep_last:
        lower.append("or let more blocks be recomputed")
    return (
        f"device memory: {where} asked for {asked[1] if asked else 'more'} {f'and {free[1]} is free' if free else 'than is free'} beside activations and "
        f"what zinf holds ({human(plan.device_nbytes)}: {parts or 'nothing'}): lower {', '.join(lower)}"
    )
