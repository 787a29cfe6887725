"""Parts of a model: parameters frozen and unfrozen between steps are trained as torch.optim would, and what is frozen is not written."""

from __future__ import annotations

import functools

import pytest
import torch
from models import HYPER, LEAF_BYTES
from models import batches as any_batches
from models import llama as any_llama
from oracle import Oracle, assert_same, engine_snapshot
from torch import nn

from zinf.engine import Engine
from zinf.errors import ConfigError, EngineError

DEVICES = pytest.mark.parametrize("device", ["cpu", "sim"])
MODES = pytest.mark.parametrize("mode", ["deferred", "backward"])
PLACES = {"memory": {}, "nvme": dict(weights="nvme", state="nvme", chunk_size=4096)}


def llama(dtype=torch.bfloat16):
    return any_llama(dtype, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, vocab_size=128)


def batches(count: int) -> torch.Tensor:
    return any_batches(count, rows=2, length=12, vocab=128)


def build(tmp_path, model, place="nvme", **options) -> Engine:
    nvme = {"nvme_path": str(tmp_path)} if place == "nvme" else {}
    return Engine(model, leaf_bytes=LEAF_BYTES, **{**HYPER, **PLACES[place], **nvme, **options})


def train_only(model: nn.Module, *parts: str) -> None:
    """Freeze all but the parameters whose names contain one of `parts`."""
    for name, p in model.named_parameters():
        p.requires_grad_(any(part in name for part in parts))


def lm(model, ids, **kwargs):
    return model(input_ids=ids, labels=ids, **kwargs).loss


# Of each step, what is trained in it.
PLANS = {
    "gradually": [["layers.3"], ["layers.3", "norm."], ["layers.3", "layers.2", "norm."], [""]],
    "in turns": [["layers.0", "embed"], ["layers.1", "layers.3"], ["layers.0", "embed"], ["layers.1", "layers.3"]],
    "parts of blocks": [["mlp.up", "self_attn"], ["mlp.up"], ["self_attn", "mlp.down"], ["mlp.up", "embed"]],
}


@functools.cache
def oracle_of(plan: str):
    """(losses and norms, snapshot)."""
    oracle, seen = Oracle(llama(), **HYPER, leaf_bytes=LEAF_BYTES), []
    for ids, parts in zip(batches(4), PLANS[plan], strict=True):
        train_only(oracle.model, *parts)
        loss = lm(oracle.model, ids, use_cache=False)
        oracle.backward(loss)
        seen.append((loss.item(), oracle.step()))
    return seen, oracle.snapshot()


@DEVICES
@MODES
@pytest.mark.parametrize("plan", PLANS)
def test_toggled_between_steps(tmp_path, plan, mode, device):
    for place in [p for p in PLACES if mode == "deferred" or p == "nvme"]:
        model, seen = llama(), []
        train_only(model, *PLANS[plan][0])
        with build(tmp_path, model, place, device=device, step_mode=mode, trainable="*") as engine:
            for ids, parts in zip(batches(4), PLANS[plan], strict=True):
                train_only(model, *parts)
                loss = lm(engine, ids)
                engine.backward(loss)
                seen.append((loss.item(), engine.step().grad_norm))
            assert seen == oracle_of(plan)[0]
            assert_same(engine_snapshot(engine), oracle_of(plan)[1])


class Gan(nn.Module):
    """Both halves in one model; the discriminator is frozen while the generator trains."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.g = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        self.d = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        self.to(torch.bfloat16)

    def forward(self, x):
        return self.d(self.g(x))


@DEVICES
@pytest.mark.parametrize("toggled", ["before the forward", "between forward and backward"])
def test_two_halves_in_turns(tmp_path, device, toggled):
    """Also where a graph was made before the toggling: what it does not train stays as it is."""

    def run(module, model, stepper):
        losses = []
        for step in range(6):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            model.d.requires_grad_(step % 2 == 0)
            model.g.requires_grad_(step % 2 == 1)
            loss = module(x).float().square().mean()
            if toggled != "before the forward":
                model.requires_grad_(True)
            losses.append(loss.item())
            stepper.backward(loss)
            stepper.step()
        return losses

    oracle, model = Oracle(Gan(), **HYPER, leaf_bytes=LEAF_BYTES), Gan()
    with build(tmp_path, model, device=device) as engine:
        assert run(engine, model, engine) == run(oracle.model, oracle.model, oracle)
        assert_same(engine_snapshot(engine), oracle.snapshot())


@MODES
def test_what_is_frozen_for_now_is_not_written(tmp_path, mode):
    model = llama()
    with build(tmp_path, model, step_mode=mode) as engine:
        store = engine.memory.parts.records.store
        spec = {s.name: s for s in engine.layout.shards}["model.layers.3"]
        before = store.stats()
        for i, ids in enumerate(batches(3)):
            train_only(model, "layers.3")
            engine.backward(lm(engine, ids))
            engine.step()
            engine.synchronize()
            after = store.stats()
            assert after["weights_written"] - before["weights_written"] == (i + 1) * spec.weights_nbytes
            assert after["state_written"] - before["state_written"] == (i + 1) * spec.state_nbytes
            assert after["state_read"] - before["state_read"] == i * spec.state_nbytes  # the first reads what was never written


def test_state_and_step_count_rest_while_frozen_over_a_resume(tmp_path):
    oracle = Oracle(llama(), **HYPER, leaf_bytes=LEAF_BYTES)
    for first, parts in enumerate((["layers.0"], ["layers.1"], ["layers.0", "layers.1"])):
        model = llama()
        train_only(model, *parts)
        train_only(oracle.model, *parts)
        with build(tmp_path, model, trainable=["*layers.[01]*"], resume=first > 0) as engine:
            for ids in batches(6)[2 * first : 2 * first + 2]:
                want = lm(oracle.model, ids, use_cache=False)
                loss = lm(engine, ids)
                assert loss.item() == want.item()
                engine.backward(loss)
                oracle.backward(want)
                engine.step()
                oracle.step()
    with build(tmp_path, llama().requires_grad_(False), trainable="*layers.1*", resume=True) as engine:  # the store says what has state
        weights, _ = engine_snapshot(engine)
    for name, value in oracle.snapshot()[0].items():
        assert torch.equal(weights[name], value), name


def test_late_unfreezing_names_the_option(tmp_path):
    model = llama()
    train_only(model, "layers.1")
    with build(tmp_path, model) as engine:
        engine.backward(lm(engine, batches(1)[0]))
        model.requires_grad_(True)
        with pytest.raises(EngineError, match=r"frozen when the engine was built.*trainable="):
            engine.step()
    with pytest.raises(ConfigError, match="trainable has the pattern lm_haed"):
        build(tmp_path, llama(), trainable="lm_haed*", run_name="other")
    model = llama()
    train_only(model, "layers.1")
    with pytest.raises(ConfigError, match="param_groups lacks"):
        build(tmp_path, model, trainable="*", run_name="other", param_groups=[{"params": [p for p in model.parameters() if p.requires_grad]}])


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class Direct(Wrapper):
    """Past the hooks of what it wraps, as PEFT calls it, and without passing on what it is not told."""

    def forward(self, input_ids, labels):
        return self.module.forward(input_ids=input_ids, labels=labels)


@pytest.mark.parametrize("wrap", [Wrapper, Direct, lambda m: Wrapper(Direct(Wrapper(m)))], ids=["wrapper", "direct", "nested"])
def test_no_kv_cache_under_wrappers_of_any_depth(tmp_path, wrap):
    def run(module, stepper):
        losses = []
        for ids in batches(2):
            loss = lm(module, ids)
            losses.append(loss.item())
            stepper.backward(loss)
            stepper.step()
        return losses

    plain = llama()
    plain.config.use_cache = False
    oracle = Oracle(wrap(plain), **HYPER, leaf_bytes=LEAF_BYTES)
    with build(tmp_path, wrap(llama())) as engine:
        assert run(engine, engine) == run(oracle.model, oracle)
        assert_same(engine_snapshot(engine), oracle.snapshot())


def test_metadata_is_true_at_all_times(tmp_path):
    model, plain = llama(), llama()
    want = {n: (p.shape, p.dtype, p.numel(), p.device) for n, p in plain.state_dict().items()}

    def check(*_):
        assert {n: (p.shape, p.dtype, p.numel(), p.device) for n, p in model.state_dict().items()} == want
        assert {n: (p.shape, p.dtype, p.numel(), p.device) for n, p in model.named_parameters(remove_duplicate=False)} == want

    check()
    with build(tmp_path, model) as engine:
        for name in ("model.layers.0", "model.layers.2.mlp", "lm_head", "model"):
            module = model.get_submodule(name)
            module.register_forward_hook(check)
            module.register_full_backward_hook(check)
        for ids in batches(2):
            check()
            engine.backward(lm(engine, ids))
            check()
            engine.step()
            with torch.no_grad():
                engine.eval()(input_ids=ids)
            engine.train()
        check()
        values = model.state_dict()
        streamed = values["model.layers.1.mlp.up_proj.weight"]
        for use in (torch.Tensor.tolist, lambda t: t + 1, torch.Tensor.cpu, torch.Tensor.contiguous):
            with pytest.raises(EngineError, match=r"model\.layers\.1\.mlp\.up_proj\.weight was used.*engine\.gather"):
                use(streamed)
        assert "streamed" in repr(streamed)
    check()


@DEVICES
def test_moving_and_casting_the_model_are_refused_at_once(tmp_path, device):
    model = llama()
    with build(tmp_path, model, device=device) as engine:
        before = engine_snapshot(engine)
        assert model.to("cpu") is model and model.to(torch.bfloat16) is model and model.bfloat16() is model
        for change in (model.half, model.float, lambda: model.to(torch.float32), lambda: model.to("meta"), lambda: Wrapper(model).double()):
            with pytest.raises(EngineError, match=r"do that before zinf\.Engine"):
                change()
        assert_same(engine_snapshot(engine), before)
        engine.backward(lm(engine, batches(1)[0]))
        engine.step()
    assert "_apply" not in model.__dict__ and "load_state_dict" not in model.__dict__
