"""flops_profiler of DeepSpeed's config: the first micro-batch of one step is counted, and its table goes to the log or to a file. See zinf/profiler.py."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from zinf.profiler import Profiler

log = logging.getLogger("zinf")


class StepProfile:
    """Of one engine. Off unless the config has it enabled."""

    def __init__(self, section: Mapping[str, Any]):
        self._wanted: int | None = int(section.get("profile_step", 1)) if section.get("enabled") else None
        self._file = section.get("output_file")
        self._how = {"module_depth": section.get("module_depth", -1), "top_modules": section.get("top_modules", 1), "detailed": section.get("detailed", True)}
        self._counter: Profiler | None = None

    def begin(self, module: nn.Module, step: int) -> None:
        """A forward of training begins."""
        if self._wanted == step and module.training:
            self._wanted = None
            self._counter = Profiler(module)
            self._counter.__enter__()

    def end(self) -> None:
        """Its backward is over. No-op if nothing was counted."""
        counter, self._counter = self._counter, None
        if counter is None:
            return
        counter.__exit__(None, None, None)
        if self._file:
            counter.report.write(self._file, **self._how)
        else:
            log.info("flops_profiler\n%s", counter.report.table(**self._how))
