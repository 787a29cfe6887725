"""What a model needs in each tier, asked the way DeepSpeed's estimators are asked and answered by zinf's layout. Returned, not printed.

On the device the largest shard's weights and grads (activations and the batch come on top); in host memory or on NVMe the records: weights, and
state of what is trained, 12 bytes a parameter in bf16. `zinf plan MODEL` also says how long a step takes, on which machine.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from zinf.config import Config, format_bytes
from zinf.discover import discover, layout_of

SLABS = 3  # shards on the device at once: one computes, the next comes, grads of one leave


@dataclasses.dataclass(frozen=True)
class Need:
    """Bytes. `str()` of it is a few lines for people."""

    params: int  # their number
    largest_layer: int  # parameters of the largest shard
    device: int  # at least: slabs
    host_all: int  # with everything in host memory
    host_least: int  # with weights and state on NVMe: grads that wait, and buffers
    nvme: int  # with weights and state on NVMe, two versions of each chunk

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.params / 1e6:.0f}M parameters, {self.largest_layer / 1e6:.0f}M in the largest shard",
                f"device  {format_bytes(self.device)} at least, activations apart",
                f"host    {format_bytes(self.host_all)} with everything in memory; {format_bytes(self.host_least)} with weights and state on NVMe",
                f"NVMe    {format_bytes(self.nvme)}, with two versions of each chunk",
            ]
        )


def _need(params: int, largest: int, trained: int, weights: int, state: int) -> Need:
    """weights, state: bytes in all."""
    return Need(
        params, largest, SLABS * 2 * largest, weights + state + 2 * trained, 2 * trained + SLABS * 12 * min(largest, Config.chunk_size), 2 * (weights + state)
    )


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> Need:
    """Of a model that is there (its parameters may be on the meta device)."""
    laid = layout_of(discover(model), Config.chunk_size)
    trained = sum(p.numel for s in laid.shards for run in s.runs if run.trainable for p in run.params)
    weights, state = sum(s.weights_nbytes for s in laid.shards), sum(s.state_nbytes for s in laid.shards)
    return _need(laid.numel, max(s.numel for s in laid.shards), trained, weights, state)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float, largest_layer_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> Need:
    """Of a model that nobody has, all of it trained in bf16."""
    n = int(total_params)
    return _need(n, int(largest_layer_params), n, 2 * n, 10 * n)


def estimate_zero3_model_states_mem_needs(total_params: float, largest_layer_params: float, *args: Any, **options: Any) -> tuple[int, int, int]:
    """(host bytes, device bytes, bytes of the largest layer), with everything in host memory."""
    need = estimate_zero3_model_states_mem_needs_all_cold(total_params, largest_layer_params)
    return need.host_all, need.device, 2 * need.largest_layer


estimate_zero2_model_states_mem_needs_all_live = estimate_zero3_model_states_mem_needs_all_live


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> Need:
    """As that of stage 3: zinf places what moves by itself, whatever the stage. One layer of fifty is taken for the largest."""
    return estimate_zero3_model_states_mem_needs_all_cold(total_params, int(total_params) // 50)
