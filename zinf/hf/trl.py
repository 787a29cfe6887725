"""What TRL's trainers do past a model's modules, done through the engine. Nothing here imports TRL: what it left on a model is looked at.

[Note: the head of TRL] Its trainers replace the model's forward by one that reads the weight of the head and hands it to a kernel of its own,
which makes log-probabilities by tiles. A streamed head has no weight outside of its own forward. So the same code runs with another kernel in
its place: one that enters the head's forward, as the engine's own fused loss does, and calls TRL's there.

[Note: the reference model] DPO and KTO compare with the model as it was. With adapters that is the base, with the adapters off, streamed from
the same store. In full fine-tuning the reference's log-probabilities are computed once, before the first step, by the engine itself: a
second model, which TRL would load into memory otherwise, is never needed. GRPO and RLOO make their texts as they go, so they can have a
reference with adapters only.
"""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zinf.engine import Engine
from zinf.errors import ConfigError

log = logging.getLogger("zinf")

_FORWARD, _KERNEL = "_fused_forward", "_ChunkedLogProbFunction"  # TRL's names


def fused_models(model: nn.Module) -> list[nn.Module]:
    """The modules of `model` whose forward is TRL's."""
    return [m for m in model.modules() if _function(m).__code__.co_name == _FORWARD]


def _function(module: nn.Module) -> Any:
    forward = module.__dict__.get("forward")
    return forward.__func__ if isinstance(forward, types.MethodType) else _plain


def _plain() -> None:
    """No forward of TRL's."""


def take_head(engine: Engine, device: torch.device) -> None:
    """Let TRL's forward find the weights of the head. See [Note: the head of TRL]. Nothing where it is not there, or the head is resident.

    Raises:
        ConfigError: it cannot be done; says what can.
    """
    for model in fused_models(engine.module):
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        if engine.memory.root is not None and any(p is head.weight for *_, p in engine.memory.root.params):
            continue
        function, fused = _function(model), engine.fused_head
        if fused is None or fused.head is not head or _KERNEL not in function.__code__.co_names:
            raise ConfigError(
                f"TRL reads the weights of {type(model).__name__}'s head outside of its forward, in a way that zinf cannot follow "
                f"(fused_head: {engine.config.fused_head}): keep the head on the device, with zinf={{'leaf_bytes': '1TiB'}}"
            )
        names = {**function.__globals__, _KERNEL: _InHead(function.__globals__[_KERNEL], fused.streamed)}
        again = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
        again.__kwdefaults__, again.__dict__ = function.__kwdefaults__, function.__dict__
        model.forward = types.MethodType(again, _Model(model, device))  # type: ignore[method-assign]


class _InHead:
    """Stands for TRL's kernel: calls it in the head's forward, where the weights are."""

    def __init__(self, kernel: Any, streamed: Callable[..., Any]) -> None:
        self._kernel, self._streamed = kernel, streamed

    def apply(self, hidden: torch.Tensor, weight: Any, bias: Any, *rest: Any) -> Any:
        return self._streamed(hidden, loss=lambda h, w, b: self._kernel.apply(h, w, b, *rest))


class _Model:
    """Stands for the model in TRL's forward: all of it but the head's weights, of which there is a device."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._head = model, types.SimpleNamespace(weight=types.SimpleNamespace(device=device), bias=None)

    def get_output_embeddings(self) -> Any:
        return self._head

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _parameters(cls: type) -> Any:
    return inspect.signature(cls.__init__).parameters if "__init__" in cls.__dict__ else ()  # type: ignore[misc]


def settle_reference(trainer: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Let a preference trainer do without a second model. See [Note: the reference model].

    Args:
        trainer: the class; of no interest if it has no reference.
        args, kwargs: what its __init__ is given.

    Raises:
        ConfigError: it would need one that moves, or has no arguments to say so in.
    """
    preference = next((c for c in trainer.__mro__ if "compute_ref_log_probs" in c.__dict__), None)
    online = next((c for c in trainer.__mro__ if "reward_funcs" in _parameters(c)), None)
    base = preference or online
    if base is None:
        return
    given = inspect.signature(base.__init__).bind_partial(None, *args, **kwargs).arguments  # type: ignore[misc]
    options: Any = given.get("args")
    model = given.get("model")
    if given.get("ref_model") is not None or given.get("peft_config") is not None or hasattr(model, "peft_config"):
        return
    if preference is None:
        if options is not None and options.beta:
            raise ConfigError(f"beta={options.beta} compares with a second model, which would be in memory: set beta=0.0, or train adapters (peft_config=)")
        return
    if options is None:
        raise ConfigError(f"{base.__name__}: give args={base.__name__.replace('Trainer', 'Config')}(...), so that the reference can be computed beforehand")
    if options.sync_ref_model:
        raise ConfigError("sync_ref_model needs a second model that follows the first: leave it out, or train adapters")
    if not options.precompute_ref_log_probs:
        log.info("the log-probabilities of the reference are computed before the first step (precompute_ref_log_probs): no second model is needed")
        options.precompute_ref_log_probs = True
