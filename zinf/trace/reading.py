"""A trace read back: the last steps of it, whether or not its run came to an end."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from typing import Any, NamedTuple

KEEP = 6  # steps


class Event(NamedTuple):
    """Times in seconds since the trace began. `shard` is an index, -1 for none."""

    lane: str
    name: str
    verb: str
    start: float
    end: float
    shard: int
    nbytes: int
    who: str = ""  # of a wait: what would have computed


class Step(NamedTuple):
    number: int
    start: float
    end: float


@dataclasses.dataclass
class Timeline:
    """`counters`: name -> [(seconds, {what: bytes})]. `damaged`: lines that could not be read."""

    events: list[Event] = dataclasses.field(default_factory=list)
    steps: list[Step] = dataclasses.field(default_factory=list)
    counters: dict[str, list[tuple[float, dict[str, int]]]] = dataclasses.field(default_factory=dict)
    damaged: int = 0

    def typical(self) -> Step | None:
        """The step of median length among those that are here, the first apart: it warms up."""
        steps = sorted(self.steps[1:] or self.steps, key=lambda s: s.end - s.start)
        return steps[len(steps) // 2] if steps else None

    def within(self, start: float, end: float) -> list[Event]:
        return [e for e in self.events if e.end > start and e.start < end]


def read(path: str | os.PathLike[str], keep: int = KEEP) -> Timeline:
    """The last `keep` steps of a trace, and what came after them. Raises OSError; lines that are no events are counted."""
    timeline = Timeline()
    lanes: dict[int, str] = {}
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            text = line.strip().rstrip(",")
            if text in ("", "[", "]"):
                continue
            try:
                _take(json.loads(text), timeline, lanes)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                timeline.damaged += 1
            if len(timeline.steps) > keep:
                _forget(timeline)
    return timeline


def _take(row: dict[str, Any], timeline: Timeline, lanes: dict[int, str]) -> None:
    """Add one line of the file. Raises one of many errors where it is none of ours."""
    kind = row["ph"]
    if kind == "M" and row["name"] == "thread_name":
        lanes[row["tid"]] = str(row["args"]["name"])
    elif kind == "C":
        values = {str(k): int(v) for k, v in row["args"].items()}
        timeline.counters.setdefault(str(row["name"]), []).append((float(row["ts"]) / 1e6, values))
    elif kind == "X":
        start, args = float(row["ts"]) / 1e6, row["args"]
        end = start + float(row["dur"]) / 1e6
        if not (math.isfinite(start) and start <= end < math.inf):
            raise ValueError("no times")
        if lanes[row["tid"]] == "steps":
            timeline.steps.append(Step(int(args["step"]), start, end))
        else:
            event = Event(lanes[row["tid"]], str(row["name"]), row.get("cat", ""), start, end, int(args.get("shard", -1)), int(args.get("bytes", 0)))
            timeline.events.append(event._replace(who=str(args["who"])) if "who" in args else event)


def _forget(timeline: Timeline) -> None:
    """Drop the oldest step, and what was over before the next one."""
    del timeline.steps[0]
    first = timeline.steps[0].start
    timeline.events = [e for e in timeline.events if e.end >= first]
    for name, points in timeline.counters.items():
        timeline.counters[name] = [p for p in points if p[0] >= first]
