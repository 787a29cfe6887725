"""What the link between host and device carries: copies of the engine's own device, by kind of host memory and by direction.

    registered  the engine's: an arena, registered with the card in pieces
    pinned      torch's pin_memory, for comparison
    unpinned    plain memory: the driver copies it once more, and waits

up and down alone, both at once (each way), and both at once while a drive is read and written into the same arena (each way; the drive's rate, both
ways together, beside it).
Bytes a second. A copy is as large as a few chunks, so that its start does not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import torch

from zinf.aio import open_engine
from zinf.errors import ConfigError
from zinf.tiers.device import Device, is_direct, open_device
from zinf.tiers.host import Arena

COPY = 64 << 20  # bytes of one
BLOCK = 4 << 20  # of the drive's reads and writes
KINDS = ("registered", "pinned", "unpinned")


@dataclasses.dataclass(frozen=True)
class Rates:
    """Of one kind of host memory. None: this machine has no such memory."""

    kind: str
    up: float | None
    down: float | None
    both: float | None  # each way


@dataclasses.dataclass(frozen=True)
class Link:
    """All that was measured. `drive` and `with_drive` are of registered memory; None: no path was given."""

    device: str
    rates: tuple[Rates, ...]
    with_drive: float | None
    drive: float | None

    @property
    def planned(self) -> float:
        """What a plan may count on, each way."""
        registered = self.rates[0]
        return min(rate for rate in (registered.up, registered.down, registered.both, self.with_drive) if rate is not None)


def measure(path: str | None = None, seconds: float = 8.0, device: str = "cuda", copy: int = COPY, done: Callable[[], None] = lambda: None) -> Link:
    """Measure for about `seconds`; with `path` also beside a drive there. `done` is called after each run, of which there are `runs(path)`.

    Raises:
        ConfigError: there is no link: compute reads host memory.
    """
    if is_direct(device):
        raise ConfigError(f"compute on {device} reads host memory, so nothing crosses a link: give cuda, or sim")
    card = open_device(device)
    each = seconds / runs(path)
    try:
        card.reserve(2 * copy + (2 << 12))
        buffers = [card.alloc(copy, "bench") for _ in range(2)]
        rates = []
        with_drive = drive = None
        for kind in KINDS:
            with _host(kind, card, copy) as host:
                if host is None:
                    rates.append(Rates(kind, None, None, None))
                    continue
                found = []
                for mode in ("up", "down", "both"):
                    found.append(_rate(card, host, buffers, mode, each))
                    done()
                rates.append(Rates(kind, *found))
                if kind == "registered" and path is not None:
                    with _traffic(path, copy) as moved:
                        with_drive = _rate(card, host, buffers, "both", each)
                    drive = moved()
                    done()
    finally:
        card.close()
    name = torch.cuda.get_device_name() if card.name == "cuda" and card.torch_device.type == "cuda" else card.name
    return Link(name, tuple(rates), with_drive, drive)


def runs(path: str | None) -> int:
    """Runs of a measurement, for a progress bar."""
    return 3 * len(KINDS) + (path is not None)


def _rate(card: Device, host: list[torch.Tensor], buffers: list[torch.Tensor], mode: str, seconds: float) -> float:
    """Bytes a second each way, after one copy that warms up."""

    def once() -> None:
        events = []
        if mode != "down":
            events.append(card.upload(host[0], buffers[0]))
        if mode != "up":
            events.append(card.offload(buffers[1], host[1]))
        for event in events:
            event.wait()

    once()
    begun, count = time.perf_counter(), 0
    while count < 2 or time.perf_counter() < begun + seconds:
        once()
        count += 1
    return count * host[0].nbytes / (time.perf_counter() - begun)


@contextlib.contextmanager
def _host(kind: str, card: Device, copy: int) -> Iterator[list[torch.Tensor] | None]:
    """Two buffers of `copy` bytes; None where there is no such memory."""
    if kind == "registered":
        arena = Arena(2 * copy)
        undo = card.pin(arena.address, arena.nbytes)
        try:
            yield [arena.carve(copy, "bench") for _ in range(2)]
        finally:
            undo()
            arena.close()
        return
    buffers: list[torch.Tensor] | None = [torch.ones(copy, dtype=torch.uint8) for _ in range(2)]
    if kind == "pinned" and buffers is not None:
        try:
            buffers = [b.pin_memory() for b in buffers]
        except RuntimeError:  # a torch without a card
            buffers = None
    yield buffers


@contextlib.contextmanager
def _traffic(path: str, size: int) -> Iterator[Callable[[], float]]:
    """Read and write a file below `path`, at once, for as long as the block runs; yields what tells the bytes a second, both ways together."""
    stop, moved, error = threading.Event(), [0, 0.0], []
    block = min(BLOCK, size)
    with tempfile.TemporaryDirectory(dir=path, prefix="zinf-bench-") as folder:
        io = open_engine()
        arena = Arena(2 * size, io)
        buffer = arena.carve(2 * size, "bench")
        file = io.open(os.path.join(folder, "link.bin"), write=True, create=True)
        base, at = buffer.data_ptr(), range(0, size, block)

        def batch(kinds: str) -> None:
            ops = [(kind, file, k * size + a, base + k * size + a, block) for k, kind in enumerate(kinds) for a in at]
            for ticket in io.submit(ops, buffer):
                ticket.wait()
            moved[0] += len(ops) * block

        def run() -> None:
            try:
                begun, moved[0] = time.perf_counter(), 0
                while not stop.is_set():
                    batch("rw")
                moved[1] = time.perf_counter() - begun
            except BaseException as e:
                error.append(e)

        thread = threading.Thread(target=run, name="zinf-bench-drive")
        try:
            batch("ww")
            thread.start()
            yield lambda: moved[0] / moved[1]
        finally:
            stop.set()
            if thread.ident is not None:
                thread.join()
            file.close()
            io.close()
            arena.close()
    if error:
        raise error[0]
