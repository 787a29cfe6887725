"""A control group of Linux with a limit of memory, v2 or v1, for tests. Who may not make one skips, and is told why."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_NAMES = {"cgroup2": ("memory.max", "memory.current", "memory.events"), "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")}


class Group:
    """Its processes share the limit: pages of files are taken from them first, then one of them is killed, by its oom_score_adj."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self._kind = folder, kind

    def enter(self) -> None:
        """The calling process, with all that it will start."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def limit(self, nbytes: int) -> None:
        (self.folder / _NAMES[self._kind][0]).write_text(str(nbytes))

    @property
    def limited(self) -> bool:
        text = (self.folder / _NAMES[self._kind][0]).read_text().strip()
        return text != "max" and int(text) < 1 << 60

    @property
    def used(self) -> int:
        """Bytes, pages of files included."""
        return int((self.folder / _NAMES[self._kind][1]).read_text())

    @property
    def killed(self) -> int:
        """Processes that were, as there was no memory."""
        lines = (line.split() for line in (self.folder / _NAMES[self._kind][2]).read_text().splitlines())
        return next((int(number) for key, number in lines if key == "oom_kill"), 0)


@contextlib.contextmanager
def group() -> Iterator[Group]:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    found = [(Path(at), kind) for _, at, kind, options, *_ in mounts if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(","))]
    said = "no memory controller is mounted"
    for root, kind in found:
        here = root / f"zinf-test-{os.getpid()}"
        try:
            here.mkdir()
        except OSError as e:
            said = str(e)
            continue
        try:
            if not (here / _NAMES[kind][0]).exists():
                continue
            try:
                (here / "cgroup.procs").read_text()
                yield Group(here, kind)
                return
            except PermissionError as e:
                said = str(e)
        finally:
            _remove(here)
    pytest.skip(f"no control group with a limit of memory can be made here: {said}")


def _remove(folder: Path) -> None:
    for _ in range(100):  # those that were killed take a moment to go
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.05)
