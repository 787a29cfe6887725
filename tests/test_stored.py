"""A model that was streamed into a store, and changed before its engine takes it: the numbers of the same changes in memory."""

from __future__ import annotations

import contextlib
import copy
import os

import pytest
import torch
from models import HYPER
from oracle import Oracle, assert_same, engine_snapshot
from test_partial import batches, lm
from test_partial import llama as small
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import zinf
from zinf.engine import Engine
from zinf.errors import StoreError
from zinf.stored import Stored

peft = pytest.importorskip("peft")

NVME = dict(weights="nvme", state="nvme")
DEVICES = pytest.mark.parametrize("device", ["cpu", "sim"])
BLOCK = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    small().save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def plain(folder, auto=AutoModelForCausalLM, dtype=torch.bfloat16):
    return auto.from_pretrained(folder, dtype=dtype).train()


def streamed(tmp_path, folder, **options):
    return zinf.from_pretrained(folder, nvme_path=tmp_path, **{"chunk_size": 4096, **options}).train()


def adapted(model, **options):
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj", "up_proj"], **options}))


def train(stepper, model, first=0, loss_of=lm):
    losses = []
    for ids in batches(3)[first:]:
        loss = loss_of(model, ids)
        losses.append(loss.item())
        stepper.backward(loss)
        stepper.step()
    return losses


@DEVICES
@pytest.mark.parametrize("options", [{}, dict(use_dora=True, init_lora_weights=False), dict(modules_to_save=["norm"])], ids=["lora", "dora", "norm"])
def test_adapters_on_a_streamed_base_that_is_stored_once(tmp_path, folder, options, device):
    oracle = Oracle(adapted(plain(folder), **options), **HYPER)
    want = train(oracle, oracle.model)
    model = adapted(streamed(tmp_path, folder, trainable=False), **options)
    with Engine(model, device=device, **NVME, **HYPER) as engine:
        assert os.path.samefile(tmp_path / "run" / "frozen", tmp_path / "run-adapted" / "frozen")
        assert engine.memory.parts.records.store.stats()["weights_written"] < 200_000  # the root, with what it has of adapters
        losses = train(engine, engine)
        assert losses == want
        got = engine_snapshot(engine)
        assert_same(got, oracle.snapshot())
        engine.merge_and_save(tmp_path / "merged")
    merged = copy.deepcopy(oracle.model).merge_and_unload().state_dict()
    assert all(torch.equal(v, merged[n]) for n, v in plain(tmp_path / "merged").state_dict().items())
    again = streamed(tmp_path, folder, trainable=False, resume=True)
    assert all(torch.equal(p + 0, dict(plain(folder).named_parameters())[n]) for n, p in again.named_parameters())  # the base is what it was


def test_resume_and_two_runs_from_one_base(tmp_path, folder):
    oracle = Oracle(adapted(plain(folder)), **HYPER)
    want = train(oracle, oracle.model)
    with contextlib.ExitStack() as stack:
        for name in ("alice", "bob"):
            model = adapted(streamed(tmp_path, folder, trainable=False, resume=name == "bob"))
            engine = stack.enter_context(Engine(model, run_name=name, **NVME, **HYPER))
            loss = lm(engine, batches(3)[0])
            engine.backward(loss)
            engine.step()
            assert loss.item() == want[0]
    with pytest.raises(StoreError, match="resume=True"):
        Engine(adapted(streamed(tmp_path, folder, trainable=False, resume=True)), run_name="alice", **NVME, **HYPER)
    with Engine(adapted(streamed(tmp_path, folder, trainable=False, resume=True)), run_name="alice", resume=True, **NVME, **HYPER) as engine:
        assert train(engine, engine, first=1) == want[1:]
        assert_same(engine_snapshot(engine), oracle.snapshot())
    with Engine(model, run_name="bob", resume=True, **NVME, **HYPER) as engine:  # the same model, after its engine was closed
        assert train(engine, engine, first=1) == want[1:]


@DEVICES
def test_a_base_that_was_to_be_trained_is_copied(tmp_path, folder, device):
    oracle = Oracle(adapted(plain(folder)), **HYPER)
    want = train(oracle, oracle.model)
    with Engine(adapted(streamed(tmp_path, folder)), device=device, host_memory="8MiB", **HYPER) as engine:
        assert not os.path.samefile(tmp_path / "run" / "weights", tmp_path / "run-adapted" / "frozen")
        assert train(engine, engine) == want
        assert_same(engine_snapshot(engine), oracle.snapshot())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_resized_embeddings(tmp_path, folder, dtype):
    """And the master of an fp32 checkpoint is copied with all its digits."""
    fp32 = plain(folder, dtype=torch.float32)
    with torch.no_grad():
        for p in fp32.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 1e-4)
    fp32.save_pretrained(folder)

    def resized(model):
        torch.manual_seed(2)
        model.resize_token_embeddings(140)
        return model

    changed = resized(streamed(tmp_path, folder, dtype=dtype))
    assert type(changed.get_parameter(BLOCK)) is Stored and type(changed.lm_head.weight) is torch.nn.Parameter
    with (
        Engine(changed, loss_scale=1.0, **NVME, **HYPER) as engine,
        Engine(streamed(tmp_path, folder, dtype=dtype, run_name="whole"), **NVME, **HYPER) as whole,
    ):
        assert engine.state_dict()["lm_head.weight"].shape == (140, 32)
        assert torch.equal(engine.state_dict()["lm_head.weight"], resized(plain(folder, dtype=dtype)).lm_head.weight)
        ours, theirs = engine_snapshot(engine), engine_snapshot(whole)
        for (name, r), planes in ours[1].items():
            if "layers" in name:
                assert all(torch.equal(a, b) for a, b in zip(planes, theirs[1][name, r], strict=True))
        assert all(torch.equal(v, theirs[0][n]) for n, v in ours[0].items() if "layers" in n)
        loss = lm(engine, batches(1)[0] + 12)
        engine.backward(loss)
        engine.step()
        engine.save_pretrained(tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == 140


def test_a_new_head_is_what_transformers_makes_of_it(tmp_path, folder, caplog):
    torch.manual_seed(3)
    theirs = plain(folder, AutoModelForSequenceClassification)
    torch.manual_seed(3)
    with caplog.at_level("WARNING", "zinf"):
        model = streamed(tmp_path, folder, auto_class=AutoModelForSequenceClassification)
    assert "score.weight" in caplog.text and "layers" not in caplog.text
    model.config.pad_token_id = theirs.config.pad_token_id = 0

    def loss_of(m, ids):
        return m(input_ids=ids, labels=ids[:, 0] % 2).loss

    oracle = Oracle(theirs, **HYPER)
    want = train(oracle, oracle.model, loss_of=loss_of)
    with Engine(model, **NVME, **HYPER) as engine:
        assert train(engine, engine, loss_of=loss_of) == want
        assert_same(engine_snapshot(engine), oracle.snapshot())


def test_parameters_are_read_as_they_are_needed_and_are_the_models_own_once_written(tmp_path, folder):
    model, values = streamed(tmp_path, folder), dict(plain(folder).named_parameters())
    p = model.get_parameter(BLOCK)
    assert (p.shape, p.dtype, p.requires_grad, p.is_leaf) == (values[BLOCK].shape, torch.bfloat16, True, True)
    assert torch.equal(p, values[BLOCK]) and torch.equal(p.float() * 2, values[BLOCK].float() * 2)
    assert type(p) is Stored and "in a store" in repr(p)
    with torch.no_grad():
        assert torch.equal(model(input_ids=batches(1)[0]).logits, plain(folder)(input_ids=batches(1)[0]).logits)
        other = copy.deepcopy(model.model.layers[1])
        assert type(other.mlp.up_proj.weight) is torch.nn.Parameter and torch.equal(other.mlp.up_proj.weight, p)
        assert type(p) is Stored
        p[0] = 1.0
        model.get_parameter("model.norm.weight").data.mul_(2)
        embedding = model.model.embed_tokens.weight
        assert embedding.data.ndim == 2 and embedding.to(torch.bfloat16) is embedding and type(embedding) is Stored
        embedding.data[:2].fill_(3.0)  # through a view
    assert type(p) is torch.nn.Parameter
    with Engine(model, **NVME, **HYPER) as engine:
        state = engine.state_dict()
        assert torch.equal(state["model.norm.weight"], values["model.norm.weight"] * 2) and state[BLOCK][0].eq(1).all()
        assert torch.equal(state[BLOCK][1:], values[BLOCK][1:])
        assert state["lm_head.weight"][:2].eq(3).all() and torch.equal(state["lm_head.weight"][2:], values["model.embed_tokens.weight"][2:])
