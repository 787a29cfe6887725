"""A training script written for DeepSpeed changes its import line, and gets the oracle's bits; every method and attribute of the engine is there."""

from __future__ import annotations

import argparse
import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_data import make_losses
from models import LEAF_BYTES, batches
from models import llama as any_llama
from oracle import Oracle, engine_snapshot
from torch import nn

from zinf.errors import ConfigError, EngineError
from zinf.integrations import deepspeed

STEPS, ACCUMULATION = 4, 2


def llama(*args: Any, **sizes: Any) -> nn.Module:
    """Of two layers."""
    return any_llama(*args, **{"num_hidden_layers": 2, **sizes})


CONFIG: dict[str, Any] = {
    "train_batch_size": 4,
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-3, "warmup_num_steps": 3}},
    "zero_optimization": {"stage": 3},
}
SMALL = dict(leaf_bytes=LEAF_BYTES, io_threads=1, cpu_threads=1)
HOMES = ["memory", "nvme"]


def config(folder: Path, home: str, **more: Any) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": str(folder)} if home == "nvme" else {"device": "cpu"}
    zero = {"stage": 3, "offload_param": offload, "offload_optimizer": offload}
    return {**CONFIG, "zero_optimization": zero, **more}


def lrs() -> list[float]:
    """What the schedule gives each step, from DeepSpeed's own formula: the first two steps are made with warmup_min_lr."""
    out = [1e-4]
    for i in range(STEPS - 1):
        out.append(1e-4 + (1e-3 - 1e-4) * (1.0 / math.log(3) * math.log(i + 1) if i < 3 else 1.0))
    return out


@functools.cache
def oracle_run(steps: int = STEPS, wide: bool = True) -> tuple[list[float], list[float], Any]:
    return oracle_of(llama(), steps, wide, LEAF_BYTES)


def oracle_of(model: nn.Module, steps: int, wide: bool, leaf_bytes: int) -> tuple[list[float], list[float], Any]:
    oracle = Oracle(model, betas=(0.9, 0.95), lr=1e-3, weight_decay=0.1, max_grad_norm=0.5, wide=wide, leaf_bytes=leaf_bytes)
    losses, norms = [], []
    for ids, lr in zip(batches(steps), lrs(), strict=False):
        oracle.optimizer.param_groups[0]["lr"] = lr
        for part in ids.chunk(ACCUMULATION):
            loss = oracle.model(input_ids=part, labels=part, use_cache=False).loss
            losses.append(loss.item())
            oracle.backward(loss / ACCUMULATION)
        norms.append(oracle.step())
    return losses, norms, oracle.snapshot()


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(other), strict=True))


# ------------------------------------------------------------------------------------------------------------ the script


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("home", HOMES)
def test_their_loop_gives_the_oracles_bits(tmp_path: Path, home: str, device: str) -> None:
    """The loop of DeepSpeed's README."""
    ds_config = tmp_path / "ds_config.json"
    ds_config.write_text(json.dumps(config(tmp_path, home)))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(ds_config)])
    model = llama()
    losses, norms = [], []
    model_engine, optimizer, _, scheduler = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), device=device, **SMALL)
    for ids in batches(STEPS):
        for part in ids.chunk(ACCUMULATION):
            loss = model_engine(input_ids=part, labels=part).loss
            model_engine.backward(loss)
            boundary = model_engine.is_gradient_accumulation_boundary()
            model_engine.step()
            assert model_engine.was_step_applied() is boundary
            losses.append(loss.item())
        norms.append(model_engine.get_global_grad_norm())
    want_losses, want_norms, want = oracle_run()
    assert losses == want_losses and norms == want_norms
    assert same(engine_snapshot(model_engine.zinf), want)
    assert (model_engine.global_steps, model_engine.micro_steps, model_engine.global_samples) == (STEPS, 2 * STEPS, 4 * STEPS)
    assert optimizer is model_engine.optimizer and scheduler is model_engine.lr_scheduler and model_engine.get_lr() == scheduler.get_last_lr()
    model_engine.destroy()


def test_without_optimizer_of_the_config(tmp_path: Path) -> None:
    """An optimizer and a schedule of torch, built by the script; loss.backward() by the script itself."""
    model = llama()
    own = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(own, lambda i: lrs()[min(i, STEPS - 1)] / 1e-3)
    plain = {k: v for k, v in config(tmp_path, "nvme").items() if k not in ("optimizer", "scheduler")}
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, optimizer=own, lr_scheduler=schedule, config=plain, **SMALL)
    with engine:
        for ids in batches(STEPS):
            assert own.param_groups[0]["lr"] == engine.get_lr()[0] == optimizer.param_groups[0]["lr"]
            for part in ids.chunk(ACCUMULATION):
                engine(input_ids=part, labels=part).loss.backward()
                engine.step()
        assert scheduler is schedule and scheduler.last_epoch == STEPS
        oracle = Oracle(llama(), betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=0.5, wide=True, leaf_bytes=LEAF_BYTES)
        for ids, i in zip(batches(STEPS), range(STEPS), strict=True):
            oracle.optimizer.param_groups[0]["lr"] = 1e-3 * (lrs()[i] / 1e-3)
            for part in ids.chunk(ACCUMULATION):
                oracle.backward(oracle.model(input_ids=part, labels=part, use_cache=False).loss / ACCUMULATION)
            oracle.step()
        assert same(engine_snapshot(engine.zinf), oracle.snapshot())


def test_the_boundary_is_the_scripts(tmp_path: Path) -> None:
    """As accelerate does it: one step() for several backwards, divided by the script."""
    engine, *_ = deepspeed.initialize(model=llama(), config=config(tmp_path, "memory", gradient_accumulation_steps=1, train_batch_size=2), **SMALL)
    with engine:
        for ids in batches(STEPS):
            for i, part in enumerate(ids.chunk(ACCUMULATION)):
                engine.set_gradient_accumulation_boundary(i == 1)
                engine.backward(engine(input_ids=part, labels=part).loss / ACCUMULATION)
            engine.step()
        assert same(engine_snapshot(engine.zinf), oracle_run(wide=False)[2])
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(engine(input_ids=part, labels=part).loss)
        engine.step()
        assert engine.global_steps == STEPS and not engine.was_step_applied()
        engine.zero_grad()


def test_unmanaged_accumulation(tmp_path: Path) -> None:
    """Each step() is a boundary, whatever the number of backwards; samples are counted by them."""
    given = config(tmp_path, "memory", managed_gradient_accumulation=False)
    engine, *_ = deepspeed.initialize(model=llama(), config=given, **SMALL)
    with engine:
        for part in batches(1)[0].chunk(ACCUMULATION):
            engine.backward(engine(input_ids=part, labels=part).loss)
        engine.step()
        assert engine.was_step_applied() and engine.global_samples == 4
        with pytest.raises(EngineError, match="each step\\(\\) is a boundary"):
            engine.set_gradient_accumulation_boundary(True)


@pytest.mark.parametrize("home", HOMES)
def test_a_checkpoint_goes_on_with_the_same_bits(tmp_path: Path, home: str) -> None:
    """save_checkpoint after 2 steps, load_checkpoint into a fresh engine, 2 more: the bits of 4 steps; client_state comes back."""

    def run(engine: Any, steps: slice) -> None:
        for ids in batches(STEPS)[steps]:
            for part in ids.chunk(ACCUMULATION):
                engine.backward(engine(input_ids=part, labels=part).loss)
                engine.step()

    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder in folders:
        folder.mkdir()
    client = {"epoch": 3, "seen": [1, 2], "best": (0.5, "x"), 7: torch.arange(3)}
    first, *_ = deepspeed.initialize(model=llama(), config=config(folders[0], home), **SMALL)
    with first:
        run(first, slice(0, 2))
        first.save_checkpoint(str(tmp_path / "ckpt"), client_state=client)
        run(first, slice(2, 3))
        first.save_checkpoint(str(tmp_path / "ckpt"), tag="later", save_latest=False)
    assert (tmp_path / "ckpt" / "latest").read_text().strip() == "global_step2" and (tmp_path / "ckpt" / "later").is_dir()
    second, *_ = deepspeed.initialize(model=llama(), config=config(folders[1], home), **SMALL)
    with second:
        assert second.load_checkpoint(str(tmp_path / "empty")) == (None, None)
        path, state = second.load_checkpoint(str(tmp_path / "ckpt"))
        assert path == str(tmp_path / "ckpt" / "global_step2") and torch.equal(state.pop(7), client[7])
        assert state == {k: v for k, v in client.items() if k != 7}
        assert (second.global_steps, second.micro_steps, second.global_samples, second.get_lr()) == (2, 4, 8, [lrs()[2]])
        run(second, slice(2, 4))
        assert same(engine_snapshot(second.zinf), oracle_run()[2])
    third, *_, schedule = deepspeed.initialize(model=llama(), config=config(folders[2], home), **SMALL)
    with third:
        _, state = third.load_checkpoint(str(tmp_path / "ckpt"), tag="global_step2", load_module_only=True)
        assert state["epoch"] == 3 and third.global_steps == 0 and schedule.last_batch_iteration == -1 and third.get_lr() == [1e-4]
        assert same(third.state_dict(), oracle_run(2)[2][0] | {"lm_head.weight": oracle_run(2)[2][0]["model.embed_tokens.weight"]})
        third.load_checkpoint(str(tmp_path / "ckpt"), load_optimizer_states=False)
        assert schedule.last_batch_iteration == 1 and third.micro_steps == 4


def test_an_overflow_skips_the_step_and_the_schedule(tmp_path: Path) -> None:
    """fp16 as DeepSpeed has it: the step counts as global step, changes nothing, and the schedule stays."""
    given = config(
        tmp_path, "memory", bf16={"enabled": False}, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1}, gradient_accumulation_steps=1
    )
    engine, optimizer, _, schedule = deepspeed.initialize(model=llama(torch.float32), config=given, **SMALL)
    with engine:
        assert engine.fp16_enabled() and {p.dtype for p in engine.parameters()} == {torch.float16} and engine.loss_scale == 16
        before = engine.module_state_dict()
        ids = batches(1)[0]
        engine.backward(engine(input_ids=ids, labels=ids).loss * 1e30)
        engine.step()
        assert not engine.was_step_applied() and optimizer.overflow and engine.loss_scale == 8
        assert (engine.global_steps, engine.skipped_steps, schedule.last_batch_iteration) == (1, 1, -1)
        assert same(engine.module_state_dict(), before)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        assert engine.was_step_applied() and not optimizer.overflow and schedule.last_batch_iteration == 0


def test_a_model_in_a_store(tmp_path: Path) -> None:
    """From zinf.from_pretrained: its own store, its own dtype."""
    from transformers import LlamaForCausalLM

    import zinf

    llama().save_pretrained(tmp_path / "hf")
    (tmp_path / "nvme").mkdir()
    model = zinf.from_pretrained(tmp_path / "hf", nvme_path=tmp_path / "nvme")
    with pytest.raises(ConfigError, match=r"the store has bf16 weights, and the config says fp16: give dtype=torch.float16 to from_pretrained"):
        deepspeed.initialize(model=model, config={**CONFIG, "bf16": {"enabled": False}, "fp16": {"enabled": True}})
    engine, *_ = deepspeed.initialize(model=model.train(), config=config(tmp_path / "nvme", "nvme"), io_threads=1, cpu_threads=1)
    with engine:
        for ids in batches(STEPS):
            for part in ids.chunk(ACCUMULATION):
                engine.backward(engine(input_ids=part, labels=part).loss)
                engine.step()
        plain = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16).train()  # whose buffers are fp32, other than llama()'s
        weights = oracle_of(plain, STEPS, True, 4 << 20)[2][0]
        assert same({name: value for name, value in engine.module_state_dict().items() if name in weights}, weights)


# ---------------------------------------------------------------------------------------------------- methods, attributes


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    made, *_ = deepspeed.initialize(model=llama(), config=config(tmp_path, "nvme"), **SMALL)
    with made:
        yield made


def test_questions_about_the_config(engine: Any) -> None:
    assert engine.train_batch_size() == 4 and engine.train_micro_batch_size_per_gpu() == 2 and engine.gradient_accumulation_steps() == 2
    assert engine.get_batch_info() == (4, 2, 2) and engine.zero_optimization_stage() == 3 and engine.zero_optimization()
    assert engine.bfloat16_enabled() and not engine.fp16_enabled() and engine.gradient_clipping() == 0.5
    assert engine.optimizer_name() == "adamw" and engine.scheduler_name() == "WarmupLR" and engine.optimizer_params()["lr"] == 1e-3
    assert engine.zero_gather_16bit_weights_on_model_save() and engine.get_mom() == [(0.9, 0.95)]
    assert engine.local_rank == 0 and engine.device == torch.device("cpu") and engine.skipped_steps == 0 and engine.get_global_grad_norm() is None
    engine.set_train_batch_size(6)
    assert engine.get_batch_info() == (6, 2, 3)
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (15, 5, 3)
    with pytest.raises(ValueError, match="train_batch_size 16 is not a multiple of train_micro_batch_size_per_gpu, 5"):
        engine.set_train_batch_size(16)


def test_what_the_engine_has_not_is_the_modules(engine: Any) -> None:
    assert engine.config["gradient_clipping"] == 0.5 and engine.module.config.vocab_size == 512 and engine.generation_config is not None
    assert len(list(engine.parameters())) == len(list(engine.module.parameters()))
    with pytest.raises(AttributeError, match="neither the engine nor its LlamaForCausalLM has 'nothing'"):
        engine.nothing  # noqa: B018
    assert engine.eval().module.training is False and engine.train().training
    engine.offload_states()
    engine.reload_states()
    engine.empty_partition_cache()


def test_wrong_turns_in_a_step(engine: Any) -> None:
    with pytest.raises(EngineError, match=r"loss of one element, and this has the shape \(2,\)"):
        engine.backward(torch.ones(2, requires_grad=True))
    with pytest.raises(EngineError, match=r"step\(\) within no_sync"), engine.no_sync():
        engine.step()
    with pytest.raises(EngineError, match="custom_load_fn"):
        engine.load_checkpoint("x", custom_load_fn=print)


def test_save_16bit_model(engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.torch import load_file

    assert engine.save_16bit_model(str(tmp_path / "out"))
    assert "pytorch_model.bin is written as model.safetensors" in caplog.text
    weights = engine.module_state_dict()
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in saved.items()) and (tmp_path / "out" / "config.json").is_file()
    assert engine.save_16bit_model(str(tmp_path / "out"), "weights.pt") and (tmp_path / "out" / "weights.safetensors").is_file()


def test_the_loader_has_deepspeeds_order(tmp_path: Path) -> None:
    data = list(range(10))
    given = config(tmp_path, "memory", dataloader_drop_last=True, train_batch_size=8, train_micro_batch_size_per_gpu=4)
    engine, _, loader, _ = deepspeed.initialize(model=llama(), training_data=data, config=given, collate_fn=tuple, **SMALL)
    with engine:
        order = torch.randperm(10, generator=torch.Generator().manual_seed(0)).tolist()
        assert list(loader) == [tuple(order[:4]), tuple(order[4:8])] == list(loader)
        assert list(engine.deepspeed_io(data, batch_size=5, route="eval", collate_fn=list)) == [data[:5], data[5:]]


# ------------------------------------------------------------------------------------------------- beside DeepSpeed itself


@pytest.mark.parametrize("name", make_losses.CONFIGS)
def test_deepspeeds_own_run(name: str) -> None:
    """The loop that DeepSpeed 0.19.8 ran (ds_data/make_losses.py, fp32): its losses, norms, learning rates and boundaries.

    Close, as its AdamW and its norm are torch's; the learning rates and the boundaries are equal.
    """
    want = json.loads((Path(make_losses.__file__).with_name("losses.json")).read_text())["runs"][name]
    got = make_losses.run(deepspeed, make_losses.CONFIGS[name], **SMALL)
    assert got["boundaries"] == want["boundaries"] and got["lrs"] == want["lrs"]
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-5) and got["norms"] == pytest.approx(want["norms"], rel=1e-4)
    assert len(want["norms"]) == make_losses.STEPS and len(set(want["losses"])) > 5


# ------------------------------------------------------------------------------------------------------------- initialize


def test_weights_are_cast_as_the_config_says() -> None:
    model = llama(torch.float32)
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG, **SMALL)
    with engine:
        assert {p.dtype for p in engine.parameters()} == {torch.bfloat16}
        assert all(b.dtype is torch.float32 for name, b in model.named_buffers() if "inv_freq" in name)


def test_auto_precision_is_the_models_own() -> None:
    given = {**CONFIG, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    engine, *_ = deepspeed.initialize(model=llama(), config=given, **SMALL)
    with engine:
        assert engine.bfloat16_enabled()


def test_no_optimizer_is_an_engine_to_evaluate_with() -> None:
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=llama(), config={"train_batch_size": 1, "bf16": {"enabled": True}}, **SMALL)
    with engine, torch.no_grad():
        ids = batches(1)[0]
        assert (optimizer, loader, scheduler) == (None, None, None)
        assert torch.equal(engine(input_ids=ids).logits, llama()(input_ids=ids).logits)
        with pytest.raises(EngineError, match=r"step\(\) without an optimizer: name one in the config"):
            engine.step()


def test_frozen_and_left_out_parameters() -> None:
    """model_parameters are what is trained; the others keep their values."""
    model = llama()
    wanted = [p for name, p in model.named_parameters() if ".mlp." in name]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=wanted, config={**CONFIG, "gradient_accumulation_steps": 1}, **SMALL)
    with engine:
        for _ in range(2):
            engine.backward(engine(input_ids=batches(1)[0], labels=batches(1)[0]).loss)
            engine.step()
        after = engine.module_state_dict()
        assert {name for name in before if not torch.equal(before[name], after[name])} == {name for name in before if ".mlp." in name}


@pytest.mark.parametrize(
    ("optimizer", "kind", "options"),
    [
        (lambda p: torch.optim.Adam(p, lr=1e-3), "adam", {}),
        (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), "sgd", {"momentum": 0.9}),
        (lambda p: torch.optim.Adagrad(p, lr=1e-2), "adagrad", {}),
        ("DeepSpeedCPUAdam", "adamw", {}),
        ("FusedAdam", "adamw", {}),
    ],
)
def test_optimizers_of_the_script(optimizer: Any, kind: str, options: dict[str, Any]) -> None:
    if isinstance(optimizer, str):
        from zinf.integrations.deepspeed.ops import adam

        optimizer = getattr(adam, optimizer)
    plain = {k: v for k, v in CONFIG.items() if k not in ("optimizer", "scheduler")}
    model = llama(num_hidden_layers=1)
    own = optimizer(model.parameters())
    engine, returned, *_ = deepspeed.initialize(model=model, optimizer=own, config=plain, **SMALL)
    with engine:
        assert engine.zinf.config.optimizer == kind and returned.param_groups is own.param_groups
        assert all(own.param_groups[0][k] == v for k, v in options.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(config=None), "initialize needs a config: a path, a mapping, or args.deepspeed_config"),
        (dict(model=None), "initialize needs a model"),
        (dict(config={"train_batch_size": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}), "train_batch_size, optimizer.params.lr are auto"),
        (dict(config="nowhere.json"), "nowhere.json: No such file"),
        (dict(mpu=1), "mpu and mesh_param divide a model among ranks"),
        (dict(args=argparse.Namespace(deepspeed_config="x.json")), "there is a config in args.deepspeed_config and another one"),
        (dict(optimizer=lambda p: torch.optim.RMSprop(p)), "zinf does not step as RMSprop does: it has adamw"),
        (dict(optimizer=lambda p: torch.optim.AdamW(p, amsgrad=True)), "amsgrad of AdamW is on"),
        (dict(optimizer=3), "optimizer is a int: give a torch optimizer"),
        (dict(host_memry="1GiB"), "did you mean 'host_memory'?"),
    ],
)
def test_wrong_turns_of_initialize(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        deepspeed.initialize(**{"model": llama(num_hidden_layers=1), "config": CONFIG, **changes})
    assert message in str(e.value) and "\n" not in str(e.value)


def test_a_launcher_with_several_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2: .* trains on one card"):
        deepspeed.init_distributed()


def test_an_unknown_name_of_the_module() -> None:
    with pytest.raises(AttributeError, match=r"zinf has no deepspeed.PipelineModule: see docs/from-deepspeed.md"):
        deepspeed.PipelineModule  # noqa: B018


# ---------------------------------------------------------------------------------------------------------------- zero, utils


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_one_parameter_in_full(tmp_path: Path, home: str, device: str) -> None:
    """Master, moments and gradient of single parameters are the oracle's; what is set is what the next step takes."""
    from zinf.integrations.deepspeed import utils

    engine, *_ = deepspeed.initialize(model=llama(), config=config(tmp_path, home), device=device, chunk_size=2048, **SMALL)
    oracle = Oracle(llama(), betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=0.5, wide=True, leaf_bytes=LEAF_BYTES)
    with engine:
        for i, ids in enumerate(batches(2)):
            oracle.optimizer.param_groups[0]["lr"] = lrs()[i]
            for part in ids.chunk(ACCUMULATION):
                engine.backward(engine(input_ids=part, labels=part).loss)
                oracle.backward(oracle.model(input_ids=part, labels=part, use_cache=False).loss / ACCUMULATION)
                if not engine.is_gradient_accumulation_boundary():
                    engine.step()
            params = dict(engine.module.named_parameters())
            for name in ("model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
                assert torch.equal(utils.safe_get_full_grad(params[name]), oracle.sums[name]), name
            changed = params["model.layers.0.mlp.up_proj.weight"]
            utils.safe_set_full_grad(changed, utils.safe_get_full_grad(changed) * 2)
            oracle.sums["model.layers.0.mlp.up_proj.weight"] *= 2
            engine.step()
            assert oracle.step() == engine.get_global_grad_norm()
        weights, state = oracle.snapshot()
        assert same(engine_snapshot(engine.zinf), (weights, state))
        p = params["model.layers.1.mlp.up_proj.weight"]
        (planes, spec) = next(
            (state[s.name, r], q)
            for s in oracle.layout.shards
            for r, run in enumerate(s.runs)
            for q in run.params
            if q.name == "model.layers.1.mlp.up_proj.weight"
        )
        here = slice(spec.offset, spec.offset + spec.numel)
        lo, m, v = (plane[here].view(p.shape) for plane in planes)
        assert torch.equal(utils.safe_get_full_optimizer_state(p, "exp_avg"), m) and torch.equal(utils.safe_get_full_optimizer_state(p, "exp_avg_sq"), v)
        master = utils.safe_get_full_fp32_param(p)
        hi = weights["model.layers.1.mlp.up_proj.weight"].view(torch.int16).int() << 16
        assert torch.equal(master.view(torch.int32), hi + lo.int())
        utils.safe_set_full_fp32_param(p, master + 1e-4)
        utils.safe_set_full_optimizer_state(p, m * 3, "exp_avg")
        assert torch.equal(utils.safe_get_full_fp32_param(p), master + 1e-4) and torch.equal(utils.safe_get_full_optimizer_state(p, "exp_avg"), m * 3)
        assert utils.safe_get_full_grad(p) is None and torch.equal(utils.safe_get_local_fp32_param(p), (master + 1e-4).view(-1))
        with pytest.raises(EngineError, match="no optimizer state 'sum'; this optimizer has exp_avg, exp_avg_sq"):
            utils.safe_get_full_optimizer_state(p, "sum")
    assert utils.safe_get_full_fp32_param(nn.Parameter(torch.ones(2))) is None


def test_gathered_parameters(engine: Any) -> None:
    zero, p = deepspeed.zero, engine.module.model.layers[0].mlp.up_proj.weight
    before = engine.module_state_dict()["model.layers.0.mlp.up_proj.weight"]
    with zero.GatheredParameters(p):
        assert torch.equal(p, before)
    with zero.GatheredParameters([p], modifier_rank=0), torch.no_grad():
        p.add_(1)
    assert torch.equal(engine.module_state_dict()["model.layers.0.mlp.up_proj.weight"], before + 1)
    with zero.GatheredParameters(engine.module.parameters(), enabled=False), pytest.raises(EngineError, match="outside its shard's forward"):
        p.sum()
    with zero.GatheredParameters([nn.Parameter(torch.ones(2))], modifier_rank=0):
        pass


def test_init_casts_what_is_made_in_it() -> None:
    zero = deepspeed.zero
    with zero.Init(config_dict_or_path=CONFIG):
        inside = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    outside = nn.Linear(3, 2)
    assert {p.dtype for p in inside.parameters()} == {torch.bfloat16} and inside[1].running_mean.dtype is torch.float32
    assert outside.weight.dtype is torch.float32
    with zero.Init(enabled=False):
        assert nn.Linear(3, 2).weight.dtype is torch.float32
    zero.Init(module=outside, dtype=torch.float16)
    assert outside.weight.dtype is torch.float16


def test_leaf_modules_and_external_parameters(engine: Any) -> None:
    zero = deepspeed.zero
    assert len(zero.set_z3_leaf_modules(engine.module, ["LlamaMLP"])) == 2 and zero.get_z3_leaf_modules(engine.module) == []
    with pytest.raises(ConfigError, match="has no module of class Nothing"):
        zero.set_z3_leaf_modules(engine.module, ["Nothing"])
    zero.register_external_parameter(engine.module, next(engine.module.parameters()))
    with zero.unwrap_model_for_generation(engine) as model:
        assert model is engine.module


def test_estimates_are_zinfs() -> None:
    model = llama()
    need = deepspeed.zero.estimate_zero3_model_states_mem_needs_all_live(model)
    n = sum(p.numel() for p in model.parameters())
    assert need.params == n and need.host_all >= 12 * n and need.nvme == 2 * (need.host_all - 2 * n)
    assert "everything in memory" in str(need)
    cold = deepspeed.zero.estimate_zero3_model_states_mem_needs_all_cold(8e9, 5e8)
    assert cold.nvme == 2 * 12 * 8 * 10**9 and cold.device == 3 * 2 * 5 * 10**8


def test_comm_and_accelerator() -> None:
    comm, accelerator = deepspeed.comm, deepspeed.get_accelerator()
    assert (comm.get_rank(), comm.get_world_size(), comm.is_initialized()) == (0, 1, True)
    comm.barrier()
    x = torch.ones(3)
    comm.all_reduce(x)
    out = [torch.zeros(3)]
    comm.all_gather(out, x)
    assert torch.equal(out[0], x) and accelerator.device_name() in ("cpu", "cuda") and accelerator.device_count() == 1
    assert accelerator.device(0).type == accelerator.device_name() and accelerator.communication_backend_name() in ("gloo", "nccl")


def test_activation_checkpointing_of_a_models_own() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    layer = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    deepspeed.checkpointing.configure(None)
    torch.manual_seed(1)
    deepspeed.checkpointing.checkpoint(layer, x).sum().backward()
    recomputed, x.grad = x.grad, None
    torch.manual_seed(1)
    layer(x).sum().backward()
    assert torch.equal(recomputed, x.grad) and deepspeed.checkpointing.is_configured()


def test_init_inference() -> None:
    model = llama(torch.float32, num_hidden_layers=1)
    engine = deepspeed.init_inference(model, dtype=torch.bfloat16, replace_with_kernel_inject=True, mp_size=1)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and not engine.training
    assert engine.generate(batches(1)[0][:1, :4], max_new_tokens=2, do_sample=False).shape == (1, 6)
    with pytest.raises(ConfigError, match=r"dtype is torch.int8, expected one of fp16, bf16, fp32"):
        deepspeed.init_inference(model, dtype=torch.int8)
    with pytest.raises(ConfigError, match="divided among 2 cards"):
        deepspeed.init_inference(model, {"tensor_parallel": {"tp_size": 2}})
    with pytest.raises(ConfigError, match="as an argument: give one of them"):
        deepspeed.init_inference(model, {"dtype": "fp16"}, dtype="bf16")
