"""Faults of the disk under a whole run: storms that nobody may notice, errors that everybody must."""

from __future__ import annotations

import errno
import threading
import time

import pytest
from models import HYPER, LEAF_BYTES, batches, engine_run, llama, oracle_run, train
from oracle import assert_same, engine_snapshot

from zinf.aio.faults import Rule
from zinf.engine import Engine
from zinf.errors import EngineError

NVME = dict(weights="nvme", state="nvme", chunk_size=4096)


@pytest.mark.parametrize("backend", ["faults:uring", "faults:threads", "faults:python"])
@pytest.mark.parametrize("options", [dict(max_grad_norm=1e9), dict(step_mode="backward"), dict(device="sim")], ids=["deferred", "backward", "sim"])
def test_a_storm_of_short_and_repeated_transfers_changes_no_bit(tmp_path, backend, options, monkeypatch):
    monkeypatch.setenv("ZINF_IO_BACKEND", backend)
    losses, norms, snapshot = engine_run(tmp_path, 3, **NVME, **options)
    want = oracle_run(3)
    assert (losses, norms) == want[:2]
    assert_same(snapshot, want[2])


@pytest.fixture(autouse=True)
def faulty(monkeypatch):
    monkeypatch.setenv("ZINF_IO_BACKEND", "faults:uring")


def begin(folder, resume=False, **options):
    return Engine(llama(), nvme_path=str(folder), run_name="run", resume=resume, leaf_bytes=LEAF_BYTES, **{**NVME, **HYPER, **options})


@pytest.mark.parametrize("mode", ["backward", "deferred"])
@pytest.mark.parametrize("kind", ["r", "w"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_an_error_of_the_disk_in_a_step(tmp_path, kind, mode, device):
    """It surfaces as OSError with the place, nothing hangs, no thread stays, and the run goes on from its last commit."""
    threads = threading.active_count()
    error = errno.EIO if kind == "r" else errno.ENOSPC
    engine = begin(tmp_path, step_mode=mode, device=device)
    train(engine, 3)
    engine.synchronize()
    engine.memory.io.arm([Rule(kind, "state", nth=5, error=error)])
    with pytest.raises(OSError, match=r"state of shard .*(layers|embed)") as raised:
        for ids in batches(20)[3:]:
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
    assert raised.value.errno == error and "state" in str(raised.value.filename)
    with pytest.raises(EngineError, match="stopped at an error"):
        engine(input_ids=batches(1)[0])
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 5
    assert threading.active_count() == threads
    with begin(tmp_path, resume=True, step_mode=mode, device=device) as engine:
        engine.memory.io.disarm()
        first = engine.global_step
        assert 3 <= first < 20
        losses, norms = train(engine, 6, first=first) if first < 6 else ([], [])
        snapshot = engine_snapshot(engine)
    if first < 6:
        want = oracle_run(6)
        assert (losses, norms) == (want[0][first:], want[1][first:])
        assert_same(snapshot, want[2])


def test_a_commit_that_cannot_be_written(tmp_path):
    engine = begin(tmp_path, max_grad_norm=1.0)
    train(engine, 2)
    engine.synchronize()
    engine.memory.io.arm([Rule("d", nth=1, error=errno.EIO)])
    with pytest.raises(OSError):
        for ids in batches(10):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
    engine.close()
    with begin(tmp_path, resume=True) as engine:
        engine.memory.io.disarm()
        assert engine.global_step >= 2
