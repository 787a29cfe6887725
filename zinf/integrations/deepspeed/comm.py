"""deepspeed.comm on one card: there is one rank and nobody to talk to. No process group is made.

Where torch.distributed is initialised by the script itself, these answer what it says.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from zinf.errors import ConfigError


def init_distributed(dist_backend: str | None = None, auto_mpi_discovery: bool = True, **options: Any) -> None:
    """Nothing is started. Raises ConfigError where a launcher has started several ranks."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise ConfigError(f"WORLD_SIZE is {world}: deepspeed.initialize of zinf trains on one card; start one process, without the launcher")


def is_initialized() -> bool:
    """So that scripts that ask before they start a process group do not."""
    return True


def is_available() -> bool:
    return True


def _there() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank(group: Any = None) -> int:
    return dist.get_rank(group) if _there() else 0


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if _there() else 1


def barrier(group: Any = None, **options: Any) -> None:
    """Nobody is waited for."""
    if _there():
        dist.barrier(group)


def broadcast(tensor: Any, src: int = 0, group: Any = None, async_op: bool = False, **options: Any) -> Any:
    return dist.broadcast(tensor, src, group, async_op) if _there() else None


def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False, **options: Any) -> Any:
    """Of one rank the sum, mean, maximum and minimum are its own."""
    return dist.all_reduce(tensor, op, group, async_op) if _there() else None


def all_gather(tensor_list: list[Any], tensor: Any, group: Any = None, async_op: bool = False, **options: Any) -> Any:
    if _there():
        return dist.all_gather(tensor_list, tensor, group, async_op)
    tensor_list[0].copy_(tensor)
    return None


def destroy_process_group(group: Any = None) -> None:
    if _there():
        dist.destroy_process_group(group)


ReduceOp = dist.ReduceOp
