"""The host tier: one exactly sized allocation, cut into regions and equal slots.

    arena   one anonymous mapping: page-aligned, huge pages asked for, populated once, registered with the I/O engine
    region  a part of the arena that is carved once and keeps its meaning (a record that is resident, a staging area)
    slot    one of several equal regions that is acquired and released; it holds a chunk

Nothing is allocated after the arena: in a steady state memory only changes hands. The sum of all live arenas is
allocated_bytes(), which the engine holds against `host_memory`.

[Note: memory outlives its arena while a view lives]
close() gives the pages back to the system at once, but the addresses stay mapped until the last tensor carved from the arena
is gone, so a forgotten view reads zeros instead of crashing the process. Nobody may use a view after close(), and nothing may be
in flight. An arena that is dropped without close() keeps its bytes, since a transfer may still need them: they go with the last
view, or, where they are registered, with the I/O engine.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from zinf.errors import BudgetError, EngineError
from zinf.layout import PAGE, round_up

if TYPE_CHECKING:
    from zinf.aio import IoEngine

log = logging.getLogger("zinf")

HUGE = 2 << 20  # bytes of a huge page (x86-64, and arm64 with 4 KiB pages)
REGISTER = 1 << 30  # bytes: the kernel takes no larger registered buffer
POPULATE = 256 << 20  # bytes populated at a time, so that other threads get the GIL in between
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it
_POISON = 0xFF  # all ones is NaN in bf16, fp16 and fp32

_live: dict[int, int] = {}  # arena number -> bytes. One dict operation each: a finalizer may run anywhere, even within itself
_numbers = itertools.count()


def allocated_bytes() -> int:
    """Bytes of all live arenas of this process."""
    return sum(list(_live.values()))


class Arena:
    """One page-aligned allocation of exactly `nbytes` (rounded up to a page), carved from front to back.

    Attributes:
        nbytes: size in bytes.
        used: bytes carved so far.
        address: of the first byte; a multiple of 2 MiB where nbytes is at least that.
        registered: whether the I/O engine holds all of it as registered buffers.

    Raises:
        ValueError: nbytes is not positive.
        BudgetError: the machine, or the cgroup of this process, has not that much memory available.
    """

    def __init__(self, nbytes: int, io: IoEngine | None = None, *, poison: bool = False) -> None:
        if nbytes <= 0:
            raise ValueError(f"an arena needs a positive number of bytes, not {nbytes}")
        self.nbytes = round_up(nbytes, PAGE)
        self.used = 0
        self.poison = poison
        self.registered = False
        self._io: IoEngine | None = io
        self._pieces: list[int] = []  # addresses registered with io
        self._slots: list[Slots] = []
        self._closed = True  # until there is something to close
        self._pid = os.getpid()
        free = available_bytes()
        if free is not None and self.nbytes > free:
            raise BudgetError(f"host memory: {self.nbytes} bytes are asked for, and {free} are available: lower host_memory, or end what uses the rest")
        huge = self.nbytes >= HUGE
        # Address space for an aligned start; pages that are never touched cost nothing. Private: a shared mapping would be tmpfs.
        self._map = mmap.mmap(-1, self.nbytes + (HUGE - PAGE if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._start = -base % HUGE if huge else 0  # offset of the arena in the mapping
        self.address = base + self._start
        number = next(_numbers)
        _live[number] = self.nbytes
        self._forget = weakref.finalize(self._map, _live.pop, number, None)  # an arena that is dropped counts until its last view is gone
        self._closed = False
        try:
            self._advise()
            self._populate()
            self._register()
        except BaseException:
            self.close()
            raise

    def _advise(self) -> None:
        # A forked child (a data loader's worker) gets no copy: else each page that we write later would be copied for it,
        # which doubles the memory and moves pages away from under registered buffers. It must not touch the arena.
        for name, advice in (("MADV_HUGEPAGE", mmap.MADV_HUGEPAGE), ("MADV_DONTFORK", mmap.MADV_DONTFORK)):
            try:
                self._map.madvise(advice, self._start, self.nbytes)
            except OSError as e:
                log.info("the host arena goes on without %s (%s)", name, e.strerror)

    def _populate(self) -> None:
        """Touch every page now: a page fault in a step would be an allocation."""
        for at in range(0, self.nbytes, POPULATE):
            piece = min(POPULATE, self.nbytes - at)
            try:
                self._map.madvise(_MADV_POPULATE_WRITE, self._start + at, piece)
            except OSError:
                self._view(at, piece).zero_()

    def _register(self) -> None:
        if self._io is None:
            return
        for at in range(0, self.nbytes, REGISTER):
            if not self._io.register(self.address + at, min(REGISTER, self.nbytes - at), self._map):
                return  # the engine has said why; what is registered so far still helps
            self._pieces.append(self.address + at)
        self.registered = True

    def _view(self, offset: int, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8 over the mapping, which it keeps alive."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=self._start + offset)

    @property
    def left(self) -> int:
        """Bytes not carved yet."""
        return self.nbytes - self.used

    def carve(self, nbytes: int, what: str) -> torch.Tensor:
        """The next region: (nbytes,) uint8, page-aligned, zero. Its last page is its own even if it is not full.

        Raises:
            ValueError: not positive, or more than is left; names `what`.
            EngineError: the arena is closed.
        """
        if self._closed:
            raise EngineError(f"{what} is carved from an arena that is closed")
        if nbytes <= 0:
            raise ValueError(f"{what} needs a positive number of bytes, not {nbytes}")
        missing = round_up(nbytes, PAGE) - self.left
        if missing > 0:
            raise ValueError(f"host memory: {what} needs {nbytes} bytes, and {self.left} of {self.nbytes} are left: raise host_memory by {missing} bytes")
        region = self._view(self.used, nbytes)
        self.used += round_up(nbytes, PAGE)
        return region

    def slots(self, count: int, nbytes: int, what: str) -> Slots:
        """`count` equal regions of `nbytes`, handed out one at a time. Errors as carve; nothing is carved if they do not all fit."""
        if count <= 0:
            raise ValueError(f"{what} needs at least one slot, not {count}")
        need = count * round_up(nbytes, PAGE)
        if need > self.left:
            raise ValueError(
                f"host memory: {count} slots of {nbytes} bytes for {what} need {need} bytes, and {self.left} of {self.nbytes} are left: "
                f"raise host_memory by {need - self.left} bytes"
            )
        slots = Slots([self.carve(nbytes, what) for _ in range(count)], what, poison=self.poison)
        self._slots.append(slots)
        return slots

    def close(self) -> None:
        """Wake waiters, unregister, give the pages back. Idempotent. See [Note: memory outlives its arena while a view lives]."""
        if self._closed or self._pid != os.getpid():  # a forked child has no arena
            return
        self._closed = True
        for slots in self._slots:
            slots.close()
        for address in self._pieces:
            assert self._io is not None
            self._io.unregister(address)
        self._pieces.clear()
        self._io = None
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_DONTNEED, self._start, self.nbytes)
        self._forget()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Slot:
    """One acquisition of a slot: `buffer` is the holder's until release(). A `with` block releases it."""

    __slots__ = ("_home", "buffer", "index")

    def __init__(self, home: Slots, index: int) -> None:
        self._home: Slots | None = home
        self.index = index
        self.buffer = home.buffers[index]  # (nbytes,) uint8

    def release(self) -> None:
        """Give it back. Raises EngineError the second time: somebody else may hold the slot by then."""
        home, self._home = self._home, None
        if home is None:
            raise EngineError(f"slot {self.index} was released twice")
        home._give_back(self.index)

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Slots:
    """Equal staging buffers. Thread safe. The one released last is handed out first: its cache lines are still warm.

    Attributes:
        buffers: the slots' tensors, (nbytes,) uint8 each.
        nbytes: bytes of one slot.
    """

    def __init__(self, buffers: list[torch.Tensor], what: str, *, poison: bool = False) -> None:
        self.buffers = buffers
        self.what = what
        self.nbytes = buffers[0].numel()
        self._poison = poison
        self._free: deque[int] = deque(range(len(buffers)))
        self._changed = threading.Condition()  # a slot was released, or all were closed; acquire() waits
        self._closed = False

    def __len__(self) -> int:
        return len(self.buffers)

    @property
    def free(self) -> int:
        """Slots that nobody holds at this moment."""
        return len(self._free)

    def acquire(self, timeout: float | None = None) -> Slot:
        """A free slot; blocks until there is one.

        Raises:
            EngineError: closed, before or while waiting.
            TimeoutError: none became free within `timeout` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._free or self._closed, timeout):
                raise TimeoutError(f"no slot for {self.what} became free within {timeout} seconds; all {len(self)} are held")
            self._check_open()
            return Slot(self, self._free.pop())

    def try_acquire(self) -> Slot | None:
        """A free slot, or None if all are held. Raises EngineError when closed."""
        with self._changed:
            self._check_open()
            return Slot(self, self._free.pop()) if self._free else None

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(f"the slots for {self.what} are closed")

    def _give_back(self, index: int) -> None:
        if self._poison and not self._closed:
            self.buffers[index].fill_(_POISON)  # before anyone else can have it: what is read after release is NaN
        with self._changed:
            self._free.append(index)
            self._changed.notify()

    def close(self) -> None:
        """Wake every waiter with EngineError. Slots that are held may still be released. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def available_bytes() -> int | None:
    """Bytes of memory that can be had without swapping: of the machine, or of this process's cgroup if that is less. None if unknown."""
    limits: list[int] = []
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        with open("/proc/meminfo", encoding="ascii") as f:
            limits.append(next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable:")))
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        with open("/proc/self/cgroup", encoding="ascii") as f:
            group = next(line.split(":", 2)[2].strip() for line in f if line.startswith("0::"))
        limits.extend(_cgroup_available(f"/sys/fs/cgroup{group}"))
    return min(limits, default=None)


def _cgroup_available(folder: str) -> list[int]:
    """What memory.max leaves (cgroup v2); page cache counts as used there but is given back on demand. [] without a limit."""
    values = {}
    for name in ("memory.max", "memory.current"):
        with open(f"{folder}/{name}", encoding="ascii") as f:
            values[name] = f.read().strip()
    if values["memory.max"] == "max":
        return []
    with open(f"{folder}/memory.stat", encoding="ascii") as f:
        stats = dict(line.split() for line in f)
    cache = int(stats.get("active_file", 0)) + int(stats.get("inactive_file", 0))
    return [int(values["memory.max"]) - int(values["memory.current"]) + cache]
