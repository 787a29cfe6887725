"""A model whose weights are in a store, before an engine takes it, and an engine's own store where the model has changed since.

Between from_pretrained and zinf.Engine a parameter is `Stored`: shape and dtype are true, and an operation that needs its
values gets them from the store, one parameter at a time. So adapters can be put around it (whatever their initialisation reads),
and embeddings can be resized; a parameter that is written to comes into memory, and is the model's own from then on.

[Note: stored once, by reference] If the model is no longer what was imported (it has adapters, a new head, resized embeddings),
the engine gets a store of its own. Frozen weights that stand there in the same places are not copied: both stores have the file of
them, by a hard link, and nobody ever writes it. Everything else is copied once, the imported store stays as it is, and any
number of runs can start from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zinf import layout
from zinf.aio import IoEngine, open_engine
from zinf.checkpoint import ModuleSource
from zinf.checkpoint.sources import Reader
from zinf.checkpoint.staging import pages
from zinf.chunks import DTYPES, master_of, plane_views
from zinf.layout import FROZEN, STATE, WEIGHTS, Key
from zinf.shard import METADATA
from zinf.tiers.nvme import Store
from zinf.tiers.opening import Shared

log = logging.getLogger("zinf")


class Stored(nn.Parameter):
    """A parameter whose values are in a store, as `zinf_stored`: its name there. `zinf_load()` reads them."""

    zinf_stored: str
    zinf_load: Callable[[], torch.Tensor]

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Sequence = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = f"{func.__self__.__name__}.{name}"  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("data.__get__", "detach"):
                lazy: Any = func(*args, **(kwargs or {})).as_subclass(StoredTensor)
                lazy.zinf_owner = _owner(args[0])
                return lazy
            if name in METADATA:
                return func(*args, **(kwargs or {}))
            if args and isinstance(args[0], (Stored, StoredTensor)):
                if name == "data.__set__":
                    _own(_owner(args[0]))
                elif _writes(name):
                    _adopt(_owner(args[0]), None)
            return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.zinf_load(), requires_grad=self.requires_grad)
        return memo[id(self)]

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"{self.zinf_stored} of shape {tuple(self.shape)}, {self.dtype}, in a store"


class StoredTensor(torch.Tensor):
    """`data`, or detach(), of a Stored parameter: reads what that has, and writes to it."""

    zinf_owner: nn.Parameter
    __torch_function__ = Stored.__torch_function__


def _owner(t: Any) -> Any:
    return t.zinf_owner if isinstance(t, StoredTensor) else t


def _run(func: Callable, args: Any, kwargs: Any) -> Any:
    """Call `func` on values. What is no other tensor (x.to(its own dtype), say) stays in the store; what is a view may be written to, so
    its parameter comes into memory for good."""
    loaded: list[tuple[torch.Tensor, Any]] = []

    def load(t: Any) -> Any:
        if not isinstance(t, (Stored, StoredTensor)):
            return t
        owner = _owner(t)
        loaded.append((owner.zinf_load() if isinstance(owner, Stored) else owner.data, t))
        return loaded[-1][0]

    def give(out: Any) -> Any:
        for values, lazy in loaded if isinstance(out, torch.Tensor) and out.layout is torch.strided else ():
            if out is values:
                return lazy
            if isinstance(_owner(lazy), Stored) and out.untyped_storage().data_ptr() == values.untyped_storage().data_ptr():
                _adopt(_owner(lazy), values)
        return out

    args, kwargs = tree_map(load, (tuple(args), kwargs))
    return tree_map(give, func(*args, **kwargs))


def _writes(name: str) -> bool:
    """Does this operation write to its first argument?"""
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or (name.startswith("__i") and name.endswith("__"))


def _own(p: Any) -> None:
    """`p` is an ordinary parameter from now on."""
    if isinstance(p, Stored):
        p.__class__ = nn.Parameter  # type: ignore[assignment]
        del p.__dict__["zinf_stored"], p.__dict__["zinf_load"]


def _adopt(p: Any, values: torch.Tensor | None) -> None:
    """`p` has its values (None: read them) in memory from now on."""
    if isinstance(p, Stored):
        values = p.zinf_load() if values is None else values
        _own(p)
        p.data = values


def store_away(p: nn.Parameter, name: str, load: Callable[[], torch.Tensor]) -> None:
    """Make `p`, which has true shape and dtype and no values, one whose values `load` reads."""
    p.__class__ = Stored
    p.zinf_stored, p.zinf_load = name, load  # type: ignore[attr-defined]


class StoredReader:
    """Elements of one parameter of a store. Safe to use from several threads."""

    def __init__(self, store: Store, place: tuple[int, int, layout.Param], master: bool):
        """`master`: with what the state has beyond the weights, as fp32."""
        self._store, (self._shard, self._run, self._param) = store, place
        self._layout = run = store.model.shards[self._shard].runs[self._run]
        self._kept = master and run.trainable and run.dtype != "fp32"
        self.dtype = torch.float32 if self._kept else DTYPES[run.dtype]
        self.shape = self._param.shape

    def read(self, start: int, out: torch.Tensor) -> None:
        """See checkpoint.Reader."""
        first, end = self._param.offset + start, self._param.offset + start + out.numel()
        size = self._store.model.chunk
        for chunk in self._store.model.chunks(self._shard, self._run)[first // size : -(-end // size)]:
            values = self._chunk(chunk)
            a, b = max(first, chunk.start), min(end, chunk.start + chunk.length)
            out[a - first : b - first] = values[a - chunk.start : b - chunk.start]

    def _chunk(self, chunk: layout.Chunk) -> torch.Tensor:
        mode = self._layout.mode
        weights = pages(chunk.length * mode.weights_bytes)
        items = [((WEIGHTS, self._shard, self._run, chunk.index), weights)]
        if self._kept:
            items.append(((STATE, self._shard, self._run, chunk.index), pages(chunk.length * mode.state_bytes)))
        for ticket in self._store.read(items):
            ticket.wait()
        typed = weights.view(DTYPES[mode.weights])
        if not self._kept:
            return typed
        planes = plane_views(self._layout, chunk.length, items[1][1])
        if "master" in planes and not planes["master"].any():
            return typed.float()  # it was never written
        return master_of(typed, planes)


def places(model: layout.Model) -> dict[str, tuple[int, int, layout.Param]]:
    """Where each parameter of a layout is: (shard, run, place in it)."""
    return {p.name: (s, r, p) for s, shard in enumerate(model.shards) for r, run in enumerate(shard.runs) for p in run.params}


def load_parameter(paths: Sequence[str], name: str) -> torch.Tensor:
    """The weights of one parameter of the store at `paths`, in memory."""
    with contextlib.closing(open_engine("auto")) as io, contextlib.closing(Store.open(paths, io, verify="off", writable=False)) as store:
        reader = StoredReader(store, places(store.model)[name], master=False)
        out = torch.empty(reader.shape, dtype=reader.dtype)
        reader.read(0, out.view(-1))
        return out


@dataclasses.dataclass(frozen=True)
class Basis:
    """What a changed model was imported as: the store at `paths`, and the names there of the parameters that are as they were."""

    paths: tuple[str, ...]
    names: Mapping[str, str]

    def own_paths(self, run_name: str) -> list[str]:
        """Where the engine's own store goes: beside the imported one, under `run_name`, or as NAME-adapted if that is its name."""
        return [os.path.join(os.path.dirname(p), run_name if run_name != os.path.basename(p) else f"{run_name}-adapted") for p in self.paths]

    def create_store(self, paths: Sequence[str], model: layout.Model, io: IoEngine, options: dict[str, Any]) -> Store:
        """A new store of `model` at `paths`, which shares what it can of this one. See [Note: stored once, by reference]."""
        with contextlib.closing(Store.open(self.paths, io, verify="off", writable=False)) as store:
            shared, shares = self._shared(store, model), store.shares
        if shared is not None:
            try:
                return Store.create(paths, model, io, shares=shares, shared=shared, **options)
            except OSError as e:
                if e.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
        frozen = sum(run.weights_nbytes for shard in model.shards for run in shard.runs if not run.trainable)
        if frozen:
            log.info("%d bytes of frozen weights are copied: they stand in other places than in %s, or as weights to be trained", frozen, self.paths[0])
        return Store.create(paths, model, io, shares=shares, **options)

    @contextlib.contextmanager
    def source(self, module: nn.Module) -> Iterator[ModuleSource]:
        """The parameters of the changed model: from this store, or from memory."""
        with contextlib.closing(open_engine("auto")) as io, contextlib.closing(Store.open(self.paths, io, verify="read", writable=False)) as store:
            yield _Source(module, self, store)

    def _shared(self, store: Store, model: layout.Model) -> Shared | None:
        there = places(store.model)
        theirs, ours = (layout.place(m, store.shares) for m in (store.model, model))
        digests: dict[Key, int] = {}
        for s, shard in enumerate(model.shards):
            for r, run in enumerate(shard.runs):
                if run.trainable:
                    continue
                found = [there.get(self.names.get(p.name, "")) for p in run.params]
                runs = {f[:2] for f in found if f is not None}
                if len(runs) != 1 or any(f is None or (f[2].offset, f[2].shape) != (p.offset, p.shape) for f, p in zip(found, run.params, strict=True)):
                    return None
                for chunk in model.chunks(s, r):
                    key, other = (WEIGHTS, s, r, chunk.index), (WEIGHTS, *next(iter(runs)), chunk.index)
                    if ours.places[key] != theirs.places.get(other) or (digest := store.digest(other)) is None:
                        return None
                    digests[key] = digest
        if any(a.get(FROZEN) != b.get(FROZEN) for a, b in zip(ours.sizes, theirs.sizes, strict=True)):
            return None
        return Shared([os.path.join(path, FROZEN) if FROZEN in sizes else None for path, sizes in zip(store.paths, ours.sizes, strict=True)], digests)


def basis_of(module: nn.Module, paths: Sequence[str]) -> Basis | None:
    """What `module` was imported as into the store at `paths`; None if it still is that."""
    params = dict(module.named_parameters())
    names = {name: p.__dict__["zinf_stored"] for name, p in params.items() if "zinf_stored" in p.__dict__}
    same = len(names) == len(params) and all(name == there for name, there in names.items())
    return None if same else Basis(tuple(paths), names)


def linked(store: Store) -> frozenset[tuple[int, int]]:
    """The (shard, run)s that a new store shares with another one."""
    runs = [(s, r) for s, shard in enumerate(store.model.shards) for r, run in enumerate(shard.runs) if not run.trainable]
    return frozenset((s, r) for s, r in runs if store.digest((WEIGHTS, s, r, 0)) is not None)


class _Source(ModuleSource):
    def __init__(self, module: nn.Module, basis: Basis, store: Store):
        super().__init__(module)
        self._names, self._store, self._places = basis.names, store, places(store.model)

    def open(self, name: str) -> Reader:
        if name in self._names:
            return StoredReader(self._store, self._places[self._names[name]], master=True)
        return super().open(name)
