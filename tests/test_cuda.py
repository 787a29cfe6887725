"""The GPU path without a GPU: the engine's own code on torch's streams and events, faked; and the calls that it makes, one by one."""

from __future__ import annotations

import contextlib
import os

import fake_cuda
import pytest
import torch
from fake_cuda import Card, install
from models import HYPER, LEAF_BYTES, batches, engine_run, llama, oracle_run, train
from oracle import assert_same, engine_snapshot

from zinf import moving
from zinf.engine import Engine
from zinf.errors import BudgetError, ConfigError, EngineError
from zinf.tiers import cuda, numa
from zinf.tiers.device import open_device

NVME = dict(weights="nvme", state="nvme", chunk_size=4096)
SLABS = "600KiB"  # so few that weights come and go within a step
PLACEMENTS = {
    "memory": dict(paths=0),
    "host": dict(weights="host", state="host"),
    "device": dict(weights="device", state="host"),
    "nvme": NVME,
    "activations on the host": dict(NVME, activations="host"),
    "all on nvme": dict(NVME, activations="nvme", grads="nvme"),
}


@pytest.fixture
def card(monkeypatch, one_thread) -> Card:
    return install(monkeypatch)


@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_bits(tmp_path, card, placement, debug):
    mode = "backward" if placement == "nvme" and not debug else "auto"
    losses, norms, snapshot = engine_run(tmp_path, 3, device="cuda", debug=debug, step_mode=mode, **PLACEMENTS[placement])
    want = oracle_run(3)
    assert (losses, norms) == want[:2]
    assert_same(snapshot, want[2])
    assert any(what == "copy" and stream == "upload" for stream, what, _ in card.calls)
    assert not card.registered  # all of it was given back


@pytest.mark.parametrize("mode", ["backward", "deferred"])
def test_accumulation(tmp_path, card, mode):
    losses, norms, snapshot = engine_run(tmp_path, 2, accumulation=4, device="cuda", step_mode=mode, debug=True, **NVME)
    want = oracle_run(2, accumulation=4)
    assert (losses, norms) == want[:2]
    assert_same(snapshot, want[2])


def test_nobody_waits_for_a_stream_in_a_step(tmp_path, card):
    with Engine(llama(), nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, device="cuda", max_grad_norm=1.0, **HYPER, **NVME) as engine:
        train(engine, 3)
        assert card.synchronized == []
    assert set(card.synchronized) == {"upload", "compute"}  # close


# -- the calls --------------------------------------------------------------------------------------------------------------


def named(calls, stream: str) -> list[str]:
    """What was put on `stream`, events by what they mark: mark 1, uploaded 2, offloaded 1 ..."""
    names: dict[object, str] = {}
    counts = {"compute": 0, "upload": 0, "offload": 0}
    word = {"compute": "mark", "upload": "uploaded", "offload": "offloaded"}
    for where, what, detail in calls:
        names.setdefault(detail, "of before")
        if what == "record":
            counts[where] += 1
            names[detail] = f"{word[where]} {counts[where]}"
    return [f"{what} {names[detail]}" if what != "copy" else "copy" for where, what, detail in calls if where == stream]


def test_the_calls_of_two_steps(card, monkeypatch):
    """Embedding, one block, norm and head (the root has the norm), all weights in host memory, one chunk each."""
    from zinf.shard import Shard

    fetch = Shard.fetch

    def in_order(self, cycle, before=None):  # whether a prefetch finds the job before it over is a matter of time
        if self.job is not None:
            self.job.wait_over()
        return fetch(self, cycle, before)

    monkeypatch.setattr(Shard, "fetch", in_order)
    model = llama(tied=False, num_hidden_layers=1)
    with Engine(model, device="cuda", leaf_bytes=LEAF_BYTES, step_mode="deferred", **HYPER) as engine:
        assert [s.name for s in engine.shards] == ["model.layers.0", "model.embed_tokens", "lm_head", "root"]
        card.calls.clear()
        for step in range(2):
            batch = torch.randint(0, 512, (1, 8), generator=torch.Generator().manual_seed(step))
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
            engine.synchronize()
        found = {s: named(card.calls, s) for s in ("compute", "upload", "offload")}
    assert found == {
        "compute": [
            *marks(1, 3),  # embedding, block and head are fetched: compute has left their slabs
            *("wait uploaded 1", "wait uploaded 2", "wait uploaded 3"),  # before each of them computes; backward finds them where they are
            *marks(4, 7),  # grads of head, block, embedding, root are complete
            *marks(8, 10),  # the root, and the first two of the next forward, are fetched with their steps
            "wait uploaded 4",  # the root is bound
            *marks(11, 11),  # synchronize: the head is fetched with its step
            *("wait uploaded 7", "wait uploaded 5", "wait uploaded 6"),
            *marks(12, 15),
            *marks(16, 18),
            "wait uploaded 8",
            *marks(19, 19),
            "wait uploaded 11",
        ],
        "upload": [call for k, mark in enumerate([1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19], 1) for call in (f"wait mark {mark}", "copy", f"record uploaded {k}")],
        "offload": [call for k, mark in enumerate([4, 5, 6, 7, 12, 13, 14, 15], 1) for call in (f"wait mark {mark}", "copy", f"record offloaded {k}")],
    }


def marks(first: int, last: int) -> list[str]:
    return [f"record mark {k}" for k in range(first, last + 1)]


# -- order: no wait can go ----------------------------------------------------------------------------------------------------


def without(monkeypatch, card, wait: str) -> None:
    """Take one kind of wait out of what the device does."""
    real = fake_cuda.Stream.wait_event
    if wait == "host":
        monkeypatch.setattr(fake_cuda.Event, "synchronize", lambda event: None)
    elif wait:
        monkeypatch.setattr(fake_cuda.Stream, "wait_event", lambda stream, event: None if stream.name == wait else real(stream, event))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("options", [NVME, dict(weights="host", state="host", activations="host")], ids=["nvme", "host"])
@pytest.mark.parametrize("wait", ["", "compute", "upload", "offload", "host"])
def test_without_any_one_wait_the_calls_are_a_race(tmp_path, card, monkeypatch, wait, options):
    card.check(monkeypatch)
    without(monkeypatch, card, wait)
    with pytest.raises(EngineError, match="no event orders the two") if wait else contextlib.nullcontext():
        engine_run(tmp_path, 2, device="cuda", debug=True, device_memory=SLABS, **options)
    assert wait or card.races.checked > 100


# -- faults -------------------------------------------------------------------------------------------------------------------


def test_a_copy_that_fails_stops_the_step_and_says_so(tmp_path, card):
    with pytest.raises(RuntimeError, match="illegal memory access"), Engine(llama(), nvme_path=str(tmp_path), device="cuda", **HYPER, **NVME) as engine:
        train(engine, 1)
        card.fail_copy = 3
        train(engine, 2, first=1)
    assert not card.registered


def test_host_memory_that_cannot_be_registered_is_slower_and_said_once(tmp_path, card, caplog):
    card.refuse = True
    got = engine_run(tmp_path, 2, device="cuda", **NVME)
    assert got[:2] == oracle_run(2)[:2]
    assert [r.levelname for r in caplog.records if "could not be registered" in r.message] == ["WARNING"]


def test_pieces_of_host_memory_are_registered_and_given_back(card, monkeypatch):
    monkeypatch.setattr(cuda, "PIECE", 1 << 20)
    device = open_device("cuda")
    undo = device.pin(1 << 20, 5 << 19)
    assert card.registered == {1 << 20: 1 << 20, 2 << 20: 1 << 20, 3 << 20: 1 << 19}
    undo()
    assert card.registered == {}
    device.close()


@pytest.mark.parametrize("device", ["cuda", "sim"])
@pytest.mark.parametrize("n", [1, 2])
def test_out_of_memory_in_a_step_says_what_to_lower_and_the_engine_goes_on(tmp_path, card, monkeypatch, device, n):
    """The n-th allocation of device memory for what comes back fails: in backward, in a step that has clipping."""
    options = dict(device=device, nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, activations="host", max_grad_norm=1.0, **HYPER, **NVME)
    with Engine(llama(), **options) as engine:
        kind = type(engine.memory.parts.device.inner if device == "sim" else engine.memory.parts.device)
        empty, left = kind.empty, [n]

        def limited(self, nbytes):
            left[0] -= 1
            if left[0] == 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB of which 1.50 GiB is free.")
            return empty(self, nbytes)

        monkeypatch.setattr(kind, "empty", limited)
        batch = batches(3)[0]
        with pytest.raises(BudgetError, match=r"device memory: backward asked for 2.00 GiB and 1.50 GiB is free .*: lower the batch") as error:
            engine.backward(engine(input_ids=batch, labels=batch).loss)
        assert "\n" not in str(error.value)
        engine.zero_grad()
        got = train(engine, 3)
        snapshot = engine_snapshot(engine)
    want = oracle_run(3, max_grad_norm=1.0)
    assert got == want[:2]
    assert_same(snapshot, want[2])


def test_out_of_memory_in_a_forward(tmp_path):
    with Engine(llama(), device="sim", nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, max_grad_norm=1.0, **HYPER, **NVME) as engine:

        def fail(*_):
            raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 12.00 MiB.")

        handle = engine.module.model.layers[2].mlp.register_forward_hook(fail)
        batch = batches(3)[0]
        with pytest.raises(BudgetError, match=r"forward asked for 12.00 MiB than is free|forward asked for 12.00 MiB"):
            engine(input_ids=batch, labels=batch)
        handle.remove()
        assert train(engine, 3) == oracle_run(3, max_grad_norm=1.0)[:2]


def test_slabs_that_do_not_fit_are_refused_before_any_work(card, monkeypatch):
    def empty(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    device = open_device("cuda")
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(BudgetError, match=r"zinf asked for 2.00 GiB and 8.00 GiB of 8.00 GiB are free .*: lower device_memory"):
        device.reserve(2 << 30)
    device.close()


def test_without_a_card():
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    with pytest.raises(ConfigError, match="device is 'cuda', and"):
        Engine(llama(), device="cuda")
    assert open_device("auto").name == "cpu"


# -- budgets ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, "auto"])
def test_slabs_take_what_the_first_step_leaves(tmp_path, card, budget):
    """Six blocks and room for one more slab than the engine begins with."""
    with Engine(llama(num_hidden_layers=6), device="cuda", device_memory=budget, nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, **HYPER) as engine:
        size = max(c.nbytes for c in engine.memory.plan.slabs if len(c.members) == 6)
        few = engine.memory.plan.device_nbytes
        assert next(c.count for c in engine.memory.plan.slabs if len(c.members) == 6) == 4
        card.free = cuda.LEAST + size * 3 // 2
        train(engine, 1)
        grown = engine.memory.plan.device_nbytes
        train(engine, 2, first=1)
        assert engine.memory.plan.device_nbytes == grown == few + size
        assert engine.report()["device_bytes"]["more slabs"] == size


def test_a_budget_is_a_limit_from_the_start(tmp_path, card):
    with Engine(llama(), device="cuda", device_memory=SLABS, nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, **HYPER, **NVME) as engine:
        first = engine.memory.plan.device_nbytes
        train(engine, 1)
        assert engine.memory.plan.device_nbytes == first <= 600 << 10


# -- what a card has of its own -------------------------------------------------------------------------------------------------


def test_a_recompute_draws_the_random_numbers_of_the_device(card, monkeypatch):
    """torch.utils.checkpoint saves the generators of those devices whose tensors it is given."""
    given = []
    real = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr("zinf.streaming.checkpoint", lambda run, *args, **kwargs: given.append(args) or real(run, *args, **kwargs))
    with Engine(llama(), device="cuda", leaf_bytes=LEAF_BYTES, **HYPER) as engine:
        train(engine, 1)
        place = engine.memory.parts.device.torch_device
    assert len(given) == 4 and all(isinstance(t, torch.Tensor) and t.device == place for (t,) in given)


def test_buffers_and_batches_go_where_compute_is():
    meta = torch.device("meta")
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    before = net[0].running_mean
    undo = moving.buffers_to(net, meta)
    assert {b.device for b in net.buffers()} == {meta}
    undo_to = moving.buffers_to(net, meta)  # nothing to do
    undo_to()
    assert {b.device for b in net.buffers()} == {meta}
    args, kwargs = moving.tensors_to(((torch.zeros(2), 3), {"x": [torch.zeros(2)], "scalar": torch.tensor(1.0), "s": "text"}), meta)
    assert (args[0].device, args[1], kwargs["x"][0].device, kwargs["scalar"].device.type, kwargs["s"]) == (meta, 3, meta, "cpu", "text")
    assert moving.tensors_to(net, torch.device("cpu")) is net
    assert before.device.type == "cpu"
    del undo


def test_numa_cores_near_a_card(tmp_path):
    mine = sorted(os.sched_getaffinity(0))
    card = tmp_path / "bus/pci/devices/0000:65:00.0"
    card.mkdir(parents=True)
    (card / "numa_node").write_text("1\n")
    for node, cores in enumerate(("", f"{mine[-1]},4000-4003\n")):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{node}/cpulist").write_text(cores)
    assert numa.near("0000:65:00.0", tmp_path) == (mine[-1],)
    assert numa.near("0000:66:00.0", tmp_path) == numa.near(None, tmp_path) == ()
    (card / "numa_node").write_text("-1\n")
    assert numa.near("0000:65:00.0", tmp_path) == ()
    with numa.on_node([mine[-1]]):
        assert os.sched_getaffinity(0) == {mine[-1]}
    assert sorted(os.sched_getaffinity(0)) == mine
    assert numa.parse("0-2,7\n") == {0, 1, 2, 7}
