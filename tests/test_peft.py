"""Adapters of PEFT on a streamed base: the numbers of plain PyTorch, nothing of the base is written, what is saved is small."""

from __future__ import annotations

import copy
import functools
import os

import pytest
import torch
from models import HYPER, LEAF_BYTES
from oracle import Oracle, assert_same, engine_snapshot
from test_partial import PLACES, batches, lm
from test_partial import llama as small
from test_streaming import ROUTER, SMALL
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from zinf.engine import Engine
from zinf.errors import EngineError

peft = pytest.importorskip("peft")

DEVICES = pytest.mark.parametrize("device", ["cpu", "sim"])


def llama(tied=True):
    torch.manual_seed(0)
    model = small()
    if not tied:
        model = type(model)(type(model.config)(**{**model.config.to_dict(), "tie_word_embeddings": False})).to(torch.bfloat16)
    return model


def mixtral():
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SMALL, **ROUTER, intermediate_size=64, num_key_value_heads=1)).to(torch.bfloat16)


METHODS = {
    "lora": (llama, dict(r=2, target_modules="all-linear")),
    "dora": (llama, dict(r=2, target_modules=["q_proj", "up_proj"], use_dora=True, init_lora_weights=False)),
    "rslora in the last blocks": (llama, dict(r=2, target_modules=["v_proj", "down_proj"], use_rslora=True, layers_to_transform=[2, 3])),
    "a whole head": (functools.partial(llama, False), dict(r=2, target_modules=["o_proj"], modules_to_save=["lm_head"])),
    "dora on head and embedding": (
        functools.partial(llama, False),
        dict(r=2, target_modules=["lm_head", "embed_tokens"], use_dora=True, init_lora_weights=False),
    ),
    "tied embedding": (llama, dict(r=2, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False)),
    "experts": (
        mixtral,
        dict(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], init_lora_weights=False),
    ),
}


def adapted(method: str, model=None):
    make, options = METHODS[method]
    model = model or make()
    torch.manual_seed(1)
    return peft.get_peft_model(model.train(), peft.LoraConfig(task_type="CAUSAL_LM", **options))


@functools.cache
def oracle_of(method: str):
    """(losses and norms, snapshot, the model) of three steps."""
    oracle, seen = Oracle(adapted(method), **HYPER, leaf_bytes=LEAF_BYTES), []
    for ids in batches(3):
        loss = lm(oracle.model, ids, use_cache=False)
        oracle.backward(loss)
        seen.append((loss.item(), oracle.step()))
    return seen, oracle.snapshot(), oracle.model


def train(engine, first=0):
    seen = []
    for ids in batches(3)[first:]:
        loss = lm(engine, ids)
        engine.backward(loss)
        seen.append((loss.item(), engine.step().grad_norm))
    return seen


def build(tmp_path, model, place="nvme", **options) -> Engine:
    nvme = {"nvme_path": str(tmp_path)} if place == "nvme" else {}
    return Engine(model, leaf_bytes=LEAF_BYTES, **{**HYPER, **PLACES[place], **nvme, **options})


@DEVICES
@pytest.mark.parametrize("method", METHODS)
def test_parity_and_nothing_of_the_base_is_written(tmp_path, method, device):
    model = adapted(method)
    with build(tmp_path, model, device=device, step_mode="backward" if method == "lora" else "auto") as engine:
        store = engine.memory.parts.records.store
        before = store.stats()
        seen = train(engine)
        assert_same(engine_snapshot(engine), oracle_of(method)[1])
        assert seen == oracle_of(method)[0]
        after = store.stats()
        trained = [run for s in engine.layout.shards for run in s.runs if run.trainable]
        assert after["weights_written"] - before["weights_written"] <= 3 * sum(run.weights_nbytes for run in trained)
        assert not any(run.trainable for s in engine.layout.shards if "layers" in s.name for run in s.runs)  # adapters are resident
        assert after["weights_read"] > before["weights_read"]


def test_in_memory(tmp_path):
    with build(tmp_path, adapted("lora"), "memory", device="sim") as engine:
        assert train(engine) == oracle_of("lora")[0]
        assert_same(engine_snapshot(engine), oracle_of("lora")[1])


@pytest.mark.parametrize("method", ["lora", "a whole head"])
def test_resume(tmp_path, method):
    model = adapted(method)
    with build(tmp_path, model) as engine:
        ids = batches(3)[0]
        engine.backward(lm(engine, ids))
        engine.step()
    with build(tmp_path, adapted(method), resume=True) as engine:
        assert train(engine, first=1) == oracle_of(method)[0][1:]
        assert_same(engine_snapshot(engine), oracle_of(method)[1])


@DEVICES
@pytest.mark.parametrize("method", METHODS)
def test_saved_adapters_and_merged_models(tmp_path, method, device):
    """As PEFT saves and merges the same model in memory; the adapter is small, and the engine's weights stay what they are."""
    plain = copy.deepcopy(oracle_of(method)[2])
    plain.save_pretrained(tmp_path / "theirs")
    model = adapted(method)
    (tmp_path / "nvme").mkdir()
    with build(tmp_path / "nvme", model, device=device) as engine:
        train(engine)
        engine.save_pretrained(tmp_path / "engine")
        if "head" not in method and "embedding" not in method:  # of which PEFT wants layers that are streamed
            model.save_pretrained(tmp_path / "model")
        before = engine_snapshot(engine)
        engine.merge_and_save(tmp_path / "merged")
        assert_same(engine_snapshot(engine), before)
    for name in ("engine", "model"):
        if (tmp_path / name).exists():
            again = peft.PeftModel.from_pretrained(METHODS[method][0](), tmp_path / name)
            ours, theirs = (peft.get_peft_model_state_dict(m, save_embedding_layers=False) for m in (again, plain))
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(v, theirs[n].to(v.dtype)) for n, v in ours.items())
            assert sorted(os.listdir(tmp_path / name)) == sorted(os.listdir(tmp_path / "theirs"))
            assert os.path.getsize(tmp_path / name / "adapter_model.safetensors") == os.path.getsize(tmp_path / "theirs" / "adapter_model.safetensors")
    want = plain.merge_and_unload().state_dict()
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16).state_dict()
    assert got.keys() == want.keys()
    differ = [n for n in want if not torch.equal(got[n], want[n])]
    assert not differ


def test_a_model_without_adapters_has_nothing_to_merge(tmp_path):
    with build(tmp_path, llama()) as engine, pytest.raises(EngineError, match="use save_pretrained"):
        engine.merge_and_save(tmp_path / "out")
