"""Features that work by themselves, used together."""

from __future__ import annotations

import errno

import pytest
import torch
from models import LEAF_BYTES
from oracle import Oracle, assert_same, engine_snapshot
from test_streaming import NVME, net, square

from zinf.aio.faults import Rule
from zinf.engine import Engine
from zinf.errors import EngineError, StoreError

DEVICES = pytest.mark.parametrize("device", ["cpu", "sim"])


def begin(folder, model=None, **options) -> Engine:
    return Engine(model or net(), nvme_path=str(folder), **{**NVME, "leaf_bytes": LEAF_BYTES, "lr": 1e-3, "weight_decay": 0.1, **options})


def train(engine, *steps):
    for step in steps:
        engine.backward(square(engine, step))
        engine.step()


@DEVICES
def test_an_optimizer_that_keeps_no_state_with_grads_on_nvme(tmp_path, device):
    """There is no ring for state, and one for grads."""
    runs = []
    for grads in ("host", "nvme"):
        with begin(tmp_path, net().float(), run_name=grads, optimizer="sgd", grads=grads, max_grad_norm=0.5, device=device) as engine:
            for step in range(3):
                engine.backward(engine(torch.randn(8, 64, generator=torch.Generator().manual_seed(step))).square().mean())
                engine.step()
            runs.append(engine_snapshot(engine))
    assert_same(*runs)


@DEVICES
def test_a_checkpoint_that_is_still_being_saved_is_loaded_once_it_is_whole(tmp_path, device):
    with begin(tmp_path, device=device) as engine:
        train(engine, 0, 1)
        want = engine_snapshot(engine)
        for tag in ("first", "second"):
            engine.save_checkpoint(tmp_path / "checkpoints", tag, wait=False)
            engine.load_checkpoint(tmp_path / "checkpoints", tag)
        assert_same(engine_snapshot(engine), want)


@DEVICES
def test_a_step_that_failed_is_not_exported(tmp_path, device, monkeypatch):
    """With no commit to find it: synchronize and save_pretrained wait for steps that the next forward's prefetch began."""
    monkeypatch.setenv("ZINF_IO_BACKEND", "faults:threads")
    with begin(tmp_path, device=device, commit_every=0, step_mode="deferred") as engine:
        io = engine.memory.io
        io.disarm()
        train(engine, 0)
        engine.commit()
        for read in (engine.synchronize, lambda: engine.save_pretrained(tmp_path / "out")):
            for nth in (1, 2, 3, 4):
                engine.synchronize()
                engine.backward(square(engine, 1))
                io.arm([Rule("r", "state", nth=nth, error=errno.EIO)])
                with pytest.raises(OSError, match="Input/output"):
                    engine.step()
                    read()
                io.disarm()
                assert engine.recover() == 1


@DEVICES
def test_a_prefetch_that_failed_leaves_no_weights_to_step(tmp_path, device, monkeypatch):
    """A forward may prefetch a shard that it then does not need, and nobody is told that the disk failed; its step must read it again."""
    monkeypatch.setenv("ZINF_IO_BACKEND", "faults:threads")
    oracle = Oracle(net(8), lr=1e-3, weight_decay=0.1, leaf_bytes=LEAF_BYTES)
    oracle.backward(square(oracle.model, 0))
    oracle.step()
    with begin(tmp_path, net(8), device=device, debug=True, step_mode="deferred") as engine:
        io = engine.memory.io
        io.disarm()
        engine.backward(square(engine, 0))
        engine.memory.parts.slabs.evict_all()
        first = next(shard for shard in engine.shards if shard.name == "blocks.0")
        io.arm([Rule("r", "weights", nth=1, error=errno.EIO)])
        assert first.fetch(engine.conductor.train)
        engine.memory.parts.fetcher.drain()
        io.disarm()
        engine.step()
        assert_same(engine_snapshot(engine), oracle.snapshot())


class Picky:
    """An object of a loop, which refuses a state."""

    def __init__(self):
        self.refuses = False

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        if self.refuses:
            raise ValueError("not this one")


@DEVICES
def test_an_object_that_refuses_its_state_stops_the_load_it_is_part_of(tmp_path, device):
    """Nothing is trained from the weights of one step and the learning rates of another; recover() is back before the load."""
    with begin(tmp_path, device=device) as engine:
        picky = engine.register("picky", Picky())
        train(engine, 0)
        engine.save_checkpoint(tmp_path / "checkpoints")
        train(engine, 1)
        want, picky.refuses = engine_snapshot(engine), True
        with pytest.raises(ValueError, match="not this one"):
            engine.load_checkpoint(tmp_path / "checkpoints")
        with pytest.raises(EngineError, match=r"stopped at an error.*recover"):
            train(engine, 2)
        picky.refuses = False
        assert engine.recover() == 2
        assert_same(engine_snapshot(engine), want)


def test_a_store_of_the_same_parameters_in_other_shards_says_so(tmp_path):
    with begin(tmp_path):
        pass
    with pytest.raises(StoreError, match=r"the parameters are the same, but .* other shards: use trainable, blocks"):
        begin(tmp_path, resume=True, blocks=("Linear",))
