"""What the dispatch planner is told: tiles, ranks, and two speeds.

Terms: a *block* is `block` consecutive tokens, the unit that is dispatched; the last one may be short. A *tile* is
the attention of one block of queries to one block of keys. A *load* is counted in full tiles. A *volume* is counted
in blocks of K and V (a short block counts as its share). A rank *owns* the keys and values of the blocks that it was
given, unless a mask says where its keys are.

    LayerMask(tiles, layers=1, owners=None, key_tokens=None)
    Rates(tile_seconds, block_seconds, partial=1, backward_compute=2.5, backward_communication=2)
    Workload(masks, tokens, block, ranks, rates, heads=0, kv_heads=0)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from csc.errors import InputError

EMPTY, PARTIAL, FULL = 0, 1, 2


@dataclass(frozen=True, eq=False)
class LayerMask:
    """The mask of one kind of layer.

    tiles: int8 [nQ, nK], EMPTY, PARTIAL or FULL, as the kernel computes them.
    layers: how many layers have this mask, a weight.
    owners: int [nK], the rank that holds each block of keys, where keys are not the tokens that are dispatched
        (cross-attention); None where they are (self-attention), and nK = nQ.
    key_tokens: how many keys there are, with `owners` only.
    """

    tiles: np.ndarray
    layers: float = 1.0
    owners: np.ndarray | None = None
    key_tokens: int | None = None


@dataclass(frozen=True)
class Rates:
    """Seconds of one layer on one rank, forward.

    tile_seconds: attention of one full tile, all heads.
    block_seconds: K and V of one whole block over the rank's link, in one direction; both directions work at once.
    partial: what a partial tile costs, over a full one.
    backward_compute, backward_communication: the backward pass over the forward one. 2.5: five matrix products instead
        of two; 2: keys and values come once more, and dK and dV go back the same way.
    """

    tile_seconds: float
    block_seconds: float
    partial: float = 1.0
    backward_compute: float = 2.5
    backward_communication: float = 2.0

    def seconds(self, load: float, volume: float) -> float:
        """A layer's forward and backward where the heaviest rank has `load` and the busiest link `volume`."""
        compute, communication = load * self.tile_seconds, volume * self.block_seconds
        backward = max(compute * self.backward_compute, communication * self.backward_communication)
        return max(compute, communication) + backward


@dataclass(frozen=True, eq=False)
class Workload:
    """One sequence (or one packed batch) to be dispatched to `ranks` context-parallel ranks.

    heads, kv_heads: of the attention, for the all-to-all over heads; 0 leaves that choice out.
    Raises InputError for what contradicts itself.
    """

    masks: tuple[LayerMask, ...]
    tokens: int
    block: int
    ranks: int
    rates: Rates
    heads: int = 0
    kv_heads: int = 0

    def __post_init__(self) -> None:
        where = "the workload of a dispatch"
        if not self.masks or self.tokens < 1 or self.block < 1 or self.ranks < 1:
            raise InputError("it has no mask, no token, no block or no rank", where, "Give at least one of each")
        if self.blocks < self.ranks:
            what = f"{self.blocks} blocks of {self.block} tokens cannot be dispatched to {self.ranks} ranks"
            raise InputError(what, where, "Use smaller blocks or fewer ranks; plan for at least 8 blocks a rank")
        for number, mask in enumerate(self.masks):
            self._check(mask, f"mask {number} of {where}")
        numbers = (self.rates.tile_seconds, self.rates.block_seconds, *(mask.layers for mask in self.masks))
        if min(numbers) < 0 or not np.isfinite(numbers).all() or self.rates.partial <= 0:
            raise InputError("a rate or a number of layers is negative or not a number", where, "Give seconds")

    def _check(self, mask: LayerMask, where: str) -> None:
        keys = self.tokens if mask.owners is None else mask.key_tokens
        if keys is None or (mask.owners is None and mask.key_tokens is not None):
            raise InputError(
                "`owners` and `key_tokens` come together", where, "Give both for cross-attention, else none"
            )
        shape = (self.blocks, -(-keys // self.block))
        if mask.tiles.shape != shape or mask.tiles.dtype != np.int8:
            what = f"its tiles are {mask.tiles.dtype} {mask.tiles.shape}, and these tokens need int8 {shape}"
            raise InputError(what, where, "Count tiles with the block size of the workload")
        if mask.tiles.size and (mask.tiles.min() < EMPTY or mask.tiles.max() > FULL):
            raise InputError("a tile is neither empty (0), partial (1) nor full (2)", where, "Use these three numbers")
        if mask.owners is not None and (
            mask.owners.shape != shape[1:] or mask.owners.min() < 0 or mask.owners.max() >= self.ranks
        ):
            raise InputError(
                "`owners` does not name a rank for each block of keys", where, f"Use 0 to {self.ranks - 1}"
            )

    @property
    def blocks(self) -> int:
        """nQ, how many blocks of queries there are."""
        return -(-self.tokens // self.block)

    @cached_property
    def quotas(self) -> np.ndarray:
        """int64 [P]: how many blocks each rank gets; they differ by at most one."""
        return np.diff(np.arange(self.ranks + 1) * self.blocks // self.ranks)


def shares(tokens: int, block: int) -> np.ndarray:
    """float64 [blocks]: 1 for a whole block, less for a short last one."""
    return np.minimum(block, tokens - np.arange(-(-tokens // block)) * block) / block
