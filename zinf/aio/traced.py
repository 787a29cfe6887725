"""An I/O engine that tells a recorder what it does. It stands in front of the real one only where a run is traced."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from zinf.aio.interface import Op
from zinf.trace.recorder import LANES, Recorder

VERBS = {"r": "fetch", "w": "flush"}


class TracedEngine:
    """An IoEngine that is another one, watched. Everything but the methods here is the inner engine's."""

    def __init__(self, inner: Any, recorder: Recorder, folders: Sequence[str]) -> None:
        """`folders`: a lane for each; one where there is one."""
        self.inner, self._recorder = inner, recorder
        self._lanes = [(f"{os.path.realpath(f)}{os.sep}", f", drive {i + 1}" if len(folders) > 1 else "") for i, f in enumerate(folders)]

    def submit(self, ops: Sequence[Op], owner: object = None) -> list[Any]:
        tickets = self.inner.submit(ops, owner)
        for (kind, file, offset, _, length), ticket in zip(ops, tickets, strict=True):
            shard, what = self._recorder.places.get((file.path, offset), (-1, {"file": os.path.basename(file.path)}))
            detail = "" if shard >= 0 else what["file"]
            self._recorder.moving(VERBS[kind], shard, length, ticket, detail, self._lane(VERBS[kind], file.path), what)
        return tickets

    def datasync(self, file: Any) -> Any:
        ticket = self.inner.datasync(file)
        self._recorder.moving("flush", -1, 0, ticket, "(fdatasync)", self._lane("flush", file.path))
        return ticket

    def _lane(self, verb: str, path: str) -> str:
        return LANES[verb] + next((name for folder, name in self._lanes if path.startswith(folder)), "")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
