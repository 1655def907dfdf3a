"""Batches that several processes evaluate, each a share of them, with the results of one process.

accelerate fills up the last batch with samples of the first one, and a loss over a filled batch is another one. Here
processes take full batches in turn; what is left behind the last full turn every process does by itself.

    shares = Shares(place, count, size)          Dealt(batch_sampler, shares)          of a dataset with a length
    EvaluationLoader(loader, shares)             what the Trainer's evaluation_loop runs over; .gathered gathers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from accelerate.utils import find_batch_size, gather_object, slice_tensors
from torch.utils.data import BatchSampler, IterableDataset


@dataclass
class Shares:
    """How processes share the batches that they evaluate: `count` full ones at a time, one each. What is left behind
    the last such round all of them do.
    """

    place: int
    count: int
    size: int  # samples of a full batch

    def mine(self, batches: Iterator[Any], is_full: Callable[[Any], bool]) -> Iterator[tuple[bool, Any]]:
        """(whether others have other batches of the same round, batch)."""
        while turn := list(islice(batches, self.count)):
            if len(turn) == self.count and is_full(turn[-1]):
                yield True, turn[self.place]
            else:
                for batch in turn:
                    yield False, batch


class Dealt:
    """Indices of the batches that a process evaluates: a batch sampler."""

    def __init__(self, batches: BatchSampler, shares: Shares) -> None:
        self.batches, self.shares = batches, shares
        self.batch_size, self.drop_last, self.sampler = batches.batch_size, batches.drop_last, batches.sampler

    def __iter__(self) -> Iterator[list[int]]:
        for _, batch in self.shares.mine(iter(self.batches), lambda batch: len(batch) == self.shares.size):
            yield batch

    def __len__(self) -> int:
        rounds = len(self.batches.sampler) // self.shares.size // self.shares.count  # type: ignore[arg-type]
        return rounds + len(self.batches) - rounds * self.shares.count


class EvaluationLoader:
    """What the Trainer's evaluation runs over in one of several processes, and how it gathers what comes of it."""

    def __init__(self, loader: Any, shares: Shares) -> None:
        self.loader, self.dataset, self.shares = loader, loader.dataset, shares
        self._is_dealt = not isinstance(self.dataset, IterableDataset)
        self._shared, self._samples = False, 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        size = self.shares.size
        if self._is_dealt:
            rounds = len(self.loader.batch_sampler.batches.sampler) // size // self.shares.count
            batches: Iterator[tuple[bool, Any]] = ((i < rounds, batch) for i, batch in enumerate(self.loader))
        else:
            batches = self.shares.mine(iter(self.loader), lambda batch: find_batch_size(batch) == size)
        for self._shared, batch in batches:
            samples = find_batch_size(batch)
            self._samples = size if samples is None else samples
            yield batch

    def gathered(self, accelerator: Any, as_objects: bool, data: Any) -> Any:
        """Of the batch that was yielded last: from all processes, or where all have the same, of its samples."""
        if self._shared:
            return gather_object(data) if as_objects else accelerator.gather(data)
        return data[: self._samples] if as_objects else slice_tensors(data, slice(0, self._samples))
