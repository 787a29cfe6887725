"""What a training loop has beside the model and must find again: data loader, learning-rate schedulers, loss scaler, EMA.

`Objects` holds them by name; their states go into every commit and every checkpoint, as JSON. A state is what state_dict() gives (or
get_state(), as of a torch.Generator): numbers, text, lists, tuples, dicts, and tensors or arrays of at most LIMIT bytes in all, since a
commit writes them each time. Nothing is ever pickled.

[Note: when an object is looked at] A commit of step n must hold what the loop has once step n is over. A data loader is there when
engine.step() is called, and one batch further when the model is used again. A scheduler (an EMA) is moved after engine.step(), so it is
there only when the model is used again. `late` says which of the two an object is.
"""

from __future__ import annotations

import base64
import collections
import logging
import sys
from typing import Any

import torch

from zinf.errors import ConfigError

log = logging.getLogger("zinf")

LIMIT = 16 << 20  # bytes of tensors in the state of one object
_SCHEDULERS = (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


class Objects:
    """The registered objects of one engine, and the states of those that a resumed run has not registered yet."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[Any, bool]] = {}  # name -> (object, late)
        self._unclaimed: dict[str, Any] = {}  # restored, encoded

    @property
    def late(self) -> bool:
        """Is there one that is looked at when the model is used again?"""
        return any(late for _, late in self._objects.values())

    @property
    def schedules(self) -> bool:
        """Is there a late one that moves the learning rate?"""
        return any(late and hasattr(obj, "optimizer") for obj, late in self._objects.values())

    def add(self, name: str, obj: Any, late: bool | None) -> bool:
        """Register `obj`. True if there was a state for it, which it now has. See Engine.register."""
        if name in self._objects and self._objects[name][0] is not obj:
            raise ConfigError(f"{name!r} is registered already, as a {type(self._objects[name][0]).__name__}: give another name")
        _state(name, obj)
        self._objects[name] = (obj, isinstance(obj, _SCHEDULERS) if late is None else late)
        found = name in self._unclaimed
        if found:
            _load(name, obj, self._unclaimed.pop(name))
        return found

    def capture(self, late: bool | None = None) -> dict[str, Any]:
        """The states by name, as JSON values: all of them, or only the late ones, or only the others."""
        states = {name: _state(name, obj) for name, (obj, is_late) in self._objects.items() if late is None or is_late is late}
        return states if late else {**self._unclaimed, **states}

    def restore(self, states: dict[str, Any]) -> None:
        """Give every object its state; those of objects that are not registered wait for them."""
        self._unclaimed = {name: state for name, state in states.items() if name not in self._objects}
        for name, (obj, _) in self._objects.items():
            if name in states:
                _load(name, obj, states[name])
            else:
                log.warning("nothing was saved of %r: it stays as it is", name)


def _state(name: str, obj: Any) -> Any:
    get = getattr(obj, "state_dict", None) or getattr(obj, "get_state", None)
    if get is None or not (hasattr(obj, "load_state_dict") or hasattr(obj, "set_state")):
        raise ConfigError(f"{name!r} is a {type(obj).__name__} without state_dict() and load_state_dict(): register something that has them")
    room = [LIMIT]
    return _encode(get(), name, room)


def _load(name: str, obj: Any, state: Any) -> None:
    (getattr(obj, "load_state_dict", None) or obj.set_state)(decode(state))


def _encode(value: Any, where: str, room: list[int]) -> Any:
    """`value` as JSON can hold it; what JSON has no form for is a dict with one key that begins with "$"."""
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous()
        data = raw.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"$tensor": [str(raw.dtype).removeprefix("torch."), list(raw.shape), _base64(data, where, room)]}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in "biuf":
        data = numpy.ascontiguousarray(value).tobytes()
        return {"$array": [value.dtype.str, list(value.shape), _base64(data, where, room), isinstance(value, numpy.generic)]}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": _base64(bytes(value), where, room)}
    if isinstance(value, dict):
        items = [(k, _encode(v, f"{where}.{k}", room)) for k, v in value.items()]
        if isinstance(value, collections.Counter):
            return {"$counter": [[_encode(k, where, room), v] for k, v in items]}
        if all(type(k) is str and not k.startswith("$") for k, _ in items):
            return dict(items)
        return {"$dict": [[_encode(k, where, room), v] for k, v in items]}
    if type(value) in (list, tuple):
        items = [_encode(v, f"{where}[{i}]", room) for i, v in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    raise ConfigError(f"the state of {where} is a {type(value).__name__}; it can be numbers, text, lists, tuples, dicts, tensors, arrays (nothing is pickled)")


def _base64(data: bytes, where: str, room: list[int]) -> str:
    room[0] -= len(data)
    if room[0] < 0:
        raise ConfigError(f"the state of {where} has tensors of more than {LIMIT} bytes, and every commit would write them: save them beside the checkpoint")
    return base64.b64encode(data).decode()


def decode(value: Any) -> Any:
    """The inverse of _encode."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value)) if len(value) == 1 else ""
    if not kind.startswith("$"):
        return {k: decode(v) for k, v in value.items()}
    content = value[kind]
    if kind == "$tensor":
        dtype, shape, text = content
        data = bytearray(base64.b64decode(text))
        typed = getattr(torch, dtype)
        return torch.frombuffer(data, dtype=typed).reshape(shape) if data else torch.empty(shape, dtype=typed)
    if kind == "$array":
        import numpy

        dtype, shape, text, scalar = content
        array = numpy.frombuffer(base64.b64decode(text), dtype=dtype).reshape(shape).copy()
        return array[()] if scalar else array
    if kind == "$bytes":
        return base64.b64decode(content)
    if kind == "$tuple":
        return tuple(decode(v) for v in content)
    pairs = {decode(k): decode(v) for k, v in content}
    return collections.Counter(pairs) if kind == "$counter" else pairs
