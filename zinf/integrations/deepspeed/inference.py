"""init_inference: a model to ask, on one card.

The model is cast and moved to the device; what does not fit there is for zinf's own inference (an engine that streams). DeepSpeed's options that choose
kernels or divide a model among cards are taken and have no effect.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zinf.errors import ConfigError
from zinf.integrations.deepspeed.accelerator import get_accelerator
from zinf.integrations.deepspeed.reading import read

log = logging.getLogger("zinf")

_DTYPES = {"fp16": torch.float16, "half": torch.float16, "float16": torch.float16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
_DTYPES |= {"fp32": torch.float32, "float": torch.float32, "float32": torch.float32}
_IGNORED = {
    "kernel_inject", "replace_with_kernel_inject", "replace_method", "injection_policy", "injection_policy_tuple", "injection_dict", "enable_cuda_graph",
    "use_triton", "triton_autotune", "zero", "triangular_masking", "moe", "min_out_tokens", "max_out_tokens", "max_tokens", "return_tuple", "training_mp_size",
    "set_empty_params", "transposed_mode", "save_mp_checkpoint_path", "checkpoint_config", "tp", "tensor_parallel", "mp_size", "mpu", "keep_module_on_host",
}  # fmt: skip
_REFUSED = {"quant": "zinf computes from the weights as they are", "checkpoint": "load the weights first, with from_pretrained"}


class InferenceEngine:
    """A module in eval mode. Names that it has not itself are the module's: generate, config, ..."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None = None, device: Any = None):
        self.module = module.eval().requires_grad_(False)
        if dtype is not None:
            for p in module.parameters():
                if p.is_floating_point() and p.dtype is not dtype:
                    p.data = p.data.to(dtype)
        self.module.to(device or get_accelerator().current_device_name())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.module(*args, **kwargs)

    forward = __call__

    def __getattr__(self, name: str) -> Any:
        if name == "module" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.module, name)


def init_inference(model: nn.Module, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """A model for inference as deepspeed.init_inference: `dtype` is honoured.

    Raises:
        ConfigError: an option that would change the numbers, or a model whose weights are in a store.
    """
    options: dict[str, Any] = dict(read(config)) if config is not None else {}
    for key, value in kwargs.items():
        if key in options and options[key] != value:
            raise ConfigError(f"{key} is {options[key]!r} in the config and {value!r} as an argument: give one of them")
        options[key] = value
    if getattr(model, "zinf_origin", None) is not None:
        raise ConfigError("init_inference of a model in a store: zinf.Engine(model) streams it; engine(...) computes, under torch.no_grad()")
    for key, value in options.items():
        if key in _REFUSED and value not in (None, False, {}) and not (isinstance(value, Mapping) and value.get("enabled") is False):
            raise ConfigError(f"init_inference: {key} is given, but {_REFUSED[key]}: leave it out")
        if key not in _IGNORED | set(_REFUSED) | {"dtype"}:
            log.warning("init_inference: zinf does nothing for %s", key)
    _one_card(options)
    return InferenceEngine(model, _dtype(options.get("dtype")))


def _one_card(options: Mapping[str, Any]) -> None:
    parallel = options.get("tensor_parallel", options.get("tp", {}))
    size = max(options.get("mp_size", 1), parallel.get("tp_size", 1) if isinstance(parallel, Mapping) else 1)
    if size > 1:
        raise ConfigError(f"init_inference: the model is to be divided among {size} cards, and zinf uses one: leave it out")


def _dtype(name: Any) -> torch.dtype | None:
    """Of init_inference. int8 is quantization."""
    if name is None or (isinstance(name, torch.dtype) and name in _DTYPES.values()):
        return name
    found = _DTYPES.get(str(name).removeprefix("torch."))
    if found is None:
        raise ConfigError(f"init_inference: dtype is {name}, expected one of fp16, bf16, fp32")
    return found
