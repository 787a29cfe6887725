"""Precisions: fp16 under a loss scale that rises and falls, fp32 parts in half-precision models, several dtypes in one shard."""

from __future__ import annotations

import itertools
import math
import shutil

import pytest
import torch
from models import HYPER, LEAF_BYTES, batches, llama
from oracle import Oracle, assert_same, engine_snapshot
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from zinf.config import Config
from zinf.engine import Engine
from zinf.errors import ConfigError, EngineError, NonFiniteError
from zinf.precision import keep_in_fp32
from zinf.scaling import LossScaler

MEMORY = dict(nvme_path=())
NVME = dict(weights="nvme", state="nvme")
PLACES = [("memory", "cpu", "deferred"), ("memory", "sim", "deferred"), ("nvme", "cpu", "deferred"), ("nvme", "sim", "backward"), ("nvme", "cpu", "backward")]
places = pytest.mark.parametrize(("placement", "device", "mode"), PLACES)


def place(folder, placement, device, mode, **options):
    """Options of an engine."""
    tiers = dict(nvme_path=str(folder), **NVME) if placement == "nvme" else MEMORY
    return dict(device=device, step_mode=mode, chunk_size=4096, leaf_bytes=LEAF_BYTES, **tiers, **{**HYPER, **options})


class Blocks(nn.Module):
    """A small net whose gradients overflow in fp16 at a scale of about 2^16."""

    def __init__(self, count=3, width=64, norm=nn.LayerNorm):
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(nn.Sequential(norm(width), nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)) for _ in range(count))
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return (x * self.gain).float().square().mean()


def blocks(dtype=torch.float16, **options):
    torch.manual_seed(0)
    return Blocks(**options).to(dtype)


def inputs(step, dtype=torch.float16, rows=8):
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(step)).to(dtype)


# -- the scale ------------------------------------------------------------------------------------------------------------


def scaler(**options):
    return LossScaler(Config(**options))


def sequence(s, overflows):
    scales = []
    for bad in overflows:
        scales.append(s.scale)
        s.update(bad)
    return scales


def test_with_a_hysteresis_of_one_the_scale_is_that_of_torch():
    """torch.amp.GradScaler's own update, over a long random history."""
    random = torch.Generator().manual_seed(0)
    overflows = (torch.rand(400, generator=random) < 0.15).tolist()
    ours = sequence(scaler(initial_scale_power=40, loss_scale_window=3, hysteresis=1), overflows)
    scale, good = torch.tensor(2.0**40), torch.tensor(0, dtype=torch.int32)
    for value, bad in zip(ours, overflows, strict=True):
        assert value == scale.item()
        torch._amp_update_scale_(scale, good, torch.tensor(float(bad)), 2.0, 0.5, 3)


def test_hysteresis_as_in_deepspeed():
    """The first overflows are tolerated; tolerance comes back when the scale grows, or after any good step if they have to be consecutive."""
    bad, good = True, False
    history = [bad, bad, bad, good, bad, good, good, bad, bad]
    assert sequence(scaler(initial_scale_power=4, loss_scale_window=2), history) == [16, 16, 8, 4, 4, 2, 2, 4, 4]
    assert sequence(scaler(initial_scale_power=4, loss_scale_window=2, consecutive_hysteresis=True), history) == [16, 16, 8, 4, 4, 4, 4, 8, 8]


def test_the_ends_of_the_scale():
    s = scaler(initial_scale_power=3, hysteresis=1, min_loss_scale=2)
    assert sequence(s, [True] * 4) == [8, 4, 2, 2] and not s.can_fall
    s = scaler(initial_scale_power=126, loss_scale_window=1)
    assert sequence(s, [False] * 3) == [2.0**126] * 3
    static = scaler(loss_scale=128)
    assert sequence(static, [True, True, False]) == [128] * 3 and not static.can_fall
    assert scaler(loss_scale=0).scale == 2.0**16


def fp16_run(folder, steps, placement, device, mode, poisoned=(), **options):
    """Every step beside the oracle, which is told nothing but the scale; (stats, snapshots) at the end."""
    stats = []
    with Engine(blocks(), **place(folder, placement, device, mode, **options)) as engine:
        oracle = Oracle(blocks(), **HYPER, leaf_bytes=LEAF_BYTES, max_grad_norm=options.get("max_grad_norm"))
        for step in range(steps):
            x = inputs(step) * (math.nan if step in poisoned else 1)
            oracle.loss_scale = scale = engine.loss_scale
            loss = engine(x)
            theirs = oracle.model(x)
            assert loss.item() == theirs.item() or step in poisoned
            engine.backward(loss)
            oracle.backward(theirs)
            done, norm = engine.step(), oracle.step()
            assert done.skipped == math.isnan(norm) and (done.grad_norm == norm or done.skipped) and done.loss_scale == scale
            stats.append(done)
        assert engine.skipped_steps == sum(s.skipped for s in stats) and engine.global_step == steps - engine.skipped_steps
        assert_same(engine_snapshot(engine), oracle.snapshot())
    return stats


@pytest.mark.parametrize(("placement", "device", "mode", "max_grad_norm"), [*((*p, None) for p in PLACES), ("nvme", "sim", "deferred", 0.01)])
def test_fp16_rides_the_edge_and_has_the_bits_of_the_oracle(tmp_path, placement, device, mode, max_grad_norm):
    options = dict(initial_scale_power=22, loss_scale_window=2, hysteresis=1, max_grad_norm=max_grad_norm)
    stats = fp16_run(tmp_path, 12, placement, device, mode, poisoned=(9,), **options)
    skipped, scales = [s.skipped for s in stats], [s.loss_scale for s in stats]
    assert skipped[0] and skipped[9] and not all(skipped), "overflows at first, and the poisoned batch"
    assert any(b > a for a, b in itertools.pairwise(scales)), "the scale grows again"
    norms = [s.grad_norm for s in stats if not s.skipped]
    assert max(norms) < 4 * min(norms), "norms are of unscaled grads, whatever the scale"
    if max_grad_norm:
        assert min(norms) > max_grad_norm


def test_scaling_keeps_what_fp16_would_lose():
    """Gradients below 2^-24 vanish without a scale, and do not with one: then they are those of fp32, up to fp16's rounding."""

    def norm(dtype, **options):
        with Engine(blocks(dtype), **options) as engine:
            engine.backward(engine(inputs(0, dtype)) * 2.0**-26)
            return engine.step().grad_norm

    exact = norm(torch.float32)
    assert norm(torch.float16, loss_scale=2.0**26) == pytest.approx(exact, rel=1e-2)
    assert norm(torch.float16, loss_scale=1) < 0.9 * exact


def test_a_static_scale_and_fp16_with_fp32_in_one_shard(tmp_path):
    """One scale for all: also for the fp32 norms inside of fp16 blocks."""

    class Half(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.float()).to(x.dtype)

    def make():
        model = blocks(norm=Half)
        keep_in_fp32(model, ["Half"])
        return model

    oracle = Oracle(make(), **HYPER)
    oracle.loss_scale = 128.0
    with Engine(make(), loss_scale=128, device="sim", nvme_path=str(tmp_path), **HYPER, **NVME) as engine:
        assert {tuple(r.dtype for r in s.runs) for s in engine.layout.shards if s.name.startswith("blocks")} == {("fp32", "fp16")}
        for step in range(4):
            for owner, model in ((engine, engine), (oracle, oracle.model)):
                owner.backward(model(inputs(step)))
            assert engine.step().grad_norm == oracle.step()
        assert_same(engine_snapshot(engine), oracle.snapshot())


def test_a_resumed_scaler_goes_on_exactly(tmp_path):
    """Also where a copy of the store is resumed that was made while the scale was about to grow."""
    options = place(tmp_path / "a", "nvme", "cpu", "deferred", initial_scale_power=20, loss_scale_window=4, run_name="run")

    def steps(engine, first, last):
        scales = []
        for step in range(first, last):
            engine.backward(engine(inputs(step)))
            done = engine.step()
            scales.append((done.loss_scale, done.skipped, done.grad_norm if not done.skipped else None))
        return scales

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with Engine(blocks(), **options) as engine:
        whole = steps(engine, 0, 8)
        engine.synchronize()
        shutil.copytree(tmp_path / "a", tmp_path / "b", dirs_exist_ok=True)  # the state of the last step, as a kill would leave it
        saved = engine._scaler.state()
        whole += steps(engine, 8, 16)
        want = engine_snapshot(engine)
    assert {b for _, b, _ in whole[:8]} == {True, False} and len({a for a, *_ in whole[8:]}) > 1
    with Engine(blocks(), resume=True, **{**options, "nvme_path": str(tmp_path / "b")}) as engine:
        assert engine._scaler.state() == saved and engine.loss_scale == whole[8][0]
        assert steps(engine, 8, 16) == whole[8:]
        assert_same(engine_snapshot(engine), want)


def test_skips_count_towards_the_error_only_at_the_minimum():
    with Engine(blocks(), initial_scale_power=3, hysteresis=2, max_skipped_steps=2) as engine:
        for _ in range(4 + 2):  # 8 8 4 2, then 1 1
            engine.backward(engine(inputs(0) * math.nan))
            assert engine.step().skipped
        assert engine.loss_scale == 1
        engine.backward(engine(inputs(0) * math.nan))
        with pytest.raises(NonFiniteError, match="3 steps in a row"):
            engine.step()
        assert engine.skipped_steps == 7
        engine.backward(engine(inputs(0)))
        assert not engine.step().skipped


def test_a_loss_that_is_not_scaled_is_refused():
    with Engine(blocks()) as engine:
        with pytest.raises(EngineError, match=r"call engine\.backward\(loss\), or engine\.scale\(loss\)\.backward\(\)"):
            engine(inputs(0)).backward()
        with pytest.raises(EngineError, match="step without grads"):
            engine.step()
        engine.scale(engine(inputs(0))).backward()
        kept = engine.scale(engine(inputs(0)))
        assert not engine.step().skipped
        engine._scaler.scale /= 2  # as an overflow would
        with pytest.raises(EngineError, match="scaled by 65536, and the scale is 32768"):
            kept.backward()
    for model, options in ((blocks(torch.bfloat16), {}), (blocks(), dict(loss_scale=1))):
        x = inputs(0, next(model.parameters()).dtype)
        with Engine(model, **options) as engine:
            assert engine.loss_scale == 1
            engine(x).backward()
            assert engine.step().loss_scale == 1


def test_a_frozen_fp16_base_scales_too():
    model = blocks()
    model.requires_grad_(False)
    model.gain = nn.Parameter(torch.ones(64))
    with Engine(model) as engine:
        assert engine.loss_scale == 2.0**16
        engine.backward(engine(inputs(0)))
        assert not engine.step().skipped


def test_fp16_is_deferred_unless_a_step_can_be_undone(tmp_path):
    with Engine(blocks(), nvme_path=str(tmp_path), **NVME) as engine:
        assert engine.step_mode == "deferred"
    with pytest.raises(ConfigError, match="overflows are routine"):
        Engine(blocks(), step_mode="backward")


def test_bad_scales():
    for options in (dict(loss_scale=-1), dict(loss_scale="much"), dict(initial_scale_power=127), dict(hysteresis=0), dict(min_loss_scale=0)):
        with pytest.raises(ConfigError, match=next(iter(options))):
            Config(**options)


# -- fp32 in a half-precision model -----------------------------------------------------------------------------------------


def dtypes(model):
    return {n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.dtype is torch.float32}


def test_what_is_kept():
    def kept(*names, model=None):
        model = model or blocks(torch.bfloat16)
        same = dict(model.named_parameters())
        keep_in_fp32(model, names)
        assert all(p is same[n] for n, p in model.named_parameters())
        return dtypes(model)

    norms = {f"blocks.{i}.0.{n}" for i in range(3) for n in ("weight", "bias")}
    assert kept("LayerNorm") == kept("*.?.0") == norms
    assert kept("blocks.1.3", "gain") == {"blocks.1.3.weight", "blocks.1.3.bias", "gain"}
    assert kept("*.bias") == {n for n, _ in blocks().named_parameters() if n.endswith("bias")}
    assert kept("auto") == set()
    batchnorm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)
    assert kept("BatchNorm1d", model=batchnorm) == {"1.weight", "1.bias", "1.running_mean", "1.running_var"}
    with pytest.raises(ConfigError, match=r"Blocks has no LlamaRMSNorm; .*auto"):
        kept("LlamaRMSNorm")


T5 = T5Config(d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16, vocab_size=300)
MOE = dict(moe_intermediate_size=32, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1)
HEADS = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
DEEPSEEK = DeepseekV3Config(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, vocab_size=300, **MOE, **HEADS
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("cls", "config"), [(T5ForConditionalGeneration, T5), (DeepseekV3ForCausalLM, DEEPSEEK)])
def test_auto_is_what_transformers_keeps(tmp_path, cls, config, dtype):
    """Of the same folder, whatever the dtype; and what zinf.from_pretrained laid out."""
    cls(config).save_pretrained(tmp_path / "model")
    theirs = cls.from_pretrained(tmp_path / "model", dtype=dtype)
    model = cls(config).to(dtype)
    keep_in_fp32(model, ["auto"])
    assert dtypes(model) & dict(model.named_parameters()).keys() == dtypes(theirs) & dict(theirs.named_parameters()).keys()


class Wide(nn.LayerNorm):
    """A norm that computes and answers in fp32 if its weights are, as several of transformers' do."""

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(nn.ModuleDict(dict(norm=Wide(64), up=nn.Linear(64, 64), down=nn.Linear(64, 64))) for _ in range(3))
        for block in self.blocks:
            block.forward = self.block.__get__(block)
        self.norm = Wide(64)

    @staticmethod
    def block(self, x):
        y = self["norm"](x).to(self["up"].weight.dtype)
        return x + self["down"](torch.tanh(self["up"](y)))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        self.answered = x.dtype
        return x.float().square().mean() * 0.1 + x.float().mean()


@places
@pytest.mark.parametrize("options", [{}, dict(gradient_accumulation_steps=2)])
def test_fp32_norms_in_a_bf16_model_are_plain_pytorchs(tmp_path, placement, device, mode, options):
    """Two dtypes in a shard, dtypes of activations as the modules make them: the bits of the plain model whose norms are fp32."""

    def make():
        torch.manual_seed(0)
        return Mixed().to(torch.bfloat16)

    plain = make()
    for module in plain.modules():
        if isinstance(module, Wide):
            module.float()
    accumulation = options.get("gradient_accumulation_steps", 1)
    oracle = Oracle(plain, **HYPER, leaf_bytes=LEAF_BYTES, wide=accumulation > 1)
    with Engine(make(), keep_in_fp32=["Wide"], **place(tmp_path, placement, device, mode), **options) as engine:
        for ids in batches(3, vocab=64):
            for part in ids.chunk(accumulation):
                loss, theirs = engine(part), plain(part)
                assert loss.item() == theirs.item() and engine.module.answered is plain.answered is torch.float32
                engine.backward(loss)
                oracle.backward(theirs)
            assert engine.step().grad_norm == oracle.step()
        assert engine.module.norm.weight.dtype is torch.float32
        assert_same(engine_snapshot(engine), oracle.snapshot())


def test_kept_from_the_checkpoint_on(tmp_path):
    """from_pretrained lays out fp32 records with the checkpoint's fp32 values; an engine that wants more than the store has is refused."""
    from zinf.hf.loading import from_pretrained

    exact = llama().float()
    norms = {n: p for n, p in exact.named_parameters() if "norm" in n}
    for p in norms.values():
        p.data += torch.randn(64) * 1e-3  # what bf16 cannot hold
    exact.save_pretrained(tmp_path / "model")
    options = dict(nvme_path=str(tmp_path), dtype=torch.bfloat16)
    model = from_pretrained(tmp_path / "model", keep_in_fp32=["LlamaRMSNorm"], **options)
    assert {n for n, p in model.named_parameters() if p.dtype is torch.float32} == norms.keys()
    with pytest.raises(ConfigError, match=r"the store has .*pass keep_in_fp32 to zinf\.from_pretrained"):
        Engine(model, keep_in_fp32=["*.mlp"])
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    for n, p in norms.items():
        plain.get_parameter(n).data = p.data
    ids = batches(1)[0]
    with Engine(model.train(), keep_in_fp32=["LlamaRMSNorm"], **HYPER) as engine, torch.autocast("cpu", torch.bfloat16):  # without, plain Llama fails too
        got = engine.state_dict()
        assert all(torch.equal(got[n], p) for n, p in norms.items())
        loss = engine(input_ids=ids, labels=ids).loss
        assert loss.item() == plain(input_ids=ids, labels=ids, use_cache=False).loss.item()
        engine.backward(loss)
        assert not engine.step().skipped
