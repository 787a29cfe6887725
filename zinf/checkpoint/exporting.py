"""export: the chunks of a store -> a normal Hugging Face folder of safetensors files, streamed.

[Note: a crash leaves no half checkpoint] Files are written under temporary names and fsynced. Then, in this order: the index of
an older checkpoint goes, so that its files cannot be taken for a whole one together with new ones; each file gets its name; the
new index gets its name; older files that nobody lists go (model.safetensors, which readers prefer, is whole until then). So a
folder that has model.safetensors or an index is whole at every instant. An export holds a lock on its temporary files, so the next
one to the folder knows what a killed one has left, and removes it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from zinf import layout, ops
from zinf.checkpoint.folder import Folder, Journal, digest_of
from zinf.checkpoint.format import BITS, NAMES, Tensor, write_header
from zinf.checkpoint.sources import SINGLE, pread
from zinf.checkpoint.staging import Part, Progress, Segment, Slot, Stream, Transfer, Workers, cast, cut, make_slots, segments, stage_views
from zinf.chunks import DTYPES, plane_views
from zinf.errors import CheckpointError
from zinf.tiers.chunk import checksum

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
    journal: Journal | None = None,
    contents: str = "",
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
        journal: what goes on where an export was killed, see folder.py; `contents` names the values that `read` gives.

    Raises:
        CheckpointError: names that do not fit the model.
        OSError: ENOSPC with the numbers, before the first byte, if there is no room; or what the disk says. No file is left
            behind but those that a journal has, and a checkpoint that was there still is.
    """
    if dtype is not None and dtype not in layout.MASTERS:
        raise ValueError(f"dtype is {dtype!r}; it can be None, {', '.join(layout.MASTERS)}")
    out = _plan(model, dict(names or {}), dict(buffers or {}), dtype)
    folder = os.fspath(folder)
    os.makedirs(folder, exist_ok=True)
    divided = _divide(list(out.values()), max_shard_size)
    files = [_File(name, *write_header([(x.name, x.dtype, x.shape) for x in tensors], name, metadata), tensors) for name, tensors in divided.items()]
    if journal is not None:
        beside = [checksum(_raw(b)).to_bytes(8, "little") for _, b in sorted((buffers or {}).items())]
        journal.begin(hashlib.sha256(b"".join([contents.encode(), *beside, *(file.header for file in files)])).hexdigest()[:16])
    index = None
    if len(files) > 1:
        weight_map = {x.name: file.name for file in files for x in file.tensors}
        totals = {"total_parameters": model.numel, "total_size": sum(x.nbytes for x in out.values())}
        index = json.dumps({"metadata": totals, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
    with Folder(folder, journal) as target, contextlib.closing(Workers()) as workers:
        exporter = _Exporter(model, read, files, target, workers, dtype == "fp32", frozenset(averaged), buffers or {})
        exporter.run(buffer, progress)
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


@dataclasses.dataclass
class _File:
    """A file to be written. `places` says where each tensor goes in it."""

    name: str
    header: bytes
    places: list[Tensor]
    nbytes: int
    tensors: list[_Out]
    sums: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (offset, checksum) of what was written


Job = tuple[_File, int, int, layout.Chunk]  # (file, shard, run, chunk)


class _Exporter:
    """File by file, the two stages of an export: read a chunk into a slot; cast and write what of it is the file's."""

    def __init__(
        self, model: layout.Model, read: Transfer, files: Sequence[_File], target: Folder, workers: Workers, master: bool, averaged: frozenset[str],
        buffers: Mapping[str, torch.Tensor],
    ) -> None:  # fmt: skip
        self.model, self.files, self.target, self.workers = model, files, target, workers
        self._read, self._master, self._averaged, self._buffers = read, master, averaged, buffers
        self._pieces: dict[tuple[str, str], list[tuple[int, int, int, Tensor]]] = {}  # (file, parameter) -> (its first element, count, the tensor's, tensor)
        for file in files:
            places = {t.name: t for t in file.places}
            for tensor in file.tensors:
                for name, at, start, count in tensor.sources:
                    self._pieces.setdefault((file.name, name), []).append((at, count, start, places[tensor.name]))

    def run(self, buffer: torch.Tensor | None, progress: Progress | None) -> None:
        """Write every file that is not there already."""
        jobs = {file.name: list(self._jobs(file)) for file in self.files}
        nbytes = {name: sum(map(self._nbytes, found)) for name, found in jobs.items()}
        total, done = sum(nbytes.values()), 0
        todo = []
        for file in self.files:
            if not self.target.adopt(file.name, lambda fd, digest, file=file: self._unchanged(file, jobs[file.name], fd, digest)):  # type: ignore[misc]
                todo.append(file)
                continue
            done += nbytes[file.name]
            if progress is not None:
                progress(done, total)
        self.target.check_space(sum(file.nbytes for file in todo))
        last = {id(jobs[file.name][-1]): file for file in todo if jobs[file.name]}
        states = any(self.needs_state(run) for shard in self.model.shards for run in shard.runs)
        finishing: list[concurrent.futures.Future[None]] = []  # beside the next file; the fsync waits for the drive
        with (
            concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="zinf-checkpoint") as pool,
            contextlib.closing(Stream(make_slots(self.model, states, buffer), self.read, self.write).run(self._begun(todo, jobs))) as stream,
        ):
            finishing += [pool.submit(self._finish, file) for file in todo if not jobs[file.name] and self._begin(file)]
            for job in stream:
                done += self._nbytes(job)
                if progress is not None:
                    progress(done, total)
                if id(job) in last:
                    for future in filter(concurrent.futures.Future.done, finishing):
                        future.result()
                    finishing.append(pool.submit(self._finish, last[id(job)]))
        for future in finishing:
            future.result()

    def _jobs(self, file: _File) -> Iterator[Job]:
        """The chunks that a file has something of."""
        for s, shard in enumerate(self.model.shards):
            for r, run in enumerate(shard.runs):
                if any((file.name, p.name) in self._pieces for p in run.params):
                    yield from ((file, s, r, chunk) for chunk in run.chunks(self.model.chunk) if any(self._cut(file, x) for x in segments(run, chunk)))

    def _begun(self, files: Sequence[_File], jobs: Mapping[str, list[Job]]) -> Iterator[Job]:
        """The jobs of files, each of which is begun before its first."""
        for file in files:
            if jobs[file.name]:
                self._begin(file)
            yield from jobs[file.name]

    def _begin(self, file: _File) -> bool:
        self.target.create(file.name, file.header, file.nbytes)
        for place in file.places:
            if place.name in self._buffers:
                raw = _raw(self._buffers[place.name])
                self.target.write(place, 0, raw)
                file.sums.append((place.begin, checksum(raw)))
        return True

    def _finish(self, file: _File) -> None:
        self.target.finish(file.name, digest_of(file.header, file.sums))

    def _nbytes(self, job: Job) -> int:
        return job[3].length * self.model.shards[job[1]].runs[job[2]].mode.weights_bytes

    def needs_state(self, run: layout.Run) -> bool:
        """Whether what is wanted is not all in the weights."""
        return run.trainable and ((self._master and run.dtype != "fp32") or any(p.name in self._averaged for p in run.params))

    def read(self, job: Job, slot: Slot) -> list:
        """First stage."""
        _, s, r, chunk = job
        run = self.model.shards[s].runs[r]
        items = [((layout.WEIGHTS, s, r, chunk.index), slot.weights[: chunk.length * run.mode.weights_bytes])]
        if self.needs_state(run):
            items.append(((layout.STATE, s, r, chunk.index), slot.state[: chunk.length * run.mode.state_bytes]))
        return list(self._read(items))

    def write(self, job: Job, slot: Slot) -> list:
        """Second stage."""
        file, s, r, chunk = job
        run = self.model.shards[s].runs[r]
        weights = slot.weights[: chunk.length * run.mode.weights_bytes].view(DTYPES[run.dtype])
        planes = plane_views(run, chunk.length, slot.state) if self.needs_state(run) else {}
        master = next((planes[name] for name, _ in layout.MASTERS[run.dtype] if self._master and planes), None)
        jobs = []
        for segment in segments(run, chunk):
            kept = planes["ema"] if segment.param.name in self._averaged else master
            jobs += [(file, weights[a:b], None if kept is None else kept[a:b], tensor, start) for a, b, tensor, start in self._cut(file, segment)]
        return [self.workers.submit(self._piece, *job) for job in jobs]

    def _cut(self, file: _File, segment: Segment) -> list[tuple[int, int, Tensor, int]]:
        """(first and last element in the chunk, tensor, first element in it) of the transfers of a segment into a file."""
        found = []
        for at, count, start, tensor in self._pieces.get((file.name, segment.param.name), ()):
            a, b = max(at, segment.start), min(at + count, segment.start + segment.count)
            for first, length in cut(max(b - a, 0), BITS[tensor.dtype] // 8):
                here = segment.at + a - segment.start + first
                found.append((here, here + length, tensor, start + a - at + first))
        return found

    def _piece(self, stage: torch.Tensor, file: _File, weights: torch.Tensor, kept: torch.Tensor | None, tensor: Tensor, start: int) -> None:
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
        raw = weights.view(torch.uint8)
        file.sums.append((tensor.begin + start * itemsize, checksum(raw)))
        self.target.write(tensor, start * itemsize, raw)

    def _unchanged(self, file: _File, jobs: Sequence[Job], fd: int, digest: str) -> bool:
        """Whether an open file is byte for byte the one whose pieces had this digest."""
        if os.fstat(fd).st_size != file.nbytes or os.pread(fd, len(file.header), 0) != file.header:
            return False
        runs = [(segments(self.model.shards[s].runs[r], chunk)) for _, s, r, chunk in jobs]
        cuts = [x for found in runs for segment in found for x in self._cut(file, segment)]
        pieces = [(t.begin + start * BITS[t.dtype] // 8, (b - a) * BITS[t.dtype] // 8) for a, b, t, start in cuts]
        futures = [self.workers.submit(_sum, fd, self.target.folder, at, n) for at, n in pieces]
        sums = [future.result() for future in futures]
        for place in file.places:
            if place.name in self._buffers:
                raw = torch.empty(place.end - place.begin, dtype=torch.uint8)
                pread(fd, file.name, place.begin, raw)
                sums.append((place.begin, checksum(raw)))
        return digest_of(file.header, sums) == digest


def _raw(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _sum(stage: torch.Tensor, fd: int, path: str, at: int, nbytes: int) -> tuple[int, int]:
    pread(fd, path, at, stage[:nbytes])
    return at, checksum(stage[:nbytes])
