"""Weights that are set by hand: what a gather block wrote, what load_state_dict brings.

[Note: what an edit does to the master] An element whose weight keeps its bits keeps its master. One that changes gets the new
value as its master, exactly: `lo` becomes 0, or what a value given in fp32 has beyond bf16. Moments and step counts stay, as
they do when a parameter of a torch optimizer is written to.

Records are written chunk by chunk, two versions and commit as ever; so memory is that of a chunk, and of a copy of the weights
of each shard whose parameters are views of its record itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zinf import layout, ops
from zinf.checkpoint.staging import Segment, pages, segments
from zinf.chunks import DTYPES
from zinf.errors import EngineError
from zinf.layout import STATE, WEIGHTS
from zinf.shard import Shard

Values = Callable[[layout.Param, int, int], torch.Tensor | None]  # elements (start, count) of a parameter, 1-D on the CPU; None: they stay


class Edit:
    """One shard, bound, that someone writes to."""

    def __init__(self, shard: Shard):
        self.shard = shard
        home = shard.parts.records.weights(shard.index)
        bound = shard.weights_buffer()
        self._before = bound.clone() if home is not None and home.data_ptr() == bound.data_ptr() else None
        shard.edited = True

    def undo(self) -> None:
        """Nothing was written. The caller fetches the shard again."""
        self.shard.edited = False
        if self._before is not None:
            self.shard.weights_buffer().copy_(self._before)
        else:
            self.shard.valid = False
        self.shard.note_values()

    def _check(self) -> None:
        """Bring what was put in a parameter's place into the slab; raise EngineError for what cannot be written."""
        shard = self.shard
        for (r, spec, p), view, version in zip(shard.params, shard.views(shard.weights_buffer()), shard.versions, strict=True):
            if p.data_ptr() != view.data_ptr():
                if p.shape != view.shape:
                    raise EngineError(f"{spec.name} was given the shape {tuple(p.shape)}, and is {tuple(view.shape)} in the engine")
                view.copy_(p.detach())
                p.data = view
            if p._version != version and not editable(shard, r):
                raise EngineError(f"{spec.name} was changed, but is frozen, and its only copy on NVMe belongs to the last commit")
        shard.note_values()

    def write(self) -> bool:
        """What the parameters hold now are the weights. True if that changed any."""
        self.shard.edited = False
        self._check()
        params = {spec.name: p for _, spec, p in self.shard.params}

        def values(spec: layout.Param, start: int, count: int) -> torch.Tensor:
            return params[spec.name].detach().view(-1)[start : start + count].cpu()

        return write(self.shard, values, self._before)


def editable(shard: Shard, run: int) -> bool:
    """A frozen record has one version on NVMe, which the last commit needs."""
    return shard.spec.runs[run].trainable or shard.parts.records.store is None


def write(shard: Shard, values: Values, before: torch.Tensor | None = None) -> bool:
    """Set elements of a shard's records; True if that changed any. Nothing may be moving in or out of them.

    Args:
        before: the weights as they were (a slab's bytes), if the records have what the parameters hold now.

    Raises:
        OSError: the shard is half written then.
    """
    changed = False
    for r, run in enumerate(shard.spec.runs):
        if not editable(shard, r):
            continue
        for chunk in shard.parts.records.model.chunks(shard.index, r):
            given = [(s, v) for s in segments(run, chunk) if (v := values(s.param, s.start, s.count)) is not None]
            old = None
            if before is not None:
                start = shard.spec.run_offset(r) + chunk.start * run.mode.weights_bytes
                old = before[start : start + chunk.length * run.mode.weights_bytes]
            if given:
                changed |= _write_chunk(shard, r, chunk, given, old)
    if changed:
        shard.steps += 1  # a graph from before must not be recomputed from these values
    return changed


def _write_chunk(shard: Shard, r: int, chunk: layout.Chunk, given: list[tuple[Segment, torch.Tensor]], before: torch.Tensor | None) -> bool:
    run, records = shard.spec.runs[r], shard.parts.records
    weights = pages(chunk.length * run.mode.weights_bytes)
    key = (WEIGHTS, shard.index, r, chunk.index)
    for ticket in records.read([(key, weights)]):
        ticket.wait()
    if before is not None:
        weights.copy_(before)
    items = [(key, weights)]
    kept = None
    if run.trainable and run.dtype != "fp32":
        state = pages(chunk.length * run.mode.state_bytes)
        items.append(((STATE, shard.index, r, chunk.index), state))
        for ticket in records.read(items[1:]):
            ticket.wait()
        plane = run.mode.planes[0][1]
        kept = state[: chunk.length * layout.ITEMSIZE[plane]].view(DTYPES[plane])
    changed = False
    for segment, value in given:
        here = slice(segment.at, segment.at + segment.count)
        changed |= _set(weights.view(DTYPES[run.dtype])[here], None if kept is None else kept[here], value)
    if changed:
        for ticket in records.write(items):
            ticket.wait()
    return changed


def _set(weights: torch.Tensor, kept: torch.Tensor | None, value: torch.Tensor) -> bool:
    """Set elements of one parameter in place, and what their master has beyond them. See [Note: what an edit does to the master]."""
    old = (weights.clone(), kept.clone() if kept is not None else None)
    if value.dtype == weights.dtype or kept is None:
        weights.copy_(value)
        if kept is not None:
            changed = _bits(weights) != _bits(old[0])
            kept[changed] = 0 if kept.dtype == torch.int16 else value[changed].to(kept.dtype)
    elif kept.dtype == torch.int16:
        ops.split(value.float().contiguous(), weights, kept)
    else:
        kept.copy_(value)
        weights.copy_(kept)
    return not torch.equal(_bits(weights), _bits(old[0])) or (kept is not None and not torch.equal(_bits(kept), _bits(old[1])))  # type: ignore[arg-type]


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.int16 if t.itemsize == 2 else torch.int32)
