"""Finds what a drive does for zinf: the block size and depth that suit it, and its rates for reading, writing, and both at once.

As the tiers use it: large records into and out of a registered, huge-paged arena, by the engine that a store uses, on a file that really stands
on the drive (random bytes; O_DIRECT where there is one). First blocks are tried at the usual depth, then depths at the best block, then that
pair once more for longer. A trial ends after some time or some bytes, whichever comes first: a search writes at most some 10 GB.

`both` reads and writes equally many bytes, in other halves of the file: a step's mix. A drive for which times simply add has
1/both = 1/read + 1/write; one that is faster in both directions at once has more, and some have less.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import glob
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zinf.aio import IoEngine, open_engine
from zinf.config import format_bytes, require
from zinf.errors import StoreError
from zinf.measured import BLOCK_SIZE, QUEUE_DEPTH, Drive
from zinf.tiers import directory
from zinf.tiers.host import Arena

KIB, MIB = 1 << 10, 1 << 20
BLOCKS = (512 * KIB, 1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB)
DEPTHS = (4, 8, 16, 32)
RECORD = 8 * MIB  # of one read or write of the tiers, about: the engine cuts it into blocks
FLIGHT = 16  # records in flight, as many as an engine's staging ring has about
FILE = 1 << 30
PREFIX = ".zinf-bench-"
MODES = ("read", "write", "both")
NEAR = 0.97  # of the best score: what is nearer than this is as good


@dataclasses.dataclass(frozen=True)
class Trial:
    """Bytes a second of one pair; of `both` each way."""

    block_size: int
    queue_depth: int
    read: float
    write: float
    both: float

    @property
    def score(self) -> float:
        """A step's rate: it reads and writes, at once where it can."""
        return (self.read * self.write * self.both) ** (1 / 3)


def trials() -> int:
    """Runs that a search makes, for a progress bar."""
    return len(MODES) * (len(BLOCKS) + len(DEPTHS) - 1 + 1)


def search(path: str, seconds: float = 25.0, size: int = FILE, backend: str = "auto", done: Callable[[], None] = lambda: None) -> tuple[Drive, list[Trial]]:
    """Measure the drive below the folder `path` for about `seconds`. `done` is called after each run.

    Raises:
        StoreError, OSError: the folder cannot be used, has no room, or the drive failed; nothing stays behind.
    """
    path = os.path.abspath(path)
    require(size >= 4 * MIB and size % MIB == 0, "--size", format_bytes(size), "whole MiB, at least 4")
    directory.check(path)
    each = seconds / (trials() + len(MODES))  # the last pair runs twice as long
    with _file(path, size, backend) as name:

        def trial(block: int, depth: int, seconds: float = each) -> Trial:
            rates = {}
            for mode in MODES:
                rates[mode] = _run(name, mode, block, depth, size, seconds, backend)
                done()
            return Trial(block, depth, **rates)

        found = [trial(block, QUEUE_DEPTH) for block in BLOCKS]
        block = best(found, (BLOCK_SIZE, QUEUE_DEPTH)).block_size
        deeper = [trial(block, depth) for depth in DEPTHS if depth != QUEUE_DEPTH]
        depth = best([t for t in found if t.block_size == block] + deeper, (block, QUEUE_DEPTH)).queue_depth
        final = trial(block, depth, 2 * each)
    when = datetime.date.today().isoformat()
    return Drive(path=path, when=when, block_size=block, queue_depth=depth, read=final.read, write=final.write, both=final.both), [*found, *deeper, final]


def best(found: list[Trial], usual: tuple[int, int]) -> Trial:
    """That with the highest score; but the `usual` (block, depth), where that is as good but for the noise of a measurement."""
    top = max(found, key=lambda t: t.score)
    return next((t for t in found if (t.block_size, t.queue_depth) == usual and t.score >= NEAR * top.score), top)


@contextlib.contextmanager
def _file(path: str, size: int, backend: str) -> Iterator[str]:
    """A file of random bytes, durable, on the drive."""
    _clean(path)
    directory.check_space({path: size}, what="the measurement", advice="or give a smaller --size")
    try:
        fd, name = tempfile.mkstemp(prefix=PREFIX, dir=path)
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as e:
        raise StoreError(f"{path} cannot be written to ({e.strerror}): give --path a folder on the drive that is yours") from e
    try:
        os.posix_fallocate(fd, 0, size)
        block = os.urandom(min(size, RECORD))
        for at in range(0, size, len(block)):
            os.pwrite(fd, block[: size - at], at)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        yield name
    finally:
        os.close(fd)
        os.unlink(name)


def _clean(path: str) -> None:
    """Remove the files of measurements that were killed: nobody holds their lock any more."""
    for name in glob.glob(os.path.join(glob.escape(path), PREFIX + "*")):
        with contextlib.suppress(OSError):
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name)
            finally:
                os.close(fd)


def _run(name: str, mode: str, block: int, depth: int, size: int, seconds: float, backend: str) -> float:
    """Bytes a second, of `both` each way."""
    io = open_engine(backend, block_size=block, queue_depth=depth)
    try:
        record = min(RECORD, size // 4)
        arena = Arena(FLIGHT * record, io)
        try:
            file = io.open(name, write=True)
            buffer = arena.carve(FLIGHT * record, "bench")
            return _move(io, file, buffer, mode, record, size, seconds)
        finally:
            arena.close()
    finally:
        io.close()


def _move(io: IoEngine, file: Any, buffer: torch.Tensor, mode: str, record: int, size: int, seconds: float) -> float:
    """Keep FLIGHT records in flight, one after the other through the file, until time or bytes are over; then wait for the last."""
    lanes = {"read": ["r"], "write": ["w"], "both": ["r", "w"]}[mode]
    span = size // len(lanes) // record  # records of a lane's part of the file
    flight = FLIGHT // len(lanes)
    queues: list[deque[Any]] = [deque() for _ in lanes]
    begun, moved = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds and moved * record < size:
        for k, kind in enumerate(lanes):
            if len(queues[k]) == flight:
                queues[k].popleft().wait()
            offset = (k * span + moved % span) * record
            address = buffer.data_ptr() + (k * flight + moved % flight) * record
            queues[k] += io.submit([(kind, file, offset, address, record)], buffer)
        moved += 1
    for queue in queues:
        for ticket in queue:
            ticket.wait()
    return moved * record / (time.perf_counter() - begun)
