"""Learning-rate schedulers of torch and transformers work on the engine's optimizer: the same rates, the same bits, also after a resume."""

from __future__ import annotations

import io

import pytest
import torch
from oracle import assert_same, engine_snapshot
from test_optimizers import engine_of, model, oracle_of, train
from torch.optim import lr_scheduler
from transformers import get_cosine_schedule_with_warmup

import zinf
from zinf import ConfigError, Engine

STEPS = 5


def sequential(optimizer):
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.ExponentialLR(optimizer, 0.7)], milestones=[2])


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=2e-2, total_steps=STEPS + 1),  # moves betas and momentum, too
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=10.0),
    "SequentialLR": sequential,
    "transformers' cosine": lambda o: get_cosine_schedule_with_warmup(o, 2, STEPS),
}


def scheduled(engine, scheduler, steps, first=0):
    """Train; the rates of each step's groups, and its losses."""
    rates = []

    def after():
        rates.append([(g["lr"], g.get("betas"), g.get("momentum")) for g in engine.optimizer.param_groups])
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))

    return train(engine, steps, first=first, after=after), rates


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # the oracle's optimizer is never stepped itself
@pytest.mark.filterwarnings("ignore:To get the last learning rate")
@pytest.mark.parametrize("mode", ["backward", "deferred"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_same_rates_and_bits(tmp_path, name, mode):
    """The step of a shard may be made long after scheduler.step(): it goes by the rate of its own time."""
    optimizer = "momentum" if name == "OneCycleLR" and mode == "deferred" else "adamw"
    oracle = oracle_of(optimizer)
    want = scheduled(oracle, SCHEDULERS[name](oracle.optimizer), STEPS)
    assert len({rates[0][0] for rates in want[1]}) > 2
    with engine_of(optimizer, tmp_path, step_mode=mode, device="sim") as engine:
        assert scheduled(engine, SCHEDULERS[name](engine.optimizer), STEPS) == want
        assert_same(engine_snapshot(engine), oracle.snapshot())


@pytest.mark.parametrize(("name", "how"), [*((name, "torch.save") for name in SCHEDULERS), ("CosineAnnealingLR", "registered"), ("SequentialLR", "registered")])
def test_resumed_rates(tmp_path, name, how):
    """In the commit (engine.register), or by hand as with any torch optimizer: two small files that weights_only loads."""
    with engine_of("adamw") as engine:
        want = scheduled(engine, SCHEDULERS[name](engine.optimizer), STEPS)
    file = io.BytesIO()
    with engine_of("adamw", tmp_path, run_name="run") as engine:
        scheduler = SCHEDULERS[name](engine.optimizer)
        if how == "registered":
            engine.register("schedule", scheduler)
        begun = scheduled(engine, scheduler, 2)
        torch.save({"optimizer": engine.optimizer.state_dict(), "schedule": scheduler.state_dict()}, file)
    assert len(file.getvalue()) < 16384
    with engine_of("adamw", tmp_path, run_name="run", resume=True) as engine:
        scheduler = SCHEDULERS[name](engine.optimizer)
        if how == "registered":
            assert engine.register("schedule", scheduler)
        else:
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            engine.optimizer.load_state_dict(saved["optimizer"])
            scheduler.load_state_dict(saved["schedule"])
        losses, rates = scheduled(engine, scheduler, STEPS, first=2)
    assert (begun[0] + losses, begun[1] + rates) == want


def test_state_dict_is_small_and_plain():
    """Only the groups: weights_only loads it, and what was loaded is what the next step goes by."""
    oracle = oracle_of("sgd")
    train(oracle, 1)
    oracle.optimizer.param_groups[0]["lr"] = 0.125
    train(oracle, 2, first=1)
    with engine_of("sgd") as engine:
        train(engine, 1)
        file = io.BytesIO()
        torch.save(engine.optimizer.state_dict(), file)
        assert len(file.getvalue()) < 8192
        file.seek(0)
        state = torch.load(file, weights_only=True)
        assert state["state"] == {} and [g["lr"] for g in state["param_groups"]] == [1e-2]
        state["param_groups"][0]["lr"] = 0.125
        engine.optimizer.load_state_dict(state)
        train(engine, 2, first=1)
        assert_same(engine_snapshot(engine), oracle.snapshot())


def test_the_moments_of_another_optimizer_are_refused():
    theirs = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))])
    theirs.param_groups[0]["params"][0].grad = torch.ones(3)
    theirs.step()
    with Engine(model()) as engine, pytest.raises(ConfigError, match="has moments, which zinf keeps in its store"):
        engine.optimizer.load_state_dict(theirs.state_dict())


def test_groups_are_fixed():
    with Engine(model()) as engine, pytest.raises(ConfigError, match="parameter groups are fixed once the engine is built, since their records are laid out"):
        engine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})


# -- who is decayed ----------------------------------------------------------------------------------------------------------


def architectures():
    from transformers import BertConfig, BertForMaskedLM, GemmaConfig, GemmaForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    decoder = dict(**sizes, num_key_value_heads=1, head_dim=16)
    return [
        model(),
        GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)),
        BertForMaskedLM(BertConfig(**sizes)),
        Qwen3ForCausalLM(Qwen3Config(**decoder)),  # norms of heads
        GemmaForCausalLM(GemmaConfig(**decoder)),
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 4, bias=False)),
    ]


@pytest.mark.parametrize("i", range(6))
def test_norms_and_biases_are_those_of_the_trainer(i):
    from transformers import Trainer

    net = architectures()[i]
    wanted = set(Trainer.get_decay_parameter_names(None, net))  # type: ignore[arg-type]
    decayed, plain = zinf.decay_groups(net, 0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in net.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == wanted & set(names.values())
    assert {names[id(p)] for p in plain["params"]} == set(names.values()) - wanted
    assert len(decayed["params"]) + len(plain["params"]) == len(names)


def test_norms_are_not_decayed(tmp_path):
    """The key of the config does what the groups do, and the bits are those of two groups."""
    net = model()
    oracle = oracle_of("adamw", net=net, groups=zinf.decay_groups(net, 0.1))
    want = train(oracle, 3)
    with engine_of("adamw", tmp_path, decay_norms_and_biases=False) as engine:
        assert [g["weight_decay"] for g in engine.optimizer.param_groups] == [0.1, 0.0]
        assert train(engine, 3) == want
        assert_same(engine_snapshot(engine), oracle.snapshot())
    assert want != train(oracle_of("adamw"), 3)
