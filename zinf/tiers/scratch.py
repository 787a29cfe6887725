"""Room on NVMe for what no commit names: grads and activations that wait there within a step.

A scratch is one range of bytes, cut into stripes over the directories of a store, whose lock its owner holds. Its files have
all their blocks before anything is written, so a disk that fills up is found here and not in a transfer; and no name: whatever
ends the process, nothing stays behind. `Space` says which bytes of such a range (or of a region of host memory) are free.

With `verify: always` the checksum of each piece that is written stays in memory, and whoever reads compares.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zinf.errors import IntegrityError
from zinf.layout import PAGE, round_up
from zinf.tiers import directory
from zinf.tiers.chunk import checksum

if TYPE_CHECKING:
    from zinf import aio

STRIPE = 1 << 20  # bytes on one path before the next one's turn


class Space:
    """The free bytes of a range, in pages, first fit.

    Attributes:
        used: bytes taken now.
        end: where the highest byte ever taken ends.
    """

    def __init__(self, nbytes: int | None = None):
        """None: a range without end."""
        self.used = self.end = 0
        self._free: list[tuple[int, int]] = [(0, nbytes if nbytes is not None else 1 << 62)]  # (start, end), ascending, never touching

    def take(self, nbytes: int) -> int | None:
        """The start of `nbytes` that are the caller's until `give`; None where no free range is that long."""
        need = round_up(nbytes, PAGE)
        for i, (start, end) in enumerate(self._free):
            if end - start >= need:
                self._free[i : i + 1] = [(start + need, end)] if end - start > need else []
                self.used += need
                self.end = max(self.end, start + need)
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """The inverse of `take`."""
        end = start + round_up(nbytes, PAGE)
        self.used -= end - start
        i = bisect.bisect(self._free, (start, end))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i and self._free[i - 1][1] == start:
            i -= 1
            start = self._free.pop(i)[0]
        self._free.insert(i, (start, end))


class Scratch:
    """Files without a name on the paths of a store, addressed as one range. Not for concurrent use of the same bytes."""

    def __init__(self, paths: Sequence[str], name: str, io: aio.IoEngine, advice: str, verify: bool = False):
        """`name` (one of directory.SCRATCH) and `advice` (what to change where there is no room) are for errors."""
        self._paths, self._name, self._io, self._advice = list(paths), name, io, advice
        self._sums: dict[int, tuple[int, int]] | None = {} if verify else None  # start of a piece: (bytes, checksum) as last written
        self._files: list[Any] = []
        self._each = 0  # bytes of each file
        try:
            for path in self._paths:
                full = os.path.join(path, name)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(full)  # of a run that was killed between the next two lines
                self._files.append(io.open(full, write=True, create=True))
                os.unlink(full)
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        return self._each * len(self._files)

    def grow(self, nbytes: int) -> None:
        """Have at least `nbytes` in all, allocated.

        Raises:
            StoreError: they are not free; names the need and what is there.
            OSError: the disk failed, or filled up meanwhile.
        """
        each = round_up(-(-nbytes // len(self._files)), STRIPE)
        more = each - self._each
        if more <= 0:
            return
        directory.check_space({path: more for path in self._paths}, what=f"{nbytes} bytes of {self._name}", advice=self._advice)
        for path, file in zip(self._paths, self._files, strict=True):
            try:
                os.posix_fallocate(file.fd, self._each, more)
            except OSError as e:
                raise OSError(e.errno, f"allocate {more} bytes: {os.strerror(e.errno or 0)}", os.path.join(path, self._name)) from e
        self._each = each

    def read(self, start: int, buffer: torch.Tensor) -> list[aio.Ticket]:
        """Start reading into `buffer` (uint8, whole pages, page-aligned), which is the reader's until its tickets are done.

        With `verify` it must be one or more whole pieces, and the tickets' wait raises IntegrityError if they are not what was written.
        """
        tickets = self._io.submit(list(self._ops("r", start, buffer)), buffer)
        return tickets if self._sums is None else [_Compared(tickets, lambda: self._compare(start, buffer))]

    def write(self, start: int, buffer: torch.Tensor, cuts: Iterable[int] = ()) -> list[aio.Ticket]:
        """Start writing `buffer`, which must not change until its tickets are done. `cuts`: where in it pieces begin that are read alone."""
        if self._sums is not None:
            bounds = [0, *cuts, buffer.numel()]
            for a, b in itertools.pairwise(bounds):
                self._sums[start + a] = (b - a, checksum(buffer[a:b]))
        return self._io.submit(list(self._ops("w", start, buffer)), buffer)

    def _compare(self, start: int, buffer: torch.Tensor) -> None:
        assert self._sums is not None
        at = 0
        while at < buffer.numel():
            nbytes, digest = self._sums[start + at]
            if checksum(buffer[at : at + nbytes]) != digest:
                (_, file, offset, _, _) = next(self._ops("r", start + at, buffer[at : at + nbytes]))
                raise IntegrityError(
                    f"{file.path}: {nbytes} bytes of {self._name}, from offset {offset} on, are not what was written there in this step: "
                    f"nothing that is committed is touched by that, recover() goes on; look at the drive"
                )
            at += nbytes

    def _ops(self, kind: str, start: int, buffer: torch.Tensor) -> Iterator[aio.Op]:
        address, end = buffer.data_ptr() - start, start + buffer.numel()
        while start < end:
            stripe, inside = divmod(start, STRIPE)
            row, column = divmod(stripe, len(self._files))
            n = min(STRIPE - inside, end - start)
            yield (kind, self._files[column], row * STRIPE + inside, address + start, n)
            start += n

    def close(self) -> None:
        """Give the blocks back. Idempotent; waits for what is in flight."""
        for file in self._files:
            file.close()
        self._files = []


class _Compared:
    """The tickets of one read as one ticket, that compares once all have landed."""

    def __init__(self, tickets: list[aio.Ticket], compare: Callable[[], None]):
        self._tickets, self._compare = tickets, compare

    def wait(self, timeout: float | None = None) -> None:
        for ticket in self._tickets:
            ticket.wait(timeout)
        self._compare()

    def done(self) -> bool:
        return all(ticket.done() for ticket in self._tickets)

    @property
    def times(self) -> tuple[float, float] | None:
        times = [ticket.times for ticket in self._tickets]
        known = [t for t in times if t is not None]
        return (min(t[0] for t in known), max(t[1] for t in known)) if len(known) == len(times) else None
