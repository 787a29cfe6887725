"""A torch DataLoader that knows where it is: how many batches the loop has taken, not how many the workers have fetched ahead.

The order of an epoch is a pure function of (seed, epoch), as in zinf.data, so (epoch, batches taken) is all there is to remember. The
loader draws nothing from torch's global random numbers, so a run that was resumed inside an epoch draws what it would have drawn.
(Random transforms inside a dataset draw from its worker's generator, which begins anew with each worker: let them depend on the index.)

    loader = zinf.ResumableLoader(dataset, batch_size=8, shuffle=True, seed=0, num_workers=4)
    engine.register("data", loader)  # in every commit and checkpoint; a resumed run goes on inside the epoch
    while engine.global_step < steps:
        for batch in loader:  # to the end of the epoch
            ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from zinf.data import epoch_order
from zinf.errors import ConfigError

_OURS = ("sampler", "batch_sampler", "generator")  # what of DataLoader's arguments follows from the position


class ResumableLoader:
    """Batches of a map-style dataset; iterating goes from the position to the end of its epoch, and the next one begins.

    Args:
        dataset: has __len__ and __getitem__.
        shuffle: another order in each epoch.
        options: of torch.utils.data.DataLoader: num_workers, collate_fn, pin_memory, ...

    Attributes:
        epoch: the current one, from 0.
        taken: batches of it that the loop has taken.

    Raises:
        ConfigError: a dataset without a length, or an option that the position decides.
    """

    def __init__(self, dataset: Any, batch_size: int = 1, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False, **options: Any) -> None:
        if not isinstance(dataset, Sized):
            raise ConfigError(f"{type(dataset).__name__} has no length, so there is no order to go on in: register a loader that can find its own position")
        if wrong := [key for key in _OURS if key in options]:
            raise ConfigError(f"{wrong[0]} follows from shuffle, seed and the position: leave it out, or register a loader of your own")
        self.batch_size, self.shuffle, self.seed, self.drop_last = batch_size, shuffle, seed, drop_last
        self.epoch, self.taken = 0, 0
        self._rows = len(dataset)
        rows: Any = dataset
        self._generator = torch.Generator()
        if len(self) == 0:
            raise ConfigError(f"{self._rows} rows make no batch of {batch_size}: give more rows, or a smaller batch_size")
        self._loader: DataLoader[Any] = DataLoader(rows, batch_sampler=_Batches(self), generator=self._generator, **options)

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._rows // self.batch_size if self.drop_last else -(-self._rows // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        self._generator.manual_seed((self.seed << 20) + self.epoch)  # seeds the workers
        for batch in self._loader:
            self.taken += 1
            if self.taken == len(self):
                self.epoch, self.taken = self.epoch + 1, 0
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in: plain values."""
        return {
            "epoch": self.epoch, "taken": self.taken, "rows": self._rows, "batch_size": self.batch_size,
            "shuffle": self.shuffle, "seed": self.seed, "drop_last": self.drop_last,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state` says, from the next iteration on. Raises ConfigError if it was taken over other rows or another order."""
        mine = self.state_dict()
        for key in ("rows", "batch_size", "shuffle", "seed", "drop_last"):
            if state[key] != mine[key]:
                raise ConfigError(f"data: {key} was {state[key]} when the position was taken and is {mine[key]} now: put it back, or begin a new run")
        self.epoch, self.taken = state["epoch"], state["taken"]


class _Batches(Sampler[list[int]]):
    """The batches from the loader's position to the end of its epoch, as lists of indices."""

    def __init__(self, loader: ResumableLoader) -> None:
        self._at = loader

    def __iter__(self) -> Iterator[list[int]]:
        at = self._at
        order = epoch_order(at._rows, at.seed, at.epoch).tolist() if at.shuffle else list(range(at._rows))
        for i in range(at.taken, len(at)):
            yield order[i * at.batch_size : (i + 1) * at.batch_size]

    def __len__(self) -> int:
        return len(self._at)
