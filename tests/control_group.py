"""A control group of Linux with a limit of memory, v2 or v1, for tests. Who may not make one skips, and is told why."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_NAMES = {"cgroup2": ("memory.max", "memory.events", "memory.events"), "cgroup": ("memory.limit_in_bytes", "memory.failcnt", "memory.oom_control")}


class Group:
    """Its processes share the limit: pages of files are taken from them first, then one of them is killed, by its oom_score_adj."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self._kind = folder, kind

    def enter(self) -> None:
        """The calling process, with all that it will start."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def refused(self) -> int:
        """How often the limit was met, and pages had to be taken from somebody."""
        return self._count(_NAMES[self._kind][1], "max")

    @property
    def killed(self) -> int:
        """Processes that were, as there was no memory."""
        return self._count(_NAMES[self._kind][2], "oom_kill")

    def _count(self, name: str, key: str) -> int:
        lines = [line.split() for line in (self.folder / name).read_text().splitlines()]
        if len(lines[0]) == 1:
            return int(lines[0][0])
        return next((int(number) for found, number in lines if found == key), 0)


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
