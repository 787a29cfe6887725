"""Which shard moves next: called from the model's forward and backward, it fetches ahead along the cycle that it has learned."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from zinf.activations import Activations
from zinf.commit import Committer
from zinf.health import Health
from zinf.memory import Memory
from zinf.residency import residency
from zinf.schedule import Cycle, Phase, Use, training_cycle
from zinf.shard import Shard
from zinf.stepping import Stepper
from zinf.trace.recorder import Recorder

log = logging.getLogger("zinf")


class Conductor:
    """One per engine; see streaming.Conductor for what a call asks of it. `stepper` and `health` are set by the engine.

    Args:
        order: of the shards in a forward, before one was seen.
    """

    stepper: Stepper
    health: Health

    def __init__(self, memory: Memory, committer: Committer, order: Sequence[int], micro_batch_size: int | None):
        self.micro_batch_size = micro_batch_size
        self.batch_size: int | None = None  # rows of the current forward's batch
        self._memory, self._committer = memory, committer
        self._trace = memory.parts.trace
        self.train = Cycle(training_cycle(order))
        self._evaluate = Cycle(Use(Phase.EVALUATE, use.shard) for use in self.train.uses if use.phase is Phase.FORWARD)
        self._now = self.train  # the cycle that the current pass follows
        self._trained: list[Use] = []  # what was used since the current training cycle began
        self._evaluated: list[Use] = []

    # -- called from forward and backward -----------------------------------------------------------------------------------

    def use(self, phase: Phase, shard: Shard) -> None:
        """Compute is about to use `shard`: have its newest weights in the slab, and start fetching what comes next."""
        self.health.check_usable()
        self._trace.idle()
        use = Use(phase, shard.index)
        cycle = self._evaluate if phase is Phase.EVALUATE else self.train
        (self._evaluated if phase is Phase.EVALUATE else self._trained).append(use)
        self._now = cycle
        with self.health.noting():
            self.fetch(shard)
            if not cycle.advance(use):
                self._trace.count("misses")
            shard.hold()
            try:
                self._prefetch(cycle)
                shard.wait_fetched()
            finally:
                shard.let_go()
        self._trace.computing(phase.value, shard.index)
        if self._trace.recorder is not None:
            self._note_residency(self._trace.recorder)

    def _note_residency(self, recorder: Recorder) -> None:
        for tier, held in residency(self._memory).items():
            recorder.counter(f"{tier} memory", held)

    def call_over(self, shard: Shard) -> None:
        """A call's backward is over."""
        with self.health.noting():
            self.stepper.call_over(shard)

    def in_backward(self) -> None:
        """A backward is running."""
        self.stepper.in_backward()

    def called_in_backward(self, shard: Shard) -> None:
        """The model checkpoints around a block."""
        if not self._trace.counts["calls in backward"]:
            log.warning("%s is under a torch.utils.checkpoint of the model's own: it is recomputed twice; turn one of the two off", shard.name)
        self._trace.count("calls in backward")

    @property
    def activations(self) -> Activations:
        """What recomputed calls keep."""
        return self._memory.activations

    # -- called by the engine -----------------------------------------------------------------------------------------------

    def fetch(self, shard: Shard, before: int | None = None) -> bool:
        """Start a fetch along the current cycle. The last one that applies a step lets the commit follow."""
        pending = shard.pending is not None
        started = shard.fetch(self._now, before)
        if started and pending:
            self._committer.make_if_applied()
        return started

    def bring(self, shard: Shard) -> None:
        """Have the shard's newest weights where they can be read, outside of any pass."""
        with self.health.noting():
            self.fetch(shard)
            shard.wait_fetched()

    def _prefetch(self, cycle: Cycle) -> None:
        for index in cycle.upcoming(self._memory.lookahead):
            if not self.fetch(self._memory.shards[index], before=index):
                break

    def begin_forward(self, rows: int | None) -> None:
        """The model's forward begins, on a batch of so many rows (None: no tensor says)."""
        if not torch.is_grad_enabled():
            self._evaluated = []
        elif self._trained and self._trained[-1].phase is Phase.BACKWARD:
            self.learn()
        elif len(self._trained) > 64 * len(self._memory.shards):
            self._trained.clear()  # forwards that no backward follows are no cycle
        self.batch_size = rows

    def end_forward(self) -> None:
        """It is over, perhaps by an exception."""
        self._trace.idle()
        if self._evaluated and not torch.is_grad_enabled():
            self._evaluate.replace(self._evaluated)
            self._evaluated = []

    def learn(self) -> None:
        """What was used since the last cycle began is the cycle from now on."""
        if self._trained:
            self.train.replace(self._trained)
            self._trained = []

    def next_step(self) -> None:
        """A step was fixed: start fetching what its successor uses first."""
        self._now = self.train
        self._prefetch(self.train)

    @property
    def under_way(self) -> bool:
        """Was anything computed since the last step?"""
        return bool(self._trained)

    def start_over(self) -> None:
        """Nothing is under way."""
        self._trained, self._evaluated = [], []
        self._now = self.train
        for cycle in (self.train, self._evaluate):
            cycle.position = 0
