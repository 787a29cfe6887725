"""Bad weather for the I/O engine: rules that say which piece of I/O goes wrong, and how. For tests.

The native backends ask the rules just before a piece is handed to the kernel, below the examination of completions, so that the
retries, continuations and errors that a test sees are those of the real reactor. A piece whose fate is an error is not transferred; a short one
is transferred in part. The python backend asks the same rules in the same place, and a seed means the same sequence everywhere.

    engine = FaultyEngine(open_engine("uring"), [Rule("w", path="state", nth=3, error=errno.EIO)])
    open_engine("faults:uring")          # the same backend in a storm() that callers must not notice
    ZINF_IO_BACKEND=faults:uring pytest  # ... under a whole test suite; ZINF_FAULTS_SEED chooses another storm
"""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

_MASK = (1 << 64) - 1


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of trouble. Matches pieces (and datasyncs) by kind and path, fires on the nth match or by chance. The first rule that fires wins."""

    kinds: str = "rw"  # any of r (read), w (write), d (datasync)
    path: str = ""  # substring of the path; empty: every file
    nth: int = 0  # fires on this match, counted from 1; 0: by probability
    probability: float = 0.0
    seed: int = 0
    times: int = 0  # fires at most so often; 0: no limit
    error: int = 0  # errno instead of I/O; EAGAIN and EINTR are retried
    short: int = 0  # bytes: transfer only so many (at least a page with O_DIRECT)
    delay_ms: int = 0

    def __post_init__(self) -> None:
        if not self.kinds or set(self.kinds) - set("rwd"):
            raise ValueError(f"kinds must be letters of 'rwd', not {self.kinds!r}")
        if bool(self.nth) == bool(self.probability):
            raise ValueError("a rule fires on the nth match or by probability: give one of them")
        if not (self.error or self.short or self.delay_ms):
            raise ValueError("a rule needs a consequence: error, short or delay_ms")


@dataclasses.dataclass(frozen=True)
class Fate:
    """What happens to one piece; all zero: nothing unusual."""

    error: int = 0
    short: int = 0
    delay_ms: int = 0


def storm(seed: int | None = None, *, error: float = 0.1, short: float = 0.2, delay: float = 0.05) -> list[Rule]:
    """Troubles that no caller may notice: EAGAIN, EINTR, short transfers and delays, with these probabilities for each piece."""
    if seed is None:
        seed = int(os.environ.get("ZINF_FAULTS_SEED", "0"))
    rules = [Rule("rwd", probability=delay, seed=seed, delay_ms=2)] if delay else []
    for i, code in enumerate((errno.EAGAIN, errno.EINTR), 1):
        rules += [Rule("rwd", probability=error, seed=seed + i, error=code)] if error else []
    return rules + ([Rule("rw", probability=short, seed=seed + 3, short=8192)] if short else [])


def uniform(seed: int, index: int) -> float:
    """splitmix64 of (seed, index) in [0, 1); csrc/aio/fault.cpp computes the same."""
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


class RuleSet:
    """Rules and their counts; the python backend's copy of csrc/aio/fault.cpp. Thread safe."""

    def __init__(self, rules: Sequence[Rule] = ()) -> None:
        self._rules = list(rules)
        self._seen = [0] * len(self._rules)
        self._fired = [0] * len(self._rules)
        self._lock = threading.Lock()

    def decide(self, kind: str, path: str) -> Fate:
        if not self._rules:
            return Fate()
        chosen = None
        with self._lock:
            for i, rule in enumerate(self._rules):
                if kind not in rule.kinds or rule.path not in path:
                    continue
                self._seen[i] += 1
                hit = self._seen[i] == rule.nth if rule.nth else uniform(rule.seed, self._seen[i]) < rule.probability
                if not hit or chosen or (rule.times and self._fired[i] >= rule.times):
                    continue
                self._fired[i] += 1
                chosen = Fate(rule.error, rule.short, rule.delay_ms)
        return chosen or Fate()

    def fired(self) -> list[int]:
        with self._lock:
            return list(self._fired)


class FaultyEngine:
    """An IoEngine that is another one with rules armed; storm() if none are given. Everything but the methods here is the inner engine's."""

    def __init__(self, inner: Any, rules: Iterable[Rule] | None = None) -> None:
        self.inner = inner
        self.name = f"faults:{inner.name}"
        self.arm(storm() if rules is None else rules)

    def arm(self, rules: Iterable[Rule]) -> None:
        """Replaces the rules and their counts; what was already handed to the kernel is not affected."""
        self.rules = list(rules)
        self.inner.arm([dataclasses.astuple(rule) for rule in self.rules])

    def disarm(self) -> None:
        self.arm([])

    def fired(self) -> list[int]:
        """How often each rule has fired: a test of an error path should see that its fault happened."""
        return self.inner.fired()

    def report(self) -> dict[str, object]:
        return {**self.inner.report(), "faults": len(self.rules)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
