"""What limits a step: how busy each resource was, and the critical path through it. Pure, on events of a timeline.

[Note: the critical path] It is walked from the end of the step to its start, through the events without which the next one could
not have begun:

    compute            up to where the thread that computes stood still
    a wait             the last event of what was waited for to end
    any other event    the last one to end right before it (within SLACK) on the same resource, or of the same shard; where there is none it was
                       the thread that computes that set it going, and the path goes on there

What lies between two of them (a lock, a wake-up, Python) is `handover`; a wait whose cause is not in the trace stays `waiting`. The parts
fill the step exactly. It is a reading of what happened, not a proof: of two that ended at once one is taken.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zinf.trace.reading import Event, Step, Timeline
from zinf.trace.recorder import COMPUTE, LANES, LOOP, WAITING

SLACK = 1e-3  # seconds between an event and the one that it began upon
NVME = "NVMe"
HANDOVER = "handover"
MAIN = (COMPUTE, WAITING, LOOP)  # lanes of the thread that computes
CAUSES = {  # what is waited for -> lanes where it is done
    "fetch": (LANES["fetch"], LANES["step"], LANES["upload"]),
    "upload": (LANES["upload"], LANES["fetch"]),
    "offload": (LANES["offload"], LANES["flush"]),
    "step": (LANES["step"], LANES["fetch"]),
    "flush": (LANES["flush"], "commit", LANES["step"]),
}


def resource(lane: str) -> str:
    """The lane without the drive's direction and number: reads and writes share a drive."""
    return NVME if lane.startswith(NVME) else lane


def covered(spans: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Seconds of [start, end] that lie in at least one of the spans."""
    total, at = 0.0, start
    for a, b in sorted(spans):
        a, b = max(a, at), min(b, end)
        if b > a:
            total += b - a
            at = b
    return total


def busy(events: Sequence[Event], start: float, end: float) -> dict[str, float]:
    """Seconds of [start, end] in which each lane, and NVMe as a whole, had something to do."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for e in events:
        for name in dict.fromkeys((e.lane, resource(e.lane))):
            spans.setdefault(name, []).append((e.start, e.end))
    return {name: covered(found, start, end) for name, found in spans.items()}


class Part(NamedTuple):
    """A stretch of the critical path; `what` names the event, or is empty."""

    resource: str
    what: str
    start: float
    end: float


class _Ends:
    """Events by when they ended: the last one up to a moment."""

    def __init__(self, events: Iterable[Event]):
        self.events = sorted(events, key=lambda e: e.end)
        self._ends = [e.end for e in self.events]

    def last(self, at: float, after: float, other_than: Event | None = None) -> Event | None:
        """The last to end in (after, at], and to begin before `at`."""
        for i in range(bisect.bisect_right(self._ends, at) - 1, -1, -1):
            e = self.events[i]
            if e.end <= after:
                return None
            if e.start < at and e is not other_than:
                return e
        return None


class _Walk:
    """See [Note: the critical path]."""

    def __init__(self, events: Sequence[Event], start: float, end: float):
        self.start, self.at, self.parts = start, end, list[Part]()
        self._main = sorted((e for e in events if e.lane in MAIN and e.end > e.start), key=lambda e: e.start)
        self._starts = [e.start for e in self._main]
        work = [e for e in events if e.lane not in MAIN and e.end > e.start]
        self._by_resource = {name: _Ends(e for e in work if resource(e.lane) == name) for name in {resource(e.lane) for e in work}}
        self._by_shard = {shard: _Ends(e for e in work if e.shard == shard) for shard in {e.shard for e in work if e.shard >= 0}}
        self._by_verb = {verb: _Ends(e for e in work if e.lane.startswith(lanes)) for verb, lanes in CAUSES.items()}

    def run(self) -> list[Part]:
        cause: Event | None = None
        while self.at > self.start:
            before = self._before(cause) if cause is not None else None
            cause = self._through(before) if before is not None else self._main_before()
        return self.parts[::-1]

    def _go(self, name: str, what: str, start: float) -> None:
        """The path has been there from `start` to where it stands."""
        start = max(min(start, self.at), self.start)
        if start < self.at:
            self.parts.append(Part(name, what, start, self.at))
        self.at = start

    def _through(self, e: Event) -> Event:
        self._go(HANDOVER, "", e.end)
        self._go(resource(e.lane), e.name, e.start)
        return e

    def _before(self, e: Event) -> Event | None:
        """What `e` began upon."""
        same = (self._by_resource[resource(e.lane)], self._by_shard.get(e.shard))
        found = [f for ends in same if ends is not None and (f := ends.last(e.start, e.start - SLACK, e)) is not None]
        return max(found, key=lambda f: f.end, default=None)

    def _main_before(self) -> Event | None:
        """Along the thread that computes, to its last segment; the cause if that is a wait that has one."""
        i = bisect.bisect_left(self._starts, self.at) - 1
        if i < 0:
            self._go(HANDOVER, "", self.start)
            return None
        segment = self._main[i]
        self._go(HANDOVER, "", segment.end)
        if segment.lane == WAITING and self.at > segment.start:
            cause = self._cause(segment)
            if cause is not None:
                return self._through(cause)
        self._go(segment.lane, segment.name, segment.start)
        return None

    def _cause(self, wait: Event) -> Event | None:
        """The last to end, within the wait, of what it was for."""
        if wait.shard in self._by_shard:
            found = self._by_shard[wait.shard].last(self.at, wait.start)
            if found is not None:
                return found
        ends = self._by_verb.get(wait.verb)
        return ends.last(self.at, wait.start) if ends is not None else None


def critical_path(events: Sequence[Event], start: float, end: float) -> list[Part]:
    """What decided the length of [start, end], in order. See [Note: the critical path]."""
    return _Walk(events, start, end).run()


@dataclasses.dataclass(frozen=True)
class Summary:
    """One step. Seconds by resource, by verb for `waited`; bytes by verb."""

    step: int
    seconds: float
    busy: dict[str, float]
    waited: dict[str, float]
    path: dict[str, float]
    bytes: dict[str, int]
    parts: list[Part] = dataclasses.field(repr=False)

    @property
    def limiter(self) -> str:
        """The resource that has most of the critical path."""
        return max(self.path, key=lambda name: self.path[name], default="")

    def sentence(self) -> str:
        """For people."""
        if not self.path:
            return "Nothing was recorded in this step."
        limiter, stood = self.limiter, sum(self.waited.values())
        what = _name(limiter)
        text = f"{what[0].upper()}{what[1:]} limits this step: it is {self._percent(self.path[limiter])} of the critical path"
        text += f", and was busy for {self._percent(self.busy[limiter])} of the time" if limiter in self.busy else ""
        others = [name for name in (COMPUTE, NVME, LANES["step"]) if name != limiter and name in self.busy]
        beside = ", ".join(f"{_name(name)} for {self._percent(self.busy[name])}" for name in others)
        text += f"; {beside}" if beside else ""
        worst = max(self.waited, key=lambda verb: self.waited[verb], default="")
        mostly = f", {'mostly ' * (self.waited[worst] < 0.95 * stood)}for {worst}" if worst else ""
        return f"{text}. Compute stood still for {self._percent(stood)}{mostly}."

    def _percent(self, seconds: float) -> str:
        return f"{100 * seconds / self.seconds:.0f} %"


NAMES = {
    NVME: "the drive",
    LANES["step"]: "the CPU optimizer",
    HANDOVER: "what lies between the parts (Python, wake-ups)",
    LOOP: "the training loop between two steps (data, logging)",
    WAITING: "waiting for what is not in the trace",
}


def _name(resource: str) -> str:
    return NAMES.get(resource, resource if resource == COMPUTE else f"the lane {resource}")


def summary(timeline: Timeline, step: Step) -> Summary:
    """What limits `step`."""
    start, end = step.start, step.end
    events = timeline.within(start, end)
    waited: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    path: Counter[str] = Counter()
    for e in events:
        if e.lane == WAITING:
            waited[e.verb] += min(e.end, end) - max(e.start, start)  # type: ignore[assignment]
        elif e.nbytes and start < e.end <= end:
            moved[e.verb] += e.nbytes
    parts = critical_path(events, start, end)
    for part in parts:
        path[part.resource] += part.end - part.start  # type: ignore[assignment]
    return Summary(step.number, end - start, busy(events, start, end), dict(waited), dict(path), dict(moved), parts)
