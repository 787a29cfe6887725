"""The exponential average of the weights that `ema_decay` keeps, as values: it is a plane of state, and reading it is all that happens here.

    average = decay * average + (1 - decay) * weight        of the fp32 master after each step, in the same pass (zinf.ops)

It starts at the weights' values at the start of training, as torch.optim.swa_utils.AveragedModel's does. A parameter that is not stepped (it
got no gradient, or is frozen for now) keeps its average, where AveragedModel goes on drawing it to the weight: an expert that no token met is
not read from the drive for that. One that was never stepped has its weight for an average; frozen ones and buffers are what they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from zinf.checkpoint.staging import pages, segments
from zinf.chunks import DTYPES, master_of, plane_views
from zinf.errors import ConfigError
from zinf.layout import STATE, WEIGHTS
from zinf.shard import Shard

if TYPE_CHECKING:
    from zinf.engine import Engine


def check(engine: Engine) -> None:
    """Raise ConfigError if no average is kept."""
    if engine.config.ema_decay is None:
        raise ConfigError("ema=True, but this engine keeps no average of the weights: give ema_decay (such as 0.999) to zinf.Engine from the start")


def averaged(engine: Engine) -> frozenset[str]:
    """The names of the parameters that have been stepped, and so have an average of their own."""
    counts = engine.stepper.counts
    return frozenset(spec.name for shard in engine.shards for (_, spec, _), n in zip(shard.params, counts[shard.index], strict=True) if n)


def values(engine: Engine) -> dict[str, torch.Tensor]:
    """The averages of all parameters that may be trained, in fp32, by the layout's names. Whatever step is pending is applied first."""
    engine.synchronize()
    own = averaged(engine)
    out: dict[str, torch.Tensor] = {}
    for shard in engine.shards:
        for r, run in enumerate(shard.spec.runs):
            if run.trainable:
                out |= {p.name: torch.empty(p.shape) for p in run.params}
                for name, start, part in _parts(shard, r, own):
                    out[name].view(-1)[start : start + len(part)] = part
    return out


def _parts(shard: Shard, r: int, own: frozenset[str]) -> Iterator[tuple[str, int, torch.Tensor]]:
    """(parameter, its first element, fp32 values) chunk by chunk: the average of those in `own`, the master of the others."""
    run, records = shard.spec.runs[r], shard.parts.records
    for chunk in records.model.chunks(shard.index, r):
        weights, state = pages(chunk.length * run.mode.weights_bytes), pages(chunk.length * run.mode.state_bytes)
        for ticket in records.read([((WEIGHTS, shard.index, r, chunk.index), weights), ((STATE, shard.index, r, chunk.index), state)]):
            ticket.wait()
        planes = plane_views(run, chunk.length, state)
        master = master_of(weights.view(DTYPES[run.dtype]), planes, shard.parts.pool)
        for s in segments(run, chunk):
            source = planes["ema"] if s.param.name in own else master
            yield s.param.name, s.start, source[s.at : s.at + s.count]
