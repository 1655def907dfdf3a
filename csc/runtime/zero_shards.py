"""How data-parallel ranks divide a tensor that they would all hold alike.

Terms: a *shard* is what one of them holds: a stretch of one dimension, so that it has as many dimensions as the whole.
That is the first dimension that has an entry for each rank, else the longest; then some ranks hold a shard without
entries. Shards of different ranks have no entry in common, and together all; their sizes differ by one entry at most.

    shard_of(shape, ranks, index) -> Shard
    seen(tensor, shard) -> tensor               the shard, a view of a dense tensor
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Shard(NamedTuple):
    """Entries from start to stop of a dimension."""

    dimension: int
    start: int
    stop: int


def shard_of(shape: Sequence[int], ranks: int, index: int) -> Shard:
    """What the index-th of so many ranks holds."""
    sizes = list(shape) or [1]
    dimension = next(
        (d for d, size in enumerate(sizes) if size >= ranks), max(range(len(sizes)), key=sizes.__getitem__)
    )
    size = sizes[dimension]
    return Shard(dimension, size * index // ranks, size * (index + 1) // ranks)


def seen(tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    """A view of the tensor."""
    return tensor.narrow(shard.dimension, shard.start, shard.stop - shard.start)
