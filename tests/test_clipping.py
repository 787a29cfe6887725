"""Clipping and the norm: as torch's; and batches whose gradients are not finite leave no trace, wherever the first one was."""

from __future__ import annotations

import functools
import logging
import math

import pytest
import torch
from models import HYPER, LEAF_BYTES, batches, llama, oracle_run
from oracle import Oracle, assert_same, engine_snapshot

from zinf.engine import Engine
from zinf.errors import NonFiniteError

NVME = dict(weights="nvme", state="nvme", chunk_size=4096)
SMALL = dict(num_hidden_layers=2)
devices = pytest.mark.parametrize("device", ["cpu", "sim"])
modes = pytest.mark.parametrize("mode", ["backward", "deferred"])


def engine_of(folder, model=None, **options):
    return Engine(model or llama(), nvme_path=str(folder), **{"leaf_bytes": LEAF_BYTES, **NVME, **HYPER, **options})


def train(engine, ids):
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    return engine.step()


def train_all(engine, many):
    losses, norms = [], []
    for ids in many:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        losses.append(loss.item())
        norms.append(engine.step().grad_norm)
    return losses, norms


# -- the norm ---------------------------------------------------------------------------------------------------------------


@devices
def test_a_norm_that_is_asked_for_between_backwards(tmp_path, device):
    """It is that of the grads so far, and leaves no trace in the step's."""
    many = [part for ids in batches(1) for part in ids.chunk(4)]
    seen = []
    for ask in (False, True):
        folder = tmp_path / str(ask)
        folder.mkdir()
        with engine_of(folder, device=device, gradient_accumulation_steps=4, max_grad_norm=0.5) as engine:
            asked = []
            for ids in many:
                engine.backward(engine(input_ids=ids, labels=ids).loss / 4)
                if ask:
                    asked.append(engine.grad_norm())
            norm = engine.step().grad_norm
            assert not ask or (asked[-1] == norm and len(set(asked)) == 4)
            seen.append((norm, engine_snapshot(engine)))
    assert seen[0][0] == seen[1][0]
    assert_same(seen[0][1], seen[1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_norm", [0.25, 1e6])
def test_norm_and_coefficient_are_torchs(tmp_path, dtype, max_norm):
    """clip_grad_norm_ on the plain model's gradients in fp32; ours sums squares in double, torch in fp32 tensor by tensor."""
    ids = batches(1)[0]
    plain = llama(dtype)
    plain(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    copies = [torch.nn.Parameter(p.detach().float()) for p in plain.parameters()]
    for copy, p in zip(copies, plain.parameters(), strict=True):
        copy.grad = p.grad.float()
    before = copies[3].grad.abs().max()
    theirs = torch.nn.utils.clip_grad_norm_(copies, max_norm).item()
    with engine_of(tmp_path, llama(dtype), max_grad_norm=max_norm) as engine:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        norm = engine.grad_norm()
        assert engine.step().grad_norm == norm == pytest.approx(theirs, rel=1e-6)
        pending = {s.pending.scale for s in engine.shards if s.pending is not None}
        assert len(pending) == 1 and pending.pop() == pytest.approx((copies[3].grad.abs().max() / before).item(), rel=1e-6)


# -- clipping by value --------------------------------------------------------------------------------------------------------


PLACES = [({}, "cpu", "deferred"), (NVME, "sim", "deferred"), (NVME, "cpu", "backward"), (NVME, "sim", "backward")]


@pytest.mark.parametrize(("tiers", "device", "mode"), PLACES)
def test_clipping_by_value_that_bites(tmp_path, tiers, device, mode):
    """Also where shards are stepped under backward, as no norm is needed. The norm that is reported is that of unclipped grads."""
    value = 1e-3
    plain = oracle_run(3)
    want = oracle_run(3, max_grad_value=value)
    assert want[0] != plain[0] and want[1][0] == plain[1][0]
    where = dict(nvme_path=str(tmp_path), **tiers) if tiers else {}
    with Engine(llama(), device=device, step_mode=mode, leaf_bytes=LEAF_BYTES, max_grad_value=value, **where, **HYPER) as engine:
        losses, norms = train_all(engine, batches(3))
        assert (losses, norms) == want[:2]
        assert_same(engine_snapshot(engine), want[2])


@devices
@pytest.mark.parametrize("scaled", [False, True])
def test_norm_comes_before_value(tmp_path, device, scaled):
    """Both, as clip_grad_norm_ and then clip_grad_value_ on summed and unscaled gradients; under a loss scale as well."""
    dtype = torch.float16 if scaled else torch.float32
    oracle = Oracle(llama(dtype, **SMALL), **HYPER, leaf_bytes=LEAF_BYTES, wide=True)
    oracle.loss_scale = 2.0**8 if scaled else 1.0
    options = dict(max_grad_norm=0.25, max_grad_value=1e-3, gradient_accumulation_steps=2, loss_scale=2.0**8)
    bites = 0
    with engine_of(tmp_path, llama(dtype, **SMALL), device=device, **options) as engine:
        for ids in batches(3):
            for part in ids.chunk(2):
                for owner, model in ((engine, engine), (oracle, oracle.model)):
                    owner.backward(model(input_ids=part, labels=part, use_cache=False).loss / 2)
            stats = engine.step()
            scale = min(1.0, 0.25 / (stats.grad_norm + 1e-6))
            assert scale < 1
            for name, g in oracle.sums.items():  # what torch's two functions do, one after the other; powers of two round nothing
                g = torch.nn.Parameter(g), g * torch.tensor(scale / oracle.loss_scale)
                g[0].grad = g[1]
                torch.nn.utils.clip_grad_value_([g[0]], 1e-3, foreach=False)
                bites += (g[0].grad.abs() == 1e-3).sum().item()
                oracle.sums[name] = g[0].grad * oracle.loss_scale
            oracle.step()
            assert bites
        assert_same(engine_snapshot(engine), oracle.snapshot())


# -- gradients that are not finite --------------------------------------------------------------------------------------------


@functools.cache
def clean(steps):
    return oracle_run(steps)


SHARDS = ["model.embed_tokens", "model.layers.0", "model.layers.2", "model.layers.3", "root"]  # the embedding is the tied head as well


@pytest.mark.parametrize(
    ("mode", "device", "value"),
    [("backward", "cpu", math.nan), ("backward", "sim", math.inf), ("backward", "sim", math.nan), ("deferred", "cpu", math.inf), ("deferred", "sim", math.nan)],
)
def test_a_bad_gradient_in_any_shard_leaves_no_trace(tmp_path, caplog, mode, device, value):
    """One parameter of one shard, each in turn: named, skipped, counted, and then the bits as if that batch had never been."""
    model = llama()
    with engine_of(tmp_path, model, step_mode=mode, device=device) as engine, caplog.at_level(logging.WARNING, "zinf"):
        losses, norms, done = [], [], 0
        for k, name in enumerate(SHARDS):
            shard = next(s for s in engine.shards if s.name == name)
            p = shard.params[-1][2]
            hook = p.register_hook(lambda g: torch.full_like(g, value))
            caplog.clear()
            stats = train(engine, batches(9)[8])
            hook.remove()
            assert stats.skipped and math.isnan(stats.grad_norm) and stats.step == done
            assert f"step {done + 1} skipped: the gradient of {name} is not finite ({k + 1} skipped in all)" in caplog.text
            ids = batches(len(SHARDS))[k]
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            losses.append(loss.item())
            norms.append(engine.step().grad_norm)
            done += 1
        assert (engine.global_step, engine.skipped_steps) == (len(SHARDS), len(SHARDS))
        want = clean(len(SHARDS))
        assert (losses, norms) == want[:2]
        assert_same(engine_snapshot(engine), want[2])


@modes
def test_the_first_shard_in_backward_order_is_named(tmp_path, mode):
    """A NaN spreads to all that comes after it in backward; the message names where it began, which may be the loss."""

    def first(where):
        def poison(module, args, output):
            output = output[0] if isinstance(output, tuple) else output
            output.register_hook(lambda g: g * math.nan)

        folder = tmp_path / where
        folder.mkdir()
        with engine_of(folder, llama(num_hidden_layers=3), step_mode=mode, max_skipped_steps=1) as engine:
            train(engine, batches(1)[0])
            module = engine.module if where == "loss" else engine.module.get_submodule(where)
            if where == "loss":
                for _ in range(2):
                    engine.backward(engine(input_ids=batches(1)[0], labels=batches(1)[0]).loss * math.nan)
                    try:
                        engine.step()
                    except NonFiniteError as e:
                        return str(e)
            hook = module.register_forward_hook(poison)
            train(engine, batches(1)[0])
            with pytest.raises(NonFiniteError) as error:
                train(engine, batches(1)[0])
            hook.remove()
            assert not train(engine, batches(1)[0]).skipped, "the engine can go on"
            return str(error.value)

    for where, shard in (
        ("model.layers.2", "model.layers.2"),
        ("model.layers.1", "model.layers.1"),
        ("model.embed_tokens", "model.embed_tokens"),
        ("loss", "model.embed_tokens"),  # whose head is the first to get a gradient
    ):
        assert f"2 steps in a row had grads that are not finite, this time first in {shard} at step 2" in first(where), where


@pytest.mark.parametrize("commit_every", [1, 2])
def test_backward_mode_needs_the_commit_before(tmp_path, commit_every):
    """Shards were stepped before the bad one was found: without a commit to go back to, that is said, and nothing goes on from it."""
    with engine_of(tmp_path, step_mode="backward", commit_every=commit_every) as engine:
        train(engine, batches(1)[0])
        engine.module.model.embed_tokens.weight.register_hook(lambda g: g * math.nan)
        if commit_every == 1:
            assert train(engine, batches(1)[0]).skipped
            return
        with pytest.raises(NonFiniteError, match="step 1 was not committed: go on from the last commit"):
            train(engine, batches(1)[0])


def test_skips_are_counted_in_a_row(tmp_path):
    with engine_of(tmp_path, llama(**SMALL), max_skipped_steps=1) as engine:
        bad = [True, False, True, False, True, True]
        for k, is_bad in enumerate(bad):
            ids = batches(1)[0]
            engine.backward(engine(input_ids=ids, labels=ids).loss * (math.nan if is_bad else 1))
            if k == 5:
                with pytest.raises(NonFiniteError, match="2 steps in a row"):
                    engine.step()
            else:
                assert engine.step().skipped is is_bad
        assert (engine.global_step, engine.skipped_steps) == (2, 4)
