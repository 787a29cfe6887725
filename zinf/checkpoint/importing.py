"""import: a source of parameters -> the chunks of a store, streamed."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Collection, Mapping

import torch

from zinf import layout, ops
from zinf.checkpoint.sources import Reader, Source, check
from zinf.checkpoint.staging import Progress, Slot, Stream, Transfer, Workers, cast, cut, make_slots, segments, slots_nbytes, stage_views
from zinf.chunks import DTYPES


def import_nbytes(model: layout.Model) -> int:
    """Bytes of the `buffer` that import_tensors takes, whatever the source's dtypes."""
    return max(slots_nbytes(model, True), slots_nbytes(model, False))


def import_tensors(
    model: layout.Model,
    source: Source,
    write: Transfer,
    *,
    buffer: torch.Tensor | None = None,
    progress: Progress | None = None,
    apart: Collection[tuple[int, int]] = (),
    there: Collection[tuple[int, int, int]] = (),
    wrote: Callable[[int, int, int], None] | None = None,
) -> None:
    """Write every chunk of `model` from `source`: parameters in their places, zeros everywhere else.

    Trainable runs start with exactly the source's values: what a bf16 run cannot hold of them goes to the plane `lo`, an fp16
    run's master is the value itself. A state chunk that would be all zeros is not written (the store reads it as zeros).
    Frozen runs have weights only, rounded to nearest even as torch casts. float64 is rounded to float32 first where trained.

    Args:
        write: Store.write, or anything with its signature; chunks of a run come in order.
        buffer: memory to stage in, page-aligned uint8 of import_nbytes(model) bytes; None allocates what is needed and frees it.
        progress: called with (bytes of weights written, bytes in all).
        apart: (shard, run)s that are there already.
        there: (shard, run, chunk)s that are there already, of other runs.
        wrote: called with (shard, run, chunk) when a chunk is written.

    Raises:
        CheckpointError: the source does not fit the model; lists every misfit, before the first write.
        OSError: of the source or of `write`; nothing is in flight any more when it is raised.
    """
    readers = check(model, source)
    states = any(_needs_state(run, readers[p.name]) for shard in model.shards for run in shard.runs for p in run.params)
    workers = Workers()
    importer = _Importer(model, readers, write, workers)
    runs = [(s, r) for s, shard in enumerate(model.shards) for r in range(len(shard.runs)) if (s, r) not in apart]
    jobs = [(s, r, chunk) for s, r in runs for chunk in model.chunks(s, r) if (s, r, chunk.index) not in there]
    total = sum(shard.weights_nbytes for shard in model.shards)
    done = sum(chunk.length * model.shards[s].runs[r].mode.weights_bytes for s, r in runs for chunk in model.chunks(s, r) if (s, r, chunk.index) in there)
    with contextlib.closing(workers), contextlib.closing(Stream(make_slots(model, states, buffer), importer.fill, importer.write).run(jobs)) as stream:
        for s, r, chunk in stream:
            done += chunk.length * model.shards[s].runs[r].mode.weights_bytes
            if wrote is not None:
                wrote(s, r, chunk.index)
            if progress is not None:
                progress(done, total)


Job = tuple[int, int, layout.Chunk]  # (shard, run, chunk)


def _needs_state(run: layout.Run, reader: Reader) -> bool:
    """Whether the run's dtype alone cannot hold this parameter's values."""
    return run.trainable and (run.dtype == "fp16" or (run.dtype == "bf16" and reader.dtype != torch.bfloat16))


class _Importer:
    """The two stages of an import: fill a slot from the source, write it."""

    def __init__(self, model: layout.Model, readers: Mapping[str, Reader], write: Transfer, workers: Workers) -> None:
        self.model, self.readers, self.workers = model, readers, workers
        self._write = write
        self._filling: dict[int, list[concurrent.futures.Future[bool]]] = {}  # by address of the slot

    def fill(self, job: Job, slot: Slot) -> list[concurrent.futures.Future[bool]]:
        """First stage: read and cast every parameter of the chunk into the slot."""
        run = self.model.shards[job[0]].runs[job[1]]
        chunk = job[2]
        weights = slot.weights[: chunk.length * run.mode.weights_bytes].view(DTYPES[run.dtype])
        kept = _kept_plane(run, chunk, slot)
        found = segments(run, chunk)
        at = 0
        for s in found:
            _zero(at, s.at, weights, kept)
            at = s.at + s.count
        _zero(at, chunk.length, weights, kept)
        futures = []
        for s in found:
            reader = self.readers[s.param.name]
            for start, count in cut(s.count, reader.dtype.itemsize):
                here = slice(s.at + start, s.at + start + count)
                futures.append(self.workers.submit(_piece, run, reader, s.start + start, weights[here], None if kept is None else kept[here]))
        self._filling[id(slot)] = futures
        return futures

    def write(self, job: Job, slot: Slot) -> list:
        """Second stage: write the weights, and the state if it says anything."""
        s, r, chunk = job
        run = self.model.shards[s].runs[r]
        items = [((layout.WEIGHTS, s, r, chunk.index), slot.weights[: chunk.length * run.mode.weights_bytes])]
        if any([f.result() for f in self._filling.pop(id(slot))]):
            state = slot.state[: chunk.length * run.mode.state_bytes]
            state[chunk.length * layout.ITEMSIZE[run.mode.planes[0][1]] :].zero_()  # m and v
            items.append(((layout.STATE, s, r, chunk.index), state))
        return list(self._write(items))


def _kept_plane(run: layout.Run, chunk: layout.Chunk, slot: Slot) -> torch.Tensor | None:
    """The first plane of state, where an import keeps what the weights cannot hold; None if this one keeps nothing."""
    if not run.trainable or run.dtype == "fp32" or not slot.state.numel():
        return None
    dtype = run.mode.planes[0][1]
    return slot.state[: chunk.length * layout.ITEMSIZE[dtype]].view(DTYPES[dtype])


def _zero(start: int, end: int, *planes: torch.Tensor | None) -> None:
    for plane in planes:
        if plane is not None and start < end:
            plane[start:end].zero_()


def _piece(stage: torch.Tensor, run: layout.Run, reader: Reader, start: int, weights: torch.Tensor, kept: torch.Tensor | None) -> bool:
    """Read a piece of a parameter into its place. True if the state has to be written for it."""
    if kept is None or (run.dtype == "bf16" and reader.dtype == torch.bfloat16):  # the weights hold it all, or are all there is
        if reader.dtype == weights.dtype:
            reader.read(start, weights)
        else:
            raw, _ = stage_views(stage, reader.dtype, weights.numel())
            reader.read(start, raw)
            cast(raw, weights)
        if kept is not None:
            kept.zero_()
        return False
    raw, fp32 = stage_views(stage, reader.dtype, weights.numel())
    reader.read(start, raw)
    if run.dtype == "fp16":
        cast(raw, kept)
        ops.cast(kept, weights)
        return True
    if raw.dtype != torch.float32:
        cast(raw, fp32)
        raw = fp32
    ops.split(raw, weights, kept)
    return bool(torch.count_nonzero(kept))  # several times faster than any()
