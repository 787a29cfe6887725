"""Debug mode: a buffer that is somebody else's is found at its use, not in the numbers."""

from __future__ import annotations

import pytest
import torch
from models import HYPER, LEAF_BYTES, engine_run, llama, oracle_run, train
from oracle import assert_same

from zinf.engine import Engine
from zinf.errors import EngineError
from zinf.owners import Owners, Unwatched

NVME = dict(weights="nvme", state="nvme", chunk_size=4096, debug=True)


def test_the_book():
    owners, buffer, other = Owners(), torch.zeros(8192, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    owners.check(buffer, "a", "read")  # never handed over: not watched
    owners.lend(buffer[:4096], "a")
    owners.lend(buffer[4096:], "b")
    owners.check(buffer[4095:4096], "a", "read")
    owners.check(buffer[4096:4100], "b", "read")
    owners.check(other, "c", "read")
    with pytest.raises(EngineError, match="a was about to read a buffer that b has"):
        owners.check(buffer[5000:], "a", "read")
    with pytest.raises(EngineError, match="lent to b while a has it"):
        owners.lend(buffer[:4096], "b")
    with pytest.raises(EngineError, match="b was about to give back a buffer that a has"):
        owners.give_back(buffer[:4096], "b")
    owners.give_back(buffer[:4096], "a")
    with pytest.raises(EngineError, match="a was about to read a buffer that nobody has"):
        owners.check(buffer[:1], "a", "read")
    owners.lend(buffer[:4096], "c")


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("mode", ["backward", "deferred"])
def test_debug_changes_no_bits(tmp_path, device, mode):
    losses, norms, snapshot = engine_run(tmp_path, 3, device=device, step_mode=mode, **NVME)
    want = oracle_run(3)
    assert (losses, norms) == want[:2]
    assert_same(snapshot, want[2])


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_an_eviction_under_a_computation_is_found(tmp_path, device):
    options = dict(nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, device=device, **HYPER, **NVME)
    with pytest.raises(EngineError, match=r"layers.1 was about to leave a buffer that nobody has: this is a fault"), Engine(llama(), **options) as engine:
        shard = next(s for s in engine.shards if s.name.endswith("layers.1"))
        engine.module.model.layers[1].mlp.register_forward_hook(lambda *_: shard.parts.slabs._evict(shard.slab))
        train(engine, 1)


def test_a_slot_released_too_early_is_found(tmp_path, monkeypatch):
    from zinf.chunks import ChunkItem

    def early(self, use):
        slots = list(self._slots)
        self._release()
        self._slots = slots
        try:
            check(self, use)
        finally:
            self._slots = []

    check = ChunkItem._check_owner
    monkeypatch.setattr(ChunkItem, "_check_owner", early)
    with pytest.raises(EngineError, match=r"about to step a buffer that nobody has"):
        engine_run(tmp_path, 1, **NVME)


def test_outside_debug_mode_nothing_is_watched(tmp_path):
    with Engine(llama(), leaf_bytes=LEAF_BYTES, **HYPER) as engine:
        assert type(engine.memory.parts.owners) is Unwatched
    with Engine(llama(), leaf_bytes=LEAF_BYTES, debug=True, **HYPER) as engine:
        assert type(engine.memory.parts.owners) is Owners
