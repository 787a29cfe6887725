"""Any sequence of calls: the store against a dict."""

from __future__ import annotations

import os
import random
import shutil
import tempfile

import pytest
import torch
from fake_io import Bytes, FakeIo, fail_writes_of, get, heal, put, tiny_model, zeros
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zinf import layout
from zinf.layout import Key
from zinf.tiers import host
from zinf.tiers.nvme import Store


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

    @rule(keys=some, wait=st.booleans())
    def write(self, keys: list[Key], wait: bool) -> None:
        self.seed += 1
        # A tensor may not change while it is in flight: fresh ones, alive as long as the engine wants.
        arena = host.Arena(sum(layout.round_up(self.data.out[key].numel(), 4096) for key in keys))
        items = [(key, arena.carve(self.data.out[key].numel(), "w").random_(generator=torch.Generator().manual_seed(self.seed))) for key in keys]
        tickets = self.store.write(items)
        for (key, tensor), ticket in zip(items, tickets, strict=True):
            self.newest[key] = tensor.numpy().tobytes()
            self.failed.discard(key)
            if wait:
                ticket.wait()

    @rule(key=st.sampled_from(keys))
    def write_and_fail(self, key: Key) -> None:
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

    @precondition(lambda self: self.committed is not None)
    @rule(verify=st.sampled_from(["resume", "always", "off"]))
    def reopen(self, verify: str) -> None:
        self.store.close()
        self.store = Store.open(self.paths, self.io, verify=verify, expect=self.model)
        self.forget()

    @precondition(lambda self: self.committed is not None)
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
TestMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
