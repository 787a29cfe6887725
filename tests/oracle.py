"""The in-memory oracle: plain PyTorch for loss and gradients, ops/reference.py for the step. Slow, obvious, and the definition of right."""

from __future__ import annotations

import math

import torch
from torch import nn

from zinf import layout
from zinf.discover import discover, layout_of
from zinf.ops import reference

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int16": torch.int16}
FEW = 1 << 15  # elements at a time, in one thread: temporaries stay in the cache and no thread waits for another; the same bits, sooner


class Oracle:
    """Trains a plain module in memory. State is kept flat, run by run, as the layout has it."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=None,
        max_grad_value=None,
        decoupled=True,
        wide=False,
        blocks=None,
        leaf_bytes=4 << 20,
        algorithm="adam",
        moments=("m", "v"),
        groups=None,
        ema_decay=None,
        **options,
    ):
        """`algorithm`: the name of a function of reference.py, with its `options`; `groups`: parameter groups that may override them."""
        self.model, self.algorithm, self.ema_decay = model, algorithm, ema_decay
        if algorithm == "adam":
            options |= dict(betas=betas, eps=eps, decoupled=decoupled)
        elif algorithm == "lion":
            options |= dict(betas=betas)
        elif algorithm == "adagrad":
            options |= dict(eps=eps)
        self.optimizer = torch.optim.Optimizer(groups or list(model.parameters()), dict(lr=lr, weight_decay=weight_decay, **options))  # schedulers work on it
        moments = (*moments, "ema") if ema_decay is not None else tuple(moments)
        self.max_grad_norm, self.max_grad_value, self.wide = max_grad_norm, max_grad_value, wide
        self.loss_scale = 1.0  # of the step at hand
        units = discover(model, blocks, leaf_bytes)
        self.layout = layout_of(units, layout.PIECE, moments=moments)
        self.params = dict(model.named_parameters())
        self.state = {}
        for shard in self.layout.shards:
            for r, run in enumerate(shard.runs):
                if run.trainable:
                    self.state[shard.name, r] = tuple(torch.zeros(run.padded, dtype=DTYPES[d]) for _, d in run.mode.planes)
                    if run.dtype == "fp16":
                        self.state[shard.name, r][0].copy_(self._flat(run, lambda p: p.detach().float(), torch.float32))
        self.sums = {}
        self.steps = dict.fromkeys(self.params, 0)  # of each parameter: one without a gradient is not stepped, as in torch.optim

    def _flat(self, run, value, dtype):
        flat = torch.zeros(run.padded, dtype=dtype)
        for p in run.params:
            flat[p.offset : p.offset + p.numel] = value(self.params[p.name]).reshape(-1)
        return flat

    def backward(self, loss):
        """Gradients of one backward, added to the step's: in fp32 if wide, else in the parameter's dtype."""
        (loss if self.loss_scale == 1 else loss.float() * self.loss_scale).backward()
        for name, p in self.params.items():
            if p.grad is not None:
                g = p.grad.float() if self.wide else p.grad
                self.sums[name] = self.sums[name] + g if name in self.sums else g.clone()
                p.grad = None

    def step(self):
        """Returns the norm of the unscaled grads. One that is not finite means that nothing was changed."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._step()
        finally:
            torch.set_num_threads(threads)

    def _step(self):
        grads, sums = {}, []
        for shard in self.layout.shards:
            total = 0.0
            for r, run in enumerate(shard.runs):
                if run.trainable:
                    dtype = DTYPES[run.grads_dtype(self.wide)]
                    flat = torch.zeros(run.padded, dtype=dtype)
                    for p in run.params:
                        if p.name in self.sums:
                            flat[p.offset : p.offset + p.numel] = self.sums[p.name].reshape(-1)
                    grads[shard.name, r] = flat
                    for part in flat[: run.numel].split(FEW):
                        total = reference.sum_squares(part, total)
            sums.append(total)
        if not all(map(math.isfinite, sums)):
            self.sums = {}
            return math.nan
        norm = math.sqrt(math.fsum(sums)) / self.loss_scale
        scale = 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (norm + 1e-6))
        for shard in self.layout.shards:
            for r, run in enumerate(shard.runs):
                if not run.trainable:
                    continue
                weights = self._flat(run, lambda p: p.detach(), DTYPES[run.dtype])
                for p in run.params:
                    if p.name in self.sums:
                        self.steps[p.name] += 1
                        a, b = p.offset, p.offset + p.numel
                        planes = (weights, grads[shard.name, r], *self.state[shard.name, r])
                        for w, g, *state in zip(*(t[a:b].split(FEW) for t in planes), strict=True):
                            self._apply(p.name, w, state, g, scale / self.loss_scale)
                        with torch.no_grad():
                            self.params[p.name].copy_(weights[a:b].view(p.shape))
        self.sums = {}
        return norm

    def _apply(self, name, weights, state, grads, scale):
        group = next(g for g in self.optimizer.param_groups if any(p is self.params[name] for p in g["params"]))
        own = ("lr", "weight_decay", "eps", "decoupled", "momentum", "dampening", "nesterov", "lr_decay", "initial_accumulator_value")
        hyper = {k: float(v) if k == "lr" else v for k, v in group.items() if k in own}
        if "betas" in group:
            hyper |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
        ema = (state.pop(), self.ema_decay) if self.ema_decay is not None else None
        getattr(reference, self.algorithm)(
            weights, tuple(state), grads, step=self.steps[name], grad_scale=scale, max_abs=self.max_grad_value or math.inf, ema=ema, **hyper
        )

    def snapshot(self):
        """(weights by name, state planes by (shard, run)) as copies. Weights in the dtype they began with: some routers cast theirs in forward, for good."""
        dtypes = {p.name: DTYPES[run.dtype] for shard in self.layout.shards for run in shard.runs for p in run.params}
        return {n: p.detach().to(dtypes[n]).clone() for n, p in self.params.items()}, {k: tuple(t.clone() for t in v) for k, v in self.state.items()}


def train_alike(oracle, engine, losses, steps):
    """Train both by `losses(model, step)`, and compare losses and snapshots bit for bit."""
    want, got = [], []
    for model, kept, backward, step_of in ((oracle.model, want, oracle.backward, oracle.step), (engine, got, engine.backward, engine.step)):
        for step in range(steps):
            torch.manual_seed(step)
            loss = losses(model, step)
            kept.append(loss.item())
            backward(loss)
            step_of()
    snapshot = engine_snapshot(engine)
    assert got == want
    assert_same(snapshot, oracle.snapshot())


def engine_snapshot(engine):
    """The same of an engine, read back through its records."""
    engine.synchronize()
    records, model = engine.memory.parts.records, engine.layout
    weights = {k: v for k, v in engine.state_dict().items() if k in dict(engine.module.named_parameters())}
    state = {}
    for s, shard in enumerate(model.shards):
        for r, run in enumerate(shard.runs):
            if not run.trainable:
                continue
            planes = [[] for _ in run.mode.planes]
            for chunk in model.chunks(s, r) if run.has_state else ():
                buffer = _aligned(chunk.length * run.mode.state_bytes)
                records.read([((layout.STATE, s, r, chunk.index), buffer)])[0].wait()
                at = 0
                for plane, (_, dtype) in zip(planes, run.mode.planes, strict=True):
                    nbytes = chunk.length * layout.ITEMSIZE[dtype]
                    plane.append(buffer[at : at + nbytes].view(DTYPES[dtype]).clone())
                    at += nbytes
            state[shard.name, r] = tuple(torch.cat(p) for p in planes)
    return weights, state


def _aligned(nbytes):
    whole = torch.zeros(nbytes + 4096, dtype=torch.uint8)
    start = -whole.data_ptr() % 4096
    return whole[start : start + nbytes]


def assert_same(a, b):
    """Two snapshots have the same bits."""
    for kind, x, y in zip(("weights", "state"), a, b, strict=True):
        assert x.keys() == y.keys(), f"{kind}: {x.keys() ^ y.keys()}"
        for key in x:
            for t, u in zip(x[key] if isinstance(x[key], tuple) else (x[key],), y[key] if isinstance(y[key], tuple) else (y[key],), strict=True):
                assert t.dtype == u.dtype and torch.equal(t.reshape(-1).view(torch.uint8), u.reshape(-1).view(torch.uint8)), (
                    f"{kind} of {key} differ: {(t.float() - u.float()).abs().max()}"
                )
