"""Activations: wherever the inputs of blocks wait, and whichever blocks are recomputed, the bits are those of plain PyTorch; and they do move."""

from __future__ import annotations

import copy
import errno
import gc
import logging

import pytest
import torch
from models import LEAF_BYTES, engine_run, llama, oracle_run
from oracle import Oracle, assert_same, engine_snapshot, train_alike
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from zinf.activations import AHEAD, Activations
from zinf.aio.faults import Rule
from zinf.engine import Engine
from zinf.errors import BudgetError, ConfigError, EngineError, StoreError
from zinf.tiers import device as devices
from zinf.trace import Trace

NVME = dict(weights="nvme", state="nvme", chunk_size=4096)
PLACES = {
    "device": dict(activations="device"),
    "host": dict(activations="host", activation_memory="1MiB"),
    "little host": dict(activations="host", activation_memory="64KiB"),
    "nvme": dict(activations="nvme"),
}
WIDTH = 64
ROWS = 96  # a hidden state is ROWS * WIDTH * 2 bytes = 3 pages
HIDDEN = ROWS * WIDTH * 2
SLABS = "160KiB"  # fewer than blocks


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x, mask=None):
        y = self.drop(self.down(torch.relu(self.up(x)).exp().log1p()))
        return x + (y if mask is None else torch.where(mask, y, 0))


class Net(nn.Module):
    """Residual blocks, called in the order that `plan` says; `seen` has the storages of their inputs."""

    def __init__(self, blocks: int = 6, dropout: float = 0.0, make=Mlp):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(make(dropout) for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.plan = list(range(blocks))
        self.seen: list[StorageWeakRef] = []
        self.masked = False
        self.to(torch.bfloat16)

    def call(self, i, x, *more):
        return self.blocks[i](x, *more)

    def forward(self, x):
        self.seen = []
        mask = (x[:, :1] > 0).expand(-1, WIDTH).contiguous() if self.masked else None
        x = x * self.scale
        for i in self.plan:
            self.seen.append(StorageWeakRef(x.untyped_storage()))
            x = self.call(i, x, *([mask] if self.masked else []))
        return x

    def alive(self) -> int:
        """Inputs of blocks that device memory still holds."""
        return sum(not s.expired() for s in self.seen)


def data(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)


def square(model, step):
    return model(data(step)).float().square().mean()


def begin(tmp_path, model, **options):
    return Engine(model, leaf_bytes=LEAF_BYTES, lr=1e-3, weight_decay=0.1, **{"nvme_path": str(tmp_path), **NVME, **options})


def same_as_oracle(tmp_path, model, losses=square, steps=3, **options):
    """Train a copy of `model` in memory and the model through an engine; returns (counts, report) of the engine."""
    oracle = Oracle(copy.deepcopy(model), lr=1e-3, weight_decay=0.1, leaf_bytes=LEAF_BYTES, wide=options.get("gradient_accumulation_steps", 1) > 1)
    with begin(tmp_path, model, **options) as engine:
        train_alike(oracle, engine, losses, steps)
        return engine.stats()["counts"], engine.report()["activations"]


# -- the same bits


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", ["backward", "deferred"])
def test_places(tmp_path, place, device, mode):
    counts, report = same_as_oracle(tmp_path, Net(dropout=0.5), device=device, step_mode=mode, device_memory=SLABS, **PLACES[place])
    moves = place == "nvme" or (device == "sim" and place != "device")
    assert bool(counts.get("activation bytes in")) is bool(report["host_peak"] or report["nvme_peak"]) is moves
    assert bool(report["nvme_peak"]) is (place == "nvme" or (device == "sim" and place == "little host"))
    assert report["device"] == report["host"] == report["nvme"] == 0  # the graphs are dead


RECOMPUTE = {
    "none": dict(recompute=False),
    "some": dict(recompute=["blocks.[03]", "blocks.1"]),
    "all but two": dict(keep_last=2),
    "all kept": dict(keep_last=9),
}


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("which", RECOMPUTE)
@pytest.mark.parametrize("store", [True, False], ids=["nvme", "memory"])
def test_which_blocks_are_recomputed(tmp_path, which, device, store):
    """Fewer slabs than blocks: what a block saved is looked up in another slab than it was made from."""
    place = dict(device_memory=SLABS, activations="nvme") if store else dict(weights="host", state="host", nvme_path=())
    called = []
    model = Net(dropout=0.5)
    for i, block in enumerate(model.blocks):
        block.up.register_forward_hook(lambda *_, i=i: called.append(i))
    same_as_oracle(tmp_path, model, device=device, **place, **RECOMPUTE[which])
    again = {"none": [], "some": [3, 1, 0], "all but two": [3, 2, 1, 0], "all kept": []}[which]
    assert called[-len(again) - 6 :] == [0, 1, 2, 3, 4, 5, *again]


@pytest.mark.parametrize("place", ["host", "nvme"])
@pytest.mark.parametrize("options", [dict(micro_batch_size=32), dict(gradient_accumulation_steps=2)], ids=["micro-batches", "accumulation"])
def test_many_calls(tmp_path, place, options):
    def losses(model, step):
        return square(model, step)

    runs = []
    for i, more in enumerate((dict(activations="device"), dict(recompute=False), dict(device="sim", **PLACES[place]))):
        (tmp_path / str(i)).mkdir()
        with begin(tmp_path / str(i), Net(), **options, **more) as engine:
            for step in range(3):
                for k in range(options.get("gradient_accumulation_steps", 1)):
                    engine.backward(losses(engine, 10 * step + k))
                engine.step()
            runs.append(engine_snapshot(engine))
    assert_same(runs[1], runs[0])
    assert_same(runs[2], runs[0])


@pytest.mark.parametrize("place", ["host", "nvme"])
@pytest.mark.parametrize("plan", [[0, 0, 1, 2, 3, 0], [3, 1, 2]], ids=["reused", "another order"])
def test_blocks_used_in_any_way(tmp_path, place, plan):
    model = Net()
    model.plan = plan
    same_as_oracle(tmp_path, model, device="sim", **PLACES[place])


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_races_on_the_sim_device(tmp_path, place, monkeypatch):
    """Copies ten times slower than compute, what is released or not yet there is NaN: a missing wait is seen."""
    real = devices.SimDevice
    monkeypatch.setattr(devices, "SimDevice", lambda seed: real(seed, delay=0.02))
    same_as_oracle(tmp_path, Net(), device="sim", **PLACES[place])


def test_a_real_model(tmp_path):
    got = engine_run(tmp_path, 3, device="sim", activations="nvme", max_grad_norm=1.0, **NVME)
    want = oracle_run(3, max_grad_norm=1.0)
    assert got[:2] == want[:2]
    assert_same(got[2], want[2])


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_evaluation_between_forward_and_backward_and_two_forwards(tmp_path, place):
    def losses(model, step):
        loss = square(model, step) + square(model, step + 40)
        with torch.no_grad():
            square(model, step + 80)
        return loss

    same_as_oracle(tmp_path, Net(), losses, device="sim", **PLACES[place])


@pytest.mark.parametrize("place", ["device", "host", "nvme"])
def test_a_graph_that_is_walked_twice(tmp_path, place):
    sums = []
    for walks in (1, 2):
        with begin(
            tmp_path, Net(), device="sim", run_name=f"walks{walks}", gradient_accumulation_steps=walks, grad_accum_dtype="fp32", **PLACES[place]
        ) as engine:
            loss = square(engine, 0)
            for walk in range(walks):
                loss.backward(retain_graph=walk + 1 < walks)
            sums.append(engine.step().grad_norm)
            del loss
            assert engine.report()["activations"]["device"] == 0
    assert sums[1] == 2 * sums[0]


class Odd(Mlp):
    def forward(self, x, *more):
        kept, ints, flags, wide = more
        return super().forward(x, flags) + kept.T * ints.to(x.dtype) + wide.sum().to(x.dtype) * 0


class OddNet(Net):
    def call(self, i, x, *more):
        torch.manual_seed(i)
        kept = torch.randn(WIDTH, ROWS).to(x.dtype).T.T
        ints = torch.randint(0, 3, (ROWS, WIDTH))
        return self.blocks[i](x.T.contiguous().T, kept, ints, ints > 0, torch.ones(1, device=x.device).expand(4096, 4))


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_inputs_of_any_kind(tmp_path, place):
    """Transposed, integer, boolean, expanded."""
    counts, _ = same_as_oracle(tmp_path, OddNet(make=Odd), device="sim", **PLACES[place])
    per_step = counts["activation bytes out"] / 3
    assert per_step >= 6 * (2 * HIDDEN + ROWS * WIDTH * 8 + ROWS * WIDTH)


# -- what it costs


@pytest.mark.parametrize("place", ["host", "nvme"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_device_memory_holds_a_handful_and_nothing_grows(tmp_path, place, device):
    """In forward at most AHEAD on their way out and the newest; in backward AHEAD still on their way out, AHEAD coming, and one."""
    if (place, device) == ("host", "cpu"):
        pytest.skip("the same memory")
    blocks = 12
    model = Net(blocks)
    with begin(tmp_path, model, device=device, device_memory=SLABS, **PLACES[place]) as engine:
        for step in range(20):
            loss = square(engine, step)
            assert model.alive() <= AHEAD + 1
            engine.backward(loss)
            engine.step()
            del loss
            report = engine.report()["activations"]
            assert report["device_peak"] <= (2 * AHEAD + 1) * HIDDEN
            assert report[f"{place}_peak"] == blocks * HIDDEN
            assert report["device"] == report["host"] == report["nvme"] == 0
        counts = engine.stats()["counts"]
        assert counts["activation bytes out"] == 20 * blocks * HIDDEN  # each once
        assert 20 * (blocks - AHEAD - 1) * HIDDEN <= counts["activation bytes in"] <= 20 * blocks * HIDDEN
        assert model.alive() == 0
    model = Net(blocks)
    with begin(tmp_path, model, run_name="stays", device=device, device_memory=SLABS, activations="device") as engine:
        loss = square(engine, 0)
        assert model.alive() == blocks
        del loss


def test_forward_waits_for_slow_copies():
    """Else they would hold every tensor that is still to be copied."""
    device = devices.SimDevice(0, delay=0.05)
    activations = Activations(device, Trace(), region=torch.empty(1 << 20, dtype=torch.uint8))
    kept, storages = [], []
    for _ in range(8):
        t = torch.randn(4096)
        storages.append(StorageWeakRef(t.untyped_storage()))
        kept.append(activations.keep(t, ()))
        del t
        assert sum(not s.expired() for s in storages) <= AHEAD + 1
    activations.close()
    device.close()


def test_what_several_calls_keep_stays_on_the_device_once(tmp_path):
    model = Net()
    model.masked = True
    counts, report = same_as_oracle(tmp_path, model, device="sim", **PLACES["host"])
    mask = ROWS * WIDTH  # bytes; bool
    assert counts["activation bytes out"] == 3 * (6 * HIDDEN + mask)  # it went once in each step, before it was known to be shared
    assert counts["activation bytes in"] <= 3 * 6 * HIDDEN
    assert report["device_peak"] <= (2 * AHEAD + 1) * HIDDEN + mask


def test_budgets_hold_and_what_has_no_room_is_said(tmp_path, caplog):
    with begin(tmp_path, Net(), device="sim", activations="host", activation_memory=3 * HIDDEN) as engine:
        assert engine.memory.plan.host["activations"] == 3 * HIDDEN
        assert any("in 36.0 KiB of host memory, the rest on NVMe" in line for line in engine.plan())
        engine.backward(square(engine, 0))
        engine.step()
        report = engine.report()["activations"]
        assert (report["host_peak"], report["nvme_peak"]) == (3 * HIDDEN, 3 * HIDDEN)
    caplog.set_level(logging.INFO, "zinf")
    with Engine(Net(), device="sim", leaf_bytes=LEAF_BYTES, activations="host", activation_memory=3 * HIDDEN) as engine:
        engine.backward(square(engine, 0))
        engine.step()
        assert engine.stats()["counts"]["activations left on the device"] == 3
    assert sum("the others stay on the device" in m for m in caplog.messages) == 1
    with begin(tmp_path, Net(), run_name="cpu", device="cpu", activations="host") as engine:
        assert any("there is nothing to move" in line for line in engine.plan())
    with pytest.raises(BudgetError, match="nvme_path"):
        Engine(Net(), activations="nvme")
    with pytest.raises(ConfigError, match="recompute is 'block'"):
        begin(tmp_path, Net(), run_name="none", recompute=["block"])


# -- faults


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize(("kind", "error"), [("r", errno.EIO), ("w", errno.EIO), ("w", errno.ENOSPC)])
@pytest.mark.parametrize(("mode", "again"), [("backward", "zero_grad"), ("deferred", "zero_grad"), ("backward", "recover"), ("deferred", "recover")])
def test_an_error_of_the_disk(tmp_path, monkeypatch, kind, error, device, mode, again):
    """It surfaces as OSError, and after zero_grad (where nothing was stepped yet) or recover the step can be made again: the same bits in the end."""
    monkeypatch.setenv("ZINF_IO_BACKEND", "faults:uring")
    oracle = Oracle(Net(), lr=1e-3, weight_decay=0.1, leaf_bytes=LEAF_BYTES)
    for step in range(3):
        oracle.backward(square(oracle.model, step))
        oracle.step()
    with begin(tmp_path, Net(), device=device, step_mode=mode, activations="nvme") as engine:
        engine.memory.io.disarm()
        for step in range(3):
            if step == 1:
                engine.memory.io.arm([Rule(kind, "activations", nth=2, error=error)])
                with pytest.raises(OSError) as raised:
                    engine.backward(square(engine, step))
                assert raised.value.errno == error and "activations" in str(raised.value.filename)
                del raised  # its traceback holds the graph
                gc.collect()
                assert engine.zero_grad() is None if again == "zero_grad" else engine.recover() == step
            engine.backward(square(engine, step))
            engine.step()
        assert_same(engine_snapshot(engine), oracle.snapshot())
        report = engine.report()["activations"]
        assert report["device"] == report["nvme"] == 0


def test_a_storm_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("ZINF_IO_BACKEND", "faults:threads")
    same_as_oracle(tmp_path, Net(), device="sim", activations="nvme")


def test_a_full_disk_is_found_before_anything_is_written(tmp_path, monkeypatch):
    from zinf.tiers import directory

    with begin(tmp_path, Net(), activations="nvme") as engine:
        monkeypatch.setattr(directory, "_SLACK", 1 << 60)
        with pytest.raises(StoreError, match=r"bytes of activations needs .* are free there .*lower the batch"):
            square(engine, 0)
        monkeypatch.undo()
        engine.backward(square(engine, 0))
        engine.step()


@pytest.mark.parametrize("place", ["device", "host", "nvme"])
def test_inputs_changed_in_place_are_refused(tmp_path, place):
    class Late(Net):
        def forward(self, x):
            x = x * self.scale
            out = self.blocks[0](x)
            x.add_(1)
            return self.blocks[1](out)

    with begin(tmp_path, Late(2), device="sim", **PLACES[place]) as engine, pytest.raises(EngineError, match="changed in place"):
        engine.backward(square(engine, 0))


def test_saved_tensors_changed_in_place_are_refused(tmp_path):
    class Late(Mlp):
        def forward(self, x):
            y = self.up(x).exp()
            z = self.down(y)
            y.add_(1)
            return z

    with pytest.raises(RuntimeError, match="inplace"):
        square(Net(2, make=Late), 0).backward()
    with begin(tmp_path, Net(2, make=Late), recompute=False) as engine, pytest.raises(EngineError, match="changed in place"):
        engine.backward(square(engine, 0))


def test_what_was_saved_dies_with_the_graph(tmp_path):
    """An output that an operation saves (exp) must not keep its own graph alive."""
    model = Net(2)
    gc.collect()
    gc.disable()
    try:
        with begin(tmp_path, model, recompute=False) as engine:
            square(engine, 0)
            assert model.alive() == 0
            assert not any(call for shard in engine.shards for call in shard.calls)
    finally:
        gc.enable()


# -- models that checkpoint themselves


class Inner(Mlp):
    reentrant = False

    def forward(self, x):
        return x + checkpoint(lambda x: self.drop(self.down(torch.relu(self.up(x)))), x, use_reentrant=self.reentrant)


class Reentrant(Inner):
    reentrant = True


class Outer(Net):
    reentrant = False

    def call(self, i, x, *more):
        return checkpoint(lambda x: torch.tanh(self.blocks[i](x)) * 2, x, use_reentrant=self.reentrant)


class OuterReentrant(Outer):
    reentrant = True


@pytest.mark.parametrize("options", [dict(), dict(recompute=False), dict(activations="nvme")], ids=["recomputed", "kept", "nvme"])
@pytest.mark.parametrize("make", [lambda: Net(4, 0.5, Inner), lambda: Net(4, 0.5, Reentrant), lambda: Outer(4, 0.5), lambda: OuterReentrant(4, 0.5)],
                         ids=["inside", "inside, reentrant", "around", "around, reentrant"])  # fmt: skip
def test_own_checkpoints(tmp_path, make, options, caplog):
    counts, _ = same_as_oracle(tmp_path, make(), device="sim", device_memory=SLABS, **options)
    around = isinstance(make(), Outer)
    assert bool(counts.get("calls in backward")) is around
    assert sum("recomputed twice" in m for m in caplog.messages) == around


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("late", [True, False], ids=["a trainer's", "before"])
def test_gradient_checkpointing_of_transformers_is_taken_over(tmp_path, reentrant, late, caplog):
    caplog.set_level(logging.INFO, "zinf")
    model = llama()
    enable = lambda: model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})  # noqa: E731
    if not late:
        enable()
    from models import HYPER, train

    want = oracle_run(3)
    with Engine(model, nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, **NVME, **HYPER) as engine:
        if late:
            enable()
        got = train(engine, 3)
        assert got == want[:2]
        assert_same(engine_snapshot(engine), want[2])
        assert not model.is_gradient_checkpointing and not engine.stats()["counts"].get("calls in backward")
    assert sum("taken over" in m for m in caplog.messages) == 1
    assert model.is_gradient_checkpointing
