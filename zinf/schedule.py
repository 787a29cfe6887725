"""The order in which a step uses its shards, and the two decisions that follow from it: what to fetch next, what to evict.

Pure. A step is a fixed cycle of uses (forward in order, backward in reverse), so an LRU would always evict what is needed
next; instead the victim is the shard whose next use is farthest away (Belady, 1966), which by itself keeps the last layers of
forward for backward, and the first layers of backward's end for the next forward.

The cycle is a hint, never a truth: it is learned from what really happened; a use that does not follow it is a miss, fetched
on demand and counted, and the cycle is learned again. Training and evaluation learn separately.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Phase(enum.Enum):
    """Which pass a use belongs to."""

    FORWARD = "forward"  # with a graph: a backward will come
    BACKWARD = "backward"  # recompute, or a saved view of the slab
    EVALUATE = "evaluate"  # forward without a graph


class Use(NamedTuple):
    """One use of one shard by compute."""

    phase: Phase
    shard: int

    def __repr__(self) -> str:
        return f"{self.phase.value[0].upper()}{self.shard}"


def training_cycle(order: Sequence[int]) -> list[Use]:
    """Forward in order, backward in reverse: the guess before anything was learned."""
    return [Use(Phase.FORWARD, s) for s in order] + [Use(Phase.BACKWARD, s) for s in reversed(order)]


class Cycle:
    """One learned cycle, and where in it the run stands."""

    def __init__(self, uses: Iterable[Use]):
        self.uses: list[Use] = list(uses)
        self.position = 0  # index of the next expected use
        self.misses = 0
        self._index()

    def _index(self) -> None:
        self._at: dict[int, list[int]] = {}
        for i, use in enumerate(self.uses):
            self._at.setdefault(use.shard, []).append(i)

    def replace(self, uses: Sequence[Use]) -> None:
        """Learn a new cycle; the next expected use is its first."""
        if list(uses) != self.uses:
            self.uses = list(uses)
            self._index()
        self.position = 0

    def advance(self, use: Use) -> bool:
        """The run is about to make `use`. True if it was the expected one; else skip to its next occurrence, or stay."""
        n = len(self.uses)
        for skipped in range(n):
            i = (self.position + skipped) % n
            if self.uses[i] == use:
                self.position = (i + 1) % n
                self.misses += skipped > 0
                return skipped == 0
        self.misses += 1
        return False

    def distance(self, shard: int) -> int:
        """How many uses until `shard` is used next, 0 for the next expected use; len(cycle) or more if never."""
        at = self._at.get(shard)
        if not at:
            return 2 * len(self.uses) + 1
        i = bisect.bisect_left(at, self.position)
        return at[i] - self.position if i < len(at) else at[0] + len(self.uses) - self.position

    def upcoming(self, count: int) -> list[int]:
        """The next `count` different shards, in the order in which they will be used."""
        found: dict[int, None] = {}
        for k in range(len(self.uses)):
            if len(found) == count:
                break
            found[self.uses[(self.position + k) % len(self.uses)].shard] = None
        return list(found)


def victim(candidates: Iterable[int], cycle: Cycle, before: int | None = None) -> int | None:
    """The shard among `candidates` whose next use is farthest away, lower index on ties.

    With `before`, only a shard that is used later than the shard `before` qualifies: a prefetch never evicts what compute
    needs first.
    """
    limit = -1 if before is None else cycle.distance(before)
    best, best_distance = None, limit
    for shard in sorted(candidates):
        distance = cycle.distance(shard)
        if distance > best_distance:
            best, best_distance = shard, distance
    return best


@dataclasses.dataclass(frozen=True)
class Move:
    """What a step does to slabs, in order: ("fetch" | "evict" | "compute", shard)."""

    verb: str
    shard: int

    def __repr__(self) -> str:
        return f"{self.verb} {self.shard}"


def moves(cycle: Sequence[Use], classes: Mapping[int, int], capacity: Sequence[int], lookahead: int, steps: int = 1) -> list[Move]:
    """All slab moves of the last of `steps` cycles, for the same decisions that the engine makes, as data.

    Args:
        cycle: the uses of one step.
        classes: shard -> class of slabs.
        capacity: slabs in each class.
        lookahead: how many shards ahead of compute are fetched.

    A fetch here is the moment it is started; whether it is waited for is the machine's affair.
    """
    state = Cycle(cycle)
    resident: set[int] = set()
    out: list[Move] = []

    def place(shard: int, before: int | None, busy: int | None) -> bool:
        peers = [s for s in resident if classes[s] == classes[shard] and s != busy]
        if sum(classes[s] == classes[shard] for s in resident) >= capacity[classes[shard]]:
            out_going = victim(peers, state, before)
            if out_going is None:
                return False
            resident.discard(out_going)
            out.append(Move("evict", out_going))
        resident.add(shard)
        out.append(Move("fetch", shard))
        return True

    for _ in range(steps):
        out.clear()
        for use in cycle:
            if use.shard not in resident:
                place(use.shard, None, None)
            state.advance(use)
            for ahead in state.upcoming(lookahead):
                if ahead not in resident and not place(ahead, ahead, use.shard):
                    break
            out.append(Move("compute", use.shard))
    return out
