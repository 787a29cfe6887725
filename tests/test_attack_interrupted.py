"""Backwards that fail, steps that are half made: nothing hangs, nothing half done is read or committed, and the run goes on with the same bits."""

from __future__ import annotations

import errno

import pytest
import torch
from models import LEAF_BYTES
from oracle import Oracle, assert_same, engine_snapshot
from test_streaming import net, square

from zinf.aio.faults import Rule
from zinf.engine import Engine
from zinf.errors import EngineError

OPTIONS = dict(weights="nvme", state="nvme", chunk_size=4096, leaf_bytes=LEAF_BYTES, lr=1e-3, weight_decay=0.1)
MODES = pytest.mark.parametrize("mode", ["deferred", "backward"])


def begin(folder, blocks=6, **options) -> Engine:
    return Engine(net(blocks), nvme_path=str(folder), **{**OPTIONS, **options})


def run(engine: Engine, first: int, steps: int) -> None:
    for step in range(first, steps):
        engine.backward(square(engine, step))
        engine.step()


def oracle(steps: int, blocks: int = 6):
    it = Oracle(net(blocks), lr=1e-3, weight_decay=0.1, leaf_bytes=LEAF_BYTES)
    for step in range(steps):
        it.backward(square(it.model, step))
        it.step()
    return it.snapshot()


@MODES
@pytest.mark.timeout(60)
def test_nan_in_every_gradient_is_one_skipped_step(tmp_path, mode):
    """More shards than there are buffers for grads, and not one of them may be stepped."""
    with begin(tmp_path, step_mode=mode) as engine:
        run(engine, 0, 2)
        engine.backward(square(engine, 2) * float("nan"))
        assert engine.step().skipped
        run(engine, 2, 4)
        assert_same(engine_snapshot(engine), oracle(4))


@MODES
@pytest.mark.parametrize("kind", ["r", "w"])
@pytest.mark.timeout(60)
def test_a_disk_that_fails_for_good_ends_in_an_error(tmp_path, mode, kind, monkeypatch):
    monkeypatch.setenv("ZINF_IO_BACKEND", "faults:threads")
    engine = begin(tmp_path, step_mode=mode)
    run(engine, 0, 2)
    engine.synchronize()
    engine.memory.io.arm([Rule(kind, "state", probability=1.0, error=errno.EIO)])
    with pytest.raises(OSError, match="state of shard"):
        run(engine, 2, 5)
    engine.close()
    with begin(tmp_path, step_mode=mode, resume=True) as engine:
        engine.memory.io.disarm()
        run(engine, engine.global_step, 4)
        assert_same(engine_snapshot(engine), oracle(4))


class Oops(Exception):
    pass


def fail_in_backward(engine: Engine, block: int, error: type[BaseException] = Oops) -> None:
    def forward_hook(module, args, out):
        def fail(grad):
            raise error

        out.register_hook(fail)

    hook = engine.module.blocks[block].register_forward_hook(forward_hook)
    try:
        with pytest.raises(error):
            engine.backward(square(engine, 2))
    finally:
        hook.remove()


@MODES
@pytest.mark.parametrize("block", [0, 3, 5])
def test_a_backward_that_failed_must_be_dropped_and_then_is_as_if_it_never_was(tmp_path, mode, block):
    with begin(tmp_path, step_mode=mode) as engine:
        run(engine, 0, 2)
        for _ in range(3):  # what it had bound must not add up
            fail_in_backward(engine, block, KeyboardInterrupt)
            with pytest.raises(EngineError, match="zero_grad"):
                engine.step()
            engine.zero_grad()
        run(engine, 2, 4)
        assert_same(engine_snapshot(engine), oracle(4))


@MODES
def test_the_next_backward_does_not_add_to_one_that_failed(tmp_path, mode):
    with begin(tmp_path, step_mode=mode) as engine:
        run(engine, 0, 2)
        fail_in_backward(engine, 2)
        with pytest.raises(EngineError, match="zero_grad"):
            engine.backward(square(engine, 2))


@MODES
@pytest.mark.parametrize("failed", [False, True])
def test_close_between_backward_and_step_keeps_the_step_before(tmp_path, mode, failed):
    engine = begin(tmp_path, step_mode=mode)
    run(engine, 0, 2)
    if failed:
        fail_in_backward(engine, 2)
    else:
        engine.backward(square(engine, 2))
    engine.close()
    with begin(tmp_path, step_mode=mode, resume=True) as engine:
        assert engine.global_step == 2
        assert_same(engine_snapshot(engine), oracle(2))


def test_a_step_that_cannot_be_undone_is_not_committed(tmp_path):
    engine = begin(tmp_path, step_mode="backward", commit_every=0)
    run(engine, 0, 1)
    engine.commit()
    engine.synchronize()
    run(engine, 1, 2)
    fail_in_backward(engine, 2)
    with pytest.raises(RuntimeError, match="cannot be undone"):
        engine.zero_grad()
    with pytest.raises(EngineError, match="stopped at an error"):
        engine.step()
    engine.close()
    with begin(tmp_path, step_mode="backward", resume=True) as engine:
        assert engine.global_step == 1
        assert_same(engine_snapshot(engine), oracle(1))


def test_half_a_step_is_not_read(tmp_path):
    with begin(tmp_path, step_mode="backward") as engine:
        engine.backward(square(engine, 0))
        reads = (engine.state_dict, engine.commit, engine.synchronize, lambda: engine.save_pretrained(tmp_path / "out"), lambda: square(engine, 1))
        for read in reads:
            with pytest.raises(EngineError, match="step"):
                read()
        engine.step()
        assert_same(engine_snapshot(engine), oracle(1))


@MODES
def test_inference_mode_before_and_between_steps(tmp_path, mode):
    with begin(tmp_path, step_mode=mode) as engine:
        for step in range(3):
            with torch.inference_mode():
                square(engine, 40 + step)
            run(engine, step, step + 1)
        assert_same(engine_snapshot(engine), oracle(3))


def test_a_model_cast_after_the_engine_was_built_is_refused(tmp_path):
    with begin(tmp_path) as engine:
        engine.module.scale.data = engine.module.scale.data.float()
        with pytest.raises(EngineError, match="scale was moved or cast"):
            square(engine, 0)


def test_a_constructor_that_fails_leaves_store_and_model_free(tmp_path):
    with begin(tmp_path) as engine:
        run(engine, 0, 2)
    model = net(6)
    groups = [{"params": list(model.blocks.parameters())}, {"params": [model.scale]}]
    with pytest.raises(ValueError, match="parameter groups"):
        Engine(model, nvme_path=str(tmp_path), resume=True, param_groups=groups, **OPTIONS)
    for steps in (3, 4):  # and a closed engine's model takes the next one
        with Engine(model, nvme_path=str(tmp_path), resume=True, **OPTIONS) as engine:
            run(engine, steps - 1, steps)
            assert_same(engine_snapshot(engine), oracle(steps))


def test_a_hold_that_was_interrupted_does_not_keep_its_slab(tmp_path):
    with begin(tmp_path, step_mode="backward") as engine:
        run(engine, 0, 2)
        for shard in engine.shards[:-1]:
            shard.hold()  # Ctrl-C before the matching let_go
        engine.zero_grad()
        run(engine, 2, 4)
        assert_same(engine_snapshot(engine), oracle(4))
