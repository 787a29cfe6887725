"""The device tier behind one interface: slabs to compute from, and ordered copies to and from host memory.

    cpu   compute reads host memory: slabs lie in an arena, NVMe reads land in them, copies are nothing
    sim   CPU compute behind a separate "device" memory: copies are asynchronous, in order per direction, randomly delayed,
          so that a missing wait fails a test on a machine without a GPU
    cuda  a card: three streams and their events; see zinf/tiers/cuda.py

An Event marks the end of a copy, or of the compute that was issued when `mark` was called. The host waits with `event.wait()`;
compute is made to wait with `device.wait(event)`, which on a card is a stream waiting for an event, and else the same thing.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from zinf.aio import IoEngine
from zinf.errors import BudgetError, ConfigError, EngineError
from zinf.tiers.host import Arena


class Event(Protocol):
    """The end of one copy, or of compute."""

    def wait(self) -> None:
        """Block the calling thread until it has happened; raises what the copy raised."""

    def done(self) -> bool:
        """Is it over? Never blocks, never raises."""


class Done:
    """An event that has already happened."""

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


DONE = Done()


class Device(Protocol):
    """What the engine asks of a device. Buffers are 1-D uint8 tensors."""

    name: str
    direct: bool  # compute reads host memory: a slab is host memory, and upload and offload move nothing
    torch_device: torch.device
    cpus: Sequence[int]  # cores near the device, for what works for it; empty where that is unknown, or all the same

    def alloc(self, nbytes: int, what: str) -> torch.Tensor:
        """A page-aligned buffer in device memory, for good; carved from what `reserve` set aside."""

    def reserve(self, nbytes: int) -> None:
        """Set aside the device memory that zinf will use. Once. Raises BudgetError where the device has not that much free."""

    def extend(self, nbytes: int, what: str) -> torch.Tensor | None:
        """One more buffer beyond what was reserved; None where there is no room for it."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Device memory that lives as long as the tensor, on account of torch's allocator. Raises torch.OutOfMemoryError."""

    def room(self) -> int | None:
        """Bytes of device memory that could be had besides what torch and zinf hold, less a margin; None where host memory is the limit."""

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        """Let copies to and from this host memory run by themselves; returns what undoes it."""

    def mark(self) -> Event:
        """Happens when all compute that the calling thread has issued so far is over."""

    def upload(self, source: torch.Tensor, target: torch.Tensor, after: Event = DONE) -> Event:
        """Copy host -> device once `after` has happened. `source` must not change before the event."""

    def offload(self, source: torch.Tensor, target: torch.Tensor, then: Callable[[], None] | None = None, after: Event | None = None) -> Event:
        """Copy device -> host once `after` has happened (None: all compute issued so far); `then` runs (on a copy thread) before the event happens."""

    def wait(self, event: Event) -> None:
        """Make compute issued from now on wait for `event`."""

    def poison(self, buffer: torch.Tensor) -> None:
        """Fill a released buffer with NaN, after all compute issued so far (debug)."""

    def close(self) -> None:
        """Wait for the copies in flight, stop their threads, free the memory. Idempotent."""


class _OnHost:
    """What the devices that compute on the CPU share."""

    torch_device = torch.device("cpu")
    cpus: Sequence[int] = ()

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def room(self) -> int | None:
        return None

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        return lambda: None

    def mark(self) -> Event:
        return DONE  # compute is over when its call returns

    def wait(self, event: Event) -> None:
        event.wait()

    def poison(self, buffer: torch.Tensor) -> None:
        buffer.fill_(0xFF)


class CpuDevice(_OnHost):
    """Compute from page-aligned slabs in host memory."""

    name = "cpu"
    direct = True

    def __init__(self, io: IoEngine | None = None):
        self._io = io
        self._arena: Arena | None = None

    def reserve(self, nbytes: int) -> None:
        self._arena = Arena(nbytes, self._io) if nbytes else None

    def alloc(self, nbytes: int, what: str) -> torch.Tensor:
        if self._arena is None:
            raise EngineError(f"no device memory was reserved, and {what} wants {nbytes} bytes")
        return self._arena.carve(nbytes, what)

    def extend(self, nbytes: int, what: str) -> torch.Tensor | None:
        return None

    def upload(self, source: torch.Tensor, target: torch.Tensor, after: Event = DONE) -> Event:
        after.wait()
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
        return DONE

    def offload(self, source: torch.Tensor, target: torch.Tensor, then: Callable[[], None] | None = None, after: Event | None = None) -> Event:
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
        if then is not None:
            then()
        return DONE

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None


class Copy:
    """One asynchronous copy, and its event."""

    def __init__(self, run: Callable[[], None]):
        self.run = run
        self.error: BaseException | None = None
        self.times: tuple[float, float] | None = None  # when it ran, seconds of time.perf_counter
        self._over = threading.Event()

    def begin(self) -> None:
        self._began = time.perf_counter()

    def finish(self, error: BaseException | None) -> None:
        self.error, self.times = error, (self._began, time.perf_counter())
        self._over.set()

    def wait(self) -> None:
        self._over.wait()
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return self._over.is_set()


class Courier(threading.Thread):
    """Copies in one direction, in order, each after a random delay."""

    def __init__(self, name: str, seed: int = 0, delay: float = 0.0):
        super().__init__(name=name, daemon=True)
        self.queue: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._random, self._delay = random.Random(seed), delay
        self.start()

    def run(self) -> None:
        while (copy := self.queue.get()) is not None:
            if self._delay:
                time.sleep(self._random.random() * self._delay)
            copy.begin()
            try:
                copy.run()
            except BaseException as error:
                copy.finish(error)
            else:
                copy.finish(None)
            del copy  # what it holds must not outlive it until the next one comes

    def put(self, run: Callable[[], None]) -> Copy:
        copy = Copy(run)
        self.queue.put(copy)
        return copy

    def stop(self) -> None:
        self.queue.put(None)
        self.join()


class SimDevice(_OnHost):
    """A separate memory with two asynchronous copy streams, for finding missing waits without a GPU.

    Args:
        seed: of the delays.
        delay: the longest delay of a copy, seconds.
        memory: bytes of the device beside what activations take; None: as much as is asked for.
    """

    name = "sim"
    direct = False

    def __init__(self, seed: int = 0, delay: float = 1e-3, memory: int | None = None):
        self._free = memory
        self._memory: torch.Tensor | None = None
        self._used = 0
        # upload: host -> device, in order; overlaps with compute and with offload; compute waits for its event before it reads the slab
        self._upload = Courier("zinf-sim-upload", seed, delay)
        # offload: device -> host, in order; overlaps with compute and with upload; the host waits for its event before it reads the grads
        self._offload = Courier("zinf-sim-offload", seed + 1, delay)

    def reserve(self, nbytes: int) -> None:
        if self._free is not None:
            if nbytes > self._free:
                raise BudgetError(f"device memory: zinf needs {nbytes} bytes and {self._free} are free: lower device_memory")
            self._free -= nbytes
        self._memory = torch.full((nbytes + 4096,), 0xFF, dtype=torch.uint8)
        self._used = -self._memory.data_ptr() % 4096

    def alloc(self, nbytes: int, what: str) -> torch.Tensor:
        if self._memory is None or self._used + nbytes > self._memory.numel():
            raise EngineError(f"device memory: {what} wants {nbytes} bytes beyond what was reserved")
        start, self._used = self._used, self._used + -(-nbytes // 4096) * 4096
        return self._memory[start : start + nbytes]

    def extend(self, nbytes: int, what: str) -> torch.Tensor | None:
        if self._free is None or self._free < nbytes:
            return None
        self._free -= nbytes
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8)

    def room(self) -> int | None:
        return self._free

    def upload(self, source: torch.Tensor, target: torch.Tensor, after: Event = DONE) -> Event:
        def run() -> None:
            after.wait()
            target.copy_(source)

        return self._upload.put(run)

    def offload(self, source: torch.Tensor, target: torch.Tensor, then: Callable[[], None] | None = None, after: Event | None = None) -> Event:
        def run() -> None:
            if after is not None:
                after.wait()
            target.copy_(source)
            if then is not None:
                then()

        return self._offload.put(run)

    def close(self) -> None:
        if self._upload.is_alive():
            self._upload.stop()
            self._offload.stop()
        self._memory = None


def is_direct(name: str) -> bool:
    """Would compute on the device of that name read host memory?"""
    return name == "cpu" or (name == "auto" and not torch.cuda.is_available())


def open_device(name: str, io: IoEngine | None = None, *, seed: int = 0) -> Device:
    """The device called `name`: auto (a card if there is one), cpu, cuda or sim. Raises ConfigError for one that cannot be used."""
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        from zinf.tiers.cuda import CudaDevice

        return CudaDevice()
    if name in ("auto", "cpu"):
        return CpuDevice(io)
    if name == "sim":
        return SimDevice(seed)
    raise ConfigError(f"device is {name!r}; there are auto, cpu, cuda and sim")
