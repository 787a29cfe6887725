"""Optimizers: each trains with the bits of the reference, in every dtype, placement, device and step mode; groups, averages and what a step costs."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
import torch
from models import LEAF_BYTES, batches, llama, micro_steps
from oracle import Oracle, assert_same, engine_snapshot

import zinf
from zinf import CheckpointError, ConfigError, Engine, StoreError, layout
from zinf.algorithms import moments

SIZES = dict(num_hidden_layers=1, hidden_size=32, intermediate_size=64, vocab_size=512, num_attention_heads=2, num_key_value_heads=1)
NVME = dict(weights="nvme", state="nvme", chunk_size=4096)
# name: (optimizer, its options, the reference's function, its moments)
OPTIMIZERS = {
    "adamw": ("adamw", dict(betas=(0.8, 0.9)), "adam", ("m", "v")),
    "adam": ("adam", dict(eps=1e-6), "adam", ("m", "v")),
    "sgd": ("sgd", {}, "sgd", ()),
    "momentum": ("sgd", dict(momentum=0.9, dampening=0.5), "sgd", ("m",)),
    "nesterov": ("sgd", dict(momentum=0.9, nesterov=True), "sgd", ("m",)),
    "lion": ("lion", dict(betas=(0.8, 0.9)), "lion", ("m",)),
    "adagrad": ("adagrad", dict(lr_decay=0.1, initial_accumulator_value=0.1), "adagrad", ("s",)),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_runs = itertools.count()


def model(dtype=torch.bfloat16):
    return llama(dtype, **SIZES)


def oracle_of(name, dtype=torch.bfloat16, net=None, **options):
    optimizer, own, algorithm, moments = OPTIMIZERS[name]
    defaults = zinf.Config(optimizer=optimizer, **own).optimizer_options()
    if algorithm == "adam":
        defaults["decoupled"] = optimizer == "adamw"
    return Oracle(net or model(dtype), leaf_bytes=LEAF_BYTES, algorithm=algorithm, moments=moments, **{**defaults, "lr": 1e-2, "weight_decay": 0.1, **options})


def engine_of(name, folder=None, dtype=torch.bfloat16, net=None, **options):
    optimizer, own, *_ = OPTIMIZERS[name]
    options = {**own, "lr": 1e-2, "weight_decay": 0.1, "leaf_bytes": LEAF_BYTES, "loss_scale": 1, **options}
    if folder is not None:
        options = {"nvme_path": str(folder), "run_name": f"run{next(_runs)}", **NVME, **options}
    return Engine(net or model(dtype), optimizer=optimizer, **options)


def train(engine, steps, accumulation=1, first=0, after=lambda: None):
    """Losses of steps [first, steps), of an engine or an oracle; `after` each step."""
    losses = []
    for ids in batches(steps, rows=2, length=12)[first:]:
        for part in micro_steps(ids, accumulation):
            net = engine.model if isinstance(engine, Oracle) else engine
            loss = net(input_ids=part, labels=part, use_cache=False).loss / accumulation
            engine.backward(loss)
            losses.append(loss.item())
        engine.step()
        after()
    return losses


def check(engine, oracle, steps=3, accumulation=1):
    want = train(oracle, steps, accumulation)
    with engine:
        assert train(engine, steps, accumulation) == want
        assert_same(engine_snapshot(engine), oracle.snapshot())


@functools.cache
def reference_run(name, dtype):
    oracle = oracle_of(name, dtype)
    return train(oracle, 3), oracle.snapshot()


@pytest.mark.parametrize("place", ["memory on cpu", "nvme on cpu", "nvme on sim"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_of_the_reference(tmp_path, name, dtype, place):
    folder = tmp_path if place.startswith("nvme") else None
    losses, snapshot = reference_run(name, DTYPES[dtype])
    with engine_of(name, folder, DTYPES[dtype], device=place.split()[-1]) as engine:
        assert train(engine, 3) == losses
        assert_same(engine_snapshot(engine), snapshot)


@pytest.mark.parametrize("name", ["nesterov", "lion", "sgd"])
def test_accumulation_and_clipping(tmp_path, name):
    oracle = oracle_of(name, torch.float32, max_grad_norm=0.25, wide=True)
    check(engine_of(name, tmp_path, torch.float32, max_grad_norm=0.25, gradient_accumulation_steps=2, device="sim"), oracle, accumulation=2)


def groups_of(net):
    """Two groups, norms and biases apart, with learning rates and options of their own."""
    first, second = zinf.decay_groups(net, 0.3)
    return [{**first, "lr": 3e-3}, {**second, "lr": 2e-2}]


@pytest.mark.parametrize("mode", ["backward", "deferred"])
@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_groups_with_their_own_rates(tmp_path, name, mode):
    def pair():
        net = model()
        groups = groups_of(net)
        if name == "momentum":
            groups[1] |= {"momentum": 0.0, "dampening": 0.0}  # its m stays as it is
        return net, groups

    (mine, my_groups), (theirs, their_groups) = pair(), pair()
    oracle = oracle_of(name, net=theirs, groups=their_groups)
    if name == "momentum":
        oracle_without_momentum(oracle)
    check(engine_of(name, tmp_path, net=mine, param_groups=my_groups, step_mode=mode), oracle)


def oracle_without_momentum(oracle):
    """The oracle's kernel takes no m where a group has no momentum."""
    apply = oracle._apply

    def skipping(name, weights, state, grads, scale):
        plain = any(p is oracle.params[name] for p in oracle.optimizer.param_groups[1]["params"])
        apply(name, weights, state[:-1] if plain else state, grads, scale)

    oracle._apply = skipping


# -- what it costs ----------------------------------------------------------------------------------------------------------


def test_nothing_is_kept_for_plain_sgd_in_fp32(tmp_path):
    """No record of state: none on the drive, none in memory, none read or written."""
    with engine_of("sgd", tmp_path, torch.float32) as engine:
        train(engine, 2)
        engine.synchronize()
        store = engine.memory.parts.records.store
        assert all(key[0] == layout.WEIGHTS for key in store._entries)
        assert "state" not in engine.memory.plan.host and engine.memory.plan.state_slots == 0
        assert store.stats()["state_read"] == store.stats()["state_written"] == 0
        assert store.stats()["weights_written"] > 0
        name = engine.config.run_name
    assert not (tmp_path / name / "state").exists()
    with engine_of("sgd", tmp_path, torch.float32, run_name=name, resume=True) as engine:
        assert engine.global_step == 2
        losses = train(engine, 3, first=2)
    assert losses == train(oracle_of("sgd", torch.float32), 3)[2:]


# -- another optimizer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "options", "message"),
    [
        ("sgd", {}, r"has room for the state of adamw or adam \(m, v\), and this run needs that of sgd without momentum \(none\)"),
        ("lion", {}, r"adamw or adam \(m, v\), and this run needs that of lion or sgd with momentum \(m\)"),
        ("adamw", dict(ema_decay=0.9), r"this run needs that of adamw or adam with an average of the weights \(m, v, ema\)"),
        ("adam", {}, "the store was trained with adamw, and this run's optimizer is adam"),
    ],
)
def test_another_optimizer_than_the_store_was_made_for(tmp_path, other, options, message):
    with engine_of("adamw", tmp_path, run_name="run") as engine:
        train(engine, 1)
    with pytest.raises((ConfigError, StoreError), match=message):
        engine_of(other, tmp_path, run_name="run", resume=True, **options)


def test_a_momentum_that_there_is_no_room_for():
    with engine_of("sgd") as engine:
        engine.optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(ConfigError, match=r"momentum was set to 0.9 after the engine was built without room for one"):
            train(engine, 1)
        engine.optimizer.param_groups[0]["momentum"] = 0.0
        engine.zero_grad()
        assert train(engine, 2) == train(oracle_of("sgd"), 2)  # nothing had happened


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(optimizer="sgd", nesterov=True), r"nesterov is True, expected false, or a momentum and no dampening \(momentum is 0.0"),
        (dict(optimizer="sgd", nesterov=True, momentum=0.9, dampening=0.1), "no dampening"),
        (dict(optimizer="adamw", momentum=0.9), r"momentum is 0.9, but adamw has no momentum \(it belongs to sgd\): leave it out"),
        (dict(optimizer="sgd", betas=(0.9, 0.99)), r"but sgd has no betas \(it belongs to adamw and adam and lion\)"),
        (dict(optimizer="lion", eps=1e-8), "but lion has no eps"),
        (dict(optimizer="sgd", momentum=-0.1), "momentum is -0.1, expected zero or more"),
        (dict(optimizer="adagrad", initial_accumulator_value=-1), "initial_accumulator_value is -1.0, expected zero or more"),
        (dict(ema_decay=1.0), r"ema_decay is 1.0, expected a number in \[0, 1\)"),
        (dict(optimizer="adafactor"), "optimizer is 'adafactor', expected one of adamw, adam, sgd, lion, adagrad"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ConfigError, match=message):
        zinf.Config(**options)


def test_the_same_in_a_group():
    net = model()
    with pytest.raises(ConfigError, match="but adamw has no momentum"):
        Engine(net, param_groups=[{"params": net.parameters(), "momentum": 0.9}])
    with pytest.raises(ConfigError, match="lr is -1, expected zero or more"):
        Engine(net, param_groups=[{"params": net.parameters(), "lr": -1}])


def test_defaults_follow_the_optimizer():
    assert zinf.Config(optimizer="lion").optimizer_options() == {"lr": 1e-5, "weight_decay": 0.0, "betas": (0.9, 0.99)}
    assert zinf.Config().optimizer_options() == {"lr": 1e-5, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8}
    with Engine(model(), optimizer="lion") as engine:  # a default is no choice that would go on to another optimizer
        assert engine.optimizer.param_groups[0]["betas"] == (0.9, 0.99)


def test_a_checkpoint_of_another_optimizer_gives_its_weights(tmp_path):
    with engine_of("adamw", tmp_path, chunk_size=8192) as engine:
        train(engine, 2)
        engine.save_checkpoint(tmp_path / "saved").wait()
        want = engine_snapshot(engine)
    for options in (dict(chunk_size=8192), dict(chunk_size=4096), dict(chunk_size=8192, ema_decay=0.9)):
        with engine_of("lion", tmp_path, **options) as engine:
            train(engine, 1)
            with pytest.raises(CheckpointError, match=r"has the state of adamw or adam \(m, v\), this engine needs that of lion"):
                engine.load_checkpoint(tmp_path / "saved")
            engine.load_checkpoint(tmp_path / "saved", weights_only=True)
            weights, state = engine_snapshot(engine)
            assert all(torch.equal(weights[name], want[0][name]) for name in weights)
            for key, (lo, *moments) in state.items():
                assert torch.equal(lo, want[1][key][0]) and not any(plane.any() for plane in moments)


# -- bytes a parameter ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "each"), [("adamw", "bf16", 10), ("lion", "bf16", 6), ("sgd", "bf16", 2), ("adagrad", "fp32", 4), ("sgd", "fp16", 4)]
)
@pytest.mark.parametrize("average", [0, 4])
def test_bytes_of_a_step(tmp_path, name, dtype, each, average):
    """State is written once a step, all of it and no more."""
    with engine_of(name, tmp_path, DTYPES[dtype], ema_decay=0.9 if average else None, commit_every=1) as engine:
        train(engine, 1)
        engine.synchronize()
        before = engine.memory.parts.records.store.stats()
        train(engine, 3, first=1)
        engine.synchronize()
        after = engine.memory.parts.records.store.stats()
        elements = sum(run.padded for shard in engine.layout.shards for run in shard.runs)
        assert after["state_written"] - before["state_written"] == 2 * elements * (each + average)
        assert after["state_read"] - before["state_read"] <= 2 * elements * (each + average)  # the root's lives in memory


def table() -> list[str]:
    """The table of docs/optimizers.md."""
    lines = ["| optimizer | dtype | weights | state | on NVMe | written a step | read a step |", "|---|---|---|---|---|---|---|"]
    rows = {"adamw, adam": ("adamw", {}), "lion; sgd with momentum": ("lion", {}), "adagrad": ("adagrad", {}), "sgd": ("sgd", {})}
    for label, (optimizer, options) in rows.items():
        for dtype in DTYPES:
            mode = layout.mode(dtype, moments(zinf.Config(optimizer=optimizer, **options)))
            w, s = mode.weights_bytes, mode.state_bytes
            names = ", ".join(f"{name} {layout.ITEMSIZE[kind]}" for name, kind in mode.planes) or "none"
            lines.append(f"| {label} | {dtype} | {w} | {f'{s}: {names}' if s else 'none'} | {w + s} | {w + s} | {s} + {w} to {2 * w} |")
    return lines


def test_the_table_of_the_docs():
    text = (Path(__file__).parent.parent / "docs" / "optimizers.md").read_text()
    assert "\n".join(table()) in text, "\n".join(table())


def test_a_store_made_by_from_pretrained(tmp_path):
    """It has room for what it was told; an engine with another optimizer is told how to get it."""
    model(torch.float32).save_pretrained(tmp_path / "hf")
    options = dict(nvme_path=str(tmp_path), dtype=torch.float32)
    net = zinf.from_pretrained(tmp_path / "hf", run_name="adam", **options)
    with pytest.raises(StoreError, match=r"has room for the state of adamw or adam \(m, v\).*from_pretrained takes optimizer, momentum and ema_decay"):
        Engine(net, optimizer="lion")
    net = zinf.from_pretrained(tmp_path / "hf", run_name="lion", optimizer="lion", ema_decay=0.9, **options)
    oracle = oracle_of("lion", torch.float32, ema_decay=0.9)
    losses = train(oracle, 2)
    with Engine(net, optimizer="lion", betas=(0.8, 0.9), ema_decay=0.9, lr=1e-2, weight_decay=0.1) as engine:
        engine.train()
        assert train(engine, 2) == losses
        averages, want = engine.state_dict(ema=True), oracle.snapshot()[0]
        assert all(torch.equal(engine.state_dict()[name], w) for name, w in want.items()) and averages.keys() >= want.keys()
