"""The engine's manners: what is refused and how, what is undone, what is left behind."""

from __future__ import annotations

import pytest
import torch
from models import HYPER, LEAF_BYTES, batches, llama, oracle_run, train
from oracle import assert_same, engine_snapshot
from torch import nn

from zinf.config import Config
from zinf.engine import Engine
from zinf.errors import BudgetError, ConfigError, EngineError, NonFiniteError, StoreError

NVME = dict(weights="nvme", state="nvme", chunk_size=4096)


def engine_of(folder=None, model=None, **options):
    options = {"leaf_bytes": LEAF_BYTES, **HYPER, **options}
    if folder is not None:
        options = {**NVME, "nvme_path": str(folder), **options}
    return Engine(model if model is not None else llama(), **options)


# -- parameters between their uses ----------------------------------------------------------------------------------------


def test_parameters_tell_the_truth_and_refuse_to_be_read(tmp_path):
    plain = llama()
    with engine_of(tmp_path) as engine:
        for (name, p), (plain_name, q) in zip(engine.module.named_parameters(), plain.named_parameters(), strict=True):
            assert (name, p.shape, p.dtype, p.numel(), p.requires_grad, p.device) == (plain_name, q.shape, q.dtype, q.numel(), q.requires_grad, q.device)
            assert isinstance(p, nn.Parameter)
        p = engine.module.model.layers[1].mlp.up_proj.weight
        assert "model.layers.1.mlp.up_proj.weight" in repr(p)
        with pytest.raises(EngineError, match=r"model\.layers\.1\.mlp\.up_proj\.weight was used \(.*engine\.gather\('model\.layers\.1\.mlp"):
            p + 1
        with pytest.raises(EngineError, match="outside its shard's forward"):
            engine.module.state_dict()["model.layers.1.mlp.up_proj.weight"].clone()
        with engine.gather(p):
            assert torch.equal(p, plain.model.layers[1].mlp.up_proj.weight)
        with pytest.raises(KeyError, match="nonsense"), engine.gather("nonsense"):
            pass
        assert {k: v.shape for k, v in engine.state_dict().items()} == {k: v.shape for k, v in plain.state_dict().items()}


def test_gather_sees_the_step_that_is_pending(tmp_path):
    with engine_of(tmp_path, max_grad_norm=1e9) as engine:
        train(engine, 2)
        name = "model.layers.2.mlp.up_proj.weight"
        with engine.gather(name):
            assert torch.equal(engine.module.get_parameter(name), oracle_run(2)[2][0][name])


# -- use out of order -----------------------------------------------------------------------------------------------------


def test_a_cache_in_training_is_refused(tmp_path):
    with engine_of(tmp_path) as engine:
        assert engine(input_ids=batches(1)[0]).past_key_values is None
        engine.eval()
        assert engine(input_ids=batches(1)[0]).past_key_values is None  # a model fresh from from_pretrained is in eval mode, as elsewhere
        with pytest.raises(EngineError, match="use_cache=False"):
            engine(input_ids=batches(1)[0], use_cache=True)


def test_generation_between_steps_has_a_cache_and_changes_nothing(tmp_path):
    with engine_of(tmp_path) as engine:
        losses, _ = train(engine, 2)
        engine.eval()
        a = engine.module.generate(batches(1)[0][:1], max_new_tokens=4, do_sample=False)
        engine.train()
        rest, _ = train(engine, 4, first=2)
        assert losses + rest == oracle_run(4)[0]
        assert a.shape == (1, batches(1).shape[2] + 4)


def test_step_without_backward(tmp_path):
    with engine_of(tmp_path) as engine, pytest.raises(EngineError, match="step without grads"):
        engine.step()


def test_a_second_backward_after_a_step_under_backward(tmp_path):
    with engine_of(tmp_path, step_mode="backward") as engine:
        ids = batches(1)[0]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        with pytest.raises(EngineError, match="gradient_accumulation_steps"):
            engine.backward(engine(input_ids=ids, labels=ids).loss)


def test_zero_grad_drops_what_was_summed(tmp_path):
    with engine_of(tmp_path, step_mode="deferred") as engine:
        ids = batches(3)[2]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.zero_grad()
        assert train(engine, 2)[0] == oracle_run(2)[0]


def test_after_close(tmp_path):
    engine = engine_of(tmp_path)
    engine.close()
    engine.close()
    for call in (lambda: engine(input_ids=batches(1)[0]), engine.step, engine.zero_grad, engine.commit, lambda: engine.backward(torch.zeros(()))):
        with pytest.raises(EngineError, match="the engine is closed"):
            call()


def test_one_engine_a_model(tmp_path):
    model = llama()
    with engine_of(tmp_path, model=model), pytest.raises(EngineError, match="already has an engine"):
        engine_of(tmp_path, model=model)


# -- gradients that are not finite ----------------------------------------------------------------------------------------


class Spike(nn.Module):
    """Multiplies by 1, or gives the middle block's gradients a NaN when told to."""

    def __init__(self, width):
        super().__init__()
        self.linear, self.bad = nn.Linear(width, width), False

    def forward(self, x):
        y = self.linear(x)
        return y + (y * float("nan")).detach() * 0 if not self.bad else y * float("nan")


def spiky() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Spike(64) for _ in range(4)]).to(torch.bfloat16)


@pytest.mark.parametrize("mode", ["backward", "deferred"])
def test_a_step_with_a_nan_changes_nothing_and_is_counted(tmp_path, mode):
    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x, bad=False):
            for i, block in enumerate(self.blocks):
                x = torch.tanh(block(x))
                if bad and i == 0:
                    x.register_hook(lambda g: g * float("nan"))  # blocks 1 to 3 have finite gradients, block 0 has not
            return x.float().square().mean()

    def make():
        torch.manual_seed(0)
        return Bad().to(torch.bfloat16)

    def run(folder, steps):
        folder.mkdir()
        with engine_of(folder, make(), step_mode=mode, max_skipped_steps=2) as engine:
            skipped = []
            for i, bad in enumerate(steps):
                x = torch.randn(8, 64, generator=torch.Generator().manual_seed(sum(not b for b in steps[:i]))).to(torch.bfloat16)
                engine.backward(engine(x, bad=bad))
                skipped.append(engine.step().skipped)
            assert skipped == steps
            assert engine.global_step == steps.count(False) and engine.skipped_steps == steps.count(True)
            return engine_snapshot(engine)

    assert_same(run(tmp_path / "a", [False, False, True, True, False]), run(tmp_path / "b", [False, False, False]))
    with pytest.raises(NonFiniteError, match=r"3 steps in a row .* first in blocks\.0"):
        run(tmp_path / "c", [False, True, True, True])


# -- refused before any work ----------------------------------------------------------------------------------------------


def test_bad_models_and_options(tmp_path):
    with pytest.raises(ValueError, match="no parameters"):
        Engine(nn.ReLU())
    with pytest.raises(ConfigError, match="frozen"):
        Engine(nn.Linear(4, 4).requires_grad_(False))
    with pytest.raises(ValueError, match=r"float64.*bf16"):
        Engine(nn.Linear(4, 4).double())
    with pytest.raises(ConfigError, match=r"unknown key 'learning_rate'|'learning_rate'"):
        Engine(nn.Linear(4, 4), learning_rate=1e-3)
    with pytest.raises(BudgetError, match="there is no nvme_path"):
        Engine(nn.Linear(4, 4), weights="nvme")
    with pytest.raises(ConfigError, match="max_grad_norm needs all grads"):
        Engine(nn.Linear(4, 4), step_mode="backward", max_grad_norm=1.0)
    with pytest.raises(ConfigError, match="param_groups lacks bias"):
        model = nn.Linear(4, 4)
        Engine(model, param_groups=[{"params": [model.weight]}])
    with pytest.raises(StoreError, match="missing does not exist: mount the drive or create"):
        Engine(nn.Linear(4, 4), nvme_path=str(tmp_path / "missing"))


def test_a_store_that_is_there_is_not_overwritten(tmp_path):
    with engine_of(tmp_path, run_name="mine") as engine:
        train(engine, 2)
    with pytest.raises(StoreError, match=r"resume=True|resume"):
        engine_of(tmp_path, run_name="mine")
    with engine_of(tmp_path, run_name="mine", resume=True) as engine:
        assert engine.global_step == 2
        assert train(engine, 4, first=2)[0] == oracle_run(4)[0][2:]


# -- parameter groups and schedules -----------------------------------------------------------------------------------------


def test_groups_and_a_torch_schedule(tmp_path):
    """Decay off for norms, and a schedule of torch: the same numbers as torch.optim.AdamW on an fp32 master with the same gradients."""

    def split(model):
        decay = [p for p in model.parameters() if p.dim() > 1]
        return [{"params": decay, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 5e-4}]

    plain = llama()
    names = [n for n, _ in plain.named_parameters()]
    master = {n: p.detach().float().requires_grad_() for n, p in plain.named_parameters()}
    groups = [{**g, "params": [master[n] for n in names if (plain.get_parameter(n).dim() > 1) == (g["weight_decay"] > 0)]} for g in split(plain)]
    torch_optimizer = torch.optim.AdamW(groups, lr=1e-3, foreach=False)
    torch_schedule = torch.optim.lr_scheduler.CosineAnnealingLR(torch_optimizer, T_max=8)
    model = llama()
    with Engine(model, param_groups=split(model), nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, lr=1e-3, **NVME) as engine:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, T_max=8)
        for ids in batches(8):
            loss = engine(input_ids=ids, labels=ids).loss
            theirs = plain(input_ids=ids, labels=ids, use_cache=False).loss
            theirs.backward()
            engine.backward(loss)
            for n, p in plain.named_parameters():
                master[n].grad, p.grad = p.grad.float(), None
            torch_optimizer.step()
            torch_schedule.step()
            engine.step()
            schedule.step()
            weights, state = engine_snapshot(engine)
            with torch.no_grad():
                for n, p in plain.named_parameters():
                    p.copy_(weights[n])  # so that the gradients of the next step are the same for both
        for shard in engine.layout.shards:
            for r, run in enumerate(shard.runs):
                for p in run.params:
                    lo = state[shard.name, r][0][p.offset : p.offset + p.numel].int()
                    ours = ((weights[p.name].reshape(-1).view(torch.int16).int() << 16) + lo).view(torch.float32)
                    assert torch.allclose(ours, master[p.name].detach().reshape(-1), rtol=1e-6, atol=1e-8), p.name  # 8 steps of last roundings


def test_an_exception_in_forward_leaves_the_engine_usable(tmp_path):
    with engine_of(tmp_path, max_grad_norm=1e9) as engine:
        losses, _ = train(engine, 1)
        layer = engine.module.model.layers[2].mlp
        original, layer.forward = layer.forward, lambda x: 1 / 0
        with pytest.raises(ZeroDivisionError):
            engine(input_ids=batches(1)[0], labels=batches(1)[0])
        layer.forward = original
        assert losses + train(engine, 3, first=1)[0] == oracle_run(3)[0]


def test_config_object_and_options():
    with Engine(nn.Linear(4, 4), Config(lr=1.0), eps=1e-3) as engine:
        assert (engine.config.lr, engine.config.eps) == (1.0, 1e-3)


def test_a_parameter_unfrozen_too_late_is_refused(tmp_path):
    model = llama()
    model.model.norm.requires_grad_(False)
    with engine_of(tmp_path, model=model) as engine:
        train(engine, 1)
        model.model.norm.requires_grad_(True)
        with pytest.raises(EngineError, match=r"model\.norm\.weight was frozen when the engine was built"):
            train(engine, 2, first=1)


def test_micro_batches_of_what_has_no_rows_are_refused(tmp_path):
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            return x + self.linear(x), self.linear(x).sum((0, 1))

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Sums() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x, total = block(x)
            return x.square().mean() + total.mean()

    with engine_of(tmp_path, Chain(), micro_batch_size=2) as engine, pytest.raises(EngineError, match="leave micro_batch_size unset"):
        engine(torch.randn(4, 16, 64))
