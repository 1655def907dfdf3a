"""A mask as a picture: its tiles, the visible pairs inside, what tokens are, and the rank that computes each tile.

Terms
  cell      the picture's unit: a tile, or an eighth (fourth, half) of one where tiles are few enough to look inside
  visible   a cell of which at least half is visible; hidden: the rest of a tile that is computed; empty: a skipped tile
  runs      what tokens are along an axis: (start, end, type)

    picture(title, mask, block, owner, ranks, types, documents) -> Picture     owner: int [nQ], the rank of each block
    Picture: what `csc.masks.plot` draws
    ticks(tokens) -> (step, label of a position)

A picture has at most 1,024 x 1,024 cells. Batch row 0 is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from csc.errors import InputError
from csc.kernels.mask import Mask, counts
from csc.masks.equal_runs import begins

MOST_CELLS = 1024
EMPTY = 0  # codes of cells: 0, then 1 + 2 rank (hidden) and 2 + 2 rank (visible)
Runs = list[tuple[int, int, int]]


@dataclass(frozen=True)
class Picture:
    """What is drawn.

    cells: uint8 [rows, columns], codes. cell: tokens of a cell's side. tiles: full, partial, empty.
    loads: non-empty tiles of each rank, none without ranks. runs: of the queries and of the keys.
    starts: where documents start, of the queries and of the keys.
    """

    title: str
    queries: int
    keys: int
    block: int
    cell: float
    cells: torch.Tensor
    visible: int
    tiles: tuple[int, int, int]
    loads: tuple[int, ...]
    runs: tuple[Runs, Runs]
    starts: tuple[list[int], list[int]]

    @property
    def share(self) -> float:
        return self.visible / (self.queries * self.keys)

    @property
    def imbalance(self) -> float:
        """Tiles of the heaviest rank over the mean."""
        return max(self.loads) * len(self.loads) / max(sum(self.loads), 1)


def picture(
    title: str,
    mask: Mask,
    block: int = 128,
    owner: torch.Tensor | None = None,
    ranks: int | None = None,
    types: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> Picture:
    """The picture of a mask's row 0. owner: the rank of every block of queries, of `ranks` ranks. types, documents:
    int64 [T], of queries that are their own keys. InputError for more than 1,024 tiles a side.
    """
    tiles = counts(mask, block, block)[0]
    if max(tiles.shape) > MOST_CELLS:
        least = -(-max(mask.queries, mask.keys) // MOST_CELLS)
        raise InputError(
            f"{tiles.shape[0]} x {tiles.shape[1]} tiles are too many for a picture", title,
            f"Take blocks of {1 << (least - 1).bit_length()} tokens or more",
        )  # fmt: skip
    heights = (mask.queries - torch.arange(len(tiles)) * block).clamp(max=block)
    widths = (mask.keys - torch.arange(tiles.shape[1]) * block).clamp(max=block)
    full = tiles == heights[:, None] * widths
    there = tiles > 0
    parts = next((n for n in (8, 4, 2) if max(tiles.shape) * n <= MOST_CELLS // 2 and block % n == 0), 1)
    rank = torch.zeros(len(tiles), dtype=torch.int64) if owner is None else owner.long()
    if parts == 1:
        seen = full
    else:
        cell = block // parts
        area = (
            (mask.queries - torch.arange(len(tiles) * parts) * cell).clamp(0, cell)[:, None]
            * (mask.keys - torch.arange(tiles.shape[1] * parts) * cell).clamp(0, cell)
        )  # fmt: skip
        fine = counts(mask, cell, cell)[0]
        seen = torch.zeros_like(area, dtype=torch.bool)
        seen[: fine.shape[0], : fine.shape[1]] = fine * 2 >= area[: fine.shape[0], : fine.shape[1]]
    code = 1 + 2 * rank.repeat_interleave(parts)[:, None] + seen.long()
    grown = there.repeat_interleave(parts, 0).repeat_interleave(parts, 1)
    rows, columns = -(-mask.queries * parts // block), -(-mask.keys * parts // block)
    loads = torch.zeros(0 if owner is None else ranks or int(rank.max()) + 1, dtype=torch.int64)
    if owner is not None:
        loads.index_add_(0, rank, there.sum(1))
    along = types[None] if types is not None else torch.zeros(1, mask.queries, dtype=torch.int64)
    other = along if mask.keys == mask.queries else torch.zeros(1, mask.keys, dtype=torch.int64)
    opened = [] if documents is None else begins(documents[None])[0].nonzero().flatten().tolist()[1:]
    return Picture(
        title, mask.queries, mask.keys, block, block / parts,
        torch.where(grown, code, EMPTY)[:rows, :columns].to(torch.int16),
        int(tiles.sum()), (int(full.sum()), int((there & ~full).sum()), int((~there).sum())), tuple(loads.tolist()),
        (_runs(along), _runs(other)), (opened, opened if mask.keys == mask.queries else []),
    )  # fmt: skip


def _runs(types: torch.Tensor) -> Runs:
    start = begins(types)[0].nonzero().flatten().tolist()
    return [(a, b, int(types[0, a])) for a, b in zip(start, [*start[1:], types.shape[1]])]


def ticks(tokens: int) -> tuple[int, Callable[[int], str]]:
    """The step of an axis with 4 to 8 marks, and what is written at one: 0, 8k, 16k (k = 1,024), or plain below 8k."""
    if tokens >= 8192:
        step = 1024
        while tokens / step > 8:
            step *= 2
        return step, lambda at: f"{at // 1024}k" if at else "0"
    step = 1
    for factor in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000):
        step = factor
        if tokens / factor <= 8:
            break
    return step, lambda at: f"{at:,}"
