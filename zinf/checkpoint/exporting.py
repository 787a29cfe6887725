"""export: the chunks of a store -> a normal Hugging Face folder of safetensors files, streamed.

[Note: a crash leaves no half checkpoint] Files are written under temporary names and fsynced. Then, in this order: the index of
an older checkpoint goes, so that its files cannot be taken for a whole one together with new ones; each file gets its name; the
new index gets its name; older files that nobody lists go (model.safetensors, which readers prefer, is whole until then). So a
folder that has model.safetensors or an index is whole at every instant. An export holds a lock on its temporary files, so the next
one to the folder knows what a killed one has left, and removes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch

from zinf import layout, ops
from zinf.checkpoint.format import BITS, NAMES, Tensor, write_header
from zinf.checkpoint.sources import INDEX, SINGLE
from zinf.checkpoint.staging import Part, Progress, Segment, Slot, Stream, Transfer, Workers, cast, cut, make_slots, segments, stage_views
from zinf.chunks import DTYPES, plane_views
from zinf.errors import CheckpointError

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_TEMPORARY = re.compile(r"\.(model.*\.safetensors|model\.safetensors\.index\.json)\.\d+\.tmp")
_FORMAT = MappingProxyType({"format": "pt"})  # what transformers wants to see in every file


def export_safetensors(
    folder: str | os.PathLike[str],
    model: layout.Model,
    read: Transfer,
    *,
    names: Mapping[str, str | Sequence[Part]] | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
    max_shard_size: int = 5_000_000_000,
    dtype: str | None = None,
    averaged: Collection[str] = (),
    metadata: Mapping[str, str] = _FORMAT,
    buffer: torch.Tensor | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Write model.safetensors, or model-00001-of-0000N.safetensors and their index, into `folder`; the paths written.

    The bytes of the files are those that the safetensors package and transformers write for the same tensors. See
    [Note: a crash leaves no half checkpoint], [Note: the memory of a stream].

    Args:
        folder: created if it is not there.
        read: Store.read, or anything with its signature.
        names: parameter -> its name in the files, or the parts it is cut into; its order is the order of the tensors over the
            files. Parameters it does not have keep their names and come last.
        buffers: further tensors, small and in memory, under their names in the files.
        max_shard_size: bytes of tensors in a file, unless a single tensor has more.
        dtype: None for the weights as they are; "fp32" for the master, exactly; "bf16", "fp16" for the weights cast.
        averaged: parameters whose average (the plane `ema`) is written instead.
        buffer: memory to stage in, as for import_tensors.
        progress: called with (bytes of weights read, bytes in all).

    Raises:
        CheckpointError: names that do not fit the model.
        OSError: ENOSPC with the numbers, before the first byte, if there is no room; or what the disk says. No file is left
            behind, and a checkpoint that was there still is.
    """
    if dtype is not None and dtype not in layout.MASTERS:
        raise ValueError(f"dtype is {dtype!r}; it can be None, {', '.join(layout.MASTERS)}")
    out = _plan(model, dict(names or {}), dict(buffers or {}), dtype)
    folder = os.fspath(folder)
    os.makedirs(folder, exist_ok=True)
    files = _divide(list(out.values()), max_shard_size)
    with _Folder(folder) as target:
        places = {t.name: t for file, tensors in files.items() for t in target.add(file, [(x.name, x.dtype, x.shape) for x in tensors], metadata)}
        target.check_space()
        for name, tensor in (buffers or {}).items():
            target.write(places[name], 0, tensor.detach().cpu().contiguous().view(-1).view(torch.uint8))
        _stream(model, read, out, places, target, dtype, frozenset(averaged), buffer, progress)
        index = None
        if len(files) > 1:
            weight_map = {x.name: file for file, tensors in files.items() for x in tensors}
            totals = {"total_parameters": model.numel, "total_size": sum(x.nbytes for x in out.values())}
            index = json.dumps({"metadata": totals, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
        return target.publish(index)


@dataclasses.dataclass
class _Out:
    """A tensor to be written, and where in it each parameter goes: (parameter, its first element, the tensor's, count)."""

    name: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    sources: list[tuple[str, int, int, int]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


def _plan(model: layout.Model, names: dict[str, str | Sequence[Part]], buffers: dict[str, torch.Tensor], dtype: str | None) -> dict[str, _Out]:
    """The tensors to write, in order. Every element of each must come from exactly one parameter."""
    params = {p.name: (p, run) for shard in model.shards for run in shard.runs for p in run.params}
    out: dict[str, _Out] = {}
    order = [name for name in names if name in params or name in buffers] + [n for n in params if n not in names] + [n for n in buffers if n not in names]
    for name in order:
        if name in buffers:
            out[name] = _Out(name, NAMES[buffers[name].dtype], tuple(buffers[name].shape), [])
            continue
        p, run = params[name]
        parts = names.get(name, name)
        if isinstance(parts, str):
            parts = [Part(parts, p.shape, 0, p.numel)]
        kind = NAMES[DTYPES[dtype or run.dtype]]
        at = 0
        for part in parts:
            tensor = out.setdefault(part.name, _Out(part.name, kind, part.shape, []))
            if (tensor.shape, tensor.dtype) != (part.shape, kind):
                raise CheckpointError(f"{part.name} would be {tensor.dtype} {list(tensor.shape)} and {kind} {list(part.shape)} at once")
            tensor.sources.append((name, at, part.start, part.count))
            at += part.count
        if at != p.numel:
            raise CheckpointError(f"the parts of {name} have {at} elements and it has {p.numel}")
    for tensor in out.values():
        at = 0
        for _, _, start, count in sorted(tensor.sources, key=lambda s: s[2]):
            if start != at:
                raise CheckpointError(f"two parameters go to the tensor {tensor.name}, or nothing goes to its element {min(start, at)}")
            at += count
        if tensor.name not in buffers and at != math.prod(tensor.shape):
            raise CheckpointError(f"only {at} elements of {tensor.name} {list(tensor.shape)} come from a parameter")
    return out


def _divide(tensors: Sequence[_Out], limit: int) -> dict[str, list[_Out]]:
    """Tensors by file name: filled in order, a tensor over the limit alone, as huggingface_hub divides."""
    files: list[list[_Out]] = []
    current: list[_Out] = []
    size = 0
    for t in tensors:
        if t.nbytes > limit:
            files.append([t])
            continue
        if size + t.nbytes > limit:
            files.append(current)
            current, size = [], 0
        current.append(t)
        size += t.nbytes
    if current or not files:
        files.append(current)
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{i + 1:05d}-of-{len(files):05d}.safetensors": group for i, group in enumerate(files)}


class _Folder:
    """The files of one export, until publish() under temporary names; leaving the `with` block removes what is not published."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._fds: dict[str, int] = {}
        self._sizes: dict[str, int] = {}

    def __enter__(self) -> _Folder:
        for file in filter(_TEMPORARY.fullmatch, os.listdir(self.folder)):
            with contextlib.suppress(OSError):
                fd = os.open(self._path(file), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while whoever made it lives
                    os.unlink(self._path(file))
                finally:
                    os.close(fd)
        return self

    def __exit__(self, *exc: object) -> None:
        for file, fd in self._fds.items():
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(self._temporary(file))
        self._fds.clear()

    def _path(self, file: str) -> str:
        return os.path.join(self.folder, file)

    def _temporary(self, file: str) -> str:
        return self._path(f".{file}.{os.getpid()}.tmp")

    def add(self, file: str, tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> list[Tensor]:
        """Create a file with its header; where its tensors go. Tensor.path is the file's name."""
        header, places, self._sizes[file] = write_header(tensors, file, metadata)
        self._open(file)
        _pwrite(self._fds[file], self._path(file), 0, header)
        return places

    def _open(self, file: str) -> int:
        self._fds[file] = fd = os.open(self._temporary(file), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # a network mount may have no locks; then what a killed export leaves stays
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd

    def check_space(self) -> None:
        need = sum(self._sizes.values())
        stat = os.statvfs(self.folder)
        free = stat.f_bavail * stat.f_frsize
        if need > free:
            raise OSError(errno.ENOSPC, f"export needs {need} bytes and {free} are free; free {need - free} bytes, or export elsewhere", self.folder)

    def write(self, tensor: Tensor, start: int, raw: torch.Tensor) -> None:
        """Write uint8 `raw` from byte `start` of a tensor on."""
        fd = self._fds[tensor.path]
        _pwrite(fd, self._path(tensor.path), tensor.begin + start, raw.numpy().data)
        os.posix_fadvise(fd, tensor.begin + start, len(raw), os.POSIX_FADV_DONTNEED)  # starts writeback now: dirty pages must not pile up until the fsync

    def publish(self, index: str | None) -> list[str]:
        """Make all files durable and give them their names, see [Note: a crash leaves no half checkpoint]."""
        for fd in self._fds.values():
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        files = list(self._fds)
        if index is not None:
            files.append(INDEX)
            fd = self._open(INDEX)
            _pwrite(fd, self._path(INDEX), 0, index.encode())
            os.fsync(fd)
        stale = [f for f in os.listdir(self.folder) if f in (SINGLE, INDEX) or _SHARD.fullmatch(f)]
        if index is not None and INDEX in stale:
            os.unlink(self._path(INDEX))
            self._sync()
        for file in files:
            os.replace(self._temporary(file), self._path(file))
        self._sync()
        for file in set(stale) - set(files):
            os.unlink(self._path(file))
        self._sync()
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        return [self._path(file) for file in files]

    def _sync(self) -> None:
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _pwrite(fd: int, path: str, offset: int, data: bytes | memoryview) -> None:
    view, done = memoryview(data), 0
    try:
        while done < len(view):
            done += os.pwrite(fd, view[done:], offset + done)
    except OSError as e:
        raise OSError(e.errno, f"export: write {len(view)} bytes at {offset}: {e.strerror}", path) from e


Job = tuple[int, int, layout.Chunk]  # (shard, run, chunk)


def _stream(
    model: layout.Model, read: Transfer, out: Mapping[str, _Out], places: Mapping[str, Tensor], target: _Folder, dtype: str | None,
    averaged: frozenset[str], buffer: torch.Tensor | None, progress: Progress | None,
) -> None:  # fmt: skip
    """Read every chunk and write what it holds to its places."""
    pieces: dict[str, list[tuple[int, int, int, Tensor]]] = {}  # parameter -> (its first element, count, the tensor's first element, tensor)
    for tensor in out.values():
        for name, at, start, count in tensor.sources:
            pieces.setdefault(name, []).append((at, count, start, places[tensor.name]))
    workers = Workers()
    exporter = _Exporter(model, read, pieces, target, workers, dtype == "fp32", averaged)
    jobs = [(s, r, chunk) for s, shard in enumerate(model.shards) for r, run in enumerate(shard.runs) for chunk in run.chunks(model.chunk)]
    total, done = sum(shard.weights_nbytes for shard in model.shards), 0
    states = any(exporter.needs_state(run) for shard in model.shards for run in shard.runs)
    try:
        for s, r, chunk in Stream(make_slots(model, states, buffer), exporter.read, exporter.write).run(jobs):
            done += chunk.length * model.shards[s].runs[r].mode.weights_bytes
            if progress is not None:
                progress(done, total)
    finally:
        workers.close()


class _Exporter:
    """The two stages of an export: read a chunk into a slot, cast and write the parameters in it."""

    def __init__(
        self, model: layout.Model, read: Transfer, pieces: Mapping[str, list[tuple[int, int, int, Tensor]]], target: _Folder, workers: Workers, master: bool,
        averaged: frozenset[str],
    ) -> None:  # fmt: skip
        self.model, self.pieces, self.target, self.workers = model, pieces, target, workers
        self._read, self._master, self._averaged = read, master, averaged

    def needs_state(self, run: layout.Run) -> bool:
        """Whether what is wanted is not all in the weights."""
        return run.trainable and ((self._master and run.dtype != "fp32") or any(p.name in self._averaged for p in run.params))

    def read(self, job: Job, slot: Slot) -> list:
        """First stage."""
        s, r, chunk = job
        run = self.model.shards[s].runs[r]
        items = [((layout.WEIGHTS, s, r, chunk.index), slot.weights[: chunk.length * run.mode.weights_bytes])]
        if self.needs_state(run):
            items.append(((layout.STATE, s, r, chunk.index), slot.state[: chunk.length * run.mode.state_bytes]))
        return list(self._read(items))

    def write(self, job: Job, slot: Slot) -> list:
        """Second stage."""
        run = self.model.shards[job[0]].runs[job[1]]
        chunk = job[2]
        weights = slot.weights[: chunk.length * run.mode.weights_bytes].view(DTYPES[run.dtype])
        planes = plane_views(run, chunk.length, slot.state) if self.needs_state(run) else {}
        master = next((planes[name] for name, _ in layout.MASTERS[run.dtype] if self._master and planes), None)
        jobs = []
        for segment in segments(run, chunk):
            kept = planes["ema"] if segment.param.name in self._averaged else master
            jobs += [(weights[a:b], None if kept is None else kept[a:b], tensor, start) for a, b, tensor, start in self._cut(segment)]
        return [self.workers.submit(self._piece, *job) for job in jobs]

    def _cut(self, segment: Segment) -> list[tuple[int, int, Tensor, int]]:
        """(first and last element in the chunk, tensor, first element in it) of the transfers of a segment."""
        found = []
        for at, count, start, tensor in self.pieces[segment.param.name]:
            a, b = max(at, segment.start), min(at + count, segment.start + segment.count)
            for first, length in cut(max(b - a, 0), BITS[tensor.dtype] // 8):
                here = segment.at + a - segment.start + first
                found.append((here, here + length, tensor, start + a - at + first))
        return found

    def _piece(self, stage: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor | None, tensor: Tensor, start: int) -> None:
        """Cast a piece if need be, and write it from element `start` of its tensor on."""
        itemsize = BITS[tensor.dtype] // 8
        if kept is not None and kept.dtype == torch.float32:
            weights = kept
        elif kept is not None:
            _, fp32 = stage_views(stage, torch.float32, weights.numel())
            ops.join(weights, kept, fp32)
            weights = fp32
        if NAMES[weights.dtype] != tensor.dtype:
            out = stage[: weights.numel() * itemsize].view(next(d for d, name in NAMES.items() if name == tensor.dtype))
            cast(weights, out)
            weights = out
        self.target.write(tensor, start * itemsize, weights.view(torch.uint8))
