"""One chunk on NVMe, and the ticket of one transfer of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import cffi
import torch
import xxhash

from zinf import layout
from zinf.errors import IntegrityError
from zinf.layout import Key

if TYPE_CHECKING:
    from zinf import aio


def _without_gil() -> Callable[[int, int], int] | None:
    """XXH3_64bits(address, length) out of the xxhash package itself, called so that other threads run meanwhile.

    The package's own functions keep the GIL, which costs compute a millisecond for each chunk of a step. None where its
    symbols are not visible.
    """
    ffi = cffi.FFI()
    ffi.cdef("uint64_t XXH3_64bits(const void *input, size_t length);")
    try:
        library = ffi.dlopen(xxhash._xxhash.__file__)  # type: ignore[attr-defined]
        function = library.XXH3_64bits
    except (AttributeError, OSError):
        return None
    return lambda address, length: int(function(ffi.cast("void *", address), length))


_xxh3 = _without_gil()


def checksum(data: torch.Tensor) -> int:
    """xxh3_64 of the bytes of a 1-D contiguous uint8 CPU tensor."""
    if _xxh3 is None:
        return xxhash.xxh3_64_intdigest(data.numpy().data)
    return _xxh3(data.data_ptr(), data.numel())


def describe(model: layout.Model, key: Key) -> str:
    """What a user needs to know of a chunk: kind, shard, and the parameters in its range."""
    kind, s, r, c = key
    run = model.shards[s].runs[r]
    start = c * model.chunk
    names = [p.name for p in run.params if p.offset < start + model.chunk and p.offset + p.numel > start]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{kind} of shard {model.shards[s].name!r}, chunk {c} of run {r} ({run.dtype}), parameters {shown or 'none'}"


class Busy(Protocol):
    """A transfer in flight, or a read that is still to come (snapshot.Hold)."""

    @property
    def version(self) -> int: ...
    def done(self) -> bool: ...
    def error(self) -> Exception | None:
        """Wait until it is over."""


class Entry:
    """Where a chunk stands, which version of it is the newest, and what is in flight.

    The committed version and its checksum are the manifest's; the newest is what reads give. They differ from the first
    write of a step to the commit. Everything here changes under the store's lock only.
    """

    __slots__ = ("file", "frozen", "index", "key", "length", "newest", "newest_sum", "offsets", "path", "reads", "writing")

    def __init__(self, index: int, key: Key, places: tuple[layout.Place, ...], file: aio.File, version: int, digest: int) -> None:
        self.index = index  # in the manifest's order
        self.key = key
        self.path = places[0].path
        self.file = file  # both versions stand in one file
        self.frozen = places[0].file == "frozen"
        self.offsets = tuple(p.offset for p in places)  # bytes, one for each version
        self.length = places[0].length  # bytes
        self.newest = version  # 0, 1 or UNWRITTEN
        self.newest_sum = digest
        self.writing: Ticket | None = None  # the last write of the newest version, until it is known to be good
        self.reads: list[Busy] = []  # in flight, of any version

    def busy_reads(self, version: int) -> list[Busy]:
        """Reads of `version` that a write to its place must wait for; forgets those that are over."""
        if self.reads:
            self.reads = [t for t in self.reads if not t.done()]
        return [t for t in self.reads if t.version == version]


class Ticket:
    """One transfer of one chunk. Errors name the chunk; with a checksum to compare, wait() compares it.

    wait() may be called by several threads and again: it gives the same answer.
    """

    __slots__ = ("_digest", "_error", "_inner", "_model", "_settled", "_tensor", "entry", "version")
    version: int

    def __init__(
        self, model: layout.Model, entry: Entry, version: int, inner: aio.Ticket | None, tensor: torch.Tensor | None = None, digest: int | None = None
    ) -> None:
        self._model = model
        self.entry = entry
        self.version = version
        self._inner = inner  # None: nothing to do, or it failed before it began
        self._tensor = tensor  # only where a checksum will be compared
        self._digest = digest
        self._error: Exception | None = None
        self._settled = inner is None

    @classmethod
    def failed(cls, model: layout.Model, entry: Entry, version: int, error: Exception) -> Ticket:
        """A transfer that could not even be submitted."""
        ticket = cls(model, entry, version, None)
        ticket._error = error
        return ticket

    def done(self) -> bool:
        """True once wait() would not block. Never raises."""
        return self._settled or self._inner is None or self._inner.done()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the transfer is over.

        Raises:
            OSError: it failed; names path, operation, offset, length and the chunk.
            IntegrityError: the bytes are not those that were written.
            TimeoutError: it is not over after `timeout` seconds.
        """
        if not self._settled:
            self._settle(timeout)
        if self._error is not None:
            raise self._error.with_traceback(None)

    def error(self) -> Exception | None:
        """wait(), but what went wrong is returned."""
        if not self._settled:
            self._settle(None)
        return self._error

    def _settle(self, timeout: float | None) -> None:
        inner = self._inner
        if inner is None:  # another thread was here first
            return
        try:
            inner.wait(timeout)
        except TimeoutError as e:
            if e.errno is None:
                raise  # only the waiting is over; ETIMEDOUT of a network drive has an errno
            self._fail(e)
        except OSError as e:
            self._fail(e)
        else:
            self._compare()
        self._settled = True
        self._inner = self._tensor = None

    def _fail(self, e: OSError) -> None:
        self._error = OSError(e.errno, f"{e.strerror} ({describe(self._model, self.entry.key)})", e.filename or self.entry.file.path)

    def _compare(self) -> None:
        tensor = self._tensor
        if tensor is not None and self._digest is not None and (found := checksum(tensor)) != self._digest:
            self._error = mismatch(self._model, self.entry, self.version, found, self._digest)


def mismatch(model: layout.Model, entry: Entry, version: int, found: int, expected: int) -> IntegrityError:
    """The error for bytes that are not what was written."""
    return IntegrityError(
        f"{entry.file.path}: {entry.length} bytes at offset {entry.offsets[version]} are not what was written there "
        f"(xxh3 {found:016x}, expected {expected:016x}): "
        f"{describe(model, entry.key)}; the drive or the memory of this machine changed them: restore the store from a checkpoint"
    )


def check_tensor(tensor: torch.Tensor, entry: Entry) -> int:
    """The address of a tensor that a chunk can be read into or written from. Raises TypeError or ValueError."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.uint8 or tensor.device.type != "cpu":
        raise TypeError(
            f"{entry.key}: a chunk is a uint8 CPU tensor, not {getattr(tensor, 'dtype', type(tensor).__name__)} on {getattr(tensor, 'device', 'no device')}"
        )
    if tensor.dim() != 1 or tensor.numel() != entry.length or not tensor.is_contiguous():
        raise ValueError(f"{entry.key}: the chunk is {entry.length} contiguous bytes, the tensor has shape {tuple(tensor.shape)} and strides {tensor.stride()}")
    address = tensor.data_ptr()
    if address % layout.PAGE:
        raise ValueError(f"{entry.key}: the tensor starts {address % layout.PAGE} bytes after a page; carve it from an Arena")
    return address
