"""An I/O engine of pread and pwrite for the tests of the store, and a small model to put into it."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import zlib
from collections.abc import Callable, Sequence

import torch

from zinf import layout
from zinf.layout import Key
from zinf.tiers import host
from zinf.tiers.nvme import Store


class FakeFile:
    def __init__(self, path: str, write: bool) -> None:
        self.path, self.direct = path, False
        self.fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class FakeTicket:
    def __init__(self, io: FakeIo, run: Callable[[], None]) -> None:
        self.io, self.run, self.over, self.error = io, run, False, None

    def perform(self) -> None:
        if not self.over:
            self.over = True
            try:
                self.run()
            except OSError as e:
                self.error = e

    def wait(self, timeout: float | None = None) -> None:
        self.io.perform(self)
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return self.over


class FakeIo:
    """An I/O engine of pread and pwrite, with a journal.

    With `rng` it is lazy: an operation happens when it is waited for, and then some others that are pending happen too, in
    random order. So whoever does not wait for what it must wait for reads old bytes, or loses new ones.
    """

    name = "fake"

    def __init__(self, rng: random.Random | None = None) -> None:
        self.rng = rng
        self.pending: list[FakeTicket] = []
        self.journal: list[tuple] = []  # ("w", path, offset, bytes) as they happen, ("sync", path)
        self.fail: Callable[[str, str, int, int], OSError | None] = lambda kind, path, offset, length: None
        self.reads = 0

    def open(self, path: str, *, write: bool, create: bool = False, direct: bool | str = "auto") -> FakeFile:
        return FakeFile(path, write)

    def register(self, address: int, nbytes: int, owner: object) -> bool:
        return False

    def unregister(self, address: int) -> None:
        pass

    def submit(self, ops: Sequence[tuple], owner: object = None) -> list[FakeTicket]:
        tickets = [FakeTicket(self, lambda op=op, owner=owner: self.transfer(*op)) for op in ops]
        self.enqueue(tickets)
        return tickets

    def datasync(self, file: FakeFile) -> FakeTicket:
        ticket = FakeTicket(self, lambda: self.sync(file))
        self.enqueue([ticket])
        return ticket

    def enqueue(self, tickets: list[FakeTicket]) -> None:
        self.pending.extend(tickets)
        if self.rng is None:
            for ticket in tickets:
                self.perform(ticket)

    def perform(self, wanted: FakeTicket) -> None:
        """`wanted`, after a random choice of what else is pending."""
        others = [t for t in self.pending if t is not wanted]
        if self.rng is not None:
            self.rng.shuffle(others)
            for ticket in others[: self.rng.randrange(3)]:
                ticket.perform()
        wanted.perform()
        self.pending = [t for t in self.pending if not t.over]

    def transfer(self, kind: str, file: FakeFile, offset: int, address: int, length: int) -> None:
        if error := self.fail(kind, file.path, offset, length):
            raise error
        view = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
        if kind == "r":
            self.reads += 1
            assert os.preadv(file.fd, [view], offset) == length
        else:
            assert os.pwrite(file.fd, view, offset) == length
            self.journal.append(("w", file.path, offset, bytes(view)))

    def sync(self, file: FakeFile) -> None:
        if error := self.fail("sync", file.path, 0, 0):
            raise error
        self.journal.append(("sync", file.path))


def tiny_model(chunk: int = 2048) -> layout.Model:
    """Two shards, three dtypes, a frozen run; chunks of 4 to 20 KiB, the last of a run shorter where chunk > 2048."""
    return layout.Model(
        (
            layout.make_shard("embed", [("embed.weight", (50, 64), "bf16", True), ("embed.scale", (8,), "fp32", True)]),
            layout.make_shard("block", [("block.a", (64, 64), "bf16", True), ("block.frozen", (3000,), "fp16", False), ("block.b", (33,), "fp16", True)]),
        ),
        chunk,
    )


class Bytes:
    """Tensors of the right size for each chunk, from one arena."""

    def __init__(self, model: layout.Model) -> None:
        self.places = layout.place(model).places
        self.arena = host.Arena(sum(2 * layout.round_up(p[0].length, 4096) for p in self.places.values()))
        self.out = {key: self.arena.carve(p[0].length, str(key)) for key, p in self.places.items()}
        self.back = {key: self.arena.carve(p[0].length, str(key)) for key, p in self.places.items()}

    def fill(self, key: Key, seed: int) -> torch.Tensor:
        """What step `seed` writes into a chunk."""
        return fill(self.out[key], key, seed)


def fill(tensor: torch.Tensor, key: Key, seed: int) -> torch.Tensor:
    """Bytes that follow from (key, seed), and are never zeros."""
    digest = zlib.crc32(repr((key, seed)).encode())
    return tensor.random_(1, 256, generator=torch.Generator().manual_seed(digest))


def content(store: Store, data: Bytes) -> dict[Key, bytes]:
    """The newest version of every chunk."""
    for tensor in data.back.values():
        tensor.fill_(0x55)
    for ticket in store.read(list(data.back.items())):
        ticket.wait()
    return {key: tensor.numpy().tobytes() for key, tensor in data.back.items()}


def put(store: Store, data: Bytes, key: Key, seed: int) -> bytes:
    tensor = data.fill(key, seed)
    store.write([(key, tensor)])[0].wait()
    return tensor.numpy().tobytes()


def get(store: Store, data: Bytes, key: Key) -> bytes:
    tensor = data.back[key].fill_(0x55)
    store.read([(key, tensor)])[0].wait()
    return tensor.numpy().tobytes()


def zeros(data: Bytes, key: Key) -> bytes:
    return bytes(data.out[key].numel())


def fail_writes_of(store: Store, io: FakeIo, key: Key, code: int = errno.ENOSPC, kinds: str = "w") -> None:
    entry = store._entries[key]
    places = {(entry.file.path, offset) for offset in entry.offsets}
    io.fail = lambda kind, path, offset, length: OSError(code, os.strerror(code), path) if kind in kinds and (path, offset) in places else None


def heal(io: FakeIo) -> None:
    io.fail = lambda kind, path, offset, length: None
