"""The `zinf/...` metrics beside a Trainer's own: what moved and who waited, since the last time that something was logged."""

from __future__ import annotations

import time

import psutil
import torch

from zinf.engine import Engine

GIB = 1 << 30


class Meter:
    """One per engine.

    tokens: of the training batches since the last log; whoever has the batches adds to it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tokens = 0
        self._then, self._stats = time.perf_counter(), engine.stats()

    def read(self) -> dict[str, float]:
        """Rates and seconds since the last read, totals and peaks as they are."""
        now, stats, then = time.perf_counter(), self._engine.stats(), self._stats
        seconds = max(now - self._then, 1e-9)
        read, written = (stats[key] - then[key] for key in ("bytes_read", "bytes_written"))
        found: dict[str, float] = {"zinf/tok_per_s": self.tokens / seconds} if self.tokens else {}
        found |= {f"zinf/stall_{verb}_s": round(s - then["waited"].get(verb, 0.0), 4) for verb, s in stats["waited"].items() if s}
        if self._engine.memory.io is not None:
            found |= {"zinf/nvme_read_gbs": read / seconds / 1e9, "zinf/nvme_write_gbs": written / seconds / 1e9}
            found["zinf/nvme_written_total_tb"] = stats["bytes_written"] / 1e12
        found["zinf/host_rss_gib"] = psutil.Process().memory_info().rss / GIB
        if torch.cuda.is_available():
            found["zinf/device_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        if stats["skipped_steps"]:
            found["zinf/skipped_steps"] = stats["skipped_steps"]
        if self._engine.loss_scale != 1:
            found["zinf/loss_scale"] = self._engine.loss_scale
        self._then, self._stats, self.tokens = now, stats, 0
        return found
