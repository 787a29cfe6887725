"""The compiled backends, `uring` and `threads`: what `zinf._aio` does not do itself, which is to log and to remember why."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

from zinf import _aio
from zinf.aio.interface import Op, check_direct, check_options

log = logging.getLogger("zinf")


class NativeEngine:
    """An IoEngine over zinf._aio; see zinf.aio.interface. Raises OSError if the kernel refuses the backend."""

    def __init__(self, backend: str, *, block_size: int, queue_depth: int, threads: int) -> None:
        check_options(block_size, queue_depth, threads)
        self.name = backend
        self.block_size, self.queue_depth = block_size, queue_depth
        self._engine = _aio.Engine(backend, block_size, queue_depth, threads)
        self._owners: dict[int, object] = {}  # address of a registered range -> what keeps it alive
        self._why_unregistered = ""
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def open(self, path: str | os.PathLike[str], *, write: bool, create: bool = False, direct: bool | str = "auto") -> _aio.File:
        file = self._engine.open(os.fspath(path), write, create, check_direct(direct))
        if file.note:
            self._tell_once(f"buffered I/O in {os.path.dirname(file.path) or '.'}: {file.note}")
        return file

    def register(self, address: int, nbytes: int, owner: object) -> bool:
        why = self._engine.register(address, nbytes)
        if why:
            self._why_unregistered = why
            self._tell_once(f"I/O goes on without registered buffers: {why}", logging.WARNING if self.name == "uring" else logging.INFO)
            return False
        with self._lock:
            self._owners[address] = owner
        return True

    def unregister(self, address: int) -> None:
        self._engine.unregister(address)
        with self._lock:
            self._owners.pop(address, None)

    def submit(self, ops: Sequence[Op], owner: object = None) -> list[_aio.Ticket]:
        return self._engine.submit(ops, owner)

    def datasync(self, file: _aio.File) -> _aio.Ticket:
        return self._engine.datasync(file)

    def stats(self) -> dict[str, int | float]:
        return self._engine.stats()

    def report(self) -> dict[str, object]:
        report: dict[str, object] = {"backend": self.name, "block_size": self.block_size, "queue_depth": self.queue_depth, **self._engine.report()}
        for what in ("registered_files", "registered_buffers"):
            report[what] = report[what] or "in use"
        if self._why_unregistered:
            report["registered_buffers"] = self._why_unregistered
        return report

    def arm(self, rules: Sequence[tuple[str, str, int, float, int, int, int, int, int]]) -> None:
        """Fault rules for tests, as zinf.aio.faults makes them; an empty list disarms."""
        self._engine.arm(list(rules))

    def fired(self) -> list[int]:
        """How often each armed rule has fired."""
        return self._engine.fired()

    def close(self) -> None:
        self._engine.close()
        with self._lock:
            self._owners.clear()

    def _tell_once(self, message: str, level: int = logging.WARNING) -> None:
        with self._lock:
            new = message not in self._told
            self._told.add(message)
        if new:
            log.log(level, message)
