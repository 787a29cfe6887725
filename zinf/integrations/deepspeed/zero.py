"""deepspeed.zero: the names that model code uses around parameters. In zinf a parameter has its true shape and dtype at all times.

Init                a model made in the block has parameters of the config's dtype (to build one that does not fit, use zinf.from_pretrained)
GatheredParameters  the values, in a with block: engine.gather, and written back if modifier_rank says so
estimate_...        what a model needs, by zinf's own layout; nothing is printed, it is returned
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zinf.errors import ConfigError
from zinf.integrations.deepspeed.config import translate
from zinf.integrations.deepspeed.estimators import (
    Need,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from zinf.integrations.deepspeed.fragments import engine_of
from zinf.integrations.deepspeed.reading import read

__all__ = [
    "GatheredParameters", "Init", "Need", "estimate_zero2_model_states_mem_needs_all_cold", "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold", "estimate_zero3_model_states_mem_needs_all_live", "get_z3_leaf_modules",
    "register_external_parameter", "set_z3_leaf_modules", "unregister_external_parameter", "unset_z3_leaf_modules", "unwrap_model_for_generation",
    "z3_leaf_module",
]  # fmt: skip

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Init:
    """Parameters that modules register in the block are cast to the dtype of the config (or `dtype`), and filled in it.

    With `module`, those that it has are cast at once. Buffers are left alone.
    """

    def __init__(
        self, module: nn.Module | None = None, config_dict_or_path: Any = None, config: Any = None, enabled: bool = True, dtype: Any = None, **options: Any
    ):
        source = config_dict_or_path if config is None else config
        self._dtype = dtype or (self._of(source) if source is not None else torch.float16)
        self._enabled = enabled
        if module is not None and enabled:
            for p in module.parameters():
                _cast(p, self._dtype)

    @staticmethod
    def _of(source: Any) -> torch.dtype:
        return _DTYPES[translate(read(source)).training["dtype"] or "fp32"]

    def __enter__(self) -> None:
        if not self._enabled:
            return
        register, me, dtype = nn.Module.register_parameter, threading.get_ident(), self._dtype

        def cast_first(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            if param is not None and threading.get_ident() == me:
                _cast(param, dtype)
            register(module, name, param)

        self._register = register
        nn.Module.register_parameter = cast_first  # type: ignore[method-assign, assignment]

    def __exit__(self, *error: object) -> None:
        if self._enabled:
            nn.Module.register_parameter = self._register  # type: ignore[method-assign, assignment]


def _cast(p: nn.Parameter, dtype: torch.dtype) -> None:
    if p.dtype in _DTYPES.values() and p.dtype is not dtype:
        p.data = p.data.to(dtype)


class GatheredParameters:
    """The values of `params` in a with block. With a modifier_rank (0 is the only rank) what the block writes in place is the new weights."""

    def __init__(
        self, params: nn.Parameter | Iterable[nn.Parameter], modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True, **options: Any
    ):
        self._params = [params] if isinstance(params, torch.Tensor) else list(params)
        self._write, self._enabled = modifier_rank is not None, enabled
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        engines: list[Any] = []
        for p in self._params if self._enabled else ():
            engine = engine_of(p)
            if engine is not None and not any(engine is other for other in engines):
                engines.append(engine)
        for engine in engines:
            self._stack.enter_context(engine.gather([p for p in self._params if engine_of(p) is engine], write=self._write))

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """The module. Generating streams its weights as training does."""
    yield getattr(model, "module", model)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do: a parameter that another module uses is in the shard of both, which zinf finds; else its use is an error that names it."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing to do."""


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True) -> list[nn.Module]:
    """The modules of these classes. zinf finds the blocks that travel as one (`blocks` names them), so nothing is set."""
    names = {c if isinstance(c, str) else c.__name__ for c in leaf_module_classes}
    found = [m for m in model.modules() if type(m).__name__ in names or f"{type(m).__module__}.{type(m).__qualname__}" in names]
    if not found and raise_if_not_found:
        raise ConfigError(f"{type(model).__name__} has no module of class {', '.join(sorted(names))}")
    return found


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True) -> list[nn.Module]:
    """See set_z3_leaf_modules."""
    return set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """None were set."""
    return []


def z3_leaf_module(module: nn.Module) -> bool:
    """None were set."""
    return False
