"""What every I/O backend is, as types, and the few rules that they share.

    File    an open file
    Op      one read or write: ("r" or "w", file, file offset, memory address, length); offset, address and length in bytes
    Ticket  the promise of one op
    piece   a part of an op, at most block_size bytes: what the kernel sees

An op is cut into pieces; every piece that comes back is examined, in this order: retry (EINTR, EAGAIN), error, short (the rest is asked for
again), done. A failure cancels the pieces of that op which were not handed out yet, waits for those which were, and completes the op once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

PAGE = 4096  # bytes: alignment of offset, address and length with O_DIRECT


class File(Protocol):
    """An open file. `direct` says whether O_DIRECT is really in use, `note` why not where it was asked for."""

    @property
    def path(self) -> str: ...
    @property
    def writable(self) -> bool: ...
    @property
    def direct(self) -> bool: ...
    @property
    def note(self) -> str: ...
    @property
    def fd(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None:
        """Waits until nothing is in flight on it, then closes. Idempotent."""


Op = tuple[str, Any, int, int, int]


class Ticket(Protocol):
    """One op on its way. Dropping a ticket does not stop the op; its file and its owner live until it is complete."""

    def wait(self, timeout: float | None = None) -> None:
        """Returns when the op is complete (other threads run meanwhile); raises every time it is called if the op failed.

        OSError(errno, "read 1048576 bytes at 8192: Input/output error", path); errno ENODATA where the file ended early;
        TimeoutError after `timeout` seconds, the op then being still in flight. Ctrl-C interrupts the wait, not the op.
        """

    def done(self) -> bool:
        """Is it complete, well or badly? Never raises."""
        ...

    @property
    def times(self) -> tuple[float, float] | None:
        """When its first piece was handed to the kernel, and when it was complete, in seconds of time.perf_counter; None while it is in flight."""
        ...


class IoEngine(Protocol):
    name: str

    def open(self, path: str, *, write: bool, create: bool = False, direct: bool | str = "auto") -> Any:
        """`write` opens for reading and writing. "auto": O_DIRECT where the filesystem takes it, else buffered and one log line; True demands it.

        Files are created with mode 0600; the last component may not be a link. Raises OSError.
        """
        ...

    def register(self, address: int, nbytes: int, owner: object) -> bool:
        """Makes the range a fixed buffer of the ring and keeps `owner` alive until unregister() or close().

        Many ranges may be registered, at any time; ValueError if two overlap. False where it is not possible (one log line), never an error.
        """
        ...

    def unregister(self, address: int) -> None:
        """Forgets the range that starts at `address`; no-op where there is none. Nothing in it may be in flight."""

    def submit(self, ops: Sequence[Op], owner: object = None) -> list[Any]:
        """One ticket for each op. All ops are checked (ValueError, TypeError) before any is queued; then none is refused, whatever its length.

        `owner` is kept alive until the last of these ops is complete. Ops may be executed in any order and at the same time.
        """
        ...

    def datasync(self, file: Any) -> Any:
        """fdatasync: covers the writes whose tickets were complete before the call."""
        ...

    def stats(self) -> dict[str, int | float]:
        """Since the start: bytes_read, bytes_written (as they move), ops_read, ops_written, ops_datasync (complete), pieces, pieces_fixed (tries
        that used a registered buffer), retries, short, errors (ops that failed); in_flight (ops, now), busy_seconds (with an op in flight),
        registered_bytes (now)."""
        ...

    def report(self) -> dict[str, object]:
        """What is really in use, and why not what could be."""
        ...

    def close(self) -> None:
        """Waits for what is in flight, closes the files, ends the threads. Idempotent. Everything but stats() and report() then raises EngineError."""


def check_direct(direct: bool | str) -> int:
    """0: buffered, 1: O_DIRECT if possible, 2: O_DIRECT or an error."""
    if direct == "auto":
        return 1
    if direct is True or direct is False:
        return 2 if direct else 0
    raise ValueError(f'direct must be "auto", True or False, not {direct!r}')


def describe(verb: str, offset: int, length: int) -> str:
    return f"{verb} {length} bytes at {offset}" if length else verb


def check_options(block_size: int, queue_depth: int, threads: int) -> None:
    """Raises ValueError naming the option."""
    if not (PAGE <= block_size <= 1 << 30) or block_size % PAGE:
        raise ValueError(f"block_size must be a multiple of 4096 bytes, at most 1 GiB, not {block_size}")
    if not 1 <= queue_depth <= 4096:
        raise ValueError(f"queue_depth must be between 1 and 4096, not {queue_depth}")
    if not 1 <= threads <= 1024:
        raise ValueError(f"threads must be between 1 and 1024, not {threads}")
