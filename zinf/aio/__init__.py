"""I/O engine: reads and writes between files and memory addresses, many at once.

    engine = open_engine("auto")                      # uring, else threads, else python
    file = engine.open("/mnt/nvme/x", write=True, create=True)
    tickets = engine.submit([("w", file, 0, address, nbytes)], owner=buffer)
    tickets[0].wait()                                 # OSError if it failed
    engine.datasync(file).wait()
    engine.close()

`zinf.aio.interface` says what an engine is; the backends are `uring` and `threads` (compiled, zinf/aio/native.py) and `python` (zinf/aio/python.py).
A name with "faults:" in front ("faults:uring") is the same backend in bad weather, for tests: see zinf/aio/faults.py. The environment variable
ZINF_IO_BACKEND says what "auto" means, so that a whole test suite can be run over any of them.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

from zinf.aio.interface import File, IoEngine, Op, Ticket
from zinf.errors import ConfigError

__all__ = ["BACKENDS", "File", "IoEngine", "Op", "Ticket", "open_engine"]

log = logging.getLogger("zinf")

BACKENDS = ("uring", "threads", "python")  # best to slowest

_live: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Threads of an engine that was left open end before the interpreter does. In a forked child close() does nothing."""
    for engine in list(_live):
        engine.close()


def open_engine(backend: str = "auto", *, block_size: int = 4 << 20, queue_depth: int = 16, threads: int = 4) -> IoEngine:
    """block_size: longest piece in bytes; queue_depth: pieces in flight at once (uring, python); threads: of the pool (threads, python).

    "auto" takes the first of uring, threads, python that runs, and one log line says which. Asking for one that cannot run raises ConfigError
    with the reason.
    """
    if backend == "auto":
        backend = os.environ.get("ZINF_IO_BACKEND", "auto")
    if backend.startswith("faults:"):
        from zinf.aio import faults

        return faults.FaultyEngine(open_engine(backend.removeprefix("faults:"), block_size=block_size, queue_depth=queue_depth, threads=threads))
    if backend != "auto" and backend not in BACKENDS:
        raise ConfigError(f"I/O backend {backend!r} does not exist; choose from auto, {', '.join(BACKENDS)}")
    options = dict(block_size=block_size, queue_depth=queue_depth, threads=threads)
    reasons: list[str] = []
    for name in BACKENDS if backend == "auto" else (backend,):
        try:
            engine = _makers[name](options)
        except (ImportError, OSError) as error:
            reasons.append(f"{name}: {_reason(error)}")
            continue
        _live.add(engine)
        if backend == "auto":
            log.info("I/O backend %s%s", name, f" ({'; '.join(reasons)})" if reasons else "")
        return engine
    raise ConfigError(f"I/O backend {backend!r} cannot run here: {'; '.join(reasons)}")


def _reason(error: ImportError | OSError) -> str:
    if isinstance(error, ImportError):
        return f"the compiled module is not there ({error})"
    why = error.strerror or str(error)
    if why.startswith("io_uring_setup"):
        from zinf.aio.probe import probe

        return f"io_uring_setup: {probe()['why'] or why}"
    return why


def _native(name: str) -> Callable[[dict[str, int]], IoEngine]:
    def make(options: dict[str, int]) -> IoEngine:
        from zinf.aio.native import NativeEngine

        return NativeEngine(name, **options)

    return make


def _python(options: dict[str, int]) -> IoEngine:
    from zinf.aio.python import PythonEngine

    return PythonEngine(**options)


_makers: dict[str, Callable[[dict[str, int]], IoEngine]] = {"uring": _native("uring"), "threads": _native("threads"), "python": _python}
