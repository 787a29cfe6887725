"""The device tier on a card: NVIDIA's, or AMD's through ROCm, whose torch has the same names.

Three streams:

    compute  whatever stream of torch's is current where the model runs (also autograd's thread); zinf issues nothing there but waits
    upload   host -> device, in order; overlaps with compute and with offload
    offload  device -> host, in order; overlaps with compute and with upload

and four kinds of events:

    mark      on compute; all compute issued so far. Upload waits for it before it overwrites a slab, offload before it reads grads
    uploaded  on upload; the end of one copy. Compute waits for it before it reads the slab, the host before it reuses the slot
    offloaded on offload; the end of one copy. The courier waits for it, on the host, and then says so to whoever asked
    (close waits for both streams; nothing else ever waits for a stream, or for the device)

The host runs ahead of the card: a fetch is issued as soon as its bytes land in host memory, an offload as soon as its grads are
packed, whatever compute has come to by then. Slabs are carved from one plain allocation, made once; torch's caching allocator
sees no other request from here, but for activations that come back.

[Note: no record_stream] A buffer of torch's allocator that another stream works on is held by that copy until its event has
happened on the host. So the allocator, which only knows the stream that it allocated on, never gives such memory away, and a
copy into new memory waits for a mark made after its allocation, as the memory may be what compute still reads.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zinf.errors import BudgetError, ConfigError, EngineError
from zinf.layout import PAGE, round_up
from zinf.tiers import numa
from zinf.tiers.device import DONE, Courier, Event

log = logging.getLogger("zinf")

PIECE = 1 << 30  # bytes registered at a time: a driver that refuses more still pins the first
MARGIN = 0.04  # of the card, and at least LEAST bytes, that "auto" leaves to fragments, cuBLAS and other users
LEAST = 512 << 20


class CudaEvent:
    """A point of a stream."""

    def __init__(self, stream: torch.cuda.Stream):
        self.event = torch.cuda.Event(blocking=True)  # a host thread that waits sleeps
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()

    def done(self) -> bool:
        return self.event.query()


class CudaDevice:
    """One card. See the module's docstring.

    Raises:
        ConfigError: torch has no card to use, and why.
    """

    name = "cuda"
    direct = False

    def __init__(self, index: int | None = None):
        check_usable()
        self.torch_device = card(index)
        self.cpus: Sequence[int] = numa.near(bus_id(self.torch_device))
        self._memory: torch.Tensor | None = None
        self._used = 0
        self._lock = threading.Lock()  # an upload's wait, copy and record stay together, as several threads upload
        self._upload: torch.cuda.Stream | None = torch.cuda.Stream(self.torch_device)
        self._offload = torch.cuda.Stream(self.torch_device)
        self._courier = Courier("zinf-cuda-offload")  # issues offloads, waits for each, runs its `then`

    # -- memory ---------------------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> None:
        if not nbytes:
            return
        try:
            self._memory = torch.empty(nbytes + PAGE, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.torch_device)
            raise BudgetError(
                f"device memory: zinf asked for {_gib(nbytes)} and {_gib(free)} of {_gib(total)} are free on {self.torch_device}: "
                "lower device_memory, place less on the device, or end what else uses the card"
            ) from error
        self._used = -self._memory.data_ptr() % PAGE

    def alloc(self, nbytes: int, what: str) -> torch.Tensor:
        if self._memory is None or self._used + nbytes > self._memory.numel():
            raise EngineError(f"device memory: {what} wants {nbytes} bytes beyond what was reserved")
        start, self._used = self._used, self._used + round_up(nbytes, PAGE)
        return self._memory[start : start + nbytes]

    def extend(self, nbytes: int, what: str) -> torch.Tensor | None:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError:
            log.info("%s was not to be had: other users of the card may have taken what was free", what)
            return None

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def room(self) -> int | None:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return max(free - max(int(total * MARGIN), LEAST), 0)

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        pieces: list[int] = []
        for at in range(0, nbytes, PIECE):
            try:
                error = int(torch.cuda.cudart().cudaHostRegister(address + at, min(PIECE, nbytes - at), 0))
                why = f"error {error}"
            except (RuntimeError, AttributeError) as e:
                error, why = -1, str(e).splitlines()[0]
            if error:
                log.warning(
                    "%s of %s of host memory could not be registered with the card (%s): copies from there are slower and do not overlap; look at ulimit -l",
                    *(_gib(nbytes - at), _gib(nbytes), why),
                )
                break
            pieces.append(address + at)
        return functools.partial(_unregister, pieces)

    # -- order ----------------------------------------------------------------------------------------------------------------

    def mark(self) -> Event:
        return CudaEvent(torch.cuda.current_stream(self.torch_device))

    def wait(self, event: Event) -> None:
        if isinstance(event, CudaEvent):
            torch.cuda.current_stream(self.torch_device).wait_event(event.event)
        else:
            event.wait()

    def upload(self, source: torch.Tensor, target: torch.Tensor, after: Event = DONE) -> Event:
        if self._upload is None:
            raise EngineError("the device is closed")
        with self._lock:
            return _copy(self._upload, source, target, after)

    def offload(self, source: torch.Tensor, target: torch.Tensor, then: Callable[[], None] | None = None, after: Event | None = None) -> Event:
        start = after if after is not None else self.mark()

        def run() -> None:
            _copy(self._offload, source, target, start).wait()
            if then is not None:
                then()

        return self._courier.put(run)

    def poison(self, buffer: torch.Tensor) -> None:
        buffer.fill_(0xFF)

    def close(self) -> None:
        if self._upload is not None:
            self._courier.stop()
            self._upload.synchronize()
            torch.cuda.current_stream(self.torch_device).synchronize()
            self._upload = None
        self._memory = None


def _copy(stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor, after: Event) -> CudaEvent:
    """Copy on `stream` once `after` has happened; returns its end."""
    if isinstance(after, CudaEvent):
        stream.wait_event(after.event)
    else:
        after.wait()
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    return CudaEvent(stream)


def _unregister(pieces: list[int]) -> None:
    while pieces:
        torch.cuda.cudart().cudaHostUnregister(pieces.pop())


def _gib(nbytes: float) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"


def card(index: int | None = None) -> torch.device:
    """The card to use: torch's current one, which CUDA_VISIBLE_DEVICES and torch.cuda.set_device choose."""
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def bus_id(device: torch.device) -> str | None:
    """Where the card is, as /sys/bus/pci/devices has it; None if torch does not tell (before 2.7)."""
    p: Any = torch.cuda.get_device_properties(device)
    if not hasattr(p, "pci_bus_id"):
        return None
    return f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"


def check_usable() -> None:
    """Raise ConfigError that says why torch has no card."""
    if torch.cuda.is_available():
        return
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        raise ConfigError(f"device is 'cuda', and this torch ({torch.__version__}) is built for the CPU: install a torch for your card, or set device: cpu")
    raise ConfigError("device is 'cuda', and torch finds no card: look at nvidia-smi (rocm-smi) and CUDA_VISIBLE_DEVICES, or set device: cpu")
