"""Graphs that change between steps: generation, evaluation, exceptions, second and partial backwards, other engines in the same graph; the numbers
of plain PyTorch, or an error that says what to do, and after it the numbers as if it had never been."""

from __future__ import annotations

import contextlib

import pytest
import torch
from models import LEAF_BYTES, llama
from oracle import Oracle, assert_same, engine_snapshot
from test_streaming import Net, data, net, square
from torch import nn

from zinf.engine import Engine
from zinf.errors import EngineError

OPTIONS = dict(weights="nvme", state="nvme", chunk_size=4096, leaf_bytes=LEAF_BYTES, lr=1e-3, weight_decay=0.1)


pytestmark = pytest.mark.usefixtures("one_thread")

DEVICES = pytest.mark.parametrize("device", ["cpu", "sim"])
MODES = pytest.mark.parametrize("mode", ["deferred", "backward"])


def begin(folder, model: nn.Module, mode: str = "auto", **options) -> Engine:
    folder.mkdir(exist_ok=True)
    return Engine(model, nvme_path=str(folder), step_mode=mode, **{**OPTIONS, **options})


def oracle_of(model: nn.Module, **options) -> Oracle:
    return Oracle(model, lr=1e-3, weight_decay=0.1, leaf_bytes=LEAF_BYTES, **options)


def both(engine: Engine, oracle: Oracle, loss, *args) -> None:
    """The same backward in the engine and in the oracle."""
    got, want = loss(engine, *args), loss(oracle.model, *args)
    assert got.item() == want.item()
    engine.backward(got)
    oracle.backward(want)


def step(engine: Engine, oracle: Oracle) -> None:
    engine.step()
    oracle.step()


# -- evaluation and generation between any two micro-steps -------------------------------------------------------------------

PROMPT = torch.randint(0, 512, (3, 6), generator=torch.Generator().manual_seed(5))
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])  # padded on the left, as batches of prompts are

WAYS = {
    "greedy": dict(do_sample=False),
    "greedy without cache": dict(do_sample=False, use_cache=False),
    "sampling": dict(do_sample=True, temperature=1.5, top_k=20),
    "beams": dict(do_sample=False, num_beams=3),
    "sampled beams without cache": dict(do_sample=True, num_beams=2, use_cache=False),
}


def generated(model: nn.Module, way: str) -> torch.Tensor:
    torch.manual_seed(3)
    return model.generate(PROMPT, attention_mask=MASK, max_new_tokens=5, pad_token_id=0, eos_token_id=511, **WAYS[way])


def lm(model, ids):
    return model(input_ids=ids, labels=ids, use_cache=False).loss / 2


@DEVICES
@MODES
def test_generation_between_micro_steps(tmp_path, device, mode):
    ids = torch.randint(0, 512, (12, 2, 10), generator=torch.Generator().manual_seed(6))
    oracle = oracle_of(llama(), wide=True)
    with begin(tmp_path, llama(), mode, device=device, gradient_accumulation_steps=2) as engine:
        for i, way in enumerate([*WAYS, "greedy"]):
            both(engine, oracle, lm, ids[i])
            engine.module.train(i % 2 == 0), oracle.model.train(i % 2 == 0)
            if mode == "deferred" or i % 2 == 0:  # where shards are stepped under backward there is no whole model before step
                assert torch.equal(generated(engine.module, way), generated(oracle.model, way))
            if i % 2:
                step(engine, oracle)
                assert torch.equal(generated(engine.module, way), generated(oracle.model, way))
        assert_same(engine_snapshot(engine), oracle.snapshot())


@DEVICES
@pytest.mark.parametrize("no_graph", [torch.no_grad, torch.inference_mode])
def test_forwards_without_graph_in_train_mode(tmp_path, device, no_graph):
    """Dropout draws and running averages move, as in plain PyTorch."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm, self.drop = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.3)

        def forward(self, x):
            return self.drop(torch.relu(self.norm(self.linear(x)))) + x

    def make():
        torch.manual_seed(0)
        return nn.Sequential(*[Block() for _ in range(6)]).to(torch.bfloat16)

    oracle = oracle_of(make())
    with begin(tmp_path, make(), device=device) as engine:
        for i in range(4):
            outs = []
            for model in (engine, oracle.model):
                torch.manual_seed(i)
                with no_graph():
                    outs.append(model(data(i + 20)))
            assert torch.equal(*outs)
            torch.manual_seed(50 + i)
            a = square(engine, i)
            torch.manual_seed(50 + i)
            b = square(oracle.model, i)
            engine.backward(a), oracle.backward(b)
            step(engine, oracle)
        assert_same(engine_snapshot(engine), oracle.snapshot())
        for name, buffer in engine.module.named_buffers():
            assert torch.equal(buffer, oracle.model.get_buffer(name)), name


class OnlyInEval(Net):
    """Its last block runs in evaluation only, its first in training only."""

    def forward(self, x):
        order = self.blocks[:-1] if self.training else self.blocks[1:]
        for block in order:
            x = block(x)
        return x * self.scale


@DEVICES
@MODES
def test_blocks_of_evaluation_alone_and_of_training_alone(tmp_path, device, mode):
    def make():
        torch.manual_seed(0)
        return OnlyInEval(6).to(torch.bfloat16).train()

    oracle = oracle_of(make())
    with begin(tmp_path, make(), mode, device=device) as engine:
        for i in range(4):
            both(engine, oracle, square, i)
            step(engine, oracle)
            engine.eval(), oracle.model.eval()
            with torch.no_grad():
                assert torch.equal(engine(data(i)), oracle.model(data(i)))
            engine.train(), oracle.model.train()
        assert_same(engine_snapshot(engine), oracle.snapshot())


# -- backwards of other kinds -------------------------------------------------------------------------------------------------


@DEVICES
@pytest.mark.parametrize("recompute", [True, False])
def test_two_backwards_of_one_graph(tmp_path, device, recompute):
    oracle = oracle_of(net(6), wide=True)
    with begin(tmp_path, net(6), "deferred", device=device, gradient_accumulation_steps=2, recompute=recompute) as engine:
        for i in range(3):
            loss = square(oracle.model, i)
            loss.backward(retain_graph=True)
            for name, p in oracle.params.items():
                oracle.sums[name], p.grad = p.grad.float(), None
            oracle.backward(loss)
            loss = square(engine, i)
            loss.backward(retain_graph=True)
            engine.backward(loss)
            step(engine, oracle)
        assert_same(engine_snapshot(engine), oracle.snapshot())


@DEVICES
@MODES
@pytest.mark.parametrize("recompute", [True, False])
def test_gradients_of_inputs_before_the_backward(tmp_path, device, mode, recompute):
    """Of the same graph, kept: saliency maps, say."""
    oracle = oracle_of(net(6))
    with begin(tmp_path, net(6), mode, device=device, recompute=recompute) as engine:
        for i in range(3):
            maps = []
            for m in (engine, oracle.model):
                x = data(i).requires_grad_()
                loss = m(x).float().square().mean()
                maps.append(torch.autograd.grad(loss, x, retain_graph=True)[0])
                (oracle if m is oracle.model else engine).backward(loss)
            assert torch.equal(*maps)
            step(engine, oracle)
        assert_same(engine_snapshot(engine), oracle.snapshot())


def test_gradients_of_parameters_go_to_the_engine_alone(tmp_path):
    with begin(tmp_path, net(6)) as engine:
        weight = engine.module.blocks[2].up.weight
        for ask in (lambda: torch.autograd.grad(square(engine, 0), weight), lambda: square(engine, 0).backward(inputs=[weight])):
            with pytest.raises(EngineError, match=r"blocks\.2\.up\.weight .*engine\.backward"):
                ask()


def penalty(m, i):
    """A gradient penalty: the loss has the gradient of the model in it."""
    x = data(i).requires_grad_()
    out = m(x).float().square().mean()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    return out + grad.float().square().sum()


@DEVICES
@pytest.mark.parametrize("recompute", [True, False])
def test_double_backward(tmp_path, device, recompute):
    oracle = oracle_of(net(6))
    with begin(tmp_path, net(6), device=device, recompute=recompute) as engine:
        for i in range(3):
            both(engine, oracle, penalty, i)
            step(engine, oracle)
        assert_same(engine_snapshot(engine), oracle.snapshot())


# -- two engines in one graph ---------------------------------------------------------------------------------------------------


@DEVICES
@MODES
def test_a_gan_has_two_engines(tmp_path, device, mode):
    """The generator's loss goes through the discriminator, whose grads of it are dropped."""

    def make(seed):
        torch.manual_seed(seed)
        return Net(6).to(torch.bfloat16)

    def loss_d(d, g, i):
        with torch.no_grad():
            fake = g(data(i))
        return d(fake).float().square().mean() + (d(data(100 + i)).float() - 1).square().mean()

    def loss_g(d, g, i):
        return (d(g(data(i))).float() - 1).square().mean()

    og, od = oracle_of(make(0)), oracle_of(make(1))
    with begin(tmp_path / "g", make(0), mode, device=device) as g, begin(tmp_path / "d", make(1), mode, device=device) as d:
        for i in range(4):
            a, b = loss_d(d, g, i), loss_d(od.model, og.model, i)
            assert a.item() == b.item()
            d.backward(a), od.backward(b)
            step(d, od)
            a, b = loss_g(d, g, i), loss_g(od.model, og.model, i)
            assert a.item() == b.item()
            g.backward(a), og.backward(b)
            step(g, og)
            d.zero_grad()
            od.model.zero_grad()
        assert_same(engine_snapshot(g), og.snapshot())
        assert_same(engine_snapshot(d), od.snapshot())


@DEVICES
@MODES
def test_one_backward_trains_two_engines(tmp_path, device, mode):
    def make(seed):
        torch.manual_seed(seed)
        return Net(4).to(torch.bfloat16)

    oa, ob = oracle_of(make(0)), oracle_of(make(1))
    with begin(tmp_path / "a", make(0), mode, device=device) as a, begin(tmp_path / "b", make(1), mode, device=device) as b:
        for i in range(3):
            got, want = square(lambda x: b(a(x)), i), square(lambda x: ob.model(oa.model(x)), i)
            assert got.item() == want.item()
            got.backward()
            oa.backward(want)
            for name, p in ob.params.items():
                ob.sums[name], p.grad = p.grad, None
            step(a, oa), step(b, ob)
        assert_same(engine_snapshot(a), oa.snapshot())
        assert_same(engine_snapshot(b), ob.snapshot())


# -- autocast -------------------------------------------------------------------------------------------------------------------


class Cast(nn.Module):
    """fp32 weights, of which each is used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(6))
        self.last = nn.Linear(64, 64)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x) + block(x)
        return self.last(self.last(x))


def cast(model, i, **options):
    with torch.autocast("cpu", torch.bfloat16, **options):
        return model(data(i).float()).float().square().mean()


@DEVICES
@pytest.mark.parametrize("recompute", [True, False])
def test_autocast(tmp_path, device, recompute):
    """A streamed weight is cast anew by each use, since autocast's cache would hold a copy of the whole model through a forward."""
    oracle = oracle_of(Cast())
    with begin(tmp_path, Cast(), device=device, recompute=recompute, blocks=("Sequential",)) as engine:
        for i in range(3):
            got, want = cast(engine, i), cast(oracle.model, i, cache_enabled=False)
            assert got.item() == want.item()
            engine.backward(got)
            oracle.backward(want)
            step(engine, oracle)
        assert_same(engine_snapshot(engine), oracle.snapshot())


@DEVICES
@pytest.mark.parametrize("recompute", [True, False])
def test_autocast_around_everything_has_no_weight_of_before(tmp_path, device, recompute):
    """Nor one cast in a forward without graph. Plain PyTorch needs a context of its own for each forward and backward."""
    oracle = oracle_of(Cast())
    with begin(tmp_path, Cast(), device=device, recompute=recompute, blocks=("Sequential",)) as engine:
        for i in range(3):
            oracle.backward(cast(oracle.model, i, cache_enabled=False))
            oracle.step()
        with torch.autocast("cpu", torch.bfloat16):
            for i in range(3):
                with torch.no_grad():
                    engine(data(i + 9).float())
                engine.backward(engine(data(i).float()).float().square().mean())
                engine.step()
        assert_same(engine_snapshot(engine), oracle.snapshot())


# -- exceptions -----------------------------------------------------------------------------------------------------------------


class Oops(Exception):
    pass


@pytest.mark.parametrize("device, error", [("cpu", Oops), ("sim", KeyboardInterrupt)])
@MODES
@pytest.mark.parametrize("where", ["before", "in", "after"])
def test_a_forward_that_failed_never_was(tmp_path, device, mode, error, where):
    """Between any two micro-steps, with a graph and without."""

    def fail(*args):
        raise error

    oracle = oracle_of(net(6), wide=True)
    with begin(tmp_path, net(6), mode, device=device, gradient_accumulation_steps=2) as engine:
        for i in range(6):
            block = engine.module.blocks[i]
            target = block.up if where == "in" else block
            hook = target.register_forward_pre_hook(fail) if where == "before" else target.register_forward_hook(fail)
            with pytest.raises(error):
                square(engine, i)
            with pytest.raises(error), torch.no_grad():
                square(engine, i)
            hook.remove()
            both(engine, oracle, square, i)
            if i % 2:
                step(engine, oracle)
        assert_same(engine_snapshot(engine), oracle.snapshot())


@pytest.mark.parametrize("device, error", [("cpu", KeyboardInterrupt), ("sim", Oops)])
@MODES
@pytest.mark.parametrize("recompute", [True, False])
def test_a_backward_that_failed_never_was(tmp_path, device, mode, error, recompute):
    """In the loss, in a block's recompute, in a hook on a gradient; the second of two backwards, so that the first is dropped as well."""
    oracle = oracle_of(net(6), wide=True)
    with begin(tmp_path, net(6), mode, device=device, gradient_accumulation_steps=2, recompute=recompute) as engine:

        def fail(*args):
            if torch._C._current_graph_task_id() != -1:
                raise error

        def fail_at_the_output(module, args, out):
            out.register_hook(fail)

        blocks = engine.module.blocks
        places = [
            lambda: engine.module.register_forward_hook(fail_at_the_output),
            lambda: blocks[2].down.register_full_backward_hook(fail),
            lambda: blocks[3].down.register_forward_hook(fail),
        ]
        for i, place in enumerate(places):
            engine.backward(square(engine, 70))
            hook = place()
            with pytest.raises(error) if recompute or i != 2 else contextlib.nullcontext():
                engine.backward(square(engine, i))
            hook.remove()
            engine.zero_grad()
            for k in (2 * i, 2 * i + 1):
                both(engine, oracle, square, k)
            step(engine, oracle)
        assert_same(engine_snapshot(engine), oracle.snapshot())


class Writing(nn.Module):
    """Clamps a weight of its own in forward, behind autograd's back."""

    def __init__(self, width: int, limit: float):
        super().__init__()
        self.linear, self.limit = nn.Linear(width, width), limit

    def forward(self, x):
        self.linear.weight.data.clamp_(-self.limit, self.limit)
        return x + self.linear(x)


@DEVICES
@pytest.mark.parametrize("weights", ["host", "nvme"])
def test_a_weight_that_is_written_to_in_forward_is_an_error_and_no_damage(tmp_path, device, weights):
    def make(limit=10.0):
        torch.manual_seed(0)
        return nn.Sequential(*[Writing(64, limit) for _ in range(6)]).to(torch.bfloat16)

    oracle = oracle_of(make())
    with begin(tmp_path, make(), device=device, weights=weights) as engine:
        for i in range(3):
            both(engine, oracle, square, i)  # a clamp that changes nothing
            step(engine, oracle)
            engine.module[3].limit = 0.01
            for grad in (True, False):
                with pytest.raises(EngineError, match=r"3\.linear\.weight is written to"), torch.set_grad_enabled(grad):
                    square(engine, i)
            engine.module[3].limit = 10.0
        assert_same(engine_snapshot(engine), oracle.snapshot())


@pytest.mark.parametrize("calls", [1, 20])
def test_a_step_that_was_interrupted_is_made_by_the_resumed_engine(tmp_path, calls, monkeypatch):
    oracle = oracle_of(net(6))
    with contextlib.closing(begin(tmp_path, net(6), "deferred")) as engine:
        for i in range(2):
            both(engine, oracle, square, i)
            step(engine, oracle)
        engine.synchronize()
        engine.backward(square(engine, 2))
        real, left = engine.optimizer.algorithm, iter(range(calls))

        def algorithm(p):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return real(p)

        monkeypatch.setattr(engine.optimizer, "algorithm", algorithm)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        with pytest.raises(EngineError, match="stopped at an error"):
            engine.backward(square(engine, 2))
    with begin(tmp_path, net(6), "deferred", resume=True) as engine:
        for i in range(2, 4):
            both(engine, oracle, square, i)
            step(engine, oracle)
        assert_same(engine_snapshot(engine), oracle.snapshot())
