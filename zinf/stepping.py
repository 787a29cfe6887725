"""From gradients to steps: when a shard's grads are complete, what the norm allows, and who is stepped when.

Two modes with the same bits:

    deferred   `step` waits for all sums of squares, fixes one coefficient, and leaves a step pending on every shard; the shard's
               next fetch applies it (under the next forward). Needed for clipping, and where a step cannot be undone.
    backward   a shard is stepped as soon as its grads are complete, under the rest of backward; grads then wait only for
               their own shard's step. A gradient that is not finite is found before its own shard is stepped; shards stepped
               before it are undone by going back to the commit of the step before, which must exist.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zinf.chunks import NormItem, StepSpec
from zinf.commit import Committer
from zinf.config import Config
from zinf.errors import EngineError, NonFiniteError
from zinf.grads import ShardGrads
from zinf.optimizer import Optimizer, clip_scale, step_spec, total_norm
from zinf.pipeline import Job
from zinf.scaling import LossScaler
from zinf.shard import Shard
from zinf.tiers.device import DONE
from zinf.trace import Verb

if TYPE_CHECKING:
    from zinf.memory import Memory

log = logging.getLogger("zinf")


@dataclasses.dataclass(frozen=True)
class StepStats:
    """What one step did.

    `grad_norm` is the global L2 norm of the unscaled grads before clipping, nan where `skipped` (some grad was not finite); `loss_scale`
    is what this step's losses were multiplied by.
    """

    step: int
    grad_norm: float
    skipped: bool
    loss_scale: float = 1.0


class Stepper:
    """Grads in, steps out. One per engine; called by the thread that computes."""

    def __init__(
        self, memory: Memory, optimizer: Optimizer, committer: Committer, config: Config, mode: str, scaler: LossScaler, fetch: Callable[[Shard], object]
    ):
        self.memory = memory
        self.shards, self.grads, self.root = memory.shards, memory.grads, memory.root
        self.parts = memory.parts
        self.optimizer, self.committer, self.config, self.mode, self.scaler = optimizer, committer, config, mode, scaler
        self._fetch = fetch  # start the shard's fetch, which applies what is pending
        self.global_step = 0
        self.skipped_steps = 0
        self.backward_running = False
        self.interrupted = False  # a backward ended in an exception: the grads of this step are incomplete
        self.counts = [[0] * len(s.params) for s in self.shards]  # how often each parameter was stepped
        self._skipped_in_a_row = 0
        self._micro_step = 0  # backwards since the last step
        self._took = False  # has this backward given a parameter a gradient?
        self._waiting: list[ShardGrads] = []  # whose grads this step is made of
        self._sums: dict[int, float] = {}
        self._sum_jobs: dict[int, Job] = {}  # in the order in which shards were complete
        self._began: dict[int, None] = {}  # shards with grads, in the order of their first
        self._early: dict[int, list[bool]] = {}  # shards stepped under backward, and which of their parameters

    # -- backward -----------------------------------------------------------------------------------------------------------

    def in_backward(self) -> None:
        """Called from hooks: a backward is running; be told when it ends."""
        if not self.backward_running:
            self.check_complete()
            self.scaler.check()
            self.backward_running, self._took = True, False
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]

    def settle(self, idle: bool = False) -> None:
        """End what a backward left open that an exception ended (autograd tells nobody), or a forward: then `idle`, which says that none runs now."""
        if torch._C._current_graph_task_id() != -1 or not (idle or self.backward_running):  # type: ignore[attr-defined]
            return
        for shard in self.shards:
            if self.backward_running:
                shard.forget_calls()
            shard.forget_binds(1 if shard is self.root else 0)
        if self.backward_running:
            self.backward_running, self.interrupted = False, True

    @property
    def early(self) -> bool:
        """Have shards been stepped under a backward whose step is not over?"""
        return bool(self._early)

    @property
    def summed(self) -> bool:
        """Are there grads that no step has been given?"""
        return self.interrupted or any(g.open or (g.waiting and not g.assigned) for g in self.grads.of)

    def check_complete(self) -> None:
        """Raise EngineError after a backward that ended in an exception, until its grads are dropped."""
        if self.interrupted:
            raise EngineError("a backward ended in an exception, and its grads are incomplete: call zero_grad(), then repeat the backwards of this step")

    def check_whole(self) -> None:
        """Raise EngineError while some shards have been stepped and others have not."""
        if self.early:
            raise EngineError(
                "the backward has stepped some shards already (step_mode backward), so there is no whole model to read before the step is over: "
                "call step() first, or zero_grad() to drop the step; where several backwards make a step, set gradient_accumulation_steps"
            )

    def take(self, shard: Shard, i: int, p: nn.Parameter) -> None:
        """Parameter `i` of `shard` has a gradient: add it to the shard's, and free it."""
        grad, p.grad = p.grad, None
        assert grad is not None
        if grad.layout is not torch.strided:
            raise EngineError(f"{shard.params[i][1].name} has a sparse gradient; zinf keeps dense ones: build the embedding with sparse=False")
        self.in_backward()
        grads = self.grads.of[shard.index]
        if not grads.open and (shard.index in self._early or grads.assigned):
            raise EngineError(
                f"{shard.name} got a gradient after its step: set gradient_accumulation_steps to the number of backwards in a step, "
                "and call step() after the last"
            )
        grads.take(i, grad)
        self._began.setdefault(shard.index)
        self._took = True
        open_calls = [call for call in shard.calls if not call.over]
        if open_calls and not any(call.entered for call in open_calls):
            # No input of these calls needs a gradient, so only the parameters tell their end: each gives once in every call that trains it.
            if all(grads.counts[k] >= sum(call.trains[k] for call in shard.calls) for k in grads.trainable):
                for call in open_calls:
                    call.finish()

    def call_over(self, shard: Shard) -> None:
        """A call of `shard` is over; after its last one in this backward its grads are complete."""
        if all(call.over for call in shard.calls):
            self._complete(shard)

    def _complete(self, shard: Shard) -> None:
        """This backward makes no more grads for `shard`: offload them; sum squares and step if it is the step's last backward."""
        grads = self.grads.of[shard.index]
        if not grads.open:
            return
        grads.close()
        last = self._micro_step + 1 >= self.config.gradient_accumulation_steps
        if last or grads.away is not None:  # squares are summed before the grads leave
            self._sum_squares(grads)
        else:
            self._sum_jobs.pop(grads.shard.index, None)  # of a norm that was asked for before these
        if last and self.mode == "backward" and shard is not self.root:
            self._step_early(grads)
        else:
            grads.leave()

    def _end_backward(self) -> None:
        """The whole backward is over: end the calls that found no end, and complete the shards that were not."""
        try:
            for shard in self.shards:
                for call in list(shard.calls):
                    if not call.over and (call.bound or self.grads.of[shard.index].open):
                        call.finish()
                self._complete(shard)
                for call in [call for call in shard.calls if call.over]:
                    shard.calls.discard(call)  # a graph that someone keeps is no open call
            self._micro_step += self._took
        except BaseException:
            self.interrupted = True  # some shards' grads are not complete
            raise
        finally:
            self.backward_running = False
            self.parts.trace.idle()

    def _sum_squares(self, grads: ShardGrads) -> None:
        index, sums = grads.shard.index, self._sums
        sums.pop(index, None)

        def found(total: float) -> None:  # on the pipeline's thread, which must not keep the engine alive
            sums[index] = total

        self._sum_jobs[index] = self.parts.fetcher.submit(Job([NormItem(grads.shard, grads.arrived, found)], f"norm of {grads.shard.name}"))

    def hold(self) -> None:
        """No backward from now on is a step's last, so none steps a shard, until zero_grad."""
        self._micro_step = -(1 << 62)

    def grads_changed(self, shard: Shard) -> None:
        """Someone is about to put other values in place of the grads of `shard` that wait in host memory: their squares are summed again."""
        job = self._sum_jobs.pop(shard.index, None)
        if job is not None:
            job.wait_over()

    # -- step ---------------------------------------------------------------------------------------------------------------

    def _spec(self, shard: Shard, seen: Sequence[bool], scale: float) -> StepSpec:
        algorithms = [self.optimizer.algorithm(p) if ok else None for ok, (*_, p) in zip(seen, shard.params, strict=True)]
        steps = [n + 1 for n in self.counts[shard.index]]
        return step_spec(shard, seen, algorithms, steps, scale, self.config.max_grad_value or math.inf)

    def _assign(self, shard: Shard, scale: float) -> list[bool]:
        """Leave a step pending on `shard`; returns which parameters it steps."""
        grads = self.grads.of[shard.index]
        seen = list(grads.seen)
        shard.pending = self._spec(shard, seen, scale)
        grads.assigned = True
        return seen

    def _step_early(self, grads: ShardGrads) -> None:
        """Step under the rest of backward; the step's own thread first makes sure that the grads are finite."""
        shard, index = grads.shard, grads.shard.index
        job, sums = self._sum_jobs[index], self._sums

        def gate() -> None:
            job.wait()
            if not math.isfinite(sums[index]):
                raise NonFiniteError(f"the gradient of {shard.name} is not finite")

        self.committer.retry()
        self.committer.wait()  # the versions that this step will overwrite must not be the ones being committed
        self._early[index] = self._assign(shard, 1.0 / self.scaler.scale)
        assert shard.pending is not None
        shard.pending.gate = gate
        self._fetch(shard)

    def prepare(self) -> None:
        """Wait for all that `step` needs. Changes nothing that matters: it may be interrupted, and called again."""
        self._check_stepped()
        self.check_complete()
        for shard in self.shards:
            for _, spec, p in shard.params:
                if p.requires_grad and not self.optimizer.steps(p):
                    raise EngineError(
                        f"{spec.name} was frozen when the engine was built and has no optimizer state: name it in zinf.Engine(model, trainable=...), "
                        "or unfreeze it before"
                    )
        self.optimizer.check()
        waiting = [g for g in self.grads.of if (g.waiting and not g.assigned) or g.shard.index in self._early]
        if not waiting:
            raise EngineError("step without grads: call engine.backward(loss) first, with a loss that depends on trainable parameters")
        self.apply_pending()
        for g in waiting:
            if g.shard.index not in self._sum_jobs:
                self._sum_squares(g)
        with self.parts.trace.wait(Verb.OFFLOAD):
            for g in waiting:
                self._sum_jobs[g.shard.index].wait()
                if g.away is not None:
                    g.away.wait()  # grads that did not get there are found before the step begins
        self._waiting = waiting

    def norm(self) -> float:
        """The norm that `step` will find, after `prepare`."""
        return total_norm(self._sums[g.shard.index] for g in self._waiting) / self.scaler.scale

    def step(self) -> StepStats:
        """Fix this step, after `prepare`. See Engine.step."""
        waiting = self._waiting
        sums = {g.shard.index: self._sums[g.shard.index] for g in waiting}
        first_bad = self._first_bad(sums)
        self._sum_jobs.clear()
        self._began.clear()
        self._micro_step = 0
        loss_scale = self.scaler.scale
        norm = total_norm(sums.values()) / loss_scale
        if not math.isfinite(norm):
            return self._skip(waiting, first_bad)
        self._skipped_in_a_row = 0
        self.scaler.update(overflow=False)
        scale = clip_scale(norm, self.config.max_grad_norm) / loss_scale
        for g in waiting:
            index = g.shard.index
            seen = self._early.get(index) or self._assign(g.shard, scale)
            self.counts[index] = [n + ok for n, ok in zip(self.counts[index], seen, strict=True)]
        self.global_step += 1
        self._early.clear()
        return StepStats(self.global_step, norm, False, loss_scale)

    def apply_pending(self) -> None:
        """Have every pending step applied, whether or not a forward came by."""
        for shard in self.shards:
            if shard.pending is not None:
                self._fetch(shard)
                shard.wait_fetched()

    def drain(self) -> None:
        """Wait until all that was stepped is where it belongs; raises what a step raised that nobody has waited for."""
        self.parts.stepper.drain()
        self._check_stepped()

    def _check_stepped(self) -> None:
        error = self.parts.stepper.error
        if error is not None and not isinstance(error, NonFiniteError):
            raise error

    def zero_grad(self) -> None:
        """Drop the grads summed since the last step, and undo what was stepped with them."""
        self._drop([g for g in self.grads.of if g.open or (g.waiting and not g.assigned)])
        if self._early:
            self.undo_early()
        self._began.clear()
        self._micro_step, self.interrupted = 0, False

    def _drop(self, waiting: Any) -> None:
        for g in waiting:
            job = self._sum_jobs.pop(g.shard.index, None)
            if job is not None:
                with contextlib.suppress(Exception):  # of grads that could not be moved, or summed: nobody wants them now
                    job.wait_over()
            g.drop()

    def _first_bad(self, sums: dict[int, float]) -> str:
        """The first shard in backward order whose grads are not finite; "" if all are.

        The first that was complete: a tied layer began before the blocks, but a NaN of theirs reached it after them. If all are
        bad, the loss was, and then it is the first that began.
        """
        bad = {index for index, total in sums.items() if not math.isfinite(total)}
        order = self._began if len(bad) == len(sums) else self._sum_jobs
        return next((self.shards[index].name for index in order if index in bad), "")

    def _skip(self, waiting: list[ShardGrads], first: str) -> StepStats:
        """Some gradient was NaN or infinite: change nothing, count, and raise when it happens too often in a row."""
        self.skipped_steps += 1
        loss_scale, curable = self.scaler.scale, self.scaler.can_fall
        self._skipped_in_a_row += not curable
        self.scaler.update(overflow=True)
        log.log(
            logging.INFO if curable else logging.WARNING,
            "step %d skipped: the gradient of %s is not finite (%d skipped in all); loss scale %g, next %g",
            *(self.global_step + 1, first, self.skipped_steps, loss_scale, self.scaler.scale),
        )
        if self._early:
            self.undo_early()
        self._drop(waiting)
        if self._skipped_in_a_row > self.config.max_skipped_steps:
            raise NonFiniteError(
                f"{self._skipped_in_a_row} steps in a row had grads that are not finite, this time first in {first} at step {self.global_step + 1}: "
                "lower the learning rate, look at the data, or raise max_skipped_steps"
            )
        return StepStats(self.global_step, math.nan, True, loss_scale)

    def state(self) -> dict[str, Any]:
        """Counters, as plain JSON values. `counts` only where a parameter was not stepped every time."""
        odd = {str(i): c for i, c in enumerate(self.counts) if any(n != self.global_step for n in c)}
        return {"global_step": self.global_step, "skipped_steps": self.skipped_steps, "counts": odd, "loss_scale": self.scaler.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.global_step, self.skipped_steps = state["global_step"], state["skipped_steps"]
        if "loss_scale" in state:
            self.scaler.load_state(state["loss_scale"])
        self.counts = [state["counts"].get(str(i), [self.global_step] * len(c)) for i, c in enumerate(self.counts)]

    def undo_early(self) -> None:
        """Shards were stepped under a backward whose step will not be: go back to the commit of the step before."""
        self.drain()
        store = self.parts.records.store
        if store is None or store.step != self.global_step:
            raise NonFiniteError(
                f"shards that were stepped under the backward of step {self.global_step + 1} cannot be undone, "
                f"as step {self.global_step} was not committed: go on from the last commit, with step_mode deferred or commit_every 1"
            )
        self.memory.roll_back()
        self._early.clear()

    def forget(self) -> None:
        """Nothing of a step is under way any more, in this order: grads, then all that was fixed from them. For a rollback."""
        for g in self.grads.of:
            with contextlib.suppress(OSError, RuntimeError):  # of a copy that failed: what it should have brought is dropped
                g.arrived.wait()
            g.arrived = DONE
            g.drop()
        self._waiting = []
        self._sums.clear()
        self._sum_jobs.clear()
        self._began.clear()
        self._early.clear()
        self._micro_step = self._skipped_in_a_row = 0
        self.backward_running = self.interrupted = False
