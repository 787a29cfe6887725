"""Engines come and go: nothing grows, nothing stays, several live side by side, and what is closed says so."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import psutil
import pytest
import torch
from models import HYPER, LEAF_BYTES, batches, llama, oracle_run, train
from oracle import assert_same, engine_snapshot

from zinf.engine import Engine
from zinf.errors import EngineError, StoreError
from zinf.tiers import host

NVME = dict(weights="nvme", state="nvme", chunk_size=4096)


def engine_of(folder, model=None, **options):
    return Engine(model if model is not None else llama(), nvme_path=str(folder), leaf_bytes=LEAF_BYTES, **{**NVME, **HYPER, **options})


def used(folder: Path) -> tuple[list[str], int]:
    """(names of the files below a folder, bytes on disk)."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    return [str(p.relative_to(folder)) for p in files], sum(p.stat().st_blocks * 512 for p in files)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_made_and_closed_twenty_times_nothing_grows(tmp_path, device):
    """One store, reopened twenty times; the 22 steps are those of one run."""
    me, losses = psutil.Process(), []

    def once(step):
        with engine_of(tmp_path, resume=step > 0, device=device) as engine:
            losses.extend(train(engine, step + 1, first=step)[0])

    once(0)
    once(1)
    gc.collect()
    before = (threading.active_count(), me.num_fds(), host.allocated_bytes(), used(tmp_path))
    rss = me.memory_info().rss
    for step in range(2, 22):
        once(step)
    gc.collect()
    assert (threading.active_count(), me.num_fds(), host.allocated_bytes(), used(tmp_path)) == before
    assert me.memory_info().rss - rss < 32 << 20
    assert losses == oracle_run(22)[0]


@pytest.mark.parametrize("options", [NVME, dict(device="sim", **NVME), dict(weights="host", state="host")], ids=["nvme", "sim", "host"])
def test_a_deleted_model_frees_everything(tmp_path, options):
    threads, fds, allocated = threading.active_count(), psutil.Process().num_fds(), host.allocated_bytes()
    engine = engine_of(tmp_path, **options)
    train(engine, 2)
    model = engine.module
    left = [weakref.ref(x) for x in (engine, model, engine.memory.parts, engine.memory.parts.slabs, *engine.shards, *model.parameters())]
    del engine, model
    gc.collect()  # ends the threads
    gc.collect()  # and what they held
    assert [ref() for ref in left if ref() is not None] == []
    assert (threading.active_count(), psutil.Process().num_fds(), host.allocated_bytes()) == (threads, fds, allocated)
    with engine_of(tmp_path, resume=True, **options) as engine:  # what was committed is there
        assert engine.global_step in ((0, 1, 2) if options.get("state") == "host" else (1, 2))


def test_two_engines_in_one_process_on_one_path(tmp_path):
    """Interleaved step by step, one with clipping, both at the same drive: each is as if alone."""
    with engine_of(tmp_path, run_name="a") as a, engine_of(tmp_path, run_name="b", device="sim", max_grad_norm=0.25) as b:
        with pytest.raises(StoreError, match=r"in use"):
            engine_of(tmp_path, run_name="a", resume=True)
        for step in range(3):
            losses = train(a, step + 1, first=step)[0], train(b, step + 1, first=step)[0]
            assert losses == ([oracle_run(3)[0][step]], [oracle_run(3, max_grad_norm=0.25)[0][step]])
        assert_same(engine_snapshot(a), oracle_run(3)[2])
        assert_same(engine_snapshot(b), oracle_run(3, max_grad_norm=0.25)[2])


CHILD = """
import sys
from models import HYPER, LEAF_BYTES, llama, train
from zinf.engine import Engine
from zinf.errors import StoreError
try:
    options = dict(nvme_path=sys.argv[1], run_name=sys.argv[2], leaf_bytes=LEAF_BYTES, chunk_size=4096, weights="nvme", state="nvme")
    engine = Engine(llama(), resume=sys.argv[3] == "resume", **options, **HYPER)
except StoreError as error:
    sys.exit(f"refused: {error}")
print("open", flush=True)
sys.stdin.readline()
print(train(engine, 3)[0], flush=True)
engine.close()
"""


def child(*args: str) -> subprocess.Popen:
    environ = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parent.parent}", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", CHILD, *args], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environ)


def test_two_processes_on_one_path(tmp_path):
    """Runs of other names go side by side; one of the same name is refused in one line, and takes no harm."""
    other = child(str(tmp_path), "b", "new")
    assert other.stdout.readline() == "open\n"
    intruder = child(str(tmp_path), "b", "resume")
    _, err = intruder.communicate(timeout=120)
    assert intruder.returncode == 1 and err.startswith("refused: ") and "in use" in err and err.count("\n") == 1
    with engine_of(tmp_path, run_name="a") as engine:
        other.stdin.write("\n")
        other.stdin.flush()
        assert train(engine, 3)[0] == oracle_run(3)[0]
    assert other.communicate(timeout=120)[0] == f"{oracle_run(3)[0]}\n"
    with engine_of(tmp_path, run_name="b", resume=True) as engine:
        assert engine.global_step == 3
        assert_same(engine_snapshot(engine), oracle_run(3)[2])


def test_after_close_every_call_says_so(tmp_path):
    engine = engine_of(tmp_path)
    train(engine, 1)
    model, ids, loss = engine.module, batches(1)[0], torch.zeros((), requires_grad=True)
    engine.close()
    engine.close()
    calls = {
        "call": lambda: engine(input_ids=ids),
        "backward": lambda: engine.backward(loss),
        "step": engine.step,
        "optimizer.step": engine.optimizer.step,
        "zero_grad": engine.zero_grad,
        "optimizer.zero_grad": engine.optimizer.zero_grad,
        "commit": engine.commit,
        "synchronize": engine.synchronize,
        "state_dict": engine.state_dict,
        "save_pretrained": lambda: engine.save_pretrained(tmp_path / "out"),
        "gather": lambda: engine.gather("model.norm.weight").__enter__(),
    }
    for name, call in calls.items():
        with pytest.raises(EngineError, match="the engine is closed"):
            call()
            pytest.fail(f"{name} did not raise")
    assert not (tmp_path / "out").exists()
    with pytest.raises(EngineError, match=r"model\.embed_tokens\.weight was used after its engine was closed.*resume=True"):
        model(input_ids=ids)
    assert engine.global_step == 1 and engine.stats() and engine.report() and engine.plan()  # what was, can still be asked


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_model_trained_in_memory_keeps_its_weights(tmp_path, device):
    """Without a store nothing else has them: after close it is a plain model that trained."""
    model = llama()
    with Engine(model, leaf_bytes=LEAF_BYTES, device=device, max_grad_norm=1e9, **HYPER) as engine:
        train(engine, 3)
    weights = oracle_run(3)[2][0]
    assert type(model.lm_head.weight) is torch.nn.Parameter and model.lm_head.weight is model.model.embed_tokens.weight
    for name, p in model.named_parameters():
        assert torch.equal(p, weights[name]), name
    model(input_ids=batches(1)[0], labels=batches(1)[0]).loss.backward()  # as plain as ever
    with Engine(model, leaf_bytes=LEAF_BYTES, **HYPER) as engine:  # and can have an engine again
        train(engine, 1)


def test_close_in_a_race_with_work_in_flight(tmp_path):
    """Forwards, backwards and steps cut short by close at each of their ends: never a hang, never a thread left."""
    threads = threading.active_count()
    for cut in range(3):
        engine = engine_of(tmp_path, resume=cut > 0, device="sim", max_grad_norm=1e9)
        loss = engine(input_ids=batches(1)[0], labels=batches(1)[0]).loss
        if cut > 0:
            engine.backward(loss)
        if cut > 1:
            engine.step()
        engine.close()
        assert threading.active_count() == threads
        del loss
    with engine_of(tmp_path, resume=True) as engine:
        assert engine.global_step == 1


def test_an_engine_in_a_cycle_with_work_in_flight_is_collected(tmp_path):
    threads = threading.active_count()
    engine = engine_of(tmp_path, device="sim", max_grad_norm=1e9)
    train(engine, 1)
    engine.self = engine  # a cycle of the user's
    del engine
    gc.collect()
    assert threading.active_count() == threads
