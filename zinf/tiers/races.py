"""Is every access ordered by an event? A happens-before check over the streams of a device, for `sim` and for debug=True.

Four actors work at once: the host, compute, upload and offload. What an actor does is in order; between actors only these order:

    issue    whatever is issued comes after all that the host knows at that moment
    mark     carries what compute has done; uploaded and offloaded carry what their copy has
    wait     compute, or a copy's stream, waits for an event: what comes after it there comes after what the event carries
    told     the host waited for an event, or saw that it happened

Each actor has a vector clock, each range of memory its last accesses. An access that does not come after the last write, or a
write that does not come after the last reads, raises EngineError, whatever the delays of this run were. The numbers of a missing
wait are often right, and on another day not; this is wrong every time.

The host's threads count as one: what one of them waited for, all know. Compute is what the engine says that it computes from.
"""

from __future__ import annotations

import bisect
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zinf.errors import EngineError
from zinf.owners import Owners
from zinf.tiers.device import DONE, Device, Event

HOST, COMPUTE, UPLOAD, OFFLOAD = ACTORS = range(4)
NAMES = ("the host", "compute", "upload", "offload")
Clock = list[int]  # of each actor, how many of its accesses have happened


@dataclasses.dataclass
class Access:
    """Bytes [start, end) were read or written by `actor` at its `tick`."""

    start: int
    end: int
    actor: int
    tick: int
    writes: bool
    what: str


class Races:
    """The book of clocks and accesses. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clocks: list[Clock] = [[0] * len(ACTORS) for _ in ACTORS]
        self._bases: list[int] = []  # addresses of buffers that are accessed in parts, in order
        self._ends: dict[int, int] = {}
        self._device: set[int] = set()  # those of them that the host cannot reach
        self._last: dict[int, list[Access]] = {}
        self._error: EngineError | None = None  # found where it could not be raised
        self.checked = 0

    def know(self, buffer: torch.Tensor, device: bool = False) -> None:
        """Parts of `buffer` will be accessed."""
        base = buffer.data_ptr()
        with self._lock:
            if base not in self._ends:
                bisect.insort(self._bases, base)
            self._ends[base] = base + buffer.nbytes
            if device:
                self._device.add(base)

    def on_device(self, view: torch.Tensor) -> bool:
        with self._lock:
            return self._base(view.data_ptr()) in self._device

    def clock(self, actor: int) -> Clock:
        """What `actor` has done and waited for until now."""
        with self._lock:
            return list(self._clocks[actor])

    def join(self, actor: int, clock: Clock) -> None:
        """What `actor` does from now on comes after what `clock` has."""
        with self._lock:
            self._join(actor, clock)

    def access(self, actor: int, view: torch.Tensor, writes: bool, what: str) -> None:
        """`actor` is given the access now. Raises EngineError if it is not ordered after what it conflicts with."""
        start, end = view.data_ptr(), view.data_ptr() + view.nbytes
        with self._lock:
            if actor != HOST:
                self._join(actor, self._clocks[HOST])  # it is issued by the host
            mine = self._clocks[actor]
            last = self._last.setdefault(self._base(start), [])
            if self._error is not None:
                raise self._error
            for other in last:
                if other.start < end and start < other.end and (writes or other.writes) and mine[other.actor] < other.tick:
                    raise EngineError(
                        f"{NAMES[actor]} was about to {'write' if writes else 'read'} ({what}) what {NAMES[other.actor]} "
                        f"{'writes' if other.writes else 'reads'} ({other.what}), and no event orders the two: this is a fault in zinf"
                    )
            mine[actor] += 1
            self.checked += 1
            # What this one comes after, and covers, need not be looked at again.
            last[:] = [o for o in last if not (start <= o.start and o.end <= end and (writes or (o.actor == actor and not o.writes)))]
            last.append(Access(start, end, actor, mine[actor], writes, what))

    def hand_over(self, buffer: torch.Tensor, what: str) -> None:
        """The host gives a buffer away, or gets one. An error is raised by the next access: whoever hands over must come to the end of it."""
        try:
            self.access(HOST, buffer, True, what)
        except EngineError as error:
            self._error = error

    def _join(self, actor: int, clock: Clock) -> None:
        mine = self._clocks[actor]
        for i, tick in enumerate(clock):
            mine[i] = max(mine[i], tick)

    def _base(self, address: int) -> int:
        i = bisect.bisect_right(self._bases, address) - 1
        return self._bases[i] if i >= 0 and address < self._ends[self._bases[i]] else address


class Ordered:
    """An event, and what comes before it."""

    def __init__(self, event: Event, races: Races, clock: Clock):
        self.event, self.clock, self._races = event, clock, races

    def wait(self) -> None:
        self.event.wait()
        self._races.join(HOST, self.clock)

    def done(self) -> bool:
        done = self.event.done()
        if done:
            self._races.join(HOST, self.clock)
        return done


class OrderedDevice:
    """A device whose accesses are written down, and checked when they are issued."""

    def __init__(self, device: Device, races: Races):
        self.inner, self.races = device, races

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    name: str
    direct: bool
    torch_device: torch.device
    cpus: Sequence[int]

    def reserve(self, nbytes: int) -> None:
        self.inner.reserve(nbytes)

    def alloc(self, nbytes: int, what: str) -> torch.Tensor:
        buffer = self.inner.alloc(nbytes, what)
        self.races.know(buffer, device=True)
        return buffer

    def extend(self, nbytes: int, what: str) -> torch.Tensor | None:
        buffer = self.inner.extend(nbytes, what)
        if buffer is not None:
            self.races.know(buffer, device=True)
        return buffer

    def empty(self, nbytes: int) -> torch.Tensor:
        buffer = self.inner.empty(nbytes)
        self.races.access(COMPUTE, buffer, True, "allocation")  # what had it before may still be computing
        return buffer

    def room(self) -> int | None:
        return self.inner.room()

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        return self.inner.pin(address, nbytes)

    def mark(self) -> Event:
        return Ordered(self.inner.mark(), self.races, self.races.clock(COMPUTE))

    def wait(self, event: Event) -> None:
        event, clock = _inside(event)
        self.inner.wait(event)
        self.races.join(COMPUTE, clock)

    def upload(self, source: torch.Tensor, target: torch.Tensor, after: Event = DONE) -> Event:
        after, clock = _inside(after)
        self._copy(UPLOAD, source, target, clock)
        return Ordered(self.inner.upload(source, target, after), self.races, self.races.clock(UPLOAD))

    def offload(self, source: torch.Tensor, target: torch.Tensor, then: Callable[[], None] | None = None, after: Event | None = None) -> Event:
        after, clock = _inside(after if after is not None else self.mark())
        self._copy(OFFLOAD, source, target, clock)
        over, races = self.races.clock(OFFLOAD), self.races

        def told() -> None:
            races.join(HOST, over)
            assert then is not None
            then()

        return Ordered(self.inner.offload(source, target, told if then is not None else None, after), races, over)

    def poison(self, buffer: torch.Tensor) -> None:
        self.races.access(COMPUTE, buffer, True, "poison")
        self.inner.poison(buffer)

    def close(self) -> None:
        self.inner.close()

    def _copy(self, actor: int, source: torch.Tensor, target: torch.Tensor, after: Clock) -> None:
        self.races.join(actor, after)
        self.races.access(actor, source, False, "copy")
        self.races.access(actor, target, True, "copy")


class OrderedOwners(Owners):
    """The uses that owners tell of are accesses: of compute on the device, of the host in its own memory."""

    def __init__(self, races: Races):
        super().__init__()
        self._races = races

    def lend(self, buffer: torch.Tensor, owner: object) -> None:
        super().lend(buffer, owner)
        self._races.know(buffer)
        if not self._races.on_device(buffer):
            self._races.hand_over(buffer, "a new holder")  # the drive will write there

    def give_back(self, buffer: torch.Tensor, owner: object) -> None:
        if not self._races.on_device(buffer):
            self._races.hand_over(buffer, "release")
        super().give_back(buffer, owner)

    def check(self, view: torch.Tensor | None, owner: object, use: str) -> None:
        super().check(view, owner, use)
        self.uses(view, use)

    def uses(self, view: torch.Tensor | None, use: str) -> None:
        if view is None:
            return
        if use in ("compute from", "leave", "add to"):
            self._races.access(COMPUTE, view, use == "add to", use)
        elif use in ("step", "flush", "sum") and not self._races.on_device(view):  # what a step does to a slab is the upload's
            self._races.access(HOST, view, False, use)


def _inside(event: Event) -> tuple[Event, Clock]:
    return (event.event, event.clock) if isinstance(event, Ordered) else (event, [])
