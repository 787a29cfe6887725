"""Reading many chunks back and comparing their checksums, through a small ring of buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import xxhash

from zinf import layout
from zinf.tiers.chunk import Entry, Ticket, mismatch
from zinf.tiers.host import Arena

if TYPE_CHECKING:
    from zinf import aio

PIECE = 4 << 20  # bytes of one read
DEPTH = 8  # reads in flight

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
Report = Callable[[Exception], None]


def compare(
    io: aio.IoEngine, model: layout.Model, wanted: Sequence[tuple[Entry, int, int]], progress: Progress | None = None, report: Report | None = None
) -> None:
    """Compare each (entry, version, checksum) with what is on disk. Memory: DEPTH x PIECE bytes, whatever the chunks.

    Args:
        report: is told of each chunk that differs or cannot be read, and the rest is read too. Without it the first one is raised.

    Raises:
        IntegrityError: the first chunk that differs.
        OSError: a read failed.
    """
    pieces = [(entry, version, expected, at) for entry, version, expected in wanted for at in range(0, entry.length, PIECE)]
    if not pieces:
        return
    total, done = sum(entry.length for entry, _, _ in wanted), 0
    depth = min(DEPTH, len(pieces))
    size = min(PIECE, max(entry.length for entry, _, _ in wanted))
    with Arena(depth * layout.round_up(size, layout.PAGE), io) as arena:
        ring = [arena.carve(size, "verify") for _ in range(depth)]
        flight: deque[Ticket] = deque()  # oldest first; piece i reads into ring[i % depth]

        def start(first: int, last: int) -> None:
            ops = [
                ("r", entry.file, entry.offsets[version] + at, ring[i % depth].data_ptr(), min(size, entry.length - at))
                for i, (entry, version, _, at) in enumerate(pieces[first:last], first)
            ]
            tickets = io.submit(ops, ring)
            flight.extend(Ticket(model, entry, version, ticket) for (entry, version, _, _), ticket in zip(pieces[first:last], tickets, strict=True))

        try:
            start(0, depth)
            hasher, failed = xxhash.xxh3_64(), None
            for i, (entry, version, expected, at) in enumerate(pieces):
                failed = flight[0].error() or failed
                flight.popleft()
                length = min(size, entry.length - at)
                hasher.update(ring[i % depth][:length].numpy().data)
                if i + depth < len(pieces):
                    start(i + depth, i + depth + 1)
                if at + length == entry.length:
                    if failed is None and hasher.intdigest() != expected:
                        failed = mismatch(model, entry, version, hasher.intdigest(), expected)
                    if failed is not None:
                        _tell(failed, report)
                    hasher.reset()
                    failed = None
                    done += entry.length
                    if progress:
                        progress(done, total)
        finally:
            for ticket in flight:
                ticket.error()  # the ring is given back only when nothing is on its way into it


def _tell(error: Exception, report: Report | None) -> None:
    if report is None:
        raise error.with_traceback(None)
    report(error)
