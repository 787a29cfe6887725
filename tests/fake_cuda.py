"""torch.cuda's streams and events without a card: tensors stay in host memory, copies run on threads of their own, and all calls are written down.

A stream is a queue of what was put on it; one thread works it off, in order, each copy after a delay. Compute runs at once in the
thread that issues it, so its stream is always empty. What is put on streams is recorded as (stream, what, detail).
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
import types

import torch
from torch.overrides import TorchFunctionMode

from zinf import memory
from zinf.tiers import cuda
from zinf.tiers.device import DONE
from zinf.tiers.races import COMPUTE, HOST, OFFLOAD, UPLOAD, OrderedDevice, Races

ACTOR = {"compute": COMPUTE, "upload": UPLOAD, "offload": OFFLOAD}

_current = threading.local()


class Card:
    """The one card there is. `calls` are what was put on its streams; `delay` is the longest of a copy, in seconds."""

    def __init__(self, delay: float = 1e-3, seed: int = 0, total: int = 8 << 30):
        self.calls: list[tuple[str, str, object]] = []
        self.synchronized: list[str] = []  # streams (or the device) that someone waited for
        self.lock = threading.Lock()
        self.delay, self.random = delay, random.Random(seed)
        self.streams: list[Stream] = []
        self.events = 0
        self.registered: dict[int, int] = {}
        self.refuse = False  # to register
        self.free = self.total = total
        self.fail_copy: int | None = None  # the n-th copy from now on fails
        self.default = Stream(self, "compute")
        self.races: Races | None = None

    def check(self, monkeypatch) -> None:
        """Check the order of all accesses by the calls that come here, and not by those that the device is asked for."""
        self.races = races = Races()
        monkeypatch.setattr(memory, "Races", lambda: races)
        monkeypatch.setattr(memory, "OrderedDevice", _OnlyMemory)

    def record(self, stream: str, what: str, detail: object) -> None:
        with self.lock:
            self.calls.append((stream, what, detail))

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.refuse:
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


class _OnlyMemory(OrderedDevice):
    """Tells what memory there is, and leaves order to the streams."""

    def mark(self):
        return self.inner.mark()

    def wait(self, event):
        self.inner.wait(event)

    def upload(self, source, target, after=DONE):
        return self.inner.upload(source, target, after)

    def offload(self, source, target, then=None, after=None):
        return self.inner.offload(source, target, then, after)


class Stream:
    def __init__(self, card: Card, name: str):
        self.card, self.name = card, name
        self.queue: queue.SimpleQueue = queue.SimpleQueue()
        if name != "compute":
            threading.Thread(target=self._run, name=f"fake-{name}", daemon=True).start()

    def _run(self) -> None:
        while (op := self.queue.get()) is not None:
            op()

    def put(self, op) -> None:
        """In the order of the calls; compute has nothing in its queue, and does it now."""
        op() if self.name == "compute" else self.queue.put(op)

    def wait_event(self, event: Event) -> None:
        self.card.record(self.name, "wait", event.number)
        if self.card.races is not None:
            self.card.races.join(ACTOR[self.name], event.clock)
        self.put(event.happened.wait)

    def synchronize(self) -> None:
        self.card.synchronized.append(self.name)
        over = threading.Event()
        self.put(over.set)
        over.wait()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        card = self.card
        with card.lock:
            pause = card.random.random() * card.delay
            if card.fail_copy is not None:
                card.fail_copy -= 1
                if card.fail_copy == 0:
                    card.fail_copy = None
                    raise RuntimeError("CUDA error: an illegal memory access was encountered")
        card.record(self.name, "copy", target.nbytes)
        if card.races is not None:
            card.races.access(ACTOR[self.name], source, False, "copy")
            card.races.access(ACTOR[self.name], target, True, "copy")

        def op() -> None:
            time.sleep(pause)
            with torch.no_grad(), torch._C.DisableTorchFunction():
                target.copy_(source)

        self.put(op)


class Event:
    card: Card

    def __init__(self, enable_timing: bool = False, blocking: bool = False):
        self.happened = threading.Event()
        self.clock: list[int] = []
        with self.card.lock:
            self.card.events += 1
            self.number = self.card.events

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        self.card.record(stream.name, "record", self.number)
        if self.card.races is not None:
            self.clock = self.card.races.clock(ACTOR[stream.name])
        stream.put(self.happened.set)

    def synchronize(self) -> None:
        self.happened.wait()
        self._told()

    def query(self) -> bool:
        if self.happened.is_set():
            self._told()
        return self.happened.is_set()

    def _told(self) -> None:
        if self.card.races is not None:
            self.card.races.join(HOST, self.clock)


class _CopiesOn(TorchFunctionMode):
    """Within torch.cuda.stream(s): copies are put on s."""

    def __init__(self, stream: Stream):
        super().__init__()
        self.stream = stream

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_ and (kwargs or {}).get("non_blocking"):
            self.stream.copy(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))


def current_stream(device=None) -> Stream:
    return Event.card.default


def install(monkeypatch, **options) -> Card:
    """Let torch.cuda be a card of the fake's."""
    card = Event.card = Card(**options)
    names = iter(["upload", "offload"] * 1000)

    @contextlib.contextmanager
    def stream(s: Stream):
        with _CopiesOn(s):
            yield

    def make(device=None, priority=0) -> Stream:
        card.streams.append(Stream(card, next(names)))
        return card.streams[-1]

    def synchronize(device=None) -> None:
        card.synchronized.append("device")

    fakes = dict(
        Stream=make, Event=Event, stream=stream, current_stream=current_stream, default_stream=current_stream, is_available=lambda: True,
        current_device=lambda: 0, mem_get_info=lambda device=None: (card.free, card.total), cudart=lambda: card, synchronize=synchronize,
        get_device_properties=lambda device=None: types.SimpleNamespace(name="fake"),
    )  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(cuda, "card", lambda index=None: torch.device("cpu"))
    return card
