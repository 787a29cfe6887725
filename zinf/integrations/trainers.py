"""Trainers that know nothing of zinf, on zinf: every transformers.Trainer, of whatever subclass, gets ZinfTrainerMixin as its first base.

It is done where an instance is made (Trainer.__new__), so it does not matter which library defines the subclass, nor when. It is the
mechanism of `zinf run -- COMMAND` (hook/sitecustomize.py brings it into the command) and of the Axolotl plugin.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from zinf.config import Config

Options = Config | Mapping[str, Any] | str | os.PathLike[str] | None

_options: Options = None
_wanted = False


def install(trainer: type, options: Options = None) -> None:
    """Let instances of `trainer` (transformers.Trainer) and its subclasses train on an engine with these options; the last call's count."""
    global _options, _wanted
    _options, _wanted = options, True
    if trainer.__new__ is not _new:
        trainer.__new__ = _new  # type: ignore[method-assign, assignment]


def uninstall() -> None:
    """Undo `install` for what is made from now on. (__new__ stays: Python cannot take it from a class again.)"""
    global _wanted
    _wanted = False


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    return object.__new__(on_engine(cls) if _wanted else cls)


@functools.cache
def on_engine(cls: type) -> type:
    """`cls` with the mixin as its first base, under the same name; `cls` itself if it has it."""
    from zinf.hf.trainer import ZinfTrainerMixin

    if issubclass(cls, ZinfTrainerMixin):
        return cls

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("zinf", _options)
        ZinfTrainerMixin.__init__(self, *args, **kwargs)

    members = {"__init__": __init__, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (ZinfTrainerMixin, cls), members)
