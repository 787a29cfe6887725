"""A step that failed is retried in the same process, once the cause is gone: the run ends with the bits of one that never failed."""

from __future__ import annotations

import errno
import functools
import tempfile

import pytest
from crash.rig import MODES, begin, end, one_step, same_end, stubborn, threads, train

from zinf.aio.faults import Rule
from zinf.engine import Engine
from zinf.errors import CommitError, EngineError, StoreError
from zinf.tiers import manifest

STEPS = 5
EVERYWHERE = pytest.mark.parametrize(("mode", "device"), [(m, d) for m in MODES for d in ("cpu", "sim")])


@pytest.fixture(autouse=True)
def faulty(monkeypatch):
    monkeypatch.setenv("ZINF_IO_BACKEND", "faults:threads")
    before = threads()
    yield
    assert threads() == before


@functools.cache
def straight(mode: str):
    with tempfile.TemporaryDirectory() as folder, begin(folder, **MODES[mode]) as engine:
        engine.memory.io.disarm()
        train(engine, STEPS)
        return end(engine)


def quiet(folder, **options) -> Engine:
    engine = begin(folder, **options)
    engine.memory.io.disarm()
    return engine


RULES = {
    "read of weights": Rule("r", "weights", nth=7, error=errno.EIO),
    "read of state": Rule("r", "state", nth=3, error=errno.EIO),
    "first read of state": Rule("r", "state", nth=1, error=errno.EIO),
    "write of weights": Rule("w", "weights", nth=2, error=errno.ENOSPC),
    "write of state": Rule("w", "state", nth=4, error=errno.EDQUOT),
    "sync": Rule("d", nth=1, error=errno.EIO),
    "second sync": Rule("d", nth=2, error=errno.ENOSPC),
}


@pytest.mark.parametrize(("mode", "device"), [("deferred", "cpu"), ("backward", "cpu"), ("backward", "sim")])
@pytest.mark.parametrize(("rule", "after"), [*((rule, 2) for rule in RULES), ("write of state", 0)])
def test_recover_goes_on_with_the_same_bits(tmp_path, rule, after, mode, device):
    engine = quiet(tmp_path, **MODES[mode], device=device)
    train(engine, after)
    if after:
        engine.synchronize()
    io = engine.memory.io
    io.arm([RULES[rule]])
    errors = stubborn(engine, STEPS, io.disarm)
    assert len(errors) == 1 and ("shard" in str(errors[0]) or "sync" in rule)
    same_end(end(engine), straight(mode))
    engine.close()
    with quiet(tmp_path, resume=True, **MODES[mode]) as engine:
        engine.restore_rng()
        same_end(end(engine), straight(mode))


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("rule", [Rule(kind, "grads", nth=nth, error=errno.EIO) for kind in "rw" for nth in (1, 3)], ids=str)
def test_grads_that_cannot_be_moved(tmp_path, rule, device):
    """The error may come when the whole backward is over: what its forward drew and averaged is taken back all the same."""
    engine = quiet(tmp_path, **MODES["deferred"], device=device, grads="nvme")
    train(engine, 2)
    engine.synchronize()
    engine.memory.io.arm([rule])
    assert len(stubborn(engine, STEPS, engine.memory.io.disarm)) == 1
    same_end(end(engine), straight("deferred"))
    engine.close()


@EVERYWHERE
@pytest.mark.parametrize("phase", ["forward", "backward", "step"])
def test_a_fetch_for_compute_that_failed_loses_no_step(tmp_path, phase, mode, device):
    """Nothing was lost, so nothing is rolled back: the same step is made again."""
    engine = quiet(tmp_path, **MODES[mode], device=device)
    train(engine, 2)
    engine.synchronize()
    failed = False

    def arm(before: str) -> None:
        if before == phase:
            engine.memory.io.arm([Rule("r", "frozen", nth=1, error=errno.EIO)])  # of a shard that is never stepped

    try:
        one_step(engine, between=arm)
        one_step(engine)
    except OSError as e:
        failed = True
        assert "frozen" in str(e.filename) and "blocks.0" in str(e)
        engine.memory.io.disarm()
        step = engine.global_step
        assert engine.recover() == step
    engine.memory.io.disarm()
    assert failed
    train(engine, STEPS)
    same_end(end(engine), straight(mode))
    engine.close()


def full(monkeypatch, times: int, error: int = errno.ENOSPC, calls: str = "write_file"):
    """The next manifests find a full disk."""
    real, left = getattr(manifest, calls), [times]

    def fail(path, *data):
        if left[0] and ("manifest" in path or calls == "sync_directory"):
            left[0] -= 1
            raise OSError(error, "No room", path)
        return real(path, *data)

    monkeypatch.setattr(manifest, calls, fail)
    monkeypatch.setattr(manifest, "release_reserve", lambda path: False)
    return left


@pytest.mark.parametrize(
    ("mode", "device", "error"),
    [
        ("deferred", "cpu", errno.ENOSPC), ("backward", "cpu", errno.EDQUOT), ("deferred", "sim", errno.EROFS), ("backward", "sim", errno.ENOENT),
        ("deferred", "cpu", errno.EIO),
    ],
)  # fmt: skip
def test_a_manifest_that_cannot_be_written_loses_nothing(tmp_path, mode, device, error, monkeypatch):
    engine = quiet(tmp_path, **MODES[mode], device=device)
    train(engine, 2)
    engine.synchronize()
    store = engine.memory.parts.records.store
    left = full(monkeypatch, 10**9, error)
    seen = 0
    while engine.global_step < 4:  # in backward mode nothing is stepped before the commit is made; in deferred mode training may go on
        try:
            one_step(engine)
        except CommitError as e:
            seen += 1
            assert e.errno == error and "step 3 is made and not committed" in str(e) and "step 2 is the last" in str(e)
            if mode == "backward":
                assert engine.global_step == 3
                break
    with pytest.raises(CommitError):
        engine.synchronize()
    with pytest.raises(CommitError):
        engine.recover()
    assert store.step == 2
    assert seen or mode == "deferred"  # there, a slow commit may not be known to have failed before the loop ends
    left[0] = 0
    step = engine.global_step
    assert engine.recover() == step == store.step
    train(engine, STEPS)
    same_end(end(engine), straight(mode))
    engine.close()


@EVERYWHERE
def test_going_on_after_a_commit_error_needs_no_recover(tmp_path, mode, device, monkeypatch):
    engine = quiet(tmp_path, **MODES[mode], device=device)
    train(engine, 2)
    engine.synchronize()
    left = full(monkeypatch, 1)
    told = 0
    while engine.global_step < STEPS:
        try:
            one_step(engine)
        except CommitError:
            told += 1
            if mode == "backward" and engine.stepper.interrupted:
                pytest.fail("the second try should have made it")
    assert left[0] == 0 and told <= 1
    same_end(end(engine), straight(mode))
    engine.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_lost_rename_is_for_a_new_engine(tmp_path, mode, monkeypatch):
    """It is not known which manifest the disk will give back, so neither step may be overwritten: the store must be opened again."""
    engine = quiet(tmp_path, **MODES[mode])
    train(engine, 2)
    engine.synchronize()
    full(monkeypatch, 1, errno.EIO, "sync_directory")
    with pytest.raises(OSError, match="not known"):
        train(engine, 5)
    with pytest.raises(StoreError, match="close the store and open it again"):
        engine.recover()
    engine.close()
    with quiet(tmp_path, resume=True, **MODES[mode]) as engine:
        engine.restore_rng()
        assert engine.global_step in (2, 3)
        train(engine, STEPS)
        same_end(end(engine), straight(mode))


def test_state_in_host_memory_is_flushed_again(tmp_path):
    """A write of a record that lives in host memory may fail and lose nothing."""
    engine = quiet(tmp_path, weights="host", state="host", max_grad_norm=1.0, commit_every=2, device_memory=None)
    train(engine, 2)
    engine.synchronize()
    engine.memory.io.arm([Rule("w", "state", nth=2, error=errno.ENOSPC), Rule("d", nth=1, error=errno.EIO)])
    with pytest.raises(CommitError, match="step 4 is made and not committed"):
        train(engine, 4)
        engine.synchronize()
    engine.memory.io.disarm()
    train(engine, STEPS)  # commits at once, though 5 is not a multiple of 2
    engine.synchronize()
    assert engine.memory.parts.records.store.step == 5
    same_end(end(engine), straight("deferred"))
    engine.close()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_rollback_brings_back_what_lives_in_faster_tiers(tmp_path, device):
    """Weights on the device and in host memory, state on NVMe: commits of every second step, so that a whole step is undone."""
    engine = quiet(tmp_path, weights="device", state="nvme", device_memory=None, max_grad_norm=1.0, commit_every=2, device=device)
    train(engine, 3)
    engine.memory.parts.fetcher.drain()
    engine.memory.io.arm([Rule("r", "state", nth=5, error=errno.EIO)])
    with pytest.raises(OSError):
        train(engine, STEPS)
    engine.memory.io.disarm()
    assert engine.recover() == 2
    train(engine, STEPS)
    same_end(end(engine), straight("deferred"))
    engine.close()


def test_what_cannot_be_recovered_says_so(tmp_path):
    engine = quiet(tmp_path, crash_safe=False, **MODES["deferred"])
    train(engine, 1)
    engine.memory.io.arm([Rule("w", "state", nth=1, error=errno.EIO)])
    with pytest.raises(OSError):
        train(engine, 4)
    with pytest.raises(StoreError, match="crash_safe: false"):
        engine.recover()
    with pytest.raises(EngineError, match="recover"):
        one_step(engine)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.recover()


def test_recover_where_nothing_is_wrong_changes_nothing(tmp_path):
    with quiet(tmp_path, **MODES["deferred"]) as engine:
        for step in range(STEPS):
            assert engine.recover() == step
            one_step(engine)
            assert engine.recover() == step + 1
        same_end(end(engine), straight("deferred"))


def test_close_on_a_full_disk_loses_nothing_and_can_be_called_again(tmp_path, monkeypatch):
    """Also given up (commit=False), and at the end of a with block, which ends: then the last commit is what is there."""
    engine = quiet(tmp_path, **MODES["deferred"])
    train(engine, 2)
    engine.synchronize()
    train(engine, 3)
    left = full(monkeypatch, 10**9)
    for _ in range(2):
        with pytest.raises(CommitError, match="step 3 is made and not committed"):
            engine.close()
    left[0] = 0
    train(engine, 4)  # it is as open as it was
    left[0] = 1
    with pytest.raises(CommitError):
        engine.close()
    engine.close()
    engine.close()
    with quiet(tmp_path, resume=True, **MODES["deferred"]) as engine:
        assert engine.global_step == 4
        engine.restore_rng()
        train(engine, STEPS)
        same_end(end(engine), straight("deferred"))
        engine.synchronize()
        train(engine, STEPS + 1)
        engine.close(commit=False)
    with pytest.raises(CommitError), quiet(tmp_path, resume=True, **MODES["deferred"]) as engine:
        assert engine.global_step == STEPS
        left[0] = 10**9
    assert not engine._shutdown.alive and threads() == []
