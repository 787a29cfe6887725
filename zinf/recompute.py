"""Which blocks are recomputed in backward, and what happens to the checkpointing that a model asks for itself."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Sequence

from torch import nn

from zinf.config import nearest, require
from zinf.discover import Unit

log = logging.getLogger("zinf")


def recomputed(units: Sequence[Unit], recompute: bool | Sequence[str], keep_last: int) -> list[bool]:
    """For each unit, whether its calls are recomputed. Single layers never are.

    Args:
        recompute: all blocks, none, or patterns (as in file names) of the names of those that are.
        keep_last: that many blocks, the last by registration, are not: backward begins with them, so what they saved does not wait long.

    Raises:
        ConfigError: a pattern that no block has.
    """
    blocks = [i for i, u in enumerate(units) if u.block]
    names = [units[i].name for i in blocks]
    patterns = ("*",) if recompute is True else () if recompute is False else tuple(recompute)
    for pattern in patterns if not isinstance(recompute, bool) else ():
        require(bool(fnmatch.filter(names, pattern)), "recompute", pattern, f"true, false, or names of blocks; {nearest(pattern, names)}")
    chosen = (
        {i for i in blocks[: len(blocks) - keep_last] if any(fnmatch.fnmatchcase(units[i].name, p) for p in patterns)} if keep_last < len(blocks) else set()
    )
    return [i in chosen for i in range(len(units))]


class TakeOver:
    """transformers' gradient_checkpointing flags: blocks are recomputed once, by us, so they are turned off on blocks and what holds blocks.

    A Trainer sets them when it starts, so they are looked at before every forward.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]):
        blocks = {m for u in units if u.block for m in u.modules}
        self._modules = [m for m in model.modules() if hasattr(m, "gradient_checkpointing") and any(inner in blocks for inner in m.modules())]
        self._turned_off: list[nn.Module] = []

    def look(self) -> None:
        """Turn off what is on."""
        on = [m for m in self._modules if m.gradient_checkpointing]
        for m in on:
            m.gradient_checkpointing = False  # type: ignore[assignment]
        if on and not self._turned_off:
            log.info("gradient checkpointing of %s is taken over: the option recompute decides which blocks are recomputed", type(on[0]).__name__)
        self._turned_off += on

    def undo(self) -> None:
        """Give the flags back."""
        for m in self._turned_off:
            m.gradient_checkpointing = True  # type: ignore[assignment]
        self._turned_off.clear()
