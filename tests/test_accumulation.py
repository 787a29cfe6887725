"""Accumulation: several backwards a step, micro-batches inside of the shards, both; uneven ones; shards that only some of them use."""

from __future__ import annotations

import functools

import pytest
import torch
from models import HYPER, LEAF_BYTES, batches, llama
from oracle import Oracle, assert_same, engine_snapshot
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from zinf.discover import discover
from zinf.engine import Engine
from zinf.errors import ConfigError

TINY = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=128)
NVME = dict(weights="nvme", state="nvme")
PLACES = [("memory", "cpu", "deferred"), ("memory", "sim", "deferred"), ("nvme", "cpu", "backward"), ("nvme", "sim", "deferred"), ("nvme", "sim", "backward")]
places = pytest.mark.parametrize(("placement", "device", "mode"), PLACES)


def engine_of(model, folder, placement, device, mode, **options):
    tiers = dict(nvme_path=str(folder), **NVME) if placement == "nvme" else {}
    return Engine(model, device=device, step_mode=mode, chunk_size=2048, leaf_bytes=LEAF_BYTES, **tiers, **HYPER, **options)


class CallOracle(Oracle):
    """Keeps the gradients of each call of a shard's module, and of each slice of `size` rows of a block, apart, and sums them itself.

    Each call computes from a leaf of its own. What one backward made is summed last call first, as backward makes it: in fp32 if `wide` and there
    are slices, else in the weights' dtype, as torch's .grad. Then it is added to the step's sum, in fp32 if `wide`.
    """

    def __init__(self, model, size=None, **options):
        super().__init__(model, leaf_bytes=LEAF_BYTES, **HYPER, **options)
        self.size, self.rows, self.calls = size, 0, []
        names = {id(p): n for n, p in self.params.items()}
        for unit in discover(model, None, LEAF_BYTES):
            for module in unit.modules:
                module.forward = functools.partial(self.call, module, module.forward, {n: names[id(p)] for n, p in module.named_parameters()}, unit.block)
        model.register_forward_pre_hook(self.begin, with_kwargs=True)

    def begin(self, module, args, kwargs):
        self.rows = next(t.shape[0] for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor))

    def call(self, module, bare, names, block, *args, **kwargs):
        if module in [m for m, _ in self.calls[-1:] if m is not None]:  # functional_call, below
            return bare(*args, **kwargs)
        size, outs = self.size if block and self.size else self.rows, []
        leaves, spec = tree_flatten((args, kwargs))
        for start in range(0, self.rows, size):
            a, k = tree_unflatten([t[start : start + size] if isinstance(t, torch.Tensor) and t.dim() and t.shape[0] == self.rows else t for t in leaves], spec)
            own = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
            self.calls.append((module, {}))
            outs.append(functional_call(module, own, a, k))
            self.calls[-1] = (None, {names[n]: leaf for n, leaf in own.items()})
        if isinstance(outs[0], tuple):
            return tuple(torch.cat(parts) for parts in zip(*outs, strict=True))
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def backward(self, loss):
        loss.backward()
        made: dict[str, torch.Tensor] = {}
        for _, leaves in [*reversed(self.calls), (None, self.params)]:
            for name, p in leaves.items():
                if p.grad is not None:
                    g = p.grad.float() if self.wide and self.size else p.grad
                    made[name] = made[name] + g if name in made else g.clone()
                    p.grad = None
        for name, g in made.items():
            g = g.float() if self.wide else g
            self.sums[name] = self.sums[name] + g if name in self.sums else g
        self.calls = []


# -- dtypes of sums ---------------------------------------------------------------------------------------------------------

ROWS = (5, 1, 4)  # of the backwards of a step: with micro-batches of 2 one is uneven, one is smaller than a micro-batch


def parts(step):
    return batches(3, rows=sum(ROWS), length=8, vocab=128)[step].split(ROWS)


@functools.cache
def accumulated(size, wide, tied):
    """(losses, norms, snapshot) of two steps."""
    model = llama(tied=tied, **TINY)
    oracle = CallOracle(model, size, wide=wide) if size else Oracle(model, leaf_bytes=LEAF_BYTES, **HYPER, wide=wide)
    losses, norms = [], []
    for step in range(2):
        for ids in parts(step):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / len(ROWS)
            oracle.backward(loss)
            losses.append(loss.item())
        norms.append(oracle.step())
    return losses, norms, oracle.snapshot()


SUMS = [(*place, size, size is None, dtype) for dtype in ("bf16", "fp32") for size, where in ((None, PLACES[1:4]), (2, PLACES)) for place in where]
SUMS += [(*PLACES[2], 2, True, "bf16"), (*PLACES[3], 2, True, "fp32"), (*PLACES[3], 2, True, "auto"), (*PLACES[1], None, True, "auto")]


@pytest.mark.parametrize(("placement", "device", "mode", "size", "tied", "dtype"), SUMS)
def test_sums_of_uneven_parts(tmp_path, placement, device, mode, size, tied, dtype):
    """Each sum in each dtype has the oracle's bits; and no buffer is needed that was not planned."""
    options = dict(gradient_accumulation_steps=len(ROWS), micro_batch_size=size, grad_accum_dtype=dtype)
    with engine_of(llama(tied=tied, **TINY), tmp_path, placement, device, mode, **options) as engine:
        losses, norms = [], []
        for step in range(2):
            for ids in parts(step):
                loss = engine(input_ids=ids, labels=ids).loss / len(ROWS)
                engine.backward(loss)
                losses.append(loss.item())
            norms.append(engine.step().grad_norm)
        assert (losses, norms) == accumulated(size, dtype != "bf16", tied)[:2]
        assert_same(engine_snapshot(engine), accumulated(size, dtype != "bf16", tied)[2])
        assert engine.stats()["counts"].get("grad buffers beyond the plan", 0) == 0


def test_the_dtypes_differ():
    """Or the test above would prove nothing of them."""
    assert accumulated(None, True, True)[1] != accumulated(None, False, True)[1]
    assert accumulated(2, True, True)[1] != accumulated(2, False, True)[1]


def test_a_dtype_that_the_weights_have_not():
    for dtype, asked in ((torch.float32, "bf16"), (torch.bfloat16, "fp16")):
        with pytest.raises(ConfigError, match=rf"grad_accum_dtype is {asked}, but the weights are"):
            Engine(nn.Linear(4, 4).to(dtype), grad_accum_dtype=asked)
    with Engine(nn.Linear(4, 4).half(), grad_accum_dtype="fp16"):
        pass


def test_fp16_sums_under_a_scale(tmp_path):
    """The sum of scaled backwards in fp16 may overflow though none of them does: skipped, and the scale falls."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).half()
    with Engine(model, gradient_accumulation_steps=4, grad_accum_dtype="fp16", loss_scale=0, hysteresis=1) as engine:
        engine._scaler.scale = 2.0**15
        x = torch.ones(2, 8).half()
        skipped = []
        for _ in range(3):
            for _ in range(4):
                engine.backward(engine(x)[0, 0] * 1.0)  # the bias' gradient is the scale
            skipped.append(engine.step().skipped)
        assert skipped == [True, True, False] and engine.loss_scale == 2.0**13


# -- shards that only some backwards use --------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Goes through the blocks of `path`, and computes others `aside` whose outputs the loss does not see."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(32, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 32)

    def forward(self, x, path=(), aside=(), body=True):
        x = self.embed(x)
        out = [self.blocks[i](x) for i in aside]
        for i in path:
            x = x + torch.tanh(self.blocks[i](x))
        x = x if body else x.detach()
        return (self.head(x).float().square().mean(), *out)


def branches():
    torch.manual_seed(0)
    return Branches().bfloat16()


STEPS = [  # the backwards of each step
    [dict(path=(0, 1, 2, 3)), dict(path=(0, 3)), dict(path=(2,))],  # the last uses least
    [dict(path=(1,)), dict(path=(2, 1), aside=(3,)), dict(path=(3, 0, 3))],  # one computed and not used by its loss, one twice
    [dict(path=(0,), body=False), dict(path=(0, 1)), dict(path=(0, 1), body=False)],  # a loss that reaches the head only
    [dict(path=(1,), aside=(0,))] * 3,  # shards that the whole step does not use
]


@functools.cache
def branched(wide, size):
    oracle = CallOracle(branches(), size, wide=wide)
    return [*branch(oracle, lambda x, **how: oracle.model(x, **how)), oracle.snapshot()]


def branch(owner, model):
    losses, norms = [], []
    for s, step in enumerate(STEPS):
        for k, how in enumerate(step):
            x = torch.randn(5 - k, 32, generator=torch.Generator().manual_seed(10 * s + k)).bfloat16()
            loss = model(x, **how)[0]
            owner.backward(loss)
            losses.append(loss.item())
        done = owner.step()
        norms.append(getattr(done, "grad_norm", done))
    return losses, norms


@places
@pytest.mark.parametrize("size", [None, 2])
def test_shards_that_only_some_backwards_use(tmp_path, placement, device, mode, size):
    with engine_of(branches(), tmp_path, placement, device, mode, gradient_accumulation_steps=3, micro_batch_size=size) as engine:
        assert {"blocks.0", "blocks.3", "embed", "head"} <= {s.name for s in engine.shards}
        losses, norms = branch(engine, engine)
        want = branched(True, size)
        assert (losses, norms) == (want[0], want[1])
        assert_same(engine_snapshot(engine), want[2])


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_backwards_that_were_not_announced(tmp_path, device):
    """Without gradient_accumulation_steps, where steps are deferred: summed in the weights' dtype, as torch's .grad."""
    with engine_of(branches(), tmp_path, "nvme", device, "deferred") as engine:
        losses, norms = branch(engine, engine)
        want = branched(False, None)
        assert (losses, norms) == (want[0], want[1])
        assert_same(engine_snapshot(engine), want[2])
