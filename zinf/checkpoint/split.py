"""The lossless split of fp32 into bf16 and 16 bits more (hi, lo), in plain torch."""

from __future__ import annotations

import torch


def split(src: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor) -> None:
    """Of each fp32 in `src`: the nearest bf16 into `hi`, and what is missing into `lo` (int16)."""
    bits = src.view(torch.int32)
    high = (bits + 0x8000) >> 16
    hi.view(torch.int16).copy_(high)
    lo.copy_(bits - (high << 16))


def join(hi: torch.Tensor, lo: torch.Tensor, dst: torch.Tensor) -> None:
    """The inverse of split: fp32 into `dst`."""
    bits = dst.view(torch.int32)
    bits.copy_(hi.view(torch.int16))
    bits.bitwise_left_shift_(16).add_(lo)
