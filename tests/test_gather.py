"""Values that are set by hand become the weights, with the master that follows from them; or nothing changes."""

from __future__ import annotations

import pytest
import torch
from models import HYPER, LEAF_BYTES
from oracle import Oracle, assert_same, engine_snapshot
from test_partial import batches, llama

from zinf import layout
from zinf.engine import Engine
from zinf.errors import EngineError

DEVICES = pytest.mark.parametrize("device", ["cpu", "sim"])
MODES = pytest.mark.parametrize("mode", ["deferred", "backward"])
PLACES = {"memory": {}, "host": dict(weights="host", state="nvme", chunk_size=4096), "nvme": dict(weights="nvme", state="nvme", chunk_size=4096)}
PLACED = pytest.mark.parametrize("place", PLACES)

BLOCK, EMBEDDING, ROOT = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight"


def build(tmp_path, place="nvme", model=None, **options) -> Engine:
    nvme = {"nvme_path": str(tmp_path)} if place != "memory" else {}
    return Engine(model or llama(), leaf_bytes=LEAF_BYTES, loss_scale=1, **{**HYPER, **PLACES[place], **nvme, **options})


def step(engine, oracle, ids):
    loss, want = engine(input_ids=ids, labels=ids).loss, oracle.model(input_ids=ids, labels=ids, use_cache=False).loss
    assert loss.item() == want.item()
    engine.backward(loss)
    oracle.backward(want)
    engine.step()
    oracle.step()


@torch.no_grad()
def change(p: torch.Tensor) -> None:
    p.view(-1)[3:40] = 0.125
    p.view(-1)[50:60].mul_(1.0)  # the same values
    p.view(-1)[-5:] *= -2


def oracle_edit(oracle: Oracle, name: str, edit) -> None:
    """What `edit` does to a parameter, and to the master: where the weight changed, it is the new weight."""
    p = oracle.params[name]
    before = p.detach().clone().view(-1)
    edit(p)
    changed = before != p.detach().view(-1)
    assert 0 < changed.sum() < changed.numel()
    for shard in oracle.layout.shards:
        for r, run in enumerate(shard.runs):
            for spec in run.params:
                if spec.name == name and run.dtype != "fp32":
                    kept = oracle.state[shard.name, r][0][spec.offset : spec.offset + spec.numel]
                    kept[changed] = 0 if run.dtype == "bf16" else p.detach().view(-1)[changed].float()


@DEVICES
@PLACED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_edits_become_weights_and_training_goes_on(tmp_path, place, device, dtype):
    if dtype is not torch.bfloat16 and (place, device) not in (("memory", "cpu"), ("nvme", "sim")):
        pytest.skip("the same ways as in bf16")
    oracle = Oracle(llama(dtype), **HYPER, leaf_bytes=LEAF_BYTES)
    with build(tmp_path, place, llama(dtype), device=device) as engine:
        for i, ids in enumerate(batches(3)):
            step(engine, oracle, ids)
            if i < 2:
                with engine.gather([BLOCK, engine.module.get_parameter(EMBEDDING), ROOT], write=True):  # the step is pending until here
                    for name in (BLOCK, EMBEDDING, ROOT):
                        change(engine.module.get_parameter(name))
                for name in (BLOCK, EMBEDDING, ROOT):
                    oracle_edit(oracle, name, change)
                assert_same(engine_snapshot(engine), oracle.snapshot())
        assert_same(engine_snapshot(engine), oracle.snapshot())


@MODES
@DEVICES
def test_an_edit_survives_a_resume_and_a_skipped_step(tmp_path, mode, device):
    oracle = Oracle(llama(), **HYPER, leaf_bytes=LEAF_BYTES)
    with build(tmp_path, step_mode=mode, device=device) as engine:
        step(engine, oracle, batches(3)[0])
        with engine.gather(engine.module.model.layers[1].parameters(), write=True):
            change(engine.module.get_parameter(BLOCK))
        oracle_edit(oracle, BLOCK, change)
        ids = batches(3)[0]
        engine.backward(engine(input_ids=ids, labels=ids).loss * float("nan"))
        assert engine.step().skipped  # under step_mode backward, this goes back to a commit
        step(engine, oracle, batches(3)[1])
        with engine.gather(ROOT, write=True):
            change(engine.module.get_parameter(ROOT))
        oracle_edit(oracle, ROOT, change)
    with build(tmp_path, step_mode=mode, device=device, resume=True) as engine:
        assert engine.global_step == 2
        assert_same(engine_snapshot(engine), oracle.snapshot())
        step(engine, oracle, batches(3)[2])
        assert_same(engine_snapshot(engine), oracle.snapshot())


@DEVICES
@PLACED
def test_an_exception_in_the_block_undoes_it(tmp_path, place, device):
    oracle = Oracle(llama(), **HYPER, leaf_bytes=LEAF_BYTES)
    with build(tmp_path, place, device=device) as engine:
        step(engine, oracle, batches(2)[0])
        with engine.gather(BLOCK), pytest.raises(ZeroDivisionError), engine.gather([BLOCK, ROOT], write=True):
            change(engine.module.get_parameter(BLOCK))
            change(engine.module.get_parameter(ROOT))
            1 / 0  # noqa: B018
        with pytest.raises(ZeroDivisionError), engine.gather([BLOCK, EMBEDDING], write=True):
            with engine.gather([BLOCK, ROOT], write=True):  # BLOCK belongs to the outer one, ROOT to this
                change(engine.module.get_parameter(BLOCK))
                change(engine.module.get_parameter(ROOT))
            with engine.gather(BLOCK):
                assert engine.module.get_parameter(BLOCK).view(-1)[3] == 0.125
            1 / 0  # noqa: B018
        oracle_edit(oracle, ROOT, change)
        assert_same(engine_snapshot(engine), oracle.snapshot())
        step(engine, oracle, batches(2)[1])
        assert_same(engine_snapshot(engine), oracle.snapshot())


@DEVICES
@PLACED
def test_changes_without_write_are_refused(tmp_path, place, device):
    oracle = Oracle(llama(), **HYPER, leaf_bytes=LEAF_BYTES)
    with build(tmp_path, place, device=device) as engine:
        step(engine, oracle, batches(2)[0])
        with pytest.raises(EngineError, match=r"changed in place.*write=True"), engine.gather(BLOCK):
            change(engine.module.get_parameter(BLOCK))
        if device == "cpu" and place != "nvme":  # the parameter was its own record
            with pytest.raises(EngineError, match="go on from the last commit"):
                engine.step()
        else:
            step(engine, oracle, batches(2)[1])
            assert_same(engine_snapshot(engine), oracle.snapshot())
    with build(tmp_path, place, device=device, run_name="other") as engine:
        change(engine.module.get_parameter(ROOT))  # resident, so it can be
        with pytest.raises(EngineError, match=r"model\.norm\.weight was changed in place"):
            engine(input_ids=batches(1)[0])


def test_graphs_from_before_an_edit_are_refused(tmp_path):
    with build(tmp_path) as engine:
        loss = engine(input_ids=batches(1)[0], labels=batches(1)[0]).loss
        with engine.gather(BLOCK, write=True):
            change(engine.module.get_parameter(BLOCK))
        with pytest.raises(EngineError, match="stepped or edited between a forward and its backward"):
            engine.backward(loss)


@pytest.mark.parametrize("place", ["memory", "nvme"])
def test_frozen_parameters_are_edited_where_a_commit_does_not_need_them(tmp_path, place):
    model = llama()
    model.model.layers[1].requires_grad_(False)
    with build(tmp_path, place, model) as engine:
        if place == "memory":
            with engine.gather(BLOCK, write=True):
                change(model.get_parameter(BLOCK))
            assert engine.state_dict()[BLOCK].view(-1)[3] == 0.125
        else:
            with pytest.raises(EngineError, match="is frozen, and its only copy"), engine.gather(BLOCK, write=True):
                pass
            with pytest.raises(EngineError, match="is frozen, and its only copy"):
                model.load_state_dict(llama().state_dict())
        engine.backward(engine(input_ids=batches(1)[0], labels=batches(1)[0]).loss)
        engine.step()


@DEVICES
@PLACED
@MODES
def test_load_state_dict(tmp_path, place, device, mode):
    """Of the model and of the engine, in its dtype and in fp32; the moments stay."""
    torch.manual_seed(7)
    fp32 = {n: v.float() + torch.randn(v.shape) * 1e-4 for n, v in llama().state_dict().items() if n != "lm_head.weight"}
    if place != "nvme" and mode == "backward":
        pytest.skip("steps under backward need all records on NVMe")
    with build(tmp_path, place, device=device, step_mode=mode) as engine:
        engine.backward(engine(input_ids=batches(1)[0], labels=batches(1)[0]).loss)
        engine.step()
        weights, state = engine_snapshot(engine)
        assert engine.load_state_dict(fp32, strict=False).missing_keys == ["lm_head.weight"]
        got, after = engine_snapshot(engine)
        for s in engine.layout.shards:
            for r, run in enumerate(s.runs):
                for p in run.params:
                    lo = after[s.name, r][0][p.offset : p.offset + p.numel].int()
                    master = ((got[p.name].reshape(-1).view(torch.int16).int() << 16) + lo).view(torch.float32)
                    assert torch.equal(master, fp32[p.name].view(-1)), p.name
                for now, then in zip(after[s.name, r][1:], state[s.name, r][1:], strict=True):
                    assert torch.equal(now, then)
        loss = engine(input_ids=batches(1)[0], labels=batches(1)[0]).loss
        plain = llama()
        plain.load_state_dict({**got, "lm_head.weight": got[EMBEDDING]})
        assert loss.item() == plain(input_ids=batches(1)[0], labels=batches(1)[0], use_cache=False).loss.item()
        del loss
        engine.module.load_state_dict({**weights, "lm_head.weight": weights[EMBEDDING]})
        assert all(torch.equal(v, weights[n]) for n, v in engine.state_dict().items() if n in weights)
        for wrong, said in (({}, "is missing"), ({**weights, "x": weights[ROOT]}, "x is not of the model"), ({ROOT: torch.ones(3)}, "is .3., and .32. here")):
            with pytest.raises(RuntimeError, match=said):
                engine.module.load_state_dict(wrong, strict=ROOT not in wrong or "x" in wrong)


def test_edits_take_the_memory_of_a_chunk(tmp_path):
    """No whole record is staged: what is allocated beyond the engine's arenas is a chunk of weights and of state."""
    from unittest import mock

    from zinf import editing

    with build(tmp_path) as engine, mock.patch.object(editing, "pages", wraps=editing.pages) as pages:
        for shard in engine.shards:
            with engine.gather([p for *_, p in shard.params], write=True):
                change(shard.params[0][2])
        biggest = max(call.args[0] for call in pages.call_args_list)
        assert biggest <= 4096 * layout.mode("bf16").state_bytes
