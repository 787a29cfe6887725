"""What a Trainer is at beside its model, in every commit of the store: so that a run killed between two checkpoints loses no step.

`Progress` is registered with the engine, which asks for its state when the model is next used: the step is then over, logged, and the schedule has
moved. It holds the Trainer's own state (without its history, which grows), the schedule, the parameter groups and the random numbers: what a
checkpoint-N has in files. A store that is further than the last checkpoint is a checkpoint by itself.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from typing import Any

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from zinf import rng
from zinf.engine import Engine
from zinf.objects import decode

log = logging.getLogger("zinf")


class Progress:
    """Of one trainer and its engine. `found` is what the store's last commit had, until training goes on from it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.found: dict[str, Any] = {}
        self._ahead = 0  # steps that the engine has made more than the Trainer counts, between steps
        self._said = False

    def state_dict(self) -> dict[str, Any]:
        """Plain values; nothing in the middle of a step, outside of training, or with a schedule whose state is more than that."""
        trainer = self._trainer
        if trainer.lr_scheduler is None or not trainer.is_in_train or self._steps() != self._ahead:
            return {}
        schedule = trainer.lr_scheduler.state_dict()
        try:
            json.dumps(schedule)
        except (TypeError, ValueError):
            if not self._said:
                log.info("the state of a %s is more than numbers and text: only checkpoints can be resumed from", type(trainer.lr_scheduler).__name__)
            self._said = True
            return {}
        state = dataclasses.asdict(trainer.state) | {"log_history": []}
        groups = [{k: v for k, v in g.items() if k in ("lr", "initial_lr")} for g in trainer.optimizer.param_groups]
        folder = os.path.abspath(trainer.args.output_dir)
        return {"output_dir": folder, "state": json.dumps(state), "schedule": json.dumps(schedule), "groups": groups, "rng": rng.capture()}

    def begin(self) -> None:
        """Training begins, and the Trainer is where its engine is."""
        self._ahead = self._steps()

    def _steps(self) -> int:
        engine = self._trainer.engine
        return engine.global_step + engine.skipped_steps - self._trainer.state.global_step

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep it for `further_than`."""
        self.found = state

    def keep(self, engine: Engine) -> None:
        """Let what the last commit has be found, as by a process that opens the store."""
        snapshot = engine.progress.marks.of(engine.global_step) or {}
        self.found = decode(snapshot.get("objects", {}).get("trainer", {}))

    def further_than(self, checkpoint: str | None) -> bool:
        """Is what was found of this run, and not behind the checkpoint?"""
        if self.found.get("output_dir") != os.path.abspath(self._trainer.args.output_dir):
            return False
        return checkpoint is None or json.loads(self.found["state"])["global_step"] >= step_of(checkpoint)

    def write(self, folder: str, checkpoint: str | None) -> None:
        """Put trainer_state.json into `folder`, with the history up to the last checkpoint."""
        state = json.loads(self.found["state"])
        if checkpoint is not None:
            state["log_history"] = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME)).log_history
        with open(os.path.join(folder, TRAINER_STATE_NAME), "w", encoding="utf-8") as f:
            json.dump(state, f)

    def restore(self) -> None:
        """Set the schedule and the groups, once they are made."""
        self._trainer.lr_scheduler.load_state_dict(json.loads(self.found["schedule"]))
        for group, saved in zip(self._trainer.optimizer.param_groups, self.found["groups"], strict=True):
            group.update(saved)

    def restore_rng(self) -> None:
        """Set the random number generators, once the data is where it was."""
        rng.restore(self.found["rng"])


def step_of(checkpoint: str) -> int:
    """N of checkpoint-N."""
    return int(os.path.basename(checkpoint).removeprefix("checkpoint-"))
