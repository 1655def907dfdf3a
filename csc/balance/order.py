"""In which order an epoch goes through its samples, and how it goes on in the middle of one.

Terms
  epoch    one pass over the sampler's order; a step takes the next `batch_size` samples of it
  step     the number, within the epoch, of the step that comes next

    order = Order(dataset size, sampler, shuffle, seed)        order.of(epoch) -> [sample]
    steps_of(order, batch_size, drop_last) -> [[sample]]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from operator import index
from typing import Any

import torch

from csc.errors import InputError


class EpochOrder:
    """The same for an epoch on every rank: shuffled by `seed` and the epoch, or as a sampler says."""

    def __init__(self, count: int, sampler: Iterable[int] | None, shuffle: bool, seed: int) -> None:
        if sampler is not None and shuffle:
            raise InputError("a sampler and shuffle=True are given", "csc.balanced", "give one of them")
        if getattr(sampler, "num_replicas", 1) > 1:
            raise InputError(
                f"a {type(sampler).__name__} gives each process samples of its own, and csc divides them itself",
                "csc.balanced", "leave it out (shuffle=True, seed=...): every rank goes through all lengths",
            )  # fmt: skip
        self.count, self.seed, self.sampler, self._shuffle = count, seed, sampler, shuffle

    def of(self, epoch: int) -> list[int]:
        """The samples of an epoch. InputError for one that the dataset does not have."""
        if self.sampler is not None:
            move = getattr(self.sampler, "set_epoch", None)
            if callable(move):
                move(epoch)
            return self._checked(list(self.sampler), epoch)
        if not self._shuffle:
            return list(range(self.count))
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.count, generator=generator).tolist()

    def _checked(self, given: list[Any], epoch: int) -> list[int]:
        if not given:
            raise InputError(
                f"the sampler gives no samples in epoch {epoch}", "csc.balanced",
                "give one that can be gone through in every epoch; a generator can be once",
            )  # fmt: skip
        indices = []
        for place, one in enumerate(given):
            try:
                indices.append(index(one))
            except TypeError:
                raise InputError(
                    f"the sampler gives {one!r} at place {place}, which is no sample's number", "csc.balanced",
                    "give a sampler of whole numbers; batches are made by csc.balanced itself",
                ) from None  # fmt: skip
            if not 0 <= indices[-1] < self.count:
                raise InputError(
                    f"the sampler gives {one} at place {place}, and the dataset has {self.count} samples",
                    "csc.balanced", "give a sampler of this dataset",
                )  # fmt: skip
        return indices

    def length(self) -> int:
        """How many samples an epoch has."""
        return len(self.sampler) if isinstance(self.sampler, Sized) else self.count


def steps_of(order: Sequence[int], batch_size: int, drop_last: bool) -> list[list[int]]:
    """The samples of each step; the last one may have fewer."""
    found: list[Any] = [list(order[start : start + batch_size]) for start in range(0, len(order), batch_size)]
    return found[:-1] if drop_last and found and len(found[-1]) < batch_size else found
