"""Shard: the parameters that move together, and the verbs that move them.

Where a shard's weights are, at any time:

    record   on NVMe (the store), or at home in host memory; always the newest once a step has been flushed
    slab     a device buffer, while `slab` is set and `valid`; compute reads it through views bound to the parameters
    nowhere  between uses: the parameters then are expanded one-element placeholders of true shape and dtype, and reading one
             raises EngineError

Who does what: the thread that computes calls `fetch` (take a slab, submit a job), `wait_fetched`, `bind`, `unbind`; the
pipeline's thread runs the job's items: read, step, upload, write. A step that is `pending` is applied by the very fetch that
brings the weights to compute, so weights cross once for both.

[Note: one accumulator per call] A parameter's AccumulateGrad node is kept by the graphs that use it. `unbind` briefly gives
the parameter data of another dtype, which makes autograd drop its reference to the node, so the next call gets a node of its
own. The gradient of a call (a micro-batch, one user of a tied weight) then arrives when that call's backward is over, not when
the last one's is, and zinf adds them up itself, in the dtype it chooses.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zinf import layout, ops
from zinf.chunks import DTYPES, ChunkItem, StepSpec
from zinf.errors import EngineError
from zinf.layout import Chunk
from zinf.owners import Unwatched
from zinf.pipeline import Job, Pipeline
from zinf.schedule import Cycle
from zinf.slabs import Slab, Slabs
from zinf.tiers.device import DONE, Device, Event
from zinf.tiers.host import Slots
from zinf.tiers.records import Records
from zinf.trace import Trace, Verb

if TYPE_CHECKING:
    from zinf.grads_away import GradsAway


@dataclasses.dataclass
class Parts:
    """What all shards of an engine share."""

    device: Device
    records: Records
    slabs: Slabs
    fetcher: Pipeline  # fetches without a step, norms
    stepper: Pipeline  # fetches with a step, commits
    state_slots: Slots | None
    grads_slots: Slots | None  # only where grads wait on NVMe
    weights_slots: dict[Pipeline, Slots]  # only where compute does not read host memory
    pool: ops.Pool
    trace: Trace
    owners: Unwatched
    ema_decay: float | None = None  # of the average of the weights, which then is a plane of every state


class Unbound(nn.Parameter):
    """What a parameter is between its uses: metadata only. Anything that would read values raises."""

    zinf_name: str
    zinf_closed: bool

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Sequence = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = f"{func.__self__.__name__}.{name}"  # type: ignore[attr-defined]
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name == "detach":  # state_dict() and the like: names, shapes and dtypes are true, values are not there
            with torch._C.DisableTorchFunctionSubclass():
                out = func(*args, **(kwargs or {})).as_subclass(UnboundTensor)
            out.zinf_name = args[0].zinf_name
            return out
        if name == "__repr__":
            p = args[0]
            return f"{p.zinf_name} of shape {tuple(p.shape)}, {p.dtype}, streamed"
        owner = next((a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, (Unbound, UnboundTensor))), None)
        which = owner.zinf_name if owner is not None else "a parameter"
        if owner is not None and owner.__dict__.get("zinf_closed"):
            raise EngineError(f"{which} was used after its engine was closed, and its values are in the store: build an engine again with resume=True")
        if func in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward):
            raise EngineError(f"the gradient of {which} was asked of autograd, but goes to the engine: call engine.backward(loss), without inputs")
        raise EngineError(
            f"{which} was used ({name.removesuffix('.__get__')}) outside its shard's forward, where its values are not in memory: "
            f"read it under engine.gather({which!r}), or save through engine.save_pretrained or engine.state_dict"
        )


class UnboundTensor(torch.Tensor):
    """An Unbound parameter without its graph: what model.state_dict() has of it."""

    zinf_name: str
    __torch_function__ = Unbound.__torch_function__


class Bound(nn.Parameter):
    """What a parameter is in its shard's forward. Takes note of who gets `data`, as what is written through that is seen nowhere else."""

    zinf_shard: Callable[[], Shard | None]

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        shown = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        if (shard := self.zinf_shard()) is not None:
            shard.note_shown(self, shown)
        return shown

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, values)  # type: ignore[attr-defined]

    def set_(self, *args: Any) -> torch.Tensor:  # type: ignore[override]
        """To set it to itself, as torch's parametrizations do when they are registered (PEFT does that in forward), is no change."""
        same = len(args) == 1 and isinstance(args[0], torch.Tensor) and (args[0].data_ptr(), args[0].dtype) == (self.data_ptr(), self.dtype)
        return self if same and (args[0].shape, args[0].stride()) == (self.shape, self.stride()) else super().set_(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is nobody's."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        return memo[id(self)]


# Attributes and methods that tell about a tensor without reading its values.
_GET = """shape dtype device layout requires_grad is_leaf grad grad_fn ndim itemsize nbytes output_nr retains_grad names _grad _version
    is_cuda is_cpu is_meta is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_xla is_mps is_xpu is_mtia is_ipu is_vulkan is_maia
    _backward_hooks _post_accumulate_grad_hooks"""
_SET = "requires_grad grad _grad _backward_hooks _post_accumulate_grad_hooks"
_CALL = """size numel dim ndimension nelement element_size stride storage_offset is_contiguous is_floating_point is_complex is_signed is_inference
    is_same_size get_device requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad __hash__ __len__ untyped_storage data_ptr
    is_shared is_pinned has_names is_set_to"""
METADATA = frozenset([*(f"{a}.__get__" for a in _GET.split()), *(f"{a}.__set__" for a in _SET.split()), *_CALL.split()])


class Shard:
    """One shard at run time."""

    def __init__(self, index: int, spec: layout.Shard, params: dict[str, nn.Parameter], parts: Parts, slab: Slab | None):
        self.index, self.spec, self.name = index, spec, spec.name
        self.params: list[tuple[int, layout.Param, nn.Parameter]] = [(r, p, params[p.name]) for r, run in enumerate(spec.runs) for p in run.params]
        self.parts = parts
        self.slab, self.valid = slab, False
        self.pins = 0  # jobs that move something in or out of the slab; guarded by slabs.lock
        self.computing = 0  # computations that need the slab; guarded by slabs.lock
        self.bound = 0  # nested binds
        self._computed_from: torch.Tensor | None = None  # the slab's buffer that the parameters are bound to
        self.steps = 0  # that fetches have begun to apply
        self.pending: StepSpec | None = None
        self.grads: list[torch.Tensor | None] = []  # flat grads of each run in host memory, while a step may need them
        self.grads_away: GradsAway | None = None  # where they are if not there
        self.job: Job | None = None
        self.calls: weakref.WeakSet[Any] = weakref.WeakSet()  # calls with a graph (streaming.Call), until their graph dies
        self._uploads: list[Event] = []
        self.left: Event = DONE  # compute that read what the slab held before the fetch that is under way: its uploads wait for this
        self.edited = False  # a gather block may write to it
        self.versions: list[int] = []  # of the parameters, when they were bound or edited last
        self._shown: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = []  # whose `data` was taken since bind: what it is, what it was
        self._views: tuple[int, list[torch.Tensor]] = (-2, [])  # of the slab with this index
        self._placeholders = [_placeholders(DTYPES[spec.runs[r].dtype], p.shape, parts.device.torch_device) for r, p, _ in self.params]
        for _, spec_p, p in self.params:
            p.zinf_name = spec_p.name  # type: ignore[attr-defined]
            own = nn.Parameter if "zinf_load" in p.__dict__ else type(p)  # see stored.Stored
            p.__dict__.setdefault("zinf_class", own)  # an engine before this one may have left it Unbound
            p.__dict__.pop("zinf_closed", None)
        self._classes = [p.__dict__["zinf_class"] for *_, p in self.params]
        self._bound_classes = self._classes

    # -- fetch ----------------------------------------------------------------------------------------------------------

    def fetch(self, cycle: Cycle, before: int | None = None) -> bool:
        """Start bringing the newest weights into a slab, stepping them first if a step is pending.

        With `before` this is a prefetch: False if no slab can be had without evicting what is used sooner. No-op (True) if
        the slab is valid or coming and nothing is pending.
        """
        home = self.parts.records.weights(self.index)
        if self.pending is None and (self.valid or (self.slab is None and home is not None and self.parts.device.direct)):
            return True
        if self.job is not None and not self.job.over:
            if before is not None:
                return False  # its last flush still reads the slab: come back later
            with self.parts.trace.wait(Verb.FLUSH, self.index):
                self.job.wait_over()
        needs_slab = not (home is not None and self.parts.device.direct)
        if needs_slab and self.slab is None and not self.parts.slabs.take(self, cycle, before):
            return False
        try:
            self._submit_fetch()
        except BaseException as error:  # Ctrl-C: whether the pending step was submitted is not known
            stopped = EngineError(
                f"the fetch of {self.name} was interrupted, and its step with it: call recover(), or close the engine and go on from the last commit"
            )
            stopped.__cause__ = error
            self.parts.stepper.error = self.parts.stepper.error or stopped
            raise
        return True

    def _submit_fetch(self) -> None:
        spec, self.pending = self.pending, None
        self.steps += spec is not None
        had_weights = self.valid and (self.job is None or self.job.error is None)  # a prefetch that failed, and that nobody waited for, brought none
        self.valid = True
        self._uploads = []
        self.left = self.parts.device.mark()
        pipeline = self.parts.stepper if spec is not None else self.parts.fetcher
        self.parts.slabs.pin(self)
        self.job = pipeline.submit(
            Job(
                self._items(spec, had_weights, pipeline),
                f"fetch {self.name}",
                on_ready=self.release_grads if spec is not None else None,  # the last chunk was stepped, or none will be
                on_over=lambda: self.parts.slabs.unpin(self),
            )
        )

    def wait_fetched(self) -> None:
        """Until compute may read the slab. Raises what the fetch raised; the shard is then without valid weights."""
        if self.job is None:
            return
        if not self.job.ready:
            with self.parts.trace.wait(Verb.FETCH, self.index):
                self.job.wait()
        if self.job.error is not None:
            self.valid = False
            raise self.job.error
        uploads, self._uploads = self._uploads, []
        if uploads:
            with self.parts.trace.wait(Verb.UPLOAD, self.index):
                for event in uploads:
                    self.parts.device.wait(event)

    def _items(self, spec: StepSpec | None, had_weights: bool, pipeline: Pipeline) -> Iterator[ChunkItem]:
        for r, run in enumerate(self.spec.runs):
            for chunk in run.chunks(self.parts.records.model.chunk):
                segments = spec.segments[r] if spec is not None else []
                cut = [s for s in segments if s.start < chunk.start + chunk.length and s.end > chunk.start]
                yield ChunkItem(self, r, chunk, cut, spec, had_weights, pipeline)

    def chunk_view(self, run: int, chunk: Chunk) -> torch.Tensor:
        """The chunk's bytes in the slab."""
        assert self.slab is not None
        size = self.spec.runs[run].mode.weights_bytes
        start = self.spec.run_offset(run) + chunk.start * size
        return self.slab.buffer[start : start + chunk.length * size]

    def release_grads(self) -> None:
        """The grads were consumed: whoever lent their buffer gets it back. Set by Grads."""

    # -- bind -------------------------------------------------------------------------------------------------------------

    def bind(self, copies: bool = False) -> None:
        """Let the parameters be views of the weights, or hold copies of them. Nested calls count; the last `unbind` undoes it."""
        self.hold()
        self.bound += 1
        if self.bound > 1 and not copies:
            return
        self._computed_from = self.slab.buffer if self.slab is not None else None
        self._check_slab("compute from")
        for (*_, p), view, cls in zip(self.params, self._weights_views(), self._bound_classes, strict=True):
            p.__class__ = cls
            p.data = view.clone() if copies else view
        self.note_values()

    def note_values(self) -> None:
        """The values of the bound parameters are those of the weights now."""
        self.versions = [p._version for *_, p in self.params]

    def check_values(self) -> None:
        """Raise EngineError if a bound parameter was changed in place by someone: the master does not know of it."""
        for (*_, spec, p), version in zip(self.params, self.versions, strict=True):
            if p._version != version and not self.edited:
                raise EngineError(f"{spec.name} was changed in place, which its fp32 master does not see: change it under engine.gather(..., write=True)")

    def watch(self) -> None:
        """Forwards compute from this shard: take note of who may write to it meanwhile."""
        self._bound_classes = [Bound if cls is nn.Parameter else cls for cls in self._classes]
        for *_, p in self.params:
            p.zinf_shard = weakref.ref(self)  # type: ignore[attr-defined]

    def note_shown(self, p: nn.Parameter, values: torch.Tensor) -> None:
        """Someone gets the bound parameter's own memory, and may write to it."""
        if not any(q is p for q, *_ in self._shown):
            if self.job is not None:
                self.job.wait_over()  # its flush may still read what will be written
            self._shown.append((p, values, values.clone()))

    def check_written(self) -> None:
        """Raise EngineError if the forward has written to a weight, also through its `data`: neither the record nor its master would know."""
        self.check_values()
        for p, values, before in self._shown:
            if not torch.equal(values.reshape(-1).view(torch.uint8), before.reshape(-1).view(torch.uint8)):  # NaN is equal to itself
                values.copy_(before)
                raise EngineError(
                    f"{p.zinf_name} is written to (through its data) in the forward of {self.name}: "  # type: ignore[attr-defined]
                    "a weight changes by steps, or between them under engine.gather; keep what forward changes in a buffer"
                )

    def _check_slab(self, use: str) -> None:
        if self._computed_from is not None:
            self.parts.owners.check(self._computed_from, self.name, use)

    def check_bound(self) -> None:
        """Raise EngineError if a bound parameter computes from other memory than the slab: a step would not reach it."""
        self.check_values()
        for (*_, spec, p), view in zip(self.params, self._weights_views(), strict=True):
            if p.data_ptr() != view.data_ptr() or p.dtype is not view.dtype:
                raise EngineError(f"{spec.name} was moved or cast (model.to, half, float) after the engine was built: do that before, and build a new one")

    def unbind(self) -> None:
        """Give the parameters back their placeholders. See [Note: one accumulator per call]."""
        self.bound -= 1
        self._check_slab("leave")
        if self.bound == 0:
            self.make_placeholders()
        self.let_go()

    def hold(self) -> None:
        """Compute needs the slab until the matching `let_go`."""
        with self.parts.slabs.lock:
            self.computing += 1

    def let_go(self) -> None:
        with self.parts.slabs.lock:
            self.computing -= 1
            self.parts.slabs.cond.notify_all()

    def forget_binds(self, keep: int) -> None:
        """Nothing computes: end all but `keep` of the binds and holds, which an exception left."""
        with self.parts.slabs.lock:
            self.computing = keep
        if self.bound != keep:
            self.bound = keep
            self.make_placeholders()

    def forget_calls(self) -> None:
        """Graphs that someone still holds are no open calls: no backward will end them."""
        for call in list(self.calls):
            call.bound, call.over = False, True
            self.calls.discard(call)

    def make_placeholders(self) -> None:
        self._shown = []
        for (*_, p), (other, own) in zip(self.params, self._placeholders, strict=True):
            p.__class__ = nn.Parameter
            p.data = other
            p.data = own
            p.__class__ = Unbound

    def part(self) -> None:
        """The engine is closed. Parameters that were not handed over say so when they are read."""
        for *_, p in self.params:
            p.__dict__.pop("zinf_shard", None)
            if isinstance(p, Unbound):
                p.zinf_closed = True

    def hand_over(self) -> None:
        """Let the parameters own copies of the weights, for good: there is no store that keeps them."""
        for (*_, p), view, cls in zip(self.params, self._weights_views(), self._classes, strict=True):
            p.__class__ = nn.Parameter
            p.data = view.to("cpu", copy=True)
            p.__class__ = cls
        self.bound = 0

    def _weights_views(self) -> list[torch.Tensor]:
        buffer = self.weights_buffer()
        key = self.slab.index if self.slab is not None else -1
        if self._views[0] != key:
            with torch.inference_mode(False):  # views made in inference mode could never be trained
                self._views = (key, self.views(buffer))
        return self._views[1]

    def weights_buffer(self) -> torch.Tensor:
        """The bytes that the parameters are views of while bound."""
        buffer = self.slab.buffer if self.slab is not None else self.parts.records.weights(self.index)
        assert buffer is not None
        return buffer

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """One view of a slab-shaped buffer for each parameter, in the order of `params`."""
        out = []
        for r, p, _ in self.params:
            run = self.spec.runs[r]
            start = self.spec.run_offset(r) + p.offset * run.mode.weights_bytes
            out.append(buffer[start : start + p.numel * run.mode.weights_bytes].view(DTYPES[run.dtype]).view(p.shape))
        return out


def _placeholders(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(of another dtype, of the true dtype): NaN expanded to the shape, one element of memory each."""
    other = torch.float32 if dtype is not torch.float32 else torch.bfloat16
    nan = float("nan")
    return torch.full((1,), nan, dtype=other, device=device).expand(shape), torch.full((1,), nan, dtype=dtype, device=device).expand(shape)
