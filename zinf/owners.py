"""Whose a buffer is at this moment: the check behind `debug=True`.

Slabs, slots and buffers of grads pass from shard to shard. In debug mode every hand-over is written down here, and every use
is checked against it: bytes that are another's, or nobody's, raise an EngineError on the spot instead of being wrong numbers
later. Memory that is never handed over (a shard's own, for good) is not known here and not checked.
"""

from __future__ import annotations

import bisect
import threading

import torch

from zinf.errors import EngineError


class Unwatched:
    """Outside debug mode nothing is written down. An owner is whatever names it: compared, and shown in the error."""

    watching = False

    def lend(self, buffer: torch.Tensor, owner: object) -> None:
        """`buffer` is `owner`'s from now on. Raises EngineError if somebody has it."""

    def give_back(self, buffer: torch.Tensor, owner: object) -> None:
        """`owner` is through with `buffer`. Raises EngineError if it was not its own."""

    def check(self, view: torch.Tensor | None, owner: object, use: str) -> None:
        """`owner` is about to `use` the bytes of `view`, a part of a buffer. Raises EngineError if they are not its own."""

    def uses(self, view: torch.Tensor | None, use: str) -> None:
        """Whoever has `view` is about to `use` it: for the check of order, see zinf/tiers/races.py."""


class Owners(Unwatched):
    """The book of who has what. Thread safe."""

    watching = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []  # addresses of all buffers ever lent, in order; they never move
        self._ends: dict[int, int] = {}
        self._owner: dict[int, object] = {}

    def lend(self, buffer: torch.Tensor, owner: object) -> None:
        start = buffer.data_ptr()
        with self._lock:
            if self._owner.get(start) is not None:
                raise EngineError(f"a buffer was lent to {owner} while {self._owner[start]} has it")
            if start not in self._ends:
                bisect.insort(self._starts, start)
            self._ends[start] = start + buffer.nbytes
            self._owner[start] = owner

    def give_back(self, buffer: torch.Tensor, owner: object) -> None:
        self.check(buffer, owner, "give back")
        with self._lock:
            self._owner[buffer.data_ptr()] = None

    def check(self, view: torch.Tensor | None, owner: object, use: str) -> None:
        if view is None:
            return
        at = view.data_ptr()
        with self._lock:
            i = bisect.bisect_right(self._starts, at) - 1
            if i < 0 or at >= self._ends[self._starts[i]]:
                return
            has = self._owner[self._starts[i]]
        if has != owner:
            raise EngineError(f"{owner} was about to {use} a buffer that {has or 'nobody'} has: this is a fault in zinf")
