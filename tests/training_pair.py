"""An engine and an oracle that do the same, for the training machine. See training_machine.py."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from oracle import assert_same, engine_snapshot
from torch import nn
from training_recipe import ROWS, SCHEDULERS, VOCABULARY, Recipe, loss_of

from zinf.engine import Engine
from zinf.errors import CommitError


@dataclass
class Moment:
    """What the oracle was, and what the engine counted then."""

    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    state: dict[Any, tuple[torch.Tensor, ...]]
    steps: dict[str, int]
    groups: list[dict[str, Any]]
    scheduler: dict[str, Any] | None
    scaler: Any
    data_at: int
    global_step: int
    skipped_steps: int


class Pair:
    """An engine and an oracle that do the same; every result is compared when there is one."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder
        self.oracle = recipe.oracle()
        self.scheduler = SCHEDULERS[recipe.scheduler](self.oracle.optimizer)
        self.data_at = 0  # micro-batches taken
        self.open()

    def open(self, **options: Any) -> None:
        """An engine for the oracle: a new one, or with resume=True the one in the folder."""
        recipe, model = self.recipe, self.recipe.model()
        where = {"nvme_path": str(self.folder)} if recipe.nvme else {}
        self.engine = Engine(model, param_groups=recipe.parameter_groups(model), **recipe.options, **where, **options)
        if self.engine.memory.io:
            self.engine.memory.io.disarm()
        self.engine_scheduler = SCHEDULERS[recipe.scheduler](self.engine.optimizer)
        if self.engine_scheduler:
            self.engine.register("scheduler", self.engine_scheduler)
        for ours, theirs in zip(self.engine.module.parameters(), self.oracle.model.parameters(), strict=True):
            ours.requires_grad_(theirs.requires_grad)
        self.engine.module.order = list(self.oracle.model.order)

    @property
    def models(self) -> tuple[nn.Module, nn.Module]:
        return self.engine.module, self.oracle.model

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 + self.data_at)
        self.data_at += 1
        ids, labels = torch.randint(0, VOCABULARY, (2, ROWS), generator=generator)
        return ids, labels

    def step(self, last_factor: float = 1.0, between: Callable[[], None] = lambda: None) -> None:
        """A step of both. `last_factor` times the loss of the last micro-batch; `between` every forward and its backward. CommitError after all is done."""
        self.oracle.loss_scale = self.engine.loss_scale
        for micro in range(self.recipe.micro_batches):
            ids, labels = self.batch()
            factor = (last_factor if micro == self.recipe.micro_batches - 1 else 1.0) / self.recipe.micro_batches
            torch.manual_seed(self.data_at)
            want = loss_of(self.oracle.model, ids, labels) * factor
            self.oracle.backward(want)
            torch.manual_seed(self.data_at)
            loss = loss_of(self.engine, ids, labels) * factor
            assert _equal(loss.item(), want.item()), f"loss {loss.item()}, not {want.item()}"
            between()
            self.engine.backward(loss)
        norm, failed = self.oracle.step(), None
        skipped = math.isnan(norm)
        try:
            done = self.engine.step(extra={"data_at": self.data_at})
            assert done.skipped == skipped and (skipped or done.grad_norm == norm), f"{done}, not of norm {norm}"
        except CommitError as e:
            failed = e
        if self.scheduler and not skipped:
            for scheduler in (self.scheduler, self.engine_scheduler):
                scheduler.step(*([norm] if self.recipe.scheduler == "plateau" else []))
        if failed:
            raise failed

    def evaluate(self) -> None:
        """The same logits in evaluation."""
        ids = torch.randint(0, VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(5))
        for model in self.models:
            model.eval()
        with torch.no_grad():
            same = torch.equal(self.engine(ids), self.oracle.model(ids))
        for model in self.models:
            model.train()
        assert same, "logits of an evaluation differ"

    def compare(self) -> None:
        """Weights, state, averages, buffers, learning rates."""
        ours, want = engine_snapshot(self.engine), self.oracle.snapshot()
        if self.oracle.ema_decay is not None:  # of a parameter without a step the oracle has no average yet
            ours, want = ((weights, {key: planes[:-1] for key, planes in state.items()}) for weights, state in (ours, want))
            averages = self.engine.state_dict(ema=True)
            for key, run, p in self._places():
                if run.trainable and self.oracle.steps[p.name]:
                    average = self.oracle.state[key][-1][p.offset : p.offset + p.numel]
                    assert torch.equal(averages[p.name].reshape(-1), average), f"average of {p.name} differs"
        assert_same(ours, want)
        buffers = dict(self.engine.module.named_buffers())
        for name, buffer in self.oracle.model.named_buffers():
            assert torch.equal(buffers[name], buffer), f"buffer {name} differs"
        for mine, theirs in zip(self.engine.optimizer.param_groups, self.oracle.optimizer.param_groups, strict=True):
            assert float(mine["lr"]) == float(theirs["lr"]), f"lr {mine['lr']}, not {theirs['lr']}"

    def set_weights(self, name: str, value: torch.Tensor) -> None:
        """In the oracle, as an edit of the engine: what changed of a weight has the new value in full precision."""
        weight = self.oracle.params[name]
        for key, run, p in self._places():
            if p.name == name and run.trainable and run.dtype in ("bf16", "fp16"):
                rest = self.oracle.state[key][0][p.offset : p.offset + p.numel]  # bf16: the lower half of fp32; fp16: all of it
                new = value.reshape(-1)
                changed = new != weight.detach().reshape(-1)
                rest[changed] = 0 if run.dtype == "bf16" else new[changed].float()
        with torch.no_grad():
            weight.copy_(value)

    def _places(self):
        for shard in self.oracle.layout.shards:
            for index, run in enumerate(shard.runs):
                for p in run.params:
                    yield (shard.name, index), run, p

    def moment(self) -> Moment:
        oracle, engine = self.oracle, self.engine
        return Moment(
            {name: p.detach().clone() for name, p in oracle.params.items()},
            {name: buffer.clone() for name, buffer in oracle.model.named_buffers()},
            {key: tuple(t.clone() for t in planes) for key, planes in oracle.state.items()},
            dict(oracle.steps),
            [copy.deepcopy({key: value for key, value in group.items() if key != "params"}) for group in oracle.optimizer.param_groups],
            copy.deepcopy(self.scheduler.state_dict()) if self.scheduler else None,
            engine._scaler.state(),
            self.data_at,
            engine.global_step,
            engine.skipped_steps,
        )

    def go_back(self, moment: Moment) -> None:
        """The oracle, to where the engine says that it is; what the engine counts is compared."""
        engine, oracle = self.engine, self.oracle
        assert engine._scaler.state() == moment.scaler or not engine._scaler.dynamic, f"loss scale {engine._scaler.state()}, not {moment.scaler}"
        counts, want = (engine.global_step, engine.skipped_steps), (moment.global_step, moment.skipped_steps)
        assert counts == want, f"(steps, skipped) {counts}, not {want}"
        with torch.no_grad():
            for name, p in oracle.params.items():
                p.copy_(moment.weights[name])
            for name, buffer in oracle.model.named_buffers():
                buffer.copy_(moment.buffers[name])
        oracle.state = {key: tuple(t.clone() for t in planes) for key, planes in moment.state.items()}
        oracle.steps, oracle.sums, self.data_at = dict(moment.steps), {}, moment.data_at
        for group, saved in zip(oracle.optimizer.param_groups, moment.groups, strict=True):
            group.update(copy.deepcopy(saved))
        if self.scheduler:
            self.scheduler.load_state_dict(copy.deepcopy(moment.scheduler))


def _equal(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))
