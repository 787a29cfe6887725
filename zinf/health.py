"""Can the engine be used? The process that it belongs to, whether it is closed, and the error that stopped it."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from zinf.errors import CommitError, EngineError, NonFiniteError, StoreError


class Steps(Protocol):
    """What is asked of zinf.stepping.Stepper."""

    @property
    def early(self) -> bool: ...

    def settle(self, idle: bool = False) -> None: ...

    def check_whole(self) -> None: ...


class Health:
    """One per engine.

    Args:
        shutdown: what closes the engine; alive until then.
    """

    def __init__(self, steps: Steps, shutdown: weakref.finalize[..., Any]):
        self._pid = os.getpid()
        self._steps, self._shutdown = steps, shutdown
        self.gathered = 0  # gather blocks that are open
        self.error: BaseException | None = None  # what stopped the engine
        self.harmless: BaseException | None = None  # that error, if it may have left everything as it was after the last step

    def check_alive(self) -> None:
        """Raise EngineError in a fork, and after close."""
        if os.getpid() != self._pid:
            raise EngineError(f"the engine belongs to process {self._pid}, and this is a fork of it: its threads are not here")
        if not self._shutdown.alive:
            raise EngineError("the engine is closed: build a new one (and pass resume=True to go on from its store)")

    def check_usable(self, idle: bool = False) -> None:
        """Raise EngineError where nothing may be computed. `idle`: no forward or backward runs now."""
        self.check_alive()
        if self.error is not None:
            raise EngineError(
                f"the engine stopped at an error ({self.error}): remove its cause and call recover(), or close it and go on from the last commit"
            ) from self.error
        self._steps.settle(idle and not self.gathered)

    def check_whole(self) -> None:
        """As check_usable, where all shards must be of the same step."""
        self.check_usable()
        self._steps.check_whole()

    @contextlib.contextmanager
    def noting(self, *also: type[BaseException]) -> Iterator[None]:
        """An error of the tiers leaves a step half done: remember it, so that nothing is computed from it."""
        try:
            yield
        except CommitError:
            raise  # nothing is half done
        except NonFiniteError as error:
            if self._steps.early:  # and it could not be undone
                self.error = error
            raise
        except (*also, OSError, MemoryError, StoreError) as error:  # type: ignore[misc]
            self.error = error
            if not also:
                self.harmless = error
            raise
