"""The backend without compiled code: aiofiles in an asyncio loop on a thread of its own. Slow, obvious, and what the others are compared with.

The loop thread, `zinf-io`, owns every request: cuts it into pieces, examines each piece that comes back, completes the request once. The
blocking calls (preadv, pwritev, fdatasync) run on the threads of a pool, `zinf-io-N`, at most queue_depth of them waiting or running.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiofiles.ospath import wrap

from zinf.aio.faults import Fate, Rule, RuleSet
from zinf.aio.interface import PAGE, Op, check_direct, check_options, describe
from zinf.errors import EngineError

log = logging.getLogger("zinf")

MAX_TRIES = 1000  # EINTR/EAGAIN in a row without a byte moved: about ten seconds, then it is an error

_in_memory = {"tmpfs", "ramfs"}  # they accept O_DIRECT and ignore it
_verbs = {"r": "read", "w": "write", "d": "datasync"}

_preadv = wrap(os.preadv)
_pwritev = wrap(os.pwritev)
_fdatasync = wrap(os.fdatasync)


def _filesystem(path: str) -> str:
    """Type of the filesystem that holds `path`, by the longest mount point in /proc/mounts."""
    real = os.path.realpath(path)
    best, kind = "", ""
    with contextlib.suppress(OSError), open("/proc/mounts") as mounts:
        for line in mounts:
            _, point, this, *_ = line.split()
            if len(point) >= len(best) and (real == point or real.startswith(point.rstrip("/") + "/")):
                best, kind = point, this
    return kind


class PythonFile:
    """An open file; see zinf.aio.interface.File."""

    def __init__(self, path: str, *, write: bool, create: bool, direct: int) -> None:
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0)
        self.path, self.writable, self.direct, self.note = path, write, False, ""
        fd = -1
        if direct:
            try:
                if _filesystem(os.path.dirname(path) or ".") in _in_memory:
                    raise OSError(errno.EINVAL, "open with O_DIRECT: the filesystem is in memory", path)
                fd = os.open(path, flags | os.O_DIRECT, 0o600)
                self.direct = True
            except OSError as error:
                if error.errno != errno.EINVAL or direct == 2:
                    raise
                self.note = "the filesystem is in memory" if "memory" in str(error) else "the filesystem refuses O_DIRECT"
        self.fd = fd if fd >= 0 else os.open(path, flags, 0o600)
        self._idle = threading.Condition()
        self._in_flight = 0
        self.closed = False

    def acquire(self) -> bool:
        with self._idle:
            if not self.closed:
                self._in_flight += 1
            return not self.closed

    def release(self) -> None:
        with self._idle:
            self._in_flight -= 1
            self._idle.notify_all()

    def close(self) -> None:
        with self._idle:
            self.closed = True
            self._idle.wait_for(lambda: self._in_flight == 0)
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1

    def __enter__(self) -> PythonFile:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)


class PythonTicket:
    """One op on its way; see zinf.aio.interface.Ticket. Everything but wait() and done() belongs to the loop thread."""

    def __init__(self, kind: str, file: PythonFile, offset: int, address: int, length: int, owner: object) -> None:
        self.kind, self.offset, self.address, self.length = kind, offset, address, length
        self.path = file.path
        self.file: PythonFile | None = file
        self.owner = owner
        self.error: tuple[int, str, str] | None = None
        self.times: tuple[float, float] | None = None
        self._started = 0.0
        self._done = threading.Event()

    def what(self) -> str:
        return describe(_verbs[self.kind], self.offset, self.length)

    def fail(self, code: int, message: str) -> None:
        if self.error is None:
            self.error = (code, f"{self.what()}: {message}", self.path)

    def begin(self) -> None:
        """A piece is handed out."""
        self._started = self._started or time.perf_counter()

    def complete(self) -> None:
        ended = time.perf_counter()
        self.times = (self._started or ended, ended)
        file, self.file, self.owner = self.file, None, None
        self._done.set()
        if file is not None:
            file.release()  # after that: when file.close() returns, the tickets of its requests are done

    def wait(self, timeout: float | None = None) -> None:
        if not self._done.wait(timeout):
            raise TimeoutError(f"{self.what()} of {self.path}: still in flight after {timeout} s")
        if self.error is not None:
            raise OSError(*self.error)

    def done(self) -> bool:
        return self._done.is_set()


class PythonEngine:
    """An IoEngine; see zinf.aio.interface."""

    def __init__(self, *, block_size: int, queue_depth: int, threads: int) -> None:
        check_options(block_size, queue_depth, threads)
        self.name = "python"
        self.block_size, self.queue_depth, self.threads = block_size, queue_depth, threads
        self._pid = os.getpid()
        self._counts = dict.fromkeys(("bytes_read", "bytes_written", "ops_read", "ops_written", "ops_datasync", "pieces", "retries", "short", "errors"), 0)
        self._busy, self._since, self._in_flight = 0.0, 0.0, 0
        self._idle = threading.Condition()  # guards the two lines above and below
        self._closing = False
        self._files: weakref.WeakSet[PythonFile] = weakref.WeakSet()
        self._rules = RuleSet()
        self._told: set[str] = set()
        numbers = itertools.count()
        self._pool = ThreadPoolExecutor(threads, "zinf-io", initializer=lambda: _name_thread(f"zinf-io-{next(numbers)}"))
        self._loop = asyncio.new_event_loop()
        self._depth: asyncio.Semaphore
        started = threading.Event()
        self._thread = threading.Thread(target=self._run_loop, args=(started,), name="zinf-io", daemon=True)
        self._thread.start()
        started.wait()

    # ---- any thread

    def open(self, path: str | os.PathLike[str], *, write: bool, create: bool = False, direct: bool | str = "auto") -> PythonFile:
        self._check_open()
        file = PythonFile(os.fspath(path), write=write, create=create, direct=check_direct(direct))
        if file.note:
            self._tell_once(f"buffered I/O in {os.path.dirname(file.path) or '.'}: {file.note}", logging.WARNING)
        with self._idle:
            self._files.add(file)
        return file

    def register(self, address: int, nbytes: int, owner: object) -> bool:
        self._tell_once("I/O goes on without registered buffers: only io_uring registers them", logging.INFO)
        return False

    def unregister(self, address: int) -> None:
        pass

    def submit(self, ops: Sequence[Op], owner: object = None) -> list[PythonTicket]:
        self._check_open()
        tickets: list[PythonTicket] = []
        try:
            for op in ops:
                tickets.append(self._make_ticket(op, owner))
        except BaseException:
            for ticket in tickets:
                ticket.complete()
            raise
        return self._send(tickets)

    def datasync(self, file: PythonFile) -> PythonTicket:
        self._check_open()
        if not file.acquire():
            raise ValueError(f"datasync of {file.path}: the file is closed")
        return self._send([PythonTicket("d", file, 0, 0, 0, None)])[0]

    def stats(self) -> dict[str, int | float]:
        with self._idle:
            running = time.monotonic() - self._since if self._in_flight else 0.0
            return {**self._counts, "pieces_fixed": 0, "in_flight": self._in_flight, "busy_seconds": self._busy + running, "registered_bytes": 0}

    def report(self) -> dict[str, object]:
        no = "only io_uring registers them"
        sizes = {"block_size": self.block_size, "queue_depth": self.queue_depth, "threads": self.threads}
        return {"backend": self.name, **sizes, "setup_flags": [], "registered_files": no, "registered_buffers": no}

    def arm(self, rules: Sequence[tuple[Any, ...]]) -> None:
        self._rules = RuleSet([Rule(*rule) for rule in rules])

    def fired(self) -> list[int]:
        return self._rules.fired()

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has no threads to join
        with self._idle:
            self._closing = True
            self._idle.wait_for(lambda: self._in_flight == 0)
            files = list(self._files)
        for file in files:
            file.close()
        with contextlib.suppress(RuntimeError):  # the loop is closed: a second close()
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._pool.shutdown()

    def _tell_once(self, message: str, level: int) -> None:
        with self._idle:
            new = message not in self._told
            self._told.add(message)
        if new:
            log.log(level, message)

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise EngineError("the I/O engine belongs to the process that made it; open another one after fork()")
        if self._closing:
            raise EngineError("the I/O engine is closed")

    def _make_ticket(self, op: Op, owner: object) -> PythonTicket:
        kind, file, offset, address, length = op
        if kind not in ("r", "w"):
            raise ValueError(f'an op starts with "r" or "w", not {kind!r}')
        if not isinstance(file, PythonFile):
            raise TypeError(f"an op's file must come from the same engine's open(), not {type(file).__name__}")
        where = f"{describe(_verbs[kind], offset, length)} of {file.path}"
        if length <= 0 or offset < 0 or offset + length >= 1 << 63:
            raise ValueError(f"{where}: impossible range")
        if not 0 < address < (1 << 64) - length:
            raise ValueError(f"{where}: impossible memory address {address}")
        if kind == "w" and not file.writable:
            raise ValueError(f"{where}: the file was opened for reading")
        if file.direct:
            wrong = [name for name, value in (("offset", offset), ("address", address), ("length", length)) if value % PAGE]
            if wrong:
                raise ValueError(f"{where}: O_DIRECT needs multiples of 4096; misaligned: {' '.join(wrong)}")
        if not file.acquire():
            raise ValueError(f"{where}: the file is closed")
        return PythonTicket(kind, file, offset, address, length, owner)

    def _send(self, tickets: list[PythonTicket]) -> list[PythonTicket]:
        with self._idle:
            closing = self._closing
            if not closing and tickets:
                if self._in_flight == 0:
                    self._since = time.monotonic()
                self._in_flight += len(tickets)
                self._loop.call_soon_threadsafe(self._start, list(tickets))
        if closing:
            for ticket in tickets:
                ticket.complete()
            raise EngineError("the I/O engine is closed")
        return tickets

    # ---- the loop thread

    def _run_loop(self, started: threading.Event) -> None:
        _name_thread("zinf-io")
        asyncio.set_event_loop(self._loop)
        self._depth = asyncio.Semaphore(self.queue_depth)
        self._tasks: set[asyncio.Task[None]] = set()
        started.set()
        self._loop.run_forever()
        self._loop.close()

    def _start(self, tickets: list[PythonTicket]) -> None:
        for ticket in tickets:
            task = self._loop.create_task(self._serve(ticket))
            self._tasks.add(task)  # the loop itself holds tasks only weakly
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, ticket: PythonTicket) -> None:
        """One request: pieces in order, as many at once as the depth allows; none is begun after a failure."""
        pieces = []
        for begin in range(0, max(ticket.length, 1), self.block_size):
            await self._depth.acquire()
            if ticket.error is not None:
                self._depth.release()
                break
            self._counts["pieces"] += 1
            ticket.begin()
            length = min(self.block_size, ticket.length - begin)
            pieces.append(self._loop.create_task(self._move(ticket, begin, length)))
        await asyncio.gather(*pieces)
        self._counts[{"r": "ops_read", "w": "ops_written", "d": "ops_datasync"}[ticket.kind]] += 1
        self._counts["errors"] += ticket.error is not None
        ticket.complete()
        with self._idle:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._busy += time.monotonic() - self._since
                self._idle.notify_all()

    async def _move(self, ticket: PythonTicket, begin: int, length: int) -> None:
        """One piece, until it is done or has failed. Never raises: whatever goes wrong is the ticket's error."""
        try:
            moved = tries = 0
            while True:
                if tries > 2:
                    await asyncio.sleep(min(0.01, 1e-4 * 2 ** min(tries, 12)))
                result = await self._attempt(ticket, begin + moved, length - moved)
                if result in (-errno.EINTR, -errno.EAGAIN) and tries < MAX_TRIES:
                    tries += 1
                    self._counts["retries"] += 1
                    continue
                step = self._examine(ticket, begin, length, moved, result)
                if step is None:
                    return
                moved, tries = moved + step, 0
        except Exception as error:  # the pool is gone, memory is out: the waiter must know
            ticket.fail(errno.EIO, f"{type(error).__name__}: {error}")
        finally:
            self._depth.release()

    def _examine(self, ticket: PythonTicket, begin: int, length: int, moved: int, result: int) -> int | None:
        """Bytes to go on from, or None where the piece is done or has failed: error, done, short, in this order."""
        part = "" if length == ticket.length else f" (in the {length} bytes at {ticket.offset + begin})"
        if result < 0:
            ticket.fail(-result, os.strerror(-result) + part)
            return None
        if ticket.kind == "d":
            return None
        assert ticket.file is not None
        whole = moved + result >= length
        step = result if whole or not ticket.file.direct else result // PAGE * PAGE
        self._counts["bytes_read" if ticket.kind == "r" else "bytes_written"] += step
        if whole:
            return None
        if step == 0:
            if ticket.kind == "r":
                got = max(0, min(ticket.length, os.fstat(ticket.file.fd).st_size - ticket.offset))
                ticket.fail(errno.ENODATA, f"end of file, expected {ticket.length} bytes, got {got}")
            else:
                ticket.fail(errno.EIO, f"nothing more was written{part}")
            return None
        self._counts["short"] += 1
        return step

    async def _attempt(self, ticket: PythonTicket, begin: int, length: int) -> int:
        """Bytes moved, or -errno."""
        file = ticket.file
        assert file is not None
        fate = self._rules.decide(ticket.kind, ticket.path)
        if fate.delay_ms:
            await asyncio.sleep(fate.delay_ms / 1e3)
        if fate.error:
            return -fate.error
        call: Callable[..., Any]
        try:
            if ticket.kind == "d":
                await _fdatasync(file.fd, loop=self._loop, executor=self._pool)
                return 0
            memory = (ctypes.c_char * _span(fate, length, file.direct)).from_address(ticket.address + begin)
            call = _preadv if ticket.kind == "r" else _pwritev
            return await call(file.fd, [memory], ticket.offset + begin, loop=self._loop, executor=self._pool)
        except OSError as error:
            return -(error.errno or errno.EIO)


def _span(fate: Fate, length: int, direct: bool) -> int:
    """Bytes to ask for now: all of them, or fewer where a fault says so."""
    if fate.short == 0 or fate.short >= length:
        return length
    return min(length, max(PAGE, fate.short // PAGE * PAGE)) if direct else fate.short


def _name_thread(name: str) -> None:
    """The name that `top -H` shows; threading's own name stays in Python."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as comm:
        comm.write(name)
