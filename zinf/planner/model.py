"""What the planner knows of a model: its layout, split as the engine splits it so that both decide the same, and what a token computes.

zinf.hf.facts reads it from a config alone; an engine has it at hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from zinf import layout


@dataclasses.dataclass(frozen=True)
class Facts:
    name: str
    layout: layout.Model
    root: int | None  # index of the shard that stays on the device
    pinned: tuple[int, ...]  # shards of tied layers
    blocks: int  # that are recomputed, one boundary activation each
    hidden: int
    active: int  # parameters that a token meets: of a mixture, those of the experts it is sent to
    trained: int | None = None  # those of them that get a gradient; None: all
    dtype: str = "bf16"  # in which blocks compute

    def flops(self, tokens: int) -> tuple[float, float]:
        """Of forward, and of backward with its recomputation: 2 a parameter and token for each pass, and for each gradient of a weight."""
        trained = self.active if self.trained is None else self.trained
        return 2.0 * self.active * tokens, (4.0 * self.active + 2.0 * trained) * tokens

    def boundary(self, tokens: int) -> int:
        """Bytes of the inputs of all blocks, which wait for backward."""
        return layout.ITEMSIZE[self.dtype] * self.blocks * self.hidden * tokens


def active_parameters(model: layout.Model, config: Mapping[str, Any], trained: bool = False) -> int:
    """Parameters that compute for a token, or the `trained` ones of them. Routed experts count by how many of them are chosen."""
    chosen = config.get("num_experts_per_tok") or 0
    experts = next((config[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)), 0)
    every = [p for shard in model.shards for run in shard.runs if run.trainable or not trained for p in run.params]
    numel, routed = sum(p.numel for p in every), sum(p.numel for p in every if ".experts." in p.name) if chosen and experts else 0
    return numel - routed + (routed * chosen // experts if routed else 0)
