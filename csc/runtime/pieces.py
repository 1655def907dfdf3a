"""How data-parallel ranks divide a tensor that they would all hold alike.

Terms: a *piece* is what one of them holds: a stretch of one dimension, so that it has as many dimensions as the whole.
That is the first dimension that has an entry for each rank, else the longest; then some ranks hold a piece without
entries. Pieces of different ranks have no entry in common, and together all; their sizes differ by one entry at most.

    piece_of(shape, ranks, index) -> Piece
    seen(tensor, piece) -> tensor               the piece, a view of a dense tensor
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Piece(NamedTuple):
    """Entries from start to stop of a dimension."""

    dimension: int
    start: int
    stop: int


def piece_of(shape: Sequence[int], ranks: int, index: int) -> Piece:
    """What the index-th of so many ranks holds."""
    sizes = list(shape) or [1]
    dimension = next(
        (d for d, size in enumerate(sizes) if size >= ranks), max(range(len(sizes)), key=sizes.__getitem__)
    )
    size = sizes[dimension]
    return Piece(dimension, size * index // ranks, size * (index + 1) // ranks)


def seen(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A view of the tensor."""
    return tensor.narrow(piece.dimension, piece.start, piece.stop - piece.start)
