"""Commits: the moment from which a step survives anything.

A commit is asked for when a step is fixed, and made when every shard of that step has been stepped and flushed: under the next
forward where steps are deferred. Nobody waits for it but the next step that would write, and close.

[Note: a commit that fails] Where all that it would have named is on disk, or still in host memory, a failed commit has lost
nothing: the step before is still the committed one, and the next commit takes its place. That is a CommitError, and training
may go on. Where a chunk is lost (its write failed, or an fdatasync after which the kernel may have dropped it), the commit
fails as the write did, and only recover() helps.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from zinf.chunks import CallItem
from zinf.errors import CommitError
from zinf.pipeline import Job
from zinf.shard import Parts, Shard
from zinf.tiers.manifest import LostRename
from zinf.trace import Verb

log = logging.getLogger("zinf")


@dataclasses.dataclass
class _Commit:
    """One commit, from the moment it is asked for."""

    step: int
    extra: dict[str, Any]
    job: Job | None = None
    error: CommitError | None = None  # see [Note: a commit that fails]; set on the stepper's thread
    told: bool = False  # the error was raised


class Committer:
    """Makes the commits of one engine, on the stepper's thread, after the moves that they seal."""

    def __init__(self, parts: Parts, shards: Sequence[Shard]):
        self._parts, self._shards = parts, shards
        self._asked: _Commit | None = None
        self._last: _Commit | None = None  # the last one that was submitted

    def ask(self, step: int, extra: dict[str, Any]) -> None:
        """Commit `step` with `extra` once it is applied. Asking again before that replaces `extra`."""
        if self._parts.records.store is None:
            return
        self._asked = _Commit(step, extra)
        self.make_if_applied()

    @property
    def asked(self) -> int | None:
        """The step whose commit is still to be made."""
        return self._asked.step if self._asked is not None else None

    @property
    def failed(self) -> bool:
        """Did the last commit fail, without a loss? Does not wait for it."""
        return self._last is not None and self._last.error is not None

    def make_if_applied(self) -> None:
        """Submit the commit that was asked for, if no shard has a step pending any more."""
        if self._asked is None or any(s.pending is not None for s in self._shards):
            return
        self._settle()  # if that one failed, this one takes its place
        commit, self._asked = self._asked, None
        self._last = commit
        commit.job = self._parts.stepper.submit(Job([CallItem(lambda: self._make(commit))], f"commit of step {commit.step}"))

    def _make(self, commit: _Commit) -> None:
        stepper, records = self._parts.stepper, self._parts.records
        store = records.store
        assert store is not None
        if stepper.error is not None:
            raise stepper.error  # some chunk was not stepped, or not flushed: this is not the state after `step`
        try:
            with self._parts.trace.span(Verb.FLUSH, -1, f"commit {commit.step}"):
                records.flush()
                store.commit(commit.step, commit.extra)
        except OSError as e:
            if isinstance(e, LostRename) or records.lost():
                raise
            why = f"step {commit.step} is made and not committed ({e.strerror}), step {store.step} is the last that is: make room, then go on"
            commit.error = CommitError(e.errno, why, e.filename)
            log.warning("%s", commit.error)

    def retry(self) -> None:
        """Make the last commit again if it failed. Nothing may have been stepped since."""
        self._settle()
        if self._asked is None and self.failed:
            self._asked = dataclasses.replace(self._last, job=None, error=None, told=False)  # type: ignore[type-var]
            self.make_if_applied()

    def wait(self) -> None:
        """Until the last commit is made; raises what it raised."""
        self._settle()
        self.check()

    def check(self) -> None:
        """Raise CommitError if the last commit failed, once. Does not wait for it."""
        if self._last is not None and self._last.error is not None and not self._last.told:
            self._last.told = True
            raise self._last.error.with_traceback(None)

    def forget(self) -> None:
        """After a rollback: nothing is asked for, nothing is to be made again."""
        self._asked = self._last = None

    def _settle(self) -> None:
        """Until the last commit is over; raises what has lost something."""
        job = self._last.job if self._last is not None else None
        if job is not None:
            with self._parts.trace.wait(Verb.FLUSH):
                job.wait_over()
