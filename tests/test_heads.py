"""The loss of a language model without its logits: the numbers of plain PyTorch and transformers, in memory that does not grow with the vocabulary."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from models import LEAF_BYTES, batches, llama
from oracle import Oracle, assert_same, engine_snapshot
from torch import nn
from torch.nn import functional as F
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

import zinf
from zinf import fused, heads
from zinf.config import Config
from zinf.engine import Engine
from zinf.errors import ConfigError, EngineError
from zinf.heads import linear_cross_entropy

N, V, H = 33, 301, 16


def tensors(dtype, bias: bool = False, n: int = N, seed: int = 0):
    """(hidden, weight, bias or None, labels), the first three leaves."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, H, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(V, H, generator=g) * 0.3).to(dtype).requires_grad_()
    b = torch.randn(V, generator=g).to(dtype).requires_grad_() if bias else None
    labels = torch.randint(0, V, (n,), generator=g)
    labels[::4] = -100
    return hidden, weight, b, labels


def plain(hidden, weight, labels, bias=None, *, softcap=None, z_loss=0.0, num_items=None, reduction="mean", **kw):
    """The formulae, on full logits."""
    y = F.linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32))
    if softcap:
        y = softcap * torch.tanh(y / softcap)
    count = (labels != -100).sum()
    loss = F.cross_entropy(y, labels, reduction=reduction if num_items is None else "sum", **kw)
    if z_loss:
        z = z_loss * (torch.logsumexp(y, 1) ** 2 * (labels != -100)).sum()
        loss = loss + (z / count if reduction == "mean" and num_items is None else z)
    return loss / num_items if num_items is not None else loss


def grads(loss, *leaves):
    for t in leaves:
        t.grad = None
    loss.backward()
    return [t.grad for t in leaves if t.requires_grad]


OPTIONS = [dict(), dict(reduction="sum"), dict(label_smoothing=0.1), dict(z_loss=0.01), dict(softcap=2.0), dict(num_items=7)]
ALL = dict(label_smoothing=0.2, z_loss=0.02, softcap=3.0, num_items=5)


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("options", [dict(), ALL], ids=lambda o: "+".join(o) or "plain")
def test_gradients_by_finite_differences(once, options, monkeypatch):
    monkeypatch.setattr(heads, "ROWS_AGAIN", 3)
    hidden, weight, bias, labels = tensors(torch.float64, bias=True, n=7)
    leaves = [t.detach().contiguous().requires_grad_() for t in (hidden[:, :3], weight[:9, :3], bias[:9])]
    labels = labels.where(labels == -100, labels % 9)
    assert torch.autograd.gradcheck(lambda h, w, b: linear_cross_entropy(h, w, labels, b, chunk=2, once=once, **options), leaves)


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("options", [*OPTIONS, ALL], ids=lambda o: "+".join(o) or "plain")
def test_the_formulae(once, options):
    hidden, weight, bias, labels = tensors(torch.float64, bias=True)
    want = plain(hidden, weight, labels, bias, **options)
    got = linear_cross_entropy(hidden, weight, labels, bias, chunk=5, once=once, **options)
    torch.testing.assert_close(got, want)
    for a, b in zip(grads(got, hidden, weight, bias), grads(want, hidden, weight, bias), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", [dict(), dict(reduction="sum"), dict(num_items=7)], ids=lambda o: "+".join(o) or "plain")
def test_one_tile_has_the_bits_of_plain_pytorch(dtype, bias, options):
    hidden, weight, b, labels = tensors(dtype, bias)
    leaves = [t for t in (hidden, weight, b) if t is not None]
    want, got = plain(hidden, weight, labels, b, **options), linear_cross_entropy(hidden, weight, labels, b, once=True, **options)
    assert torch.equal(got, want)
    assert all(torch.equal(x, y) for x, y in zip(grads(got / 2, *leaves), grads(want / 2, *leaves), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("chunk", [1, 8, 32])
def test_tiles_leave_the_loss_its_bits(dtype, once, chunk):
    """And gradients differ by the order of fp32 sums, and where that flips the rounding to bf16 or fp16."""
    hidden, weight, _, labels = tensors(dtype)
    want, got = plain(hidden, weight, labels), linear_cross_entropy(hidden, weight, labels, chunk=chunk, once=once)
    if dtype is torch.float32:  # a matrix times one row is another kernel, of another order of sums
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    else:
        assert torch.equal(got, want)
    scale = 1024.0 if dtype is torch.float16 else 1.0
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    for a, b in zip(grads(got * scale, hidden, weight), grads(want * scale, hidden, weight), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * b.abs().max().item())


def test_fp16_gradients_do_not_vanish_below_a_loss_scale():
    """Probabilities of 1e-5 over many rows are zero in fp16 unless the scale is in them before they are rounded."""
    torch.manual_seed(0)
    hidden, weight = torch.zeros(512, 8, dtype=torch.float16, requires_grad=True), torch.zeros(4096, 8, dtype=torch.float16, requires_grad=True)
    labels = torch.arange(512)
    with torch.no_grad():
        hidden += 1
    d = grads(linear_cross_entropy(hidden, weight, labels) * 65536, weight)[0]
    assert (d[600:] > 0).all()


def test_what_does_not_count(monkeypatch):
    hidden, weight, _, labels = tensors(torch.float32)
    none = torch.full_like(labels, -100)
    for once in (True, False):
        mean, total = linear_cross_entropy(hidden, weight, none, chunk=5, once=once), linear_cross_entropy(hidden, weight, none, reduction="sum", once=once)
        assert mean.isnan() and total == 0
        want = grads(F.cross_entropy(hidden @ weight.T, none), hidden, weight)
        assert all(torch.equal(a, b) for a, b in zip(grads(mean, hidden, weight), want, strict=True))
        assert linear_cross_entropy(hidden, weight, none, num_items=3, once=once) == 0
        empty = linear_cross_entropy(hidden[:0], weight, labels[:0], reduction="sum", once=once)
        assert empty == 0 and not grads(empty, hidden, weight)[1].any()
        assert linear_cross_entropy(hidden[:0], weight, labels[:0], once=once).isnan()


def test_shapes_and_strides():
    _, weight, _, labels = tensors(torch.float32)
    wide = torch.randn(3, H, 11).transpose(1, 2).requires_grad_()
    labels = labels[: 3 * 11].view(3, 11)
    want, got = plain(wide.reshape(-1, H), weight, labels.view(-1)), linear_cross_entropy(wide, weight, labels)
    assert torch.equal(got, want)
    assert torch.equal(grads(got, wide, weight)[0], grads(want, wide, weight)[0])


@pytest.mark.parametrize("once", [True, False])
def test_only_what_needs_gradients_gets_them(once):
    hidden, weight, _, labels = tensors(torch.float32)
    for h, w in ((hidden, weight.detach()), (hidden.detach(), weight)):
        want, got = plain(h, w, labels), linear_cross_entropy(h, w, labels, chunk=8, once=once)
        torch.testing.assert_close(grads(got, h, w)[0], grads(want, h, w)[0])
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, labels).requires_grad
    assert not linear_cross_entropy(hidden.detach(), weight.detach(), labels).requires_grad


@pytest.mark.parametrize("once", [True, False])
def test_backward_twice_and_not_a_second_derivative(once):
    hidden, weight, _, labels = tensors(torch.float32)
    loss = linear_cross_entropy(hidden, weight, labels, once=once)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    kept = [g.clone() for g in first]
    first[1].zero_()
    assert all(torch.equal(a, b) for a, b in zip(kept, torch.autograd.grad(loss, (hidden, weight)), strict=True))
    again = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, once=once), hidden, create_graph=True)[0]
    with pytest.raises(RuntimeError):
        again.sum().backward()


def test_autocast_is_that_of_linear():
    hidden, weight, b, labels = tensors(torch.float32, bias=True)
    for once in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            want, got = plain(hidden, weight, labels, b), linear_cross_entropy(hidden, weight, labels, b, once=once)
        assert torch.equal(got, want)
        for x, y in zip(grads(got, hidden, weight, b), grads(want, hidden, weight, b), strict=True):
            torch.testing.assert_close(x, y, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (dict(labels=torch.full((N,), V)), ValueError, f"label {V} is outside of the vocabulary of {V}"),
        (dict(labels=torch.full((N,), -1)), ValueError, "label -1 is outside"),
        (dict(labels=torch.zeros(N - 1, dtype=torch.int64)), ValueError, r"labels \(32,\)"),
        (dict(labels=torch.zeros(N)), TypeError, "expected int64"),
        (dict(weight=torch.zeros(V, H + 1)), ValueError, "expected"),
        (dict(weight=torch.zeros(V, H, dtype=torch.float64)), TypeError, "one dtype"),
        (dict(bias=torch.zeros(V + 1)), ValueError, "bias"),
        (dict(reduction="none"), ValueError, "mean or sum"),
        (dict(chunk=0), ValueError, "positive"),
        (dict(label_smoothing=2.0), ValueError, "0 to 1"),
    ],
)
def test_refused(change, error, said):
    hidden, weight, _, labels = tensors(torch.float32)
    with pytest.raises(error, match=said):
        zinf.linear_cross_entropy(**{**dict(hidden=hidden, weight=weight, labels=labels), **change})


# ------------------------------------------------------------------------------------------------------------- with an engine


SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=512, intermediate_size=64)
ARCHITECTURES = {
    "llama": lambda: llama(num_hidden_layers=2),
    "untied": lambda: llama(num_hidden_layers=2, tied=False),
    "gemma2 with softcap": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, num_key_value_heads=1, head_dim=16, final_logit_softcapping=0.5)),
    "cohere with scale": lambda: CohereForCausalLM(CohereConfig(**SMALL, num_key_value_heads=1, logit_scale=0.0625)),
    "phi with bias": lambda: PhiForCausalLM(PhiConfig(**SMALL)),
    "mixtral with router loss": lambda: MixtralForCausalLM(
        MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5)
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=512, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)),
}
NVME = dict(weights="nvme", state="nvme", chunk_size=4096)


def run(folder, model, mode, steps: int = 2, **options):
    """(losses, snapshot, the engine's FusedHead) after some steps on padded rows."""
    folder.mkdir()
    losses = []
    with Engine(model, nvme_path=str(folder), leaf_bytes=LEAF_BYTES, lr=1e-3, fused_head=mode, **{**NVME, **options}) as engine:
        for ids in batches(steps):
            labels = ids.clone()
            labels[0, 10:] = labels[1, :7] = -100
            loss = engine(input_ids=ids, labels=labels).loss
            engine.backward(loss)
            losses.append(loss.item())
            engine.step()
        return losses, engine_snapshot(engine), engine.fused_head


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_trains_with_the_same_bits(tmp_path, name, device):
    torch.manual_seed(0)
    model = ARCHITECTURES[name]().to(torch.bfloat16).train()
    want, got = (run(tmp_path / mode, copy.deepcopy(model), mode, device=device) for mode in ("off", "require"))
    assert got[0] == want[0]
    assert_same(got[1], want[1])
    assert (got[2].used, got[2].full) == (2, 0)


PLACES = [dict(step_mode="backward"), dict(device="sim", step_mode="deferred"), dict(device="sim", step_mode="backward"), dict(weights="host", state="host")]


@pytest.mark.parametrize("once", [True, False])
def test_tiles_under_an_engine(tmp_path, monkeypatch, once):
    """Several tiles: placements agree with each other bit for bit, and with full logits up to the order of sums."""
    monkeypatch.setattr(heads, "TILE", 512 * 20)
    monkeypatch.setattr(heads, "ROWS_AGAIN", 30)
    if not once:
        monkeypatch.setattr(heads, "ONCE_BYTES", 0)
    runs = [run(tmp_path / str(i), llama(num_hidden_layers=2), "require", **place) for i, place in enumerate(PLACES)]
    for other in runs[1:]:
        assert other[0] == runs[0][0]
        assert_same(other[1], runs[0][1])
    want = run(tmp_path / "off", llama(num_hidden_layers=2), "off")
    assert runs[0][0][0] == want[0][0]
    assert runs[0][0] == pytest.approx(want[0], rel=1e-3)  # bf16 weights that rounded the other way


@pytest.mark.parametrize("train", ["head", "blocks", "adapter"])
def test_parts_that_are_frozen(tmp_path, train):
    def make():
        model = llama(num_hidden_layers=2, tied=False).requires_grad_(False)
        {"head": model.lm_head, "blocks": model.model.layers, "adapter": model.model.norm}[train].requires_grad_(True)
        return model

    want, got = run(tmp_path / "a", make(), "off"), run(tmp_path / "b", make(), "require")
    assert got[0] == want[0]
    assert_same(got[1], want[1])


def test_adapters(tmp_path):
    peft = pytest.importorskip("peft")

    def make():
        torch.manual_seed(1)
        model = peft.get_peft_model(llama(num_hidden_layers=2), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        return model.to(torch.bfloat16)

    want, got = run(tmp_path / "a", make(), "off"), run(tmp_path / "b", make(), "require")
    assert got[0] == want[0] and got[2].used == 2
    assert_same(got[1], want[1])


def test_auto_is_for_large_logits_and_eval_too(tmp_path, monkeypatch):
    assert run(tmp_path / "small", llama(), "auto")[2].used == 0
    monkeypatch.setattr(fused, "AUTO_BYTES", 4 * 24 * 512 * 4)
    assert run(tmp_path / "large", llama(), "auto")[2].used == 2
    with Engine(llama(), leaf_bytes=LEAF_BYTES) as engine, torch.no_grad():
        ids = batches(1)[0]
        assert torch.equal(engine(input_ids=ids, labels=ids).loss, llama()(input_ids=ids, labels=ids).loss)
        assert engine.fused_head.used == 1
        assert type(engine(input_ids=ids).logits) is torch.Tensor


def test_whoever_reads_logits_gets_them(caplog):
    ids = batches(1)[0]
    want = llama()(input_ids=ids, labels=ids)
    with Engine(llama(), leaf_bytes=LEAF_BYTES, fused_head="require") as engine, caplog.at_level("INFO", "zinf"):
        out = engine(input_ids=ids, labels=ids)
        assert out.logits.shape == want.logits.shape and out.logits.dtype is want.logits.dtype
        assert "not computed" in repr(out.logits) and (out.logits / 2).float().dtype is torch.float32 and engine.fused_head.full == 0
        assert torch.equal(out.logits[:, 1], want.logits[:, 1]) and torch.equal(torch.exp(out.logits / 2), torch.exp(want.logits / 2))
        assert sum("full logits" in r.message for r in caplog.records) == 1
        engine.backward(out.loss + out.logits.float().square().mean())  # a loss on them is a second use of the head
        unread = engine(input_ids=ids, labels=ids).logits
        norm = engine.step().grad_norm
        assert norm == pytest.approx(torch.cat([p.grad.float().flatten() for p in want_model_params(ids)]).norm().item(), rel=1e-2)
        with pytest.raises(EngineError, match="before step"):
            unread.sum()


def want_model_params(ids):
    model = llama()
    out = model(input_ids=ids, labels=ids)
    (out.loss + out.logits.float().square().mean()).backward()
    return list(model.parameters())


class Nosy(type(llama())):
    """Uses its logits after the loss, as models with a z-loss of their own do."""

    _tied_weights_keys = type(llama())._tied_weights_keys

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **{**kwargs, "use_cache": False})
        if out.loss is not None:
            out.loss = out.loss + 0.1 * out.logits.logsumexp(-1).pow(2).mean()
        return out


Nosy.__name__ = "NosyForCausalLM"


def test_a_model_that_uses_its_logits_after_the_loss(tmp_path):
    def make():
        model = llama(num_hidden_layers=2)
        model.__class__ = Nosy
        return model

    want, got = run(tmp_path / "a", make(), "off"), run(tmp_path / "b", make(), "require")
    assert got[0][0] == want[0][0] and got[2].full == 2
    assert got[0][1] == pytest.approx(want[0][1], rel=1e-4)  # a gradient that is the sum of two calls in bf16, instead of one call's


def test_all_is_taken_back_on_close(tmp_path):
    model = llama()
    model.lm_head.register_forward_hook(lambda m, args, out: None)
    with Engine(model, leaf_bytes=LEAF_BYTES, fused_head="require"):
        assert "forward" in model.lm_head.__dict__
    assert "forward" not in model.lm_head.__dict__ and "_loss_function" not in model.__dict__ and "forward" not in model.model.embed_tokens.__dict__


def test_custom_losses_and_heads_are_left_alone(caplog):
    def mine(logits, labels, vocab_size, **kw):
        return logits.float().mean()

    model = llama()
    model.loss_function = mine
    with caplog.at_level("INFO", "zinf"), Engine(model, leaf_bytes=LEAF_BYTES) as engine:
        assert engine.fused_head is None and "is not ForCausalLMLoss" in caplog.text and engine.report()["fused_head"] == "off"
    assert model.loss_function is mine
    model = llama()
    model.loss_function = mine
    with pytest.raises(ConfigError, match=r"fused_head is require, but the loss of LlamaForCausalLM is not ForCausalLMLoss"):
        Engine(model, fused_head="require")
    with pytest.raises(ConfigError, match="no causal language model"):
        Engine(nn.Sequential(nn.Linear(4, 4)), fused_head="require")


def test_off_in_a_file(tmp_path):
    (tmp_path / "c.yaml").write_text("fused_head: off\n")
    assert Config.load(tmp_path / "c.yaml").fused_head == "off"


def test_liger_is_refused_where_it_cannot_run():
    with pytest.raises(ConfigError, match="its kernels run on cuda, and the device is cpu"):
        Engine(llama(), device="cpu", fused_head="liger")


def test_liger_is_called_where_it_can(monkeypatch):
    """With a stub: which function gets what."""
    asked = []

    def function(hidden, weight, targets, bias, *, ignore_index, reduction):
        asked.append((tuple(hidden.shape), tuple(targets.shape), reduction))
        return F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, ignore_index=ignore_index, reduction=reduction)

    monkeypatch.setattr(fused, "_why_no_liger", lambda device: None)
    module = types.ModuleType("liger_kernel.transformers.functional")
    module.liger_fused_linear_cross_entropy = function
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    ids = batches(1)[0]
    with Engine(llama(), leaf_bytes=LEAF_BYTES, fused_head="liger") as engine:
        for extra in (dict(), dict(num_items_in_batch=50)):
            assert torch.equal(engine(input_ids=ids, labels=ids, **extra).loss, llama()(input_ids=ids, labels=ids, **extra).loss)
    assert asked == [((96, 64), (96,), "mean"), ((96, 64), (96,), "sum")]


# ---------------------------------------------------------------------------------------------- one mean over all tokens of a step


def uneven(seed: int = 0):
    """(ids, labels) of 4 rows that learn from 23, 11, 5 and 2 tokens."""
    ids = batches(seed + 1)[seed]
    labels = ids.clone()
    for row, count in enumerate((23, 11, 5, 2)):
        labels[row, 1 + count :] = -100
    return ids, labels


@pytest.mark.parametrize("mode", ["off", "require"])
@pytest.mark.parametrize("tensor", [False, True])
def test_num_items_in_batch_over_several_backwards(tmp_path, mode, tensor):
    """The bits of transformers' own accumulation; the numbers of one big batch."""
    ids, labels = uneven()
    n = zinf.count_targets(*labels.split(1))
    assert n == 41
    items = torch.tensor(n) if tensor else n
    oracle = Oracle(llama(), lr=1e-3, wide=True, leaf_bytes=LEAF_BYTES)
    want = []
    for i, l in zip(ids.split(1), labels.split(1), strict=True):
        loss = oracle.model(input_ids=i, labels=l, use_cache=False, num_items_in_batch=items).loss
        want.append(loss.item())
        oracle.backward(loss)
    norm = oracle.step()
    options = dict(nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, lr=1e-3, gradient_accumulation_steps=4, fused_head=mode, **NVME)
    with Engine(llama(), **options) as engine:
        got = []
        for i, l in zip(ids.split(1), labels.split(1), strict=True):
            loss = engine(input_ids=i, labels=l, num_items_in_batch=items).loss
            got.append(loss.item())
            engine.backward(loss)
        assert got == want and engine.step().grad_norm == norm
        assert_same(engine_snapshot(engine), oracle.snapshot())
    whole = llama()
    loss = whole(input_ids=ids, labels=labels).loss
    loss.backward()
    assert sum(got) == pytest.approx(loss.item(), rel=1e-3)  # bf16 logits of other matmul shapes
    assert norm == pytest.approx(torch.cat([p.grad.float().flatten() for p in whole.parameters()]).double().norm().item(), rel=1e-2)


@pytest.mark.parametrize("mode", ["off", "require"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_micro_batches_share_one_mean(tmp_path, mode, device):
    """Blocks see a row at a time, the loss all of them: a row counts by its tokens. fp32, so only sums round differently."""
    ids, labels = uneven()
    whole = llama(torch.float32)
    want = whole(input_ids=ids, labels=labels).loss
    want.backward()
    norm = torch.cat([p.grad.flatten() for p in whole.parameters()]).double().norm().item()
    with Engine(llama(torch.float32), nvme_path=str(tmp_path), leaf_bytes=LEAF_BYTES, micro_batch_size=1, device=device, fused_head=mode, **NVME) as engine:
        loss = engine(input_ids=ids, labels=labels).loss
        assert loss.item() == pytest.approx(want.item(), rel=1e-6)
        engine.backward(loss)
        assert engine.step().grad_norm == pytest.approx(norm, rel=1e-5)


# ------------------------------------------------------------------------------------------------------------------------ memory

PEAK = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from models import llama
from zinf.engine import Engine
def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
torch.manual_seed(0)
model = llama(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=131072)
options = dict(weights="nvme", state="nvme", crash_safe=False, leaf_bytes=1 << 20, device=sys.argv[3], fused_head=sys.argv[4])
with Engine(model, nvme_path=sys.argv[2], **options) as engine:
    peaks = []
    for length in (8, 256):
        ids = torch.randint(0, 131072, (2, length))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        engine.synchronize()
        peaks.append(peak())
    print(json.dumps(peaks + [engine.fused_head.used if engine.fused_head else 0, max(s.weights_nbytes for s in engine.layout.shards)]))
"""


def peak_growth(tmp_path, device, mode):
    command = [sys.executable, "-c", PEAK, str(Path(__file__).parent), str(tmp_path), device, mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    before, after, used, head = json.loads(done.stdout.splitlines()[-1])
    assert used == (mode == "auto") and head == 131072 * 64 * 2  # a shard of its own, that streams
    return after - before


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_peak_memory_at_a_vocabulary_of_128k(tmp_path, device):
    """512 tokens, whose logits are 256 MiB in fp32: the process grows by some tiles, and the weight's gradient in fp32 and bf16."""
    tile, gradient = 4 * heads.TILE, 131072 * 64 * 4
    growth = peak_growth(tmp_path, device, "auto")
    assert growth < 5 * tile + 2 * gradient + (32 << 20)
    if device == "cpu":  # the test sees what it is for
        (tmp_path / "off").mkdir()
        assert peak_growth(tmp_path / "off", device, "off") > 2.8 * (256 << 20)
