"""load: a checkpoint -> the records of an engine, whatever its placement, chunk size, paths and device.

The elements of a run are the same in every layout of one fingerprint; only where chunks are cut differs. So each chunk of the engine
is put together from the pieces of the checkpoint's chunks that it overlaps, plane by plane; pieces are whole pages, as every chunk
and plane is a multiple of 2048 elements. Where the cuts agree a chunk is one piece, and its checksum is compared as it lands; where they
do not, the checkpoint is read through and compared first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from zinf import layout
from zinf.checkpoint.staging import Slot, Stream
from zinf.layout import STATE, WEIGHTS, Chunk, Key
from zinf.tiers.chunk import checksum
from zinf.tiers.device import DONE
from zinf.tiers.nvme import Store
from zinf.tiers.records import Records
from zinf.tiers.snapshot import Snapshot

KEPT = ("lo", "master")  # planes of state that are a part of the weights


def restore(source: Store, records: Records, buffers: Sequence[torch.Tensor], *, moments: bool) -> None:
    """Write every chunk of `records` from the checkpoint `source`, of the same fingerprint (without moments: but for those). Commits nothing.

    Args:
        buffers: page-aligned, each as long as the records' longest chunk.
        moments: False leaves the moments zero, as in a run that has not begun.

    Raises:
        IntegrityError: the checkpoint is not what was saved.
        StoreError: other frozen weights, and the store's are shared with another checkpoint.
        OSError: a disk failed.
    """
    empty = torch.empty(0, dtype=torch.uint8)
    with source.snapshot() as snapshot:
        loader = _Loader(source.model, snapshot, records, moments)
        stream: Stream[_Job] = Stream([Slot(buffer, empty) for buffer in buffers], loader.fill, loader.write)
        for _ in stream.run(_jobs(records.model)):
            pass


@dataclasses.dataclass(frozen=True)
class _Job:
    """One chunk of the engine, and its planes as (name, bytes an element)."""

    key: Key
    chunk: Chunk
    planes: tuple[tuple[str, int], ...]

    @property
    def nbytes(self) -> int:
        return self.chunk.length * sum(size for _, size in self.planes)


def _jobs(model: layout.Model) -> Iterator[_Job]:
    for s, shard in enumerate(model.shards):
        for r, run in enumerate(shard.runs):
            planes = tuple((name, layout.ITEMSIZE[dtype]) for name, dtype in run.mode.planes)
            for chunk in model.chunks(s, r):
                yield _Job((WEIGHTS, s, r, chunk.index), chunk, ((WEIGHTS, run.mode.weights_bytes),))
                if run.has_state:
                    yield _Job((STATE, s, r, chunk.index), chunk, planes)


class _Loader:
    """The two stages of a load: put a chunk together, write it."""

    def __init__(self, model: layout.Model, snapshot: Snapshot, records: Records, moments: bool) -> None:
        self._model, self._snapshot, self._records, self._moments = model, snapshot, records, moments

    def fill(self, job: _Job, slot: Slot) -> list:
        """First stage: start reading every piece into its place; zeros where the checkpoint has none."""
        kind, s, r, _ = job.key
        run, size = self._model.shards[s].runs[r], self._model.chunk
        buffer = slot.weights[: job.nbytes]
        if size == self._records.model.chunk and (self._moments or kind == WEIGHTS):
            if self._snapshot.written(job.key):
                return [self._snapshot.read(job.key, buffer)]
            buffer.zero_()
            return []
        tickets = []
        start, end = job.chunk.start, job.chunk.start + job.chunk.length
        for i in range(start // size, -(-end // size)):
            key, first = (kind, s, r, i), i * size
            length = min(size, run.padded - first)  # elements of the checkpoint's chunk
            a, b = max(start, first), min(end, first + length)
            theirs = ours = 0  # where the plane begins, in bytes; the planes that are a part of the weights come first, whatever the moments
            for name, itemsize in job.planes:
                piece = buffer[ours + (a - start) * itemsize : ours + (b - start) * itemsize]
                if (self._moments or kind == WEIGHTS or name in KEPT) and self._snapshot.written(key):
                    tickets.append(self._snapshot.read(key, piece, theirs + (a - first) * itemsize))
                else:
                    piece.zero_()
                theirs, ours = theirs + length * itemsize, ours + job.chunk.length * itemsize
        return tickets

    def write(self, job: _Job, slot: Slot) -> list:
        """Second stage."""
        buffer = slot.weights[: job.nbytes]
        store = self._records.store
        run = self._records.model.shards[job.key[1]].runs[job.key[2]]
        if store is not None and not run.trainable:
            if store.digest(job.key) == checksum(buffer):
                return [DONE]
            store.thaw()
        return list(self._records.write([(job.key, buffer)]))
