"""What a run achieves, held against what the planner says of it: once, after some steps, from what is known of this machine. Measures nothing itself."""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from zinf import measured, memory
from zinf.discover import dtype_name
from zinf.errors import ConfigError
from zinf.planner import cost, machine
from zinf.planner.cost import Forecast, Workload
from zinf.planner.model import Facts, active_parameters

if TYPE_CHECKING:
    from zinf.engine import Engine

log = logging.getLogger("zinf")

STEPS = 10
WARM = 2  # the first of them, which are slower: the order is learned, pages are touched


@dataclasses.dataclass(frozen=True)
class Comparison:
    """`seconds`: the median of the steps; `timed`: was the model itself timed for the forecast?"""

    seconds: float
    forecast: Forecast
    timed: bool

    @property
    def text(self) -> str:
        f = self.forecast
        limits = " + ".join(f"{r} {f.seconds[r]:.3g} s" for r in sorted(f.seconds, key=lambda r: -f.seconds[r])[:2] if f.seconds[r])
        hint = "" if self.timed else "; compute is assumed, `zinf plan MODEL` with this batch times it"
        return f"{self.seconds:.3g} s a step, forecast {f.step:.3g} s ({self.seconds / f.step:.2f}x), most of it for {f.limiter}: {limits}{hint}"

    def as_json(self) -> dict[str, Any]:
        f = self.forecast
        return {"achieved": self.seconds, "predicted": f.step, "limiter": f.limiter, "seconds": f.seconds, "timed": self.timed, "text": self.text}


class Achieved:
    """Times the steps of one engine. Called by the thread that computes."""

    def __init__(self) -> None:
        self.comparison: Comparison | None = None
        self._ends: list[float] = []
        self._shapes: list[tuple[int, int]] = []  # rows and tokens a row of each forward since the warm steps
        self._over = False

    def forward(self, tensors: Sequence[torch.Tensor]) -> None:
        """A forward in training begins, with these inputs."""
        if not self._over and len(self._ends) >= WARM:
            ids = next((t for t in tensors if t.dim() == 2 and not t.is_floating_point()), None)
            self._shapes.append((ids.shape[0], ids.shape[1]) if ids is not None else (0, 0))

    def stepped(self, engine: Engine) -> None:
        """A step is over."""
        if self._over:
            return
        self._ends.append(time.perf_counter())
        if len(self._ends) >= STEPS:
            self._over = True
            self._compare(engine)

    def _compare(self, engine: Engine) -> None:
        times = [b - a for a, b in zip(self._ends[WARM - 1 :], self._ends[WARM:], strict=False)]
        rows, seq = (max(1, round(statistics.mean(each))) for each in zip(*self._shapes, strict=True))
        try:
            forecast, timed = of_engine(engine, rows, seq) if all(all(shape) for shape in self._shapes) else (None, False)
        except (ConfigError, OSError) as e:  # nothing that a training may stop for
            log.info("no forecast to compare with: %s", e)
            return
        if forecast is not None:
            self.comparison = Comparison(statistics.median(times), forecast, timed)
            log.info("after %d steps: %s", STEPS, self.comparison.text)


def of_engine(engine: Engine, rows: int, seq: int, book: measured.Book | None = None) -> tuple[Forecast | None, bool]:
    """What the planner says of an engine's steps on batches of that shape, and whether its model was timed. None: it knows no such engine.

    Raises:
        ConfigError: this machine is not measured.
    """
    config, parts = engine.config, engine.memory.parts
    direct, store = parts.device.direct, parts.records.store
    book = book or measured.load()
    there = machine.this(book, store.paths if store is not None else [])
    if parts.device.name == "sim" or direct != there.direct or config.gradient_accumulation_steps > 1:
        return None, False
    facts = of_model(engine)
    at_once = min(config.micro_batch_size or rows, rows)
    pace = book.paces.get(measured.pace_key(facts.layout.fingerprint(), at_once, seq, facts.dtype))
    there = there.computing(facts.dtype)
    if pace is not None:
        there = there.paced(sum(facts.flops(at_once * seq)), pace.seconds, f"compute: this model's blocks, measured {pace.when}")
    request = memory.request(config, store is not None, direct, engine.step_mode)
    work = Workload(batch=rows, seq=seq, micro_batch=config.micro_batch_size, clip=config.max_grad_norm is not None, optimizer=config.optimizer)
    plan, every = engine.memory.plan, memory.commit_every(config, engine.memory.plan, root_of(engine))
    return cost.predict(facts, plan, request, there, work, engine.step_mode == "deferred", every if store is not None else 0), pace is not None


def root_of(engine: Engine) -> int | None:
    return engine.memory.root.index if engine.memory.root is not None else None


def of_model(engine: Engine) -> Facts:
    """The planner's facts of an engine's model. Without a transformers config nothing is known of experts and of hidden sizes."""
    config: Any = getattr(engine.module, "config", None)
    keys = config.get_text_config().to_dict() if hasattr(config, "get_text_config") else {}
    units, model = engine.units, engine.layout
    dtypes = [p.dtype for unit in units if unit.block for _, p in unit.params]
    return Facts(
        type(engine.module).__name__,
        model,
        *memory.roles(units),  # type: ignore[arg-type]
        blocks=sum(u.block for u in units),
        hidden=keys.get("hidden_size") or 0,
        active=active_parameters(model, keys),
        trained=active_parameters(model, keys, trained=True),
        dtype=dtype_name(dtypes[0]) if dtypes else "bf16",
    )
