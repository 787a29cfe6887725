"""Any sequence of calls: the store against a dict."""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
from collections.abc import Sequence

import pytest
import torch
from fake_io import Bytes, FakeIo, fail_writes_of, get, heal, put, tiny_model, zeros
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zinf import layout
from zinf.errors import IntegrityError
from zinf.layout import Key
from zinf.tiers import host
from zinf.tiers.nvme import Store
from zinf.tiers.snapshot import Snapshot


class Machine(RuleBasedStateMachine):
    """The store under a lazy engine, against dicts of bytes. A crash loses what was not committed, and nothing else."""

    model = tiny_model()
    data = Bytes(model)
    keys = tuple(key for key, places in data.places.items() if places[0].file != "frozen")
    some = st.lists(st.sampled_from(keys), min_size=1, max_size=4, unique=True)

    @initialize(seed=st.integers(0, 1000), paths=st.integers(1, 2))
    def create(self, seed: int, paths: int) -> None:
        self.root = tempfile.TemporaryDirectory()
        self.generation = 0
        self.paths = [os.path.join(self.root.name, f"{i}-0") for i in range(paths)]
        self.io = FakeIo(random.Random(seed))
        self.store = Store.create(self.paths, self.model, self.io)
        self.newest = {key: zeros(self.data, key) for key in self.keys}
        self.committed: dict[Key, bytes] | None = None
        self.failed: set[Key] = set()
        self.seed = self.step = 0
        self.snapshot: Snapshot | None = None

    @rule(keys=some, wait=st.booleans())
    def write(self, keys: list[Key], wait: bool) -> None:
        self.seed += 1
        # A tensor may not change while it is in flight: fresh ones, alive as long as the engine wants.
        arena = host.Arena(sum(layout.round_up(self.data.out[key].numel(), 4096) for key in keys))
        self.make_way(keys)
        items = [(key, arena.carve(self.data.out[key].numel(), "w").random_(generator=torch.Generator().manual_seed(self.seed))) for key in keys]
        tickets = self.store.write(items)
        for (key, tensor), ticket in zip(items, tickets, strict=True):
            self.newest[key] = tensor.numpy().tobytes()
            self.failed.discard(key)
            if wait:
                ticket.wait()

    @rule(key=st.sampled_from(keys))
    def write_and_fail(self, key: Key) -> None:
        self.make_way([key])
        fail_writes_of(self.store, self.io, key)
        with pytest.raises(OSError):
            put(self.store, self.data, key, 0)
        heal(self.io)
        self.failed.add(key)

    @rule(keys=some)
    def read(self, keys: list[Key]) -> None:
        for key in keys:
            if key in self.failed:
                with pytest.raises(OSError):
                    get(self.store, self.data, key)
            else:
                assert get(self.store, self.data, key) == self.newest[key], key

    @rule()
    def commit(self) -> None:
        if self.failed:
            with pytest.raises(OSError):
                self.store.commit(self.step + 1, {})
            return
        self.step += 1
        self.store.commit(self.step, {"step": self.step})
        self.committed = dict(self.newest)

    def forget(self) -> None:
        self.newest = dict(self.committed) if self.committed is not None else {key: zeros(self.data, key) for key in self.keys}
        self.failed.clear()

    @rule()
    def rollback(self) -> None:
        self.store.rollback()
        self.forget()

    @precondition(lambda self: self.committed is not None and self.snapshot is None)
    @rule(verify=st.sampled_from(["resume", "always", "off"]))
    def reopen(self, verify: str) -> None:
        self.drop_snapshot()
        self.store.close()
        self.store = Store.open(self.paths, self.io, verify=verify, expect=self.model)
        self.forget()

    @precondition(lambda self: self.committed is not None and self.snapshot is None)
    @rule()
    def killed(self) -> None:
        """What is pending in the engine never happens."""
        self.generation += 1
        copies = [f"{path.rsplit('-', 1)[0]}-{self.generation}" for path in self.paths]
        for path, copy in zip(self.paths, copies, strict=True):
            shutil.copytree(path, copy)
        self.store.close()
        self.paths = copies
        self.store = Store.open(self.paths, self.io)
        self.forget()

    @precondition(lambda self: not self.failed)
    @rule(keys=some, count=st.integers(2, 3))
    def steps(self, keys: list[Key], count: int) -> None:
        """Both versions of a chunk get other bytes."""
        for _ in range(count):
            self.write(keys, wait=False)
            self.commit()

    @precondition(lambda self: self.committed is not None and self.snapshot is None)
    @rule(key=st.sampled_from(keys), version=st.integers(0, 1), at=st.integers(0, 1 << 20), always=st.booleans())
    def bits_rot(self, key: Key, version: int, at: int, always: bool) -> None:
        """In either version of a chunk: noticed wherever those bytes are what somebody may still ask for, and only there."""
        self.reopen("off")
        entry = self.store._entries[key]
        at %= entry.length
        self.flip(entry, version, at)
        mine = self.store._committed.versions[entry.index] == version
        if mine:
            with pytest.raises(IntegrityError, match=re.escape(f"{entry.file.path}: {entry.length} bytes at offset {entry.offsets[version]}")):
                self.store.verify()
            wrong: list[Exception] = []
            self.store.verify(report=wrong.append)
            assert len(wrong) == 1
            self.store.close()
            with pytest.raises(IntegrityError):
                Store.open(self.paths, self.io, verify="always" if always else "resume")
            self.store = Store.open(self.paths, self.io, verify="read")
            with pytest.raises(IntegrityError):
                get(self.store, self.data, key)
        self.flip(entry if mine is False else self.store._entries[key], version, at)
        self.store.verify()
        self.reopen("always" if always else "resume")

    def flip(self, entry, version: int, at: int) -> None:
        offset = entry.offsets[version] + at
        byte = os.pread(entry.file.fd, 1, offset)
        os.pwrite(entry.file.fd, bytes([byte[0] ^ 1]), offset)

    @precondition(lambda self: self.committed is not None and self.snapshot is None)
    @rule()
    def take_snapshot(self) -> None:
        self.snapshot = self.store.snapshot()
        self.kept = dict(self.committed or {})

    @precondition(lambda self: self.snapshot is not None)
    @rule(count=st.integers(1, 20))
    def read_snapshot(self, count: int) -> None:
        """Some of what is left of it, in its own order; at the end it is closed."""
        assert self.snapshot is not None
        for key in [k for k in self.snapshot.keys() if k in self.kept][:count]:
            self.read_kept(key)
        if not any(k in self.kept for k in self.snapshot.keys()):
            self.drop_snapshot()

    def read_kept(self, key: Key) -> None:
        """The bytes of the snapshot's step, whatever was written and committed since."""
        assert self.snapshot is not None
        tensor = self.data.back[key].fill_(0x55)
        self.snapshot.read(key, tensor).wait()
        assert tensor.numpy().tobytes() == self.kept.pop(key), key

    def make_way(self, keys: Sequence[Key]) -> None:
        """A write to what a snapshot holds waits until it was read; here nobody else would read it."""
        for key in keys:
            entry = self.store._entries[key]
            if self.snapshot is not None and key in self.kept and any(not t.done() for t in entry.busy_reads(self.store._target(entry))):
                if self.snapshot.written(key):
                    self.read_kept(key)

    def drop_snapshot(self) -> None:
        if self.snapshot is not None:
            self.snapshot.close()
        self.snapshot = None

    @invariant()
    def step_is_the_committed_one(self) -> None:
        if hasattr(self, "store"):
            assert self.store.step == (self.step if self.committed is not None else -1)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            if self.committed is not None:
                self.reopen("resume")
                self.read(self.keys)
            self.store.close()
            self.root.cleanup()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=settings().max_examples * 2 // 5, stateful_step_count=30, suppress_health_check=list(HealthCheck))
