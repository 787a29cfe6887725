"""How a module computes from a shard that comes and goes: bind, checkpointed forward, grads in.

Goals: the module's own forward runs unchanged; loss and gradients have the bits of plain PyTorch; nothing of a shard stays in
memory between its uses. The phases of one call of a block:

    forward    the slab is fetched, parameters become views of it, the module's forward runs under non-reentrant activation
               checkpointing, parameters become placeholders again; what the call keeps is its inputs
    backward   the first saved tensor that autograd asks for runs the forward again: the slab is fetched, bound, and stays
               bound while autograd walks the block
    done       when the input that needs a gradient has it, or all parameters have (a first block, whose input needs none); then the
               slab is unbound, and once no call of the shard is open its grads are complete

A single layer (embedding, head), or a block that `recompute` leaves out, is not recomputed: whatever it saves that is a view of
the slab is stored as (offset, shape) and looked up again in the slab of that moment; everything else it saves lives until then.

A model may checkpoint parts of itself. Inside a block that is a forward under a backward that has bound the shard; around a block
it is a call within a backward, exact, and wasted, as the block is recomputed twice: one log line says so.

A backward that makes a graph of itself (create_graph=True) computes from copies of the weights, which live as long as that graph:
what it saves goes through no hook of ours.

[Note: when a call's backward is over] Autograd runs ready nodes latest-created first, and accumulates gradients into leaves
before anything else. The first input that needs a gradient enters a call through a view made there, so that view's node is the
oldest of the call and runs last: when its hook fires, every parameter gradient of the call has been taken. One view and not one
for each input, as sums over users of an input that several blocks share keep the order that they have without us. Where that
input gets no gradient, another one's being complete ends the call: then what made it runs, and that is older than the call. A call
that never gets there (an output that the loss does not use) ends with the backward itself.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from zinf.activations import Activations, Away, Kept
from zinf.errors import EngineError
from zinf.guards import set_on
from zinf.schedule import Phase
from zinf.shard import Shard


class Conductor(Protocol):
    """What a call asks of the engine."""

    micro_batch_size: int | None
    batch_size: int | None  # rows of the current forward's batch
    activations: Activations

    def use(self, phase: Phase, shard: Shard) -> None:
        """Have the shard's newest weights in its slab, and start fetching what comes next."""

    def call_over(self, shard: Shard) -> None:
        """A call's backward is over."""

    def in_backward(self) -> None:
        """A backward is running: be told when it ends."""

    def called_in_backward(self, shard: Shard) -> None:
        """A module was called within a backward: the model checkpoints around it."""


class Call:
    """One call of a shard's module with a graph, from its forward to the end of its backward."""

    def __init__(self, shard: Shard, conductor: Conductor):
        self.shard, self._conductor = shard, conductor
        self.steps = 0  # of the shard, when this call computed from it
        self.entered = False  # an input needs a gradient, and tells when the call's backward is over
        self.over = False
        self.bound = False
        self.trains = [p.requires_grad for *_, p in shard.params]  # it may change before the backward
        self.differentiable = False  # this backward makes a graph of itself, which outlives what is in the slab

    def enter(self, tree: Any) -> Any:
        """The call's arguments, the first tensor that needs a gradient replaced by a view. See [Note: when a call's backward is over]."""
        hooks: list[Any] = []
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])
        method = weakref.WeakMethod(self._input_done)

        def input_done(grad: torch.Tensor) -> None:
            if done := method():
                done()

        def enter_one(t: Any) -> Any:
            if not isinstance(t, torch.Tensor) or not t.requires_grad:
                return t
            if self.entered:
                hooks.append(t.register_hook(input_done))
                return t
            self.entered = True
            view = t.view_as(t)
            view.register_hook(self._entry_done)
            return view

        return tree_map(enter_one, tree)

    def leave(self, out: Any) -> None:
        """The call is open for as long as the graph of what it returns lives."""
        self.steps = self.shard.steps
        ref = weakref.ref(self)

        def reached(grads: Any) -> None:  # before anything of the call: autograd's grad mode is that of the backward
            if call := ref():
                call.differentiable = torch.is_grad_enabled()

        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.grad_fn is not None:
                t.grad_fn.metadata.setdefault("zinf", []).append(self)  # type: ignore[attr-defined]
                t.grad_fn.register_prehook(reached)
                self.shard.calls.add(self)

    def begin_backward(self) -> None:
        """Autograd is about to walk this call: fetch and bind. No-op when it already does."""
        self._conductor.in_backward()
        if self.bound:
            return
        self._conductor.use(Phase.BACKWARD, self.shard)
        if self.shard.steps != self.steps:
            raise EngineError(
                f"{self.shard.name} was stepped or edited between a forward and its backward, which would compute gradients of other weights: "
                "call backward for every forward before step()"
            )
        self.shard.bind(copies=self.differentiable)
        self.shard.calls.add(self)
        self.bound, self.over = True, False

    def _entry_done(self, grad: torch.Tensor) -> None:
        self._conductor.in_backward()
        self.finish()

    def _input_done(self) -> None:
        """All users of another input have given their gradients, so this call is over even if the first input gets none."""
        if self.bound:
            self.finish()

    def finish(self) -> None:
        """Nothing of this call is computed any more in this backward."""
        self.over = True
        self.unbind()
        self._conductor.call_over(self.shard)

    def unbind(self) -> None:
        if self.bound:
            self.bound = False
            self.shard.unbind()


class Inputs:
    """A call's arguments: alive in forward, then kept detached for the recompute. They must not change until then."""

    def __init__(self, args: Any, name: str, activations: Activations):
        self._live, self._kept, self._name = args, None, name
        self._activations = activations
        self._versions = _versions(args)
        self._moved: list[Kept] = []

    def keep(self) -> None:
        if _versions(self._live) != self._versions:
            raise EngineError(f"{self._name} changes its input in place, and would be recomputed from changed values: write x = x + y, or set recompute=False")
        self._kept = tree_map(self._keep_one, self._live)
        self._live = None
        self._versions = _versions(self._kept)

    def _keep_one(self, t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        kept = self._activations.keep(t, self._moved)
        if kept is None:
            return t.detach().requires_grad_(t.requires_grad)
        self._moved.append(kept)
        return Away(kept, t)

    def get(self) -> Any:
        if self._live is not None:
            return self._live
        for kept in self._moved:
            kept.start()
        if _versions(self._kept) != self._versions:
            raise EngineError(f"an input of {self._name} was changed in place before its recompute: write x = x + y, or set recompute=False")
        if self._moved:
            self._activations.ahead(self._moved[0].number)
        return tree_map(lambda t: t.get(self._name) if isinstance(t, Away) else t, self._kept)


def _versions(tree: Any) -> list[int]:
    return [t._version for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and not t.is_inference()]


class Buffers:
    """What a module's forward changed in its buffers (running averages, say): the recompute starts from the same values, and changes nothing."""

    def __init__(self, module: nn.Module):
        self._before = [(m, name, b.clone()) for m in module.modules() for name, b in m._buffers.items() if b is not None]

    def keep(self) -> None:
        """Forward is over: what it did not change need not be kept."""
        # Comparing what is on a card would wait for it: there all are kept.
        self._before = [(m, name, b) for m, name, b in self._before if (now := m._buffers.get(name)) is None or not now.is_cpu or not torch.equal(now, b)]

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        now = [(m, name, m._buffers.get(name)) for m, name, _ in self._before]
        for m, name, b in self._before:
            m._buffers[name] = b.clone()
        try:
            yield
        finally:
            for m, name, b_now in now:
                m._buffers[name] = b_now


class Flags:
    """Which parameters of a module want a gradient: a recompute must make the graph of the forward, whatever was frozen or not since then."""

    def __init__(self, module: nn.Module):
        self._before = [(p, p.requires_grad) for p in module.parameters()]

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        changed = [(p, wanted) for p, wanted in self._before if p.requires_grad is not wanted]
        for p, wanted in changed:
            p.requires_grad_(wanted)
        try:
            yield
        finally:
            for p, wanted in changed:
                p.requires_grad_(not wanted)


def stream(module: nn.Module, shard: Shard, conductor: Conductor, block: bool, recompute: bool) -> Callable[[], None]:
    """Let `module`, a block or a single layer, compute from `shard`; returns what undoes it."""
    bare = module.forward
    shard.watch()

    def forward(*args: Any, **kwargs: Any) -> Any:
        out, buffer = bare(*args, **kwargs), shard.weights_buffer()
        shard.check_written()
        if any(_offset(t, buffer) is not None for t in tree_leaves(out)):  # the slab will be someone else's
            out = tree_map(lambda t: t.clone() if _offset(t, buffer) is not None else t, out)
        return out

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        conductor.use(Phase.EVALUATE, shard)
        shard.bind()
        try:
            return forward(*args, **kwargs)
        finally:
            shard.unbind()

    def train(*args: Any, **kwargs: Any) -> Any:
        call = Call(shard, conductor)
        args, kwargs = call.enter((args, kwargs))
        out = _recomputed(call, module, forward, args, kwargs) if recompute else _looked_up(call, forward, args, kwargs, block)
        call.leave(out)
        return out

    @_casting_anew
    def streamed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return evaluate(*args, **kwargs)
        _refuse_cache(module, kwargs)
        if torch._C._current_graph_task_id() != -1:  # type: ignore[attr-defined]
            conductor.called_in_backward(shard)
        rows, size = conductor.batch_size, conductor.micro_batch_size
        if block and rows is not None and size is not None and rows > size:
            return in_micro_batches(train, args, kwargs, rows, size)
        return train(*args, **kwargs)

    return set_on(module, "forward", streamed)


def _casting_anew(forward: Callable) -> Callable:
    """Autocast keeps what it casts until its context ends: a copy of the whole model, and stale after a step. Not so of streamed weights."""

    def without_cache(*args: Any, **kwargs: Any) -> Any:
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            return forward(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(cached)

    return without_cache


def _recomputed(call: Call, module: nn.Module, forward: Callable, args: Any, kwargs: Any) -> Any:
    shard, conductor = call.shard, call._conductor
    inputs, buffers, flags = Inputs((args, kwargs), shard.name, conductor.activations), Buffers(module), Flags(module)
    in_forward = True

    def run(_: torch.Tensor) -> Any:
        if in_forward:
            conductor.use(Phase.FORWARD, shard)
            shard.bind()
        else:
            call.begin_backward()
        a, k = inputs.get()
        if in_forward:
            return forward(*a, **k)
        with buffers.as_before(), flags.as_before():
            return forward(*a, **k)

    del args, kwargs
    bound = shard.bound
    try:
        # No early stop: a forward that leaves by an exception would skip what the module does after its last operation.
        with set_checkpoint_early_stop(False):
            # The empty tensor tells which device's random numbers are to be those of the forward again.
            out = checkpoint(run, torch.empty(0, device=conductor.activations.device.torch_device), use_reentrant=False)
    finally:
        in_forward = False
        if shard.bound > bound:
            shard.unbind()
    inputs.keep()
    buffers.keep()
    return out


def _offset(t: Any, buffer: torch.Tensor) -> int | None:
    """Where in `buffer` the tensor `t` begins, in bytes; None for anything that is no part of it."""
    if not isinstance(t, torch.Tensor) or t.layout is not torch.strided or t.device != buffer.device:
        return None
    offset = t.data_ptr() - buffer.data_ptr()
    return offset if 0 <= offset < buffer.numel() and t.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr() else None


def _looked_up(call: Call, forward: Callable, args: Any, kwargs: Any, block: bool) -> Any:
    """Forward without recompute. A block may checkpoint a part of itself, which then runs again in backward: bind it for whatever is asked for."""
    shard = call.shard
    call._conductor.use(Phase.FORWARD, shard)
    buffer = shard.weights_buffer()

    def pack(t: torch.Tensor) -> Any:
        offset = _offset(t, buffer)
        if offset is None:  # detached: an output that kept its own graph would never die
            return t.detach(), None if t.is_inference() else t._version
        return offset, t.dtype, t.shape, t.stride()

    def unpack(packed: Any) -> torch.Tensor:
        if len(packed) == 2:
            t, version = packed
            if version is not None and t._version != version:  # hooks take this check away from autograd
                raise EngineError(f"{shard.name} saved a tensor of shape {tuple(t.shape)} for backward that was changed in place since: write x = x + y")
            if block:
                call.begin_backward()
            return t
        call.begin_backward()
        offset, dtype, shape, stride = packed
        buffer = shard.weights_buffer()
        typed = torch.empty(0, dtype=dtype, device=buffer.device)
        typed.set_(buffer.untyped_storage(), (buffer.storage_offset() + offset) // dtype.itemsize, shape, stride)
        return typed.clone() if call.differentiable else typed

    shard.bind()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)
    finally:
        shard.unbind()


def _refuse_cache(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """A cache grows again at recompute, which silently changes gradients."""
    for key, value in kwargs.items():
        if value is not None and type(value).__name__.endswith("Cache") and hasattr(value, "update"):
            raise EngineError(
                f"{type(module).__name__} was given a KV cache ({key}) while training: pass use_cache=False "
                "(recompute would fill it twice and change gradients)"
            )


def _per_row(pieces: Sequence[torch.Tensor], sizes: Sequence[int], length: int) -> bool:
    """Is each piece made of rows, or of the `length` positions of rows, so that pieces can be put one after the other?"""
    return pieces[0].dim() > 0 and any(all(p.shape[0] == n * k for p, n in zip(pieces, sizes, strict=True)) for k in (1, length))


def in_micro_batches(call: Callable, args: Sequence[Any], kwargs: dict[str, Any], rows: int, size: int) -> Any:
    """Run `call` on slices of `size` rows of every tensor argument with `rows` rows, and put the outputs together again."""
    leaves, spec = tree_flatten((tuple(args), kwargs))
    outs, sizes = [], [min(size, rows - start) for start in range(0, rows, size)]
    length = next((t.shape[1] for t in leaves if isinstance(t, torch.Tensor) and t.dim() > 1 and t.shape[0] == rows), 1)
    for start in range(0, rows, size):
        part = [t[start : start + size] if isinstance(t, torch.Tensor) and t.dim() and t.shape[0] == rows else t for t in leaves]
        a, k = tree_unflatten(part, spec)
        outs.append(call(*a, **k))
    flat = [tree_flatten(out) for out in outs]
    joined = []
    for pieces in zip(*(leaves for leaves, _ in flat), strict=True):
        if not isinstance(pieces[0], torch.Tensor):
            joined.append(pieces[0])
        elif not _per_row(pieces, sizes, length):
            raise EngineError(
                f"a block returns a tensor of shape {tuple(pieces[0].shape)}, which is not one value or block of values for each row of the batch: "
                "leave micro_batch_size unset for this model"
            )
        else:
            joined.append(torch.cat(pieces))
    return tree_unflatten(joined, flat[0][1])
