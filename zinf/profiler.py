"""Where a step computes: MACs, FLOPs, parameters and time of each module, for a model as it is or one that an engine streams.

    report = zinf.profile(engine, batch)        # or a module; batch: its keyword arguments, or a tuple of positional ones
    print(report.table(module_depth=2))

FLOPs are counted by torch's FlopCounterMode from the shapes of the operations that run. What they belong to:

    forward    the modules that are being called, known from their hooks
    backward   an operation runs inside of a node of autograd, which has the number that the forward gave it: the module that was being called
               when that number was given. So nothing is known twice, and nothing is lost where blocks are recomputed
    recompute  in backward with gradients enabled: a forward that is repeated. Counted apart, as the model's own cost is without it

Times are of forwards, with counting in them (some microseconds an operation), and on a card with a wait for it at each module. Of a streamed block
that is what the loop sees: with the wait for its weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from zinf import rng
from zinf.errors import EngineError

if TYPE_CHECKING:
    from zinf.engine import Engine

aten = torch.ops.aten


@dataclasses.dataclass
class Row:
    """One module, with all that is below it. FLOPs count a multiplication and an addition as two; MACs are half of them."""

    name: str  # "" is the model
    kind: str
    depth: int
    params: int = 0
    forward: int = 0
    backward: int = 0
    recompute: int = 0
    seconds: float = 0.0
    calls: int = 0

    @property
    def macs(self) -> int:
        """Of the forward."""
        return self.forward // 2


@dataclasses.dataclass(frozen=True)
class Profile:
    """What one forward and backward did, by module, in the order of the model."""

    rows: list[Row]

    @property
    def total(self) -> Row:
        """The whole model."""
        return self.rows[0]

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def top(self, depth: int, count: int, key: str = "forward") -> list[Row]:
        """The `count` largest of a depth, of one kind of module together, by forward, params or seconds."""
        kinds: dict[str, Row] = {}
        for row in self.rows:
            if row.depth == depth:
                whole = kinds.setdefault(row.kind, Row("", row.kind, depth))
                for field in ("params", "forward", "backward", "recompute", "seconds", "calls"):
                    setattr(whole, field, getattr(whole, field) + getattr(row, field))
        return sorted(kinds.values(), key=lambda row: getattr(row, key), reverse=True)[:count]

    def table(self, module_depth: int = -1, top_modules: int = 1, detailed: bool = True) -> str:
        """Lines for people.

        Args:
            module_depth: rows down to this depth; -1: all.
            top_modules: of each depth, how many of the largest kinds of module.
            detailed: with the rows.
        """
        t = self.total
        deepest = max(row.depth for row in self.rows)
        most = deepest if module_depth < 0 else min(module_depth, deepest)
        per_second = t.forward / t.seconds if t.seconds else 0.0
        lines = [
            f"parameters {_count(t.params)}  MACs {_count(t.macs)}  "
            f"FLOPs forward {_count(t.forward)}, backward {_count(t.backward)}, recompute {_count(t.recompute)}",
            f"forward {t.seconds * 1e3:.1f} ms, {_count(per_second)}FLOP/s (with counting)",
        ]
        for depth in range(most + 1):
            for what, key in (("MACs", "macs"), ("parameters", "params"), ("latency", "seconds")):
                best = self.top(depth, top_modules, "forward" if key == "macs" else key)
                shown = ", ".join(f"{row.kind} {_time(row.seconds) if key == 'seconds' else _count(getattr(row, key))}" for row in best)
                lines.append(f"depth {depth}  top {top_modules} in {what}: {shown}")
        if detailed:
            lines += ["", *_aligned([_HEADER, *(_cells(row, t) for row in self.rows if row.depth <= most)])]
        return "\n".join(lines) + "\n"

    def write(self, file: str | os.PathLike[str], **how: Any) -> None:
        """The table, into a file."""
        with open(file, "w", encoding="utf-8") as f:
            f.write(self.table(**how))


_HEADER = ("module", "parameters", "MACs", "FLOPs forward", "backward", "recompute", "latency", "of all")


def _cells(row: Row, total: Row) -> tuple[str, ...]:
    name = "  " * row.depth + (f"{row.name.rpartition('.')[2]}: {row.kind}" if row.name else row.kind)
    share = f"{row.forward / total.forward:.1%}" if total.forward else ""
    return (name, _count(row.params), _count(row.macs), _count(row.forward), _count(row.backward), _count(row.recompute), _time(row.seconds), share)


def _aligned(table: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip() for row in table]


def _count(n: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if n < 1000:
            return f"{n:.0f}{unit and ' ' + unit}" if unit == "" or n >= 100 else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} P"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


# ---------------------------------------------------------------------------------------------------------------- counting


Shape = torch.Size  # torch's counter hands shapes to formulas, in place of tensors


def _heads(query: Shape, other: Shape) -> tuple[int, ...]:
    """Keys or values with as many heads as there are queries."""
    return (*other[:1], query[1], *other[2:])


def _sdpa(query: Shape, key: Shape, value: Shape, *args: Any, **options: Any) -> int:
    return sdpa_flop_count(query, _heads(query, key), _heads(query, value))


def _sdpa_backward(grad: Shape, query: Shape, key: Shape, value: Shape, *args: Any, **options: Any) -> int:
    return sdpa_backward_flop_count(grad, query, _heads(query, key), _heads(query, value))


# Operations that torch has no entry for: its attention on a CPU. The formulas are torch's.
_ALSO = {"_scaled_dot_product_flash_attention_for_cpu": _sdpa, "_scaled_dot_product_flash_attention_for_cpu_backward": _sdpa_backward}


def _custom() -> dict[Any, Any]:
    found = {getattr(aten, name, None): formula for name, formula in _ALSO.items()}
    return {op: formula for op, formula in found.items() if op is not None and op not in flop_counter.flop_registry}


class _NoTracker:
    """In place of torch's, which loses its way where modules are called again in backward."""

    parents: frozenset[str] = frozenset()

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class Profiler(FlopCounterMode):
    """Counts, in a with block, what `module` does."""

    def __init__(self, module: nn.Module):
        super().__init__(display=False, custom_mapping=_custom())
        self.mod_tracker: Any = _NoTracker()
        self._module = module
        self._rows = {name: Row(name, type(m).__name__, name.count(".") + 1 if name else 0) for name, m in module.named_modules()}
        self._open: list[tuple[str, int, float]] = []  # calls: module, the next number of autograd, when
        self._numbers: list[tuple[int, int, str]] = []  # calls that are over: [first, end) of the numbers given in it; inner ones first
        self._undo: list[Any] = []
        for name, m in module.named_modules():
            self._rows[name].params = sum(p.numel() for p in m.parameters())  # each once, however many names it has

    def _with_above(self, name: str) -> Iterator[Row]:
        """The row of a module and those of all that it is in."""
        while True:
            if name in self._rows:
                yield self._rows[name]
            if not name:
                return
            name = name.rpartition(".")[0]

    def __enter__(self) -> Profiler:
        for name, module in self._module.named_modules():
            self._undo.append(module.register_forward_pre_hook(self._entering(name), prepend=True))
            self._undo.append(module.register_forward_hook(self._leaving, always_call=True))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        for handle in self._undo:
            handle.remove()
        self._undo.clear()
        self._open.clear()
        return super().__exit__(*error)

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._open.append((name, torch.autograd._get_sequence_nr(), _now()))  # type: ignore[attr-defined]

        return enter

    def _leaving(self, module: nn.Module, args: Any, out: Any) -> None:
        name, first, began = self._open.pop()
        if torch._C._current_graph_task_id() == -1:  # type: ignore[attr-defined]
            row = self._rows[name]
            row.seconds, row.calls = row.seconds + _now() - began, row.calls + 1
            self._numbers.append((first, torch.autograd._get_sequence_nr(), name))  # type: ignore[attr-defined]

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if func_packet in self.flop_registry:
            count = self.flop_registry[func_packet](*args, **kwargs, out_val=out)
            node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
            field = "forward" if node is None else "recompute" if torch.is_grad_enabled() else "backward"
            name = self._open[-1][0] if self._open else self._caller(node._sequence_nr()) if node is not None else ""
            for row in self._with_above(name):
                setattr(row, field, getattr(row, field) + count)
        return out

    def _caller(self, number: int) -> str:
        """The innermost module that was being called when autograd gave this number."""
        return next((name for first, end, name in self._numbers if first <= number < end), "")

    @property
    def report(self) -> Profile:
        """What was counted until now."""
        return Profile(list(self._rows.values()))


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


# ----------------------------------------------------------------------------------------------------------------- profile


def profile(model: Any, batch: Any, *, loss: Callable[[Any], torch.Tensor] | None = None, backward: bool = True) -> Profile:
    """Run one forward and backward, and say what they cost. Weights, grads, buffers and random numbers are what they were.

    Args:
        model: a module, a zinf.Engine, or an engine of deepspeed.initialize.
        batch: keyword arguments (a mapping), positional ones (a tuple or list), or the only one.
        loss: from the model's output to a loss; default: its `loss`, the output itself if it is one number, else its sum.
        backward: also the backward.

    Raises:
        EngineError: the engine has grads that no step was given.
    """
    engine = getattr(model, "zinf", model)
    module: nn.Module = engine if isinstance(engine, nn.Module) else engine.module
    with contextlib.ExitStack() as stack:
        stack.enter_context(_unchanged(module))
        stack.enter_context(_plain(module) if module is engine else _streamed(engine))
        counter = stack.enter_context(Profiler(module))
        with contextlib.nullcontext() if backward else torch.no_grad():
            out = _call(engine, batch)
        if backward:
            value = (loss or _loss)(out)
            (engine.scale(value) if module is not engine else value).backward()
        return counter.report


def _call(model: Any, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _loss(out: Any) -> torch.Tensor:
    if isinstance(getattr(out, "loss", None), torch.Tensor):
        return out.loss
    if isinstance(out, Mapping) and isinstance(out.get("loss"), torch.Tensor):
        return out["loss"]
    tensors = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    return sum((t.float().sum() for t in tensors if t.dim()), next((t for t in tensors if not t.dim()), torch.zeros(())))


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Random numbers and buffers are afterwards what they were."""
    state, buffers = rng.capture(), [(b, b.detach().clone()) for b in module.buffers()]
    try:
        yield
    finally:
        rng.restore(state)
        with torch.no_grad():
            for b, before in buffers:
                b.copy_(before)


@contextlib.contextmanager
def _plain(module: nn.Module) -> Iterator[None]:
    """The grads of a module are put aside."""
    grads = [(p, p.grad) for p in module.parameters()]
    for p, _ in grads:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in grads:
            p.grad = grad


@contextlib.contextmanager
def _streamed(engine: Engine) -> Iterator[None]:
    """The grads of this backward are dropped, and no shard is stepped under it."""
    engine.health.check_usable(idle=True)
    if engine.stepper.summed:
        raise EngineError("profile between a backward and its step: its grads would be mixed with those: call step() first, or zero_grad()")
    engine.stepper.hold()
    try:
        yield
    finally:
        engine.zero_grad()
