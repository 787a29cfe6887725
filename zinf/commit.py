"""Commits: the moment from which a step survives anything.

A commit is asked for when a step is fixed, and made when every shard of that step has been stepped and flushed: under the next
forward where steps are deferred. Nobody waits for it but the next step that would write, and close.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zinf.chunks import CallItem
from zinf.pipeline import Job
from zinf.shard import Parts, Shard
from zinf.trace import Verb


class Committer:
    """Makes the commits of one engine, on the stepper's thread, after the moves that they seal."""

    def __init__(self, parts: Parts, shards: Sequence[Shard]):
        self._parts, self._shards = parts, shards
        self._asked: tuple[int, dict[str, Any]] | None = None
        self._job: Job | None = None

    def ask(self, step: int, extra: dict[str, Any]) -> None:
        """Commit `step` with `extra` once it is applied. Asking again before that replaces `extra`."""
        if self._parts.records.store is None:
            return
        self._asked = (step, extra)
        self.make_if_applied()

    @property
    def asked(self) -> int | None:
        """The step whose commit is still to be made."""
        return self._asked[0] if self._asked is not None else None

    def make_if_applied(self) -> None:
        """Submit the commit that was asked for, if no shard has a step pending any more."""
        if self._asked is None or any(s.pending is not None for s in self._shards):
            return
        self.wait()
        (step, extra), self._asked = self._asked, None
        records, store = self._parts.records, self._parts.records.store
        assert store is not None

        stepper = self._parts.stepper

        def commit() -> None:
            if stepper.error is not None:
                raise stepper.error  # some chunk was not stepped, or not flushed: this is not the state after `step`
            with self._parts.trace.span(Verb.FLUSH, -1, f"commit {step}"):
                records.flush()
                store.commit(step, extra)

        self._job = stepper.submit(Job([CallItem(commit)], f"commit of step {step}"))

    def wait(self) -> None:
        """Until the last commit is made; raises what it raised."""
        job, self._job = self._job, None
        if job is not None:
            with self._parts.trace.wait(Verb.FLUSH):
                job.wait_over()
