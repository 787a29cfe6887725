"""Where every byte of a model lives: model -> shards -> runs -> chunks -> (path, file, offset, length).

Pure: no torch, no I/O, no clock. Everything here is computed from names, shapes and dtypes, so two machines that agree on
those agree on the layout.

    shard   the parameters that move together (one block, one embedding, one head, or the root)
    run     the parameters of one shard that share a dtype and are all trainable or all frozen, laid end to end;
            each parameter starts at a multiple of 64 elements, the run is padded to a multiple of 2048
    chunk   K consecutive elements of a run: the atom of I/O, of optimizer work, of checksums and of versions
    record  a shard's weights, or its state, on NVMe

A chunk of weights is `length` elements; a chunk of state is its planes one after the other, `[lo | m | v]` for bf16 under Adam, so
one read brings all that one step of it needs. Which planes there are follows from the dtype and from the optimizer's moments; there
may be none (fp32 under plain SGD), and then there is no record of state. Lengths are multiples of 2048 elements, hence every record, plane and chunk starts
on a 4096-byte page and O_DIRECT needs no bounce buffer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

PAGE = 4096  # bytes: the strictest alignment O_DIRECT asks for in practice
PIECE = 2048  # elements: granularity of chunks, and of the partial sums of the gradient norm
PARAM_ALIGN = 64  # elements between starts of parameters: 128 bytes in bf16, what SIMD and BLAS like

WEIGHTS, STATE = "weights", "state"  # the two kinds of record
FROZEN = "frozen"  # the file of weights that are never trained

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "int16": 2}


# What the state of each dtype of weights holds beside the moments, so that the two together are an fp32 master: bf16 keeps it losslessly split
# into the weights (hi) and `lo`; fp16 keeps a whole one; fp32 is its own.
MASTERS: dict[str, tuple[tuple[str, str], ...]] = {"bf16": (("lo", "int16"),), "fp16": (("master", "fp32"),), "fp32": ()}
MOMENTS = ("m", "v")  # of Adam: what a store that names none has


@dataclasses.dataclass(frozen=True)
class Mode:
    """What one dtype of weights costs under one optimizer, and the planes of state beside it."""

    weights: str
    planes: tuple[tuple[str, str], ...]  # (name, dtype), in the order they have on disk: the master's, then the moments

    @property
    def weights_bytes(self) -> int:
        """Bytes a parameter of weights."""
        return ITEMSIZE[self.weights]

    @property
    def state_bytes(self) -> int:
        """Bytes a parameter of state; may be 0."""
        return sum(ITEMSIZE[dtype] for _, dtype in self.planes)


@cache
def mode(dtype: str, moments: tuple[str, ...] = MOMENTS) -> Mode:
    """The mode of weights of `dtype` whose optimizer keeps these moments, each a plane of fp32."""
    return Mode(dtype, MASTERS[dtype] + tuple((name, "fp32") for name in moments))


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is >= n."""
    return -(-n // multiple) * multiple


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter's place in its run. `offset` and `numel` count elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Elements [start, start + length) of a run; the first `count` of them are parameters or gaps, the rest is padding."""

    index: int
    start: int
    length: int
    count: int


@dataclasses.dataclass(frozen=True)
class Run:
    """The parameters of a shard with one dtype and one trainability, end to end."""

    dtype: str
    trainable: bool
    params: tuple[Param, ...]
    moments: tuple[str, ...] = MOMENTS  # planes of fp32 that the optimizer keeps; `ema`, an average of the weights, is one of them

    @property
    def mode(self) -> Mode:
        return mode(self.dtype, self.moments)

    @property
    def has_state(self) -> bool:
        """Is there a record of state at all?"""
        return self.trainable and self.mode.state_bytes > 0

    @property
    def numel(self) -> int:
        """Elements up to the end of the last parameter, gaps included (a multiple of 64)."""
        last = self.params[-1]
        return round_up(last.offset + last.numel, PARAM_ALIGN)

    @property
    def padded(self) -> int:
        """Elements that the run occupies: numel rounded up to whole pieces."""
        return round_up(self.numel, PIECE)

    @property
    def weights_nbytes(self) -> int:
        return self.padded * self.mode.weights_bytes

    @property
    def state_nbytes(self) -> int:
        """Bytes of state on NVMe; 0 when frozen, or when the optimizer keeps nothing."""
        return self.padded * self.mode.state_bytes if self.trainable else 0

    def grads_dtype(self, wide: bool) -> str:
        """Dtype of this run's grads: that of its weights, or fp32 where several gradients are summed (`wide`)."""
        return "fp32" if wide else self.dtype

    def grads_nbytes(self, wide: bool) -> int:
        """Bytes of the run's flat gradient; 0 when frozen."""
        return self.padded * ITEMSIZE[self.grads_dtype(wide)] if self.trainable else 0

    def gaps(self) -> list[tuple[int, int]]:
        """The ranges (start, end) of elements that belong to no parameter; zero in weights, state and grads, always."""
        gaps, at = [], 0
        for p in self.params:
            if p.offset > at:
                gaps.append((at, p.offset))
            at = p.offset + p.numel
        if self.padded > at:
            gaps.append((at, self.padded))
        return gaps

    def chunks(self, size: int) -> list[Chunk]:
        """The run cut into chunks of `size` elements (a multiple of PIECE); the last one may be shorter."""
        numel, padded = self.numel, self.padded
        return [Chunk(i, start, min(size, padded - start), min(size, numel - start)) for i, start in enumerate(range(0, padded, size))]


@dataclasses.dataclass(frozen=True)
class Shard:
    """One shard's parameters, run by run."""

    name: str
    runs: tuple[Run, ...]

    @property
    def numel(self) -> int:
        """Parameters (gaps not counted)."""
        return sum(p.numel for run in self.runs for p in run.params)

    @property
    def weights_nbytes(self) -> int:
        """Bytes of the slab that holds this shard's weights."""
        return sum(run.weights_nbytes for run in self.runs)

    @property
    def state_nbytes(self) -> int:
        return sum(run.state_nbytes for run in self.runs)

    @property
    def trainable(self) -> bool:
        return any(run.trainable for run in self.runs)

    @property
    def has_state(self) -> bool:
        return any(run.has_state for run in self.runs)

    def run_offset(self, run: int) -> int:
        """Byte offset of a run in the slab."""
        return sum(r.weights_nbytes for r in self.runs[:run])

    def grads_nbytes(self, wide: bool) -> int:
        """Bytes of the flat gradient of the trainable runs; see Run.grads_dtype."""
        return sum(run.grads_nbytes(wide) for run in self.runs)

    def grads_offset(self, run: int, wide: bool) -> int:
        """Byte offset of a run in the flat gradient."""
        return sum(r.grads_nbytes(wide) for r in self.runs[:run])


def make_shard(name: str, params: Iterable[tuple[str, Sequence[int], str, bool]], moments: tuple[str, ...] = MOMENTS) -> Shard:
    """Lay out a shard from (name, shape, dtype, trainable) of its parameters, in registration order, and the optimizer's moments.

    Raises:
        ValueError: a parameter is empty, or has a dtype that no kernel has.
    """
    runs: dict[tuple[str, bool], list[Param]] = {}
    ends: dict[tuple[str, bool], int] = {}
    for pname, shape, dtype, trainable in params:
        if dtype not in MASTERS:
            raise ValueError(f"parameter {pname} has dtype {dtype}; zinf streams {', '.join(MASTERS)}: cast it first, or keep it out of the engine")
        numel = math.prod(shape)
        if numel == 0:
            raise ValueError(f"parameter {pname} has shape {tuple(shape)}, that is no elements; give it its size before zinf takes it")
        key = (dtype, trainable)
        offset = round_up(ends.get(key, 0), PARAM_ALIGN)
        runs.setdefault(key, []).append(Param(pname, tuple(shape), offset, numel))
        ends[key] = offset + numel
    return Shard(name, tuple(Run(dtype, trainable, tuple(ps), moments) for (dtype, trainable), ps in runs.items()))


@dataclasses.dataclass(frozen=True)
class Model:
    """The layout of a whole model: its shards, and the size of a chunk in elements.

    `rank` and `world_size` say whose slice of the model this is (one card: 0 of 1).
    """

    shards: tuple[Shard, ...]
    chunk: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.chunk < PIECE or self.chunk % PIECE:
            raise ValueError(f"chunk_size is {self.chunk} elements; it must be a positive multiple of {PIECE}")

    @property
    def numel(self) -> int:
        return sum(shard.numel for shard in self.shards)

    @property
    def moments(self) -> tuple[str, ...]:
        """The planes that the optimizer keeps, the same for every run."""
        return next((run.moments for shard in self.shards for run in shard.runs), MOMENTS)

    def keeping(self, moments: tuple[str, ...]) -> Model:
        """The same model under an optimizer with other moments."""
        shards = tuple(Shard(s.name, tuple(dataclasses.replace(run, moments=moments) for run in s.runs)) for s in self.shards)
        return dataclasses.replace(self, shards=shards)

    def chunks(self, shard: int, run: int) -> list[Chunk]:
        return self.shards[shard].runs[run].chunks(self.chunk)

    def to_json(self) -> dict[str, Any]:
        """A plain dict for the manifest. `moments` only where they are not Adam's, so that stores from before there were others keep their fingerprint."""
        moments = {} if self.moments == MOMENTS else {"moments": list(self.moments)}
        return moments | {
            "chunk": self.chunk,
            "rank": self.rank,
            "world_size": self.world_size,
            "shards": [
                {
                    "name": s.name,
                    "runs": [
                        {"dtype": r.dtype, "trainable": r.trainable, "params": [[p.name, list(p.shape), p.offset, p.numel] for p in r.params]} for r in s.runs
                    ],
                }
                for s in self.shards
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Model:
        """The inverse of to_json. Raises KeyError, TypeError or ValueError on anything else."""
        moments = tuple(data.get("moments", MOMENTS))

        def run(r: dict[str, Any]) -> Run:
            return Run(r["dtype"], r["trainable"], tuple(Param(n, tuple(shape), offset, numel) for n, shape, offset, numel in r["params"]), moments)

        shards = tuple(Shard(s["name"], tuple(map(run, s["runs"]))) for s in data["shards"])
        return cls(shards, data["chunk"], data["rank"], data["world_size"])

    def fingerprint(self) -> str:
        """16 hex digits that name the parameters, their shapes, dtypes, trainability, moments and places (chunk size apart)."""
        data = self.to_json()
        del data["chunk"]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one version of a chunk stands on NVMe. `path` indexes the store's list of paths; offset and length in bytes."""

    path: int
    file: str
    offset: int
    length: int


Key = tuple[str, int, int, int]  # (kind, shard, run, chunk)


@dataclasses.dataclass(frozen=True)
class Placement:
    """All chunks of a store: `places[key]` has one Place per version; `sizes[path][file]` the bytes to preallocate."""

    places: dict[Key, tuple[Place, ...]]
    sizes: tuple[dict[str, int], ...]

    def nbytes(self, path: int) -> int:
        return sum(self.sizes[path].values())


def place(model: Model, shares: Sequence[float] = (1.0,), versions: int = 2) -> Placement:
    """Stripe the chunks of `model` over len(shares) paths, in proportion to the shares, each in `versions` versions.

    Files: `weights` and `state`, each all of version 0 and then all of version 1, and `frozen` with one version. Within a
    version chunks stand in shard order, so that a forward reads each file from front to back. Each chunk goes to the path
    that is furthest behind its share of the bytes so far, ties to the first.
    """
    if not shares or min(shares) <= 0:
        raise ValueError(f"shares must be positive numbers, one for each path: {list(shares)}")
    ends: list[dict[str, int]] = [{} for _ in shares]
    placed = [0] * len(shares)
    first: dict[Key, Place] = {}
    for s, shard in enumerate(model.shards):
        for r, run in enumerate(shard.runs):
            for kind, itemsize in ((WEIGHTS, run.mode.weights_bytes), (STATE, run.mode.state_bytes)):
                if kind == STATE and not run.has_state:
                    continue
                file = kind if run.trainable else FROZEN
                for chunk in run.chunks(model.chunk):
                    length = chunk.length * itemsize
                    path = min(range(len(shares)), key=lambda i: ((placed[i] + length) / shares[i], i))
                    offset = ends[path].get(file, 0)
                    first[kind, s, r, chunk.index] = Place(path, file, offset, length)
                    ends[path][file] = offset + length
                    placed[path] += length
    places: dict[Key, tuple[Place, ...]] = {}
    for key, p in first.items():
        copies = 1 if p.file == FROZEN else versions
        places[key] = tuple(Place(p.path, p.file, p.offset + v * ends[p.path][p.file], p.length) for v in range(copies))
    sizes = tuple({file: end * (1 if file == FROZEN else versions) for file, end in e.items()} for e in ends)
    return Placement(places, sizes)
