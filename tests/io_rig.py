"""What the tests of the I/O engine share: backends, weathers, page-aligned memory, and engines that must leave nothing behind.

Test modules take the fixtures with `pytest_plugins = ["io_rig"]`, and import the rest before that: too late for pytest to rewrite the few
asserts here, which PYTEST_DONT_REWRITE says is meant.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from zinf.aio import open_engine
from zinf.aio.faults import FaultyEngine, Rule, storm
from zinf.errors import ConfigError

PAGE, BLOCK, DEPTH = 4096, 64 << 10, 4
ROOT = Path(__file__).resolve().parent.parent
CXX = os.environ.get("CXX", "g++").split()

WEATHER = {
    "calm": [],
    "storm": storm(7, error=0.15, short=0.4, delay=0),
    "delays": [Rule("rwd", probability=0.2, seed=3, delay_ms=2), Rule("rwd", probability=0.1, seed=4, delay_ms=5)],
}


def runs(backend: str) -> bool:
    try:
        open_engine(backend).close()
    except ConfigError:
        return False
    return True


BACKENDS = [pytest.param(name, marks=() if runs(name) else pytest.mark.skip(f"{name} cannot run here")) for name in ("uring", "threads", "python")]
NATIVE = BACKENDS[:2]


class Memory:
    """Page-aligned bytes with an address."""

    def __init__(self, nbytes: int, fill: bytes | None = None) -> None:
        self.map = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.nbytes = nbytes
        if fill is not None:
            self.map[: len(fill)] = fill

    def bytes(self, begin: int = 0, end: int | None = None) -> bytes:
        return self.map[begin : self.nbytes if end is None else end]


def io_threads() -> list[str]:
    """Names of the engines' threads. One that was joined may show for another moment, so give it one before it counts."""
    deadline = time.monotonic() + 5
    while True:
        names = []
        for task in Path("/proc/self/task").iterdir():
            try:
                names.append((task / "comm").read_text().strip())
            except OSError:  # ended while we looked
                continue
        names = [name for name in names if name.startswith("zinf-io")]
        if not names or time.monotonic() > deadline:
            return names
        time.sleep(0.001)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def make(backend: str, weather: str = "calm", **options: int) -> FaultyEngine:
    options = {"block_size": BLOCK, "queue_depth": DEPTH, "threads": 3, **options}
    return FaultyEngine(open_engine(backend, **options), WEATHER[weather])


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(params=list(WEATHER))
def weather(request):
    return request.param


@pytest.fixture
def engine(backend, weather):
    """A small engine (many pieces, little depth) that must leave nothing behind."""
    gc.collect()
    before = descriptors()
    engine = make(backend, weather)
    yield engine
    engine.close()
    assert io_threads() == []
    gc.collect()
    assert descriptors() == before


@pytest.fixture
def calm(backend):
    engine = make(backend)
    yield engine
    engine.close()
    assert io_threads() == []


def wait_all(tickets) -> None:
    for ticket in tickets:
        ticket.wait(60)


class Owner:
    """Memory whose end can be seen."""

    def __init__(self) -> None:
        self.memory = Memory(PAGE, b"y" * PAGE)


def script(body: str, *, timeout: float = 60, **env: str) -> str:
    """Runs Python in a process of its own; its output. A hang or a non-zero exit fails the test."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(body)], cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=env)
    assert run.returncode == 0, run.stderr
    return run.stdout
