"""The log of a run: metrics.jsonl, a line for each step, so that a report needs no rerun. Plain values only.

    {"kind": "begin"}   a process begins: config, plan, what rests where, the step that it goes on from
    {"kind": "step"}    loss, grad_norm, lr, tokens, seconds; bytes, busy and waited seconds by verb; bytes held in each tier
    {"kind": "forecast"}  after the first steps: what the planner says of one, and what it takes
    {"kind": "eval"}    the held-out loss
    {"kind": "end"}     the process has ended by itself

A run that is resumed appends. Steps that were made and not committed before a kill are made again: of two lines of a step the later
one counts. Each line is one write, so a kill leaves whole lines; `read` passes over what is damaged and counts it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import time
from typing import Any

log = logging.getLogger("zinf")

METRICS, TRACE, REPORT = "metrics.jsonl", "trace.json", "report.html"


class RunLog:
    """Writes the log. A disk that refuses costs one log line, never the run."""

    def __init__(self, folder: str, fresh: bool):
        """`fresh`: what an earlier run has left there is replaced."""
        self.folder, self._fd = folder, -1
        try:
            os.makedirs(folder, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_TRUNC if fresh else 0)
            self._fd = os.open(os.path.join(folder, METRICS), flags, 0o644)
            if not fresh and os.fstat(self._fd).st_size:
                os.write(self._fd, b"\n")  # behind half a line of a run that was killed; an empty line is none
        except OSError as e:
            self._give_up(e)

    def write(self, kind: str, **values: Any) -> None:
        """One line. What is not finite is null: JSON has no word for it."""
        if self._fd < 0:
            return
        line = json.dumps({"kind": kind, "time": round(time.time(), 3), **_plain(values)}, ensure_ascii=False, default=str) + "\n"
        try:
            os.write(self._fd, line.encode(errors="replace"))
        except OSError as e:
            self._give_up(e)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _give_up(self, e: OSError) -> None:
        log.warning("the run goes on without its log: %s: %s", os.path.join(self.folder, METRICS), e.strerror)
        self.close()


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


@dataclasses.dataclass
class Run:
    """A log read back. `begins`: one for each process. `steps`: in order, each once."""

    begins: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    steps: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    evals: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    forecast: dict[str, Any] = dataclasses.field(default_factory=dict)
    ended: bool = False
    damaged: int = 0

    @property
    def begin(self) -> dict[str, Any]:
        """Of the last process."""
        return self.begins[-1] if self.begins else {}


def read(path: str | os.PathLike[str]) -> Run:
    """The run that metrics.jsonl tells of. Raises OSError; lines that cannot be read are counted."""
    run = Run()
    steps: dict[int, dict[str, Any]] = {}
    evals: dict[int, float] = {}
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                _take(json.loads(line), run, steps, evals)
            except (ValueError, KeyError, TypeError, RecursionError):
                run.damaged += 1
    run.steps = [steps[n] for n in sorted(steps)]
    run.evals = sorted(evals.items())
    return run


def _take(row: dict[str, Any], run: Run, steps: dict[int, dict[str, Any]], evals: dict[int, float]) -> None:
    kind = row["kind"]
    if kind == "begin":
        run.begins.append(row)
        run.ended = False
        for known in (steps, evals):  # made by the process before and not committed: to be made again
            for n in [n for n in known if n > int(row["step"])]:
                del known[n]  # type: ignore[attr-defined]
    elif kind == "step":
        steps[int(row["step"])] = {**row, "seconds": float(row["seconds"])}
    elif kind == "forecast":
        run.forecast = row
    elif kind == "eval":
        evals[int(row["step"])] = float(row["loss"])
    elif kind == "end":
        run.ended = True
