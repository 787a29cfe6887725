"""Writes the timeline of a run: Chrome's trace event format, one event a line, for ui.perfetto.dev and `zinf report`.

    lane      a resource: compute, waiting, CPU optimizer, host to device, NVMe read, ... A lane that does several things at once (a
              drive) is drawn in as many rows as it has things under way; within a row nothing overlaps
    moving    a transfer under way. It knows itself when it began and ended (`times`); one that does not (an event of a card) is asked at every other
              event whether it is over, and began when it was submitted, or when the one before it in its lane was over: such copies go in order
    counter   bytes held in a tier at that moment

Events are kept in memory until there are FLUSH of them or a step ends, then appended in one write: a run that is killed leaves a
file that lacks only the last of them, and the closing bracket, which readers of this format do not need. Nothing is written beyond
LIMIT bytes, and nothing of a run fails because its trace cannot be written: one log line says so.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

log = logging.getLogger("zinf")

FLUSH = 4096  # events in memory
LIMIT = 256 << 20  # bytes of a file; Perfetto opens so much
SWEEP = 256  # transfers under way before their ends are looked for

COMPUTE, WAITING, LOOP = "compute", "waiting", "training loop"
LANES = {
    "step": "CPU optimizer",
    "upload": "host to device",
    "offload": "device to host",
    "fetch": "NVMe read",
    "flush": "NVMe write",
    "evict": "evict",
    "import": "import",
}
ORDER = ("steps", COMPUTE, WAITING, LOOP, *LANES.values(), "commit")  # from top to bottom


class Moving(Protocol):
    """The end of a transfer. One that knows when it began and ended has `times`, seconds of time.perf_counter."""

    def done(self) -> bool: ...


class Recorder:
    """One file. Safe to use from several threads; never raises.

    Args:
        path: of the file, replaced; its folder is made.
        shards: their names, by index.
    """

    def __init__(self, path: str, shards: Sequence[str], limit: int = LIMIT):
        self.path, self.shards = path, list(shards)
        self.places: dict[tuple[str, int], tuple[int, dict[str, Any]]] = {}  # (file, offset) -> shard, and which chunk of it
        self._left = limit  # bytes that may still be written
        self._lock = threading.RLock()  # guards all below
        self._rows: list[tuple[str, str, str, float, float, dict[str, Any]]] = []  # lane, name, verb, start, end, args
        self._counters: list[tuple[str, float, Mapping[str, int]]] = []
        self._moving: deque[tuple[Moving, float, str, str, str, dict[str, Any]]] = deque()
        self._untimed: dict[str, deque[tuple[Moving, float, str, str, str, dict[str, Any]]]] = {}  # lane -> those that do not know their times
        self._ends: dict[str, list[float]] = {}  # lane -> where each of its rows ends
        self._last: dict[str, float] = {}  # lane -> when its last transfer without times was over
        self._ids: dict[tuple[str, int], int] = {}
        self._now: tuple[int, str, int, float] | None = None  # thread, phase, shard, since: what is being computed
        self.began = time.perf_counter()
        self._since: float | None = None  # the step under way: an evaluation is no part of one
        self._left_at: float | None = None  # when the last step returned to the training loop
        self._file: Any = None
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            self._file = open(path, "wb", buffering=0)  # a fork must not write what its parent has buffered
            self._write('[\n{"name":"process_name","ph":"M","pid":1,"tid":0,"args":{"name":"zinf"}}')
        except OSError as e:
            self._give_up(e)

    # -- what is told -------------------------------------------------------------------------------------------------------

    def span(self, verb: str, shard: int, detail: str, start: float, end: float, nbytes: int) -> None:
        """A verb that the calling thread has done. Fetches and flushes come as I/O, but for commits."""
        lane = "commit" if verb == "flush" else LANES[verb]
        if verb != "fetch":
            self.event(lane, f"{verb} {self._name(shard, detail)}", verb, start, end, {"bytes": nbytes, "shard": shard})

    def moving(
        self, verb: str, shard: int, nbytes: int, moving: Moving, detail: str = "", lane: str | None = None, args: Mapping[str, Any] | None = None
    ) -> None:
        """A transfer was started just now."""
        name = f"{verb} {self._name(shard, detail)}"
        with self._lock:
            lane = lane or LANES[verb]
            queue = self._moving if hasattr(moving, "times") else self._untimed.setdefault(lane, deque())
            queue.append((moving, time.perf_counter(), lane, name, verb, {"bytes": nbytes, "shard": shard, **(args or {})}))
            if len(self._moving) % SWEEP == 0:
                self._sweep()

    def waited(self, verb: str, shard: int, start: float, end: float) -> None:
        """The calling thread stood still. Of a pipeline's threads that is no news: to wait is what they are for."""
        with self._lock:
            now = self._now
            if now is not None and now[0] == threading.get_ident():
                self._pause(start)
                self._now = (*now[:3], end)
            elif threading.current_thread().name.startswith("zinf-"):
                return
            self.event(WAITING, f"wait for {verb} {self._name(shard, '')}".rstrip(), verb, start, end, {"shard": shard, "who": self._what(now)})

    def computing(self, phase: str, shard: int) -> None:
        with self._lock:
            now = time.perf_counter()
            self._pause(now)
            self._now = (threading.get_ident(), phase, shard, now)
            if self._left_at is not None:
                self.event(LOOP, "between two steps", "", self._left_at, now, {"shard": -1})
                self._left_at = None
            if phase == "evaluate":
                self._since = None
            elif self._since is None:
                self._since = now

    def idle(self) -> None:
        with self._lock:
            self._pause(time.perf_counter())
            self._now = None

    def stepped(self, step: int) -> None:
        """The end of a step: what happened up to now is written."""
        with self._lock:
            now = time.perf_counter()
            self.event("steps", f"step {step}", "", now if self._since is None else self._since, now, {"step": step})
            self._since = self._left_at = now
            self.flush()

    def counter(self, name: str, values: Mapping[str, int]) -> None:
        """Bytes held now, by what they are."""
        with self._lock:
            self._counters.append((name, time.perf_counter(), values))

    def event(self, lane: str, name: str, verb: str, start: float, end: float, args: dict[str, Any]) -> None:
        with self._lock:
            self._rows.append((lane, name, verb, start, end, args))
            self._poll()
            if len(self._rows) + len(self._counters) >= FLUSH:
                self.flush()

    # -- the file -----------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Append what is known to the file."""
        with self._lock:
            self._sweep()
            self._poll()
            rows, self._rows = sorted(self._rows, key=lambda row: row[4]), []
            counters, self._counters = self._counters, []
            if self._file is None:
                return
            lines = [line for row in rows for line in self._lines(*row)]
            lines += [f'{{"name":{json.dumps(name)},"ph":"C","pid":1,"ts":{self._us(at):.3f},"args":{json.dumps(values)}}}' for name, at, values in counters]
            if lines:
                self._write(",\n" + ",\n".join(lines))

    def close(self) -> None:
        """What is under way is over. Idempotent."""
        with self._lock:
            self.idle()
            self.flush()
            if self._file is not None:
                self._left += 3
                self._write("\n]\n")
            if self._file is not None:
                self._file.close()
                self._file = None

    def _lines(self, lane: str, name: str, verb: str, start: float, end: float, args: dict[str, Any]) -> list[str]:
        """The event, after the lane's own line if it is the first of its row."""
        row, tid, new = self._row(lane, start, end)
        lines = []
        if new:
            at = next((i for i, known in enumerate(ORDER) if lane.startswith(known)), len(ORDER))
            for kind, key, value in (("thread_name", "name", lane), ("thread_sort_index", "sort_index", 100 * at + row)):
                lines.append(f'{{"name":"{kind}","ph":"M","pid":1,"tid":{tid},"args":{{"{key}":{json.dumps(value)}}}}}')
        span = f'"ts":{self._us(start):.3f},"dur":{max(end - start, 0) * 1e6:.3f}'
        lines.append(f'{{"name":{json.dumps(name)},"cat":"{verb}","ph":"X","pid":1,"tid":{tid},{span},"args":{json.dumps(args)}}}')
        return lines

    def _row(self, lane: str, start: float, end: float) -> tuple[int, int, bool]:
        """The first row of the lane that is free from `start` on; its thread id; is it a new one?"""
        ends = self._ends.setdefault(lane, [])
        row = next((i for i, last in enumerate(ends) if last <= start), len(ends))
        if row == len(ends):
            ends.append(end)
        ends[row] = end
        new = (lane, row) not in self._ids
        return row, self._ids.setdefault((lane, row), len(self._ids) + 1), new

    def _write(self, text: str) -> None:
        data = text.encode()
        if len(data) > self._left:
            log.warning("the trace %s is as long as it may be (%d MiB): nothing more is recorded", self.path, LIMIT >> 20)
            self._left = 0
            file, self._file = self._file, None
            file.close()
            return
        try:
            while data:
                n = self._file.write(data)
                data, self._left = data[n:], self._left - n
        except OSError as e:
            self._give_up(e)

    def _give_up(self, e: OSError) -> None:
        log.warning("no trace is recorded: %s: %s", self.path, e.strerror)
        if self._file is not None:
            self._file.close()
        self._file = None

    # -- under the lock -----------------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Make events of the transfers that are over."""
        for _ in range(len(self._moving)):
            moving, submitted, lane, name, verb, args = entry = self._moving.popleft()
            if not moving.done():
                self._moving.append(entry)
                continue
            start, end = moving.times or (submitted, time.perf_counter())  # type: ignore[attr-defined]
            self._rows.append((lane, name, verb, start, end, args))

    def _poll(self) -> None:
        """Make events of the transfers that are over and have no times, in order."""
        for lane, queue in self._untimed.items():
            while queue and queue[0][0].done():
                _, submitted, _, name, verb, args = queue.popleft()
                now = time.perf_counter()
                start = max(submitted, self._last.get(lane, 0.0))
                self._last[lane] = now
                self._rows.append((lane, name, verb, min(start, now), now, args))

    def _pause(self, end: float) -> None:
        if self._now is not None:
            _, phase, shard, since = self._now
            if end > since:
                self.event(COMPUTE, self._what(self._now), phase, since, end, {"shard": shard})

    def _what(self, now: tuple[int, str, int, float] | None) -> str:
        return f"{now[1]} {self._name(now[2], '')}".rstrip() if now is not None else ""

    def _name(self, shard: int, detail: str) -> str:
        name = self.shards[shard] if shard >= 0 else ""
        return f"{name} {detail}".strip()

    def _us(self, t: float) -> float:
        return (t - self.began) * 1e6


def trace_path(store: str) -> str:
    """Where the trace of a run goes that is not told: into the run's folder, beside its store."""
    return os.path.join(log_folder(store), "trace.json")


def log_folder(store: str) -> str:
    """Where a run's log, trace and report are."""
    return f"{store.rstrip(os.sep)}-log"
