"""How far a run has come, beside its records: counters, groups, random numbers, buffers, the user's objects and values.

`snapshot` is what a commit stores of it, `restore` takes it back. Objects that move after step() (learning-rate schedulers) are
looked at when the model is next used; until then the commit of the step waits, as `late`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zinf import buffers, rng
from zinf.commit import Committer
from zinf.errors import ConfigError
from zinf.objects import Objects
from zinf.optimizer import Optimizer
from zinf.stepping import Stepper


class Marks:
    """Snapshots of steps that recover() may go back to and the store cannot tell of: the first, which is in no commit, and the last."""

    def __init__(self) -> None:
        self._first: tuple[int, dict[str, Any]] | None = None
        self._last: tuple[int, dict[str, Any]] | None = None

    def set(self, step: int, snapshot: dict[str, Any]) -> None:
        self._last = (step, snapshot)
        self._first = self._first or self._last

    def clear(self) -> None:
        """The state of a step was changed by hand: it is another one now."""
        self._first = self._last = None

    @property
    def empty(self) -> bool:
        return self._first is None

    def of(self, step: int) -> dict[str, Any] | None:
        """The snapshot of `step`, if there is one."""
        return next((snapshot for mark in (self._last, self._first) if mark is not None for n, snapshot in [mark] if n == step), None)


class Progress:
    """One per engine. `optimizer` and `stepper` are set by the engine."""

    optimizer: Optimizer
    stepper: Stepper

    def __init__(self, module: nn.Module, committer: Committer, algorithm: str):
        self._committer, self._algorithm = committer, algorithm
        self.extra: dict[str, Any] = {}  # the user's plain values
        self.objects = Objects()
        self.buffers = buffers.Changed(module)
        self.marks = Marks()
        self.imported: dict[str, Any] = {}  # what the import left in the store's manifest
        self.late: tuple[int, dict[str, Any]] | None = None  # the commit to be asked for when the model is next used, see objects.py
        self._resumed_step = -1
        self._resumed_groups: list[dict[str, Any]] = []
        self._rng: dict[str, Any] | None = None

    def snapshot(self) -> dict[str, Any]:
        """All that a resumed engine needs beyond the records, as of now."""
        engine = {
            **self.stepper.state(),
            "optimizer": self._algorithm,
            "groups": self._groups(),
            "rng": rng.capture(),
            "buffers": self.buffers.capture(),
        }
        return {**self.imported, "engine": engine, "user": self.extra, "objects": self.objects.capture()}

    def mark(self) -> None:
        """Keep a snapshot of the last step, for recover()."""
        self.marks.set(self.stepper.global_step, self.snapshot())

    def step_done(self, step: int) -> None:
        """`step` is fixed, and to be committed."""
        self.late = (step, self.snapshot())
        self.marks.set(*self.late)
        if not self.objects.late:
            self.ask_late()

    def ask_late(self) -> None:
        """Ask for the commit of the last step, with the late objects as they are now. See [Note: when an object is looked at] in objects.py."""
        if self.late is not None:
            (step, payload), self.late = self.late, None
            if self.objects.late:
                if self.objects.schedules:
                    payload["engine"]["groups"] = self._groups()
                payload["objects"].update(self.objects.capture(late=True))
            self._committer.ask(step, payload)

    def ask(self) -> None:
        """Ask for a commit of the last step as everything is now. No-op in an engine for inference: its store may be a run's, which goes on from there."""
        if not self._trains():
            return
        self.late = None
        self.mark()
        self._committer.ask(self.stepper.global_step, self.marks.of(self.stepper.global_step) or {})

    def register(self, name: str, obj: Any, late: bool | None) -> None:
        """See Engine.register."""
        if self.objects.add(name, obj, late) and self.stepper.global_step == self._resumed_step:
            self._load_groups(self._resumed_groups)  # a scheduler sets the learning rate when it is built

    def restore(self, committed: dict[str, Any]) -> None:
        """The inverse of `snapshot`; random numbers wait for `restore_rng`. Raises ConfigError for another optimizer's."""
        self.imported = {k: v for k, v in committed.items() if k not in ("engine", "user", "objects")}
        self.extra = committed.get("user", {})
        state = committed.get("engine")
        if state is None:
            return  # imported, never trained
        if not self._trains():
            self.buffers.restore(state.get("buffers", {}))  # for inference: what trained it does not matter
            return
        trained = state.get("optimizer", "adamw or adam")  # before it was written down, there were these two
        if self._algorithm not in trained.split():
            raise ConfigError(
                f"the store was trained with {trained}, and this run's optimizer is {self._algorithm}, which takes its state for something else: "
                f"set optimizer to {trained.split()[0]}, or start from an export of the weights under another run_name"
            )
        self.stepper.load_state(state)
        if len(state["groups"]) != len(self.optimizer.param_groups):
            raise ConfigError(
                f"the store was trained with {len(state['groups'])} parameter groups, and {len(self.optimizer.param_groups)} are given: use the same groups"
            )
        self.objects.restore(committed.get("objects", {}))
        self._resumed_step, self._resumed_groups = self.stepper.global_step, state["groups"]
        self._load_groups(state["groups"])
        self.buffers.restore(state.get("buffers", {}))
        self._rng = state["rng"]

    def restore_rng(self) -> None:
        """See Engine.restore_rng."""
        if self._rng is not None:
            rng.restore(self._rng)

    def _trains(self) -> bool:
        return any(group["params"] for group in self.optimizer.param_groups)

    def _groups(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in g.items() if k != "params" and _plain(v)} for g in self.optimizer.param_groups]

    def _load_groups(self, groups: list[dict[str, Any]]) -> None:
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})


def _plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None))) or (isinstance(value, (list, tuple)) and all(map(_plain, value)))
