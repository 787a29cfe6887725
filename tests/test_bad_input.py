"""Bad input is refused by name and before any work: nothing appears on the drive, no thread starts, the model stays as it was."""

from __future__ import annotations

import threading

import pytest
import torch
from models import HYPER, LEAF_BYTES, llama
from torch import nn

from zinf.engine import Engine
from zinf.errors import BudgetError, ConfigError, StoreError
from zinf.tiers import host


def frozen() -> nn.Module:
    return llama().requires_grad_(False)


def mixed(dtype: torch.dtype) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = nn.Parameter(torch.zeros(64, 64, dtype=dtype), requires_grad=dtype.is_floating_point)
    return model


def empty() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].extra = nn.Parameter(torch.zeros(0))
    return model


def meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(64, 64)


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(4)


NVME = dict(weights="nvme", state="nvme")
CASES = {
    "no parameters": (nn.ReLU, {}, ValueError, r"ReLU has no parameters"),
    "no module": (lambda: [1], {}, TypeError, r"expected an nn\.Module, got list"),
    "all frozen": (frozen, {}, ConfigError, r"all parameters of LlamaForCausalLM are frozen.*requires_grad"),
    "float64": (lambda: mixed(torch.float64), {}, ValueError, r"1\.weight has dtype float64.*bf16, fp16, fp32"),
    "complex": (lambda: mixed(torch.complex64), {}, ValueError, r"1\.weight has dtype complex64"),
    "no elements": (empty, {}, ValueError, r"extra has shape \(0,\)"),
    "on meta": (meta, {}, ConfigError, r"weight.*meta.*from_pretrained"),
    "lazy": (Lazy, {}, ConfigError, r"layer\.weight.*not initialised.*one batch"),
    "host budget": (llama, dict(host_memory="64KiB", **NVME), BudgetError, r"host memory: zinf needs .* but host_memory is 64\.0 KiB: raise host_memory"),
    "device budget": (llama, dict(device_memory="64KiB", **NVME), BudgetError, r"device memory: zinf needs .* but device_memory is 64\.0 KiB: raise device"),
    "unknown key": (llama, dict(host_memroy="1GiB"), ConfigError, r"host_memroy.*host_memory"),
    "a wrong unit": (llama, dict(host_memory="64 elephants"), ConfigError, r"host_memory"),
    "no such placement": (llama, dict(weights="disk"), ConfigError, r"weights.*disk.*nvme"),
    "micro-batches of no rows": (llama, dict(micro_batch_size=0), ConfigError, r"micro_batch_size"),
    "no accumulation": (llama, dict(gradient_accumulation_steps=0), ConfigError, r"gradient_accumulation_steps"),
    "learning rate": (llama, dict(lr=-1.0), (ConfigError, ValueError), r"lr"),
    "betas": (llama, dict(betas=(0.9, 1.0)), (ConfigError, ValueError), r"beta"),
    "chunk size": (llama, dict(chunk_size=1000), (ConfigError, ValueError), r"chunk_size.*2048"),
    "an unknown optimizer": (llama, dict(optimizer="adamww"), ConfigError, r"optimizer.*adamww.*adamw"),
    "an unknown device": (llama, dict(device="gpu"), ConfigError, r"device.*gpu"),
    "a block that is not there": (llama, dict(blocks=["LlamaLayer"]), ConfigError, r"LlamaLayer"),
    "a path that is not there": (llama, dict(nvme_path="/no/such/drive"), StoreError, r"/no/such/drive.*does not exist"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_by_name_and_before_any_work(tmp_path, case):
    make, options, error, words = CASES[case]
    model = make()
    before = [(p, type(p), p._version) for p in model.parameters()] if isinstance(model, nn.Module) else []
    threads, allocated = threading.active_count(), host.allocated_bytes()
    with pytest.raises(error, match=words) as raised:
        Engine(model, **{"nvme_path": str(tmp_path), "leaf_bytes": LEAF_BYTES, **HYPER, **options})
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []
    assert (threading.active_count(), host.allocated_bytes()) == (threads, allocated)
    assert all(type(p) is kind and p._version == version for p, kind, version in before)
    assert not before or not any("forward" in m.__dict__ for m in model.modules())
