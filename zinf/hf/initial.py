"""Values of parameters that no file has: a new head beside a checkpoint, or a whole model from a seed. As transformers initialises them.

RandomSource    a source of random weights: one or two units (blocks, large layers) at a time are in memory, in fp32
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zinf.checkpoint.sources import Reader, TensorReader
from zinf.discover import Unit
from zinf.errors import CheckpointError
from zinf.hf.names import Names

log = logging.getLogger("zinf")


def initialise_missing(model: Any, names: Names, inside: Collection[str]) -> list[str]:
    """Give the parameters that the checkpoint has not, but for those `inside` blocks, values as transformers does; their names.

    The random numbers are torch's: the same seed gives what transformers' from_pretrained makes of it.
    """
    missing = [name for name, _ in model.named_parameters() if name not in names.load and name not in inside]
    wanted = {id(model.get_parameter(name)) for name in missing}
    made: dict[nn.Parameter, nn.Parameter] = {}

    def real(p: nn.Parameter) -> nn.Parameter:
        return made.setdefault(p, nn.Parameter(torch.zeros(p.shape, dtype=p.dtype), requires_grad=p.requires_grad))

    if missing:
        with torch.no_grad():
            _initialise(model, wanted, real, set())
        log.warning("the checkpoint has no %s: newly initialised, to be trained", ", ".join(missing))
    return missing


def _initialise(model: Any, wanted: Collection[int], real: Callable[[nn.Parameter], nn.Parameter], around: Collection[int]) -> None:
    """Put `real(p)` in the place of each parameter with its id in `wanted`, children first, and have their owner's _init_weights fill it.

    It is called for the modules that have such a parameter of their own, and those with an id in `around`, as some fill what is below them.
    """

    def walk(module: nn.Module, owner: Any) -> None:
        owner = module if hasattr(module, "_init_weights") else owner
        for child in module.children():
            walk(child, owner)
        here = [(name, p) for name, p in module._parameters.items() if p is not None and id(p) in wanted]
        for name, p in here:
            module._parameters[name] = real(p)
        if here or id(module) in around:
            owner._init_weights(module)  # of parameters on meta it changes nothing

    walk(model, model)


class RandomSource:
    """The parameters of a transformers model as `_init_weights` makes them, from a seed, whatever is asked for first.

    For one import, in which nobody else draws random numbers or touches the model.

    Args:
        model: on the meta device.
        units: of discover(): what is made at once. Each draws from a generator of its own.
        seed: 0 or more.
    """

    where = "a new model"

    def __init__(self, model: Any, units: Sequence[Unit], seed: int) -> None:
        self._model, self._seed = model, seed
        self._units = {name: (i, unit) for i, unit in enumerate(units) for name, _ in unit.params}
        self._made: dict[int, dict[str, torch.Tensor]] = {}  # the last two: several threads read, and one may be a chunk behind
        self._lock = threading.Lock()

    def open(self, name: str) -> Reader:
        if name not in self._units:
            raise CheckpointError(f"{name} is missing")
        index, unit = self._units[name]
        param = next(p for other, p in unit.params if other == name)
        return _Lazy(tuple(param.shape), lambda: self._values(index, unit)[name])

    def unexpected(self, params: Collection[str]) -> list[str]:
        return []

    def mark(self) -> str:
        """What an import that was killed has to have in common with one that goes on from it."""
        return f"random {self._seed}"

    def close(self) -> None:
        """Free what was made last."""
        self._made.clear()

    def _values(self, index: int, unit: Unit) -> dict[str, torch.Tensor]:
        with self._lock:
            if index not in self._made:
                while len(self._made) > 1:
                    del self._made[min(self._made)]
                self._made[index] = self._make(index, unit)
            return self._made[index]

    @torch.no_grad()
    def _make(self, index: int, unit: Unit) -> dict[str, torch.Tensor]:
        made = {id(p): nn.Parameter(torch.zeros(p.shape), requires_grad=p.requires_grad) for _, p in unit.params}
        around = {id(m) for module in unit.modules for m in module.modules()} if unit.block else set()
        with torch.random.fork_rng(devices=[]), _restored(self._model):
            torch.manual_seed((self._seed * 0x9E3779B1 + index * 0x85EBCA77) % (1 << 32))  # of a seed torch's generator uses 32 bits
            _initialise(self._model, made.keys(), lambda p: made[id(p)], around)
        return {name: made[id(p)].detach() for name, p in unit.params}


class _Lazy:
    """A parameter that is made when it is read."""

    dtype = torch.float32

    def __init__(self, shape: tuple[int, ...], values: Callable[[], torch.Tensor]) -> None:
        self.shape, self._values = shape, values

    def read(self, start: int, out: torch.Tensor) -> None:
        TensorReader(self._values()).read(start, out)


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """At the end every module has the parameters that it had."""
    before = [(module, dict(module._parameters)) for module in model.modules() if module._parameters]
    try:
        yield
    finally:
        for module, parameters in before:
            module._parameters.update(parameters)
