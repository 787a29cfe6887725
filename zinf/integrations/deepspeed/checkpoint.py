"""What DeepSpeed's zero_to_fp32.py offers: a checkpoint's fp32 weights, merged. Of checkpoints of DeepSpeed, and of zinf's own.

For models that do not fit into memory use importing.import_deepspeed (`zinf import --from-deepspeed`), which streams.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from zinf.integrations.deepspeed.zero_files import ZeroCheckpoint

from zinf.integrations.deepspeed.importing import import_deepspeed, load_into  # isort: skip

__all__ = [
    "ZeroCheckpoint", "clone_tensors_for_torch_save", "convert_zero_checkpoint_to_fp32_state_dict", "get_fp32_state_dict_from_zero_checkpoint",
    "import_deepspeed", "load_into", "load_state_dict_from_zero_checkpoint",
]  # fmt: skip


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str], tag: str | None = None, exclude_frozen_parameters: bool = False, **options: Any
) -> dict[str, torch.Tensor]:
    """All weights in fp32 (frozen ones in their own dtype), buffers, and shared parameters under each of their names. In memory."""
    source = ZeroCheckpoint(os.fspath(checkpoint_dir), tag)
    names = sorted(source.trained) if exclude_frozen_parameters else source.names
    out: dict[str, torch.Tensor] = dict(source.module)
    for name in names:
        reader = source.open(name)
        flat = torch.empty(reader.shape, dtype=reader.dtype)
        reader.read(0, flat.view(-1))
        out[name] = flat
    return out | {name: out[other] for name, other in source._shared.items() if other in out}


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None) -> nn.Module:
    """`model` with the weights of a checkpoint."""
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str], output_dir: str | os.PathLike[str], tag: str | None = None, exclude_frozen_parameters: bool = False, **options: Any
) -> None:
    """Write them as output_dir/model.safetensors (nothing is pickled, whatever `safe_serialization` says)."""
    from safetensors.torch import save_file

    os.makedirs(output_dir, exist_ok=True)
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    seen: set[int] = set()
    own = {name: t for name, t in state.items() if t.data_ptr() not in seen and not seen.add(t.data_ptr())}  # type: ignore[func-returns-value]
    save_file({name: t.contiguous() for name, t in own.items()}, os.path.join(output_dir, "model.safetensors"), metadata={"format": "pt"})


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Tensors of a nested value as small copies of their own."""
    return torch.utils._pytree.tree_map(lambda t: t.detach().clone().to(device) if isinstance(t, torch.Tensor) else t, item)
