"""What the dispatch planner is told (tiles, ranks, two speeds), and what a dispatch costs, exactly."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from csc.errors import InputError

# --- What the dispatch planner is told: tiles, ranks, and two speeds -------------------------------------------------
#
# Terms: a *block* is `block` consecutive tokens, the unit that is dispatched; the last one may be short. A *tile* is
# the attention of one block of queries to one block of keys. A *load* is counted in full tiles. A *volume* is counted
# in blocks of K and V (a short block counts as its share). A rank *owns* the keys and values of the blocks that it was
# given, unless a mask says where its keys are.


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
            fault = f"{self.blocks} blocks of {self.block} tokens cannot be dispatched to {self.ranks} ranks"
            raise InputError(fault, where, "Use smaller blocks or fewer ranks; plan for at least 8 blocks a rank")
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
            fault = f"its tiles are {mask.tiles.dtype} {mask.tiles.shape}, and these tokens need int8 {shape}"
            raise InputError(fault, where, "Count tiles with the block size of the workload")
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


# --- Sets of key blocks as bits, 64 in a word ------------------------------------------------------------------------
#
# Terms: *columns* of sets: uint64 [W, n], set i is column i. Work on all sets then runs along memory.


_ONES = np.array([bin(i).count("1") for i in range(1 << 8)], np.uint8)


def pack(rows: np.ndarray) -> np.ndarray:
    """Columns of the sets that the rows of a boolean matrix are."""
    packed = np.packbits(rows, axis=1, bitorder="little")
    padded = np.zeros((len(rows), -(-rows.shape[1] // 64) * 8), np.uint8)
    padded[:, : packed.shape[1]] = packed
    return np.ascontiguousarray(padded.view("<u8").T)


def unpack(columns: np.ndarray, keys: int) -> np.ndarray:
    """The boolean matrix of columns of sets."""
    as_bytes = np.ascontiguousarray(columns.T).view(np.uint8)
    return np.unpackbits(as_bytes, axis=1, count=keys, bitorder="little").view(bool)


def _ones_by_table(columns: np.ndarray) -> np.ndarray:
    """Bits of every word, for a numpy (before 2.0) that does not count them itself."""
    return _ONES[np.ascontiguousarray(columns)[..., None].view(np.uint8)].sum(axis=-1, dtype=np.uint8)


_ones = getattr(np, "bitwise_count", _ones_by_table)


def size(columns: np.ndarray) -> np.ndarray:
    """How many members each set has."""
    return _ones(columns).sum(axis=0, dtype=np.int64)


def windows(columns: np.ndarray, length: int) -> np.ndarray:
    """Column i of the result is the union of columns i, i + 1, ..., i + length - 1, counted in a circle.

    Two running unions per stretch of `length` columns, one from its start and one from its end; every window is the
    tail of one stretch and the head of the next (van Herk 1992).
    """
    words, n = columns.shape
    stretches = -(-(n + length - 1) // length)
    indices = np.arange(stretches * length) % n
    line = columns[:, indices].reshape(words, stretches, length)
    heads = np.bitwise_or.accumulate(line, axis=2).reshape(words, -1)
    tails = np.bitwise_or.accumulate(line[:, :, ::-1], axis=2)[:, :, ::-1].reshape(words, -1)
    return tails[:, :n] | heads[:, length - 1 : length - 1 + n]


# --- What a dispatch costs: loads, needed keys, volumes and seconds, exactly -----------------------------------------
#
# Terms: a *dispatch* gives each block of queries a rank. A rank *needs* the blocks of keys that some query of its
# blocks sees; those that it does not own it *receives*, and it *sends* what it owns to every rank that needs it. A
# rank's *volume* is the larger of the two: links work in both directions at once.


@dataclass(frozen=True, eq=False)
class MaskLoads:
    """One mask, prepared."""

    layers: float
    loads: np.ndarray  # float64 [nQ], in full tiles
    needs: np.ndarray  # uint64 [W, nQ]: the key blocks that a query block sees
    reach: np.ndarray  # int8 [nQ, nK], 0 or 1: those, and in self-attention its own block too
    reach_float: np.ndarray  # the same in float32, for matrix products
    closed: np.ndarray  # uint64 [W, nQ]: the rows of `reach`
    shares: np.ndarray  # float64 [nK], of a whole block of keys
    owners: np.ndarray | None  # int [nK], None: the rank of the query block of that number


@dataclass(frozen=True, eq=False)
class Prepared:
    """A workload and the facts about its blocks."""

    workload: Workload
    masks: tuple[MaskLoads, ...]


@dataclass(frozen=True, eq=False)
class Measured:
    """One mask under one dispatch. Volumes are in blocks of keys, loads in full tiles."""

    loads: np.ndarray  # float64 [P]
    needed: np.ndarray  # bool [P, nK]
    received: np.ndarray  # float64 [P]
    sent: np.ndarray  # float64 [P]

    @property
    def load(self) -> float:
        """Of the heaviest rank."""
        return float(self.loads.max())

    @property
    def volume(self) -> float:
        """Of the busiest link, in its busier direction."""
        return float(max(self.received.max(), self.sent.max()))


def prepare(workload: Workload) -> Prepared:
    """Loads and need sets of all blocks: one pass over the tiles."""
    loads_of_masks = []
    for mask in workload.masks:
        seen = mask.tiles != 0
        reach = seen.copy()
        if mask.owners is None:
            np.fill_diagonal(reach, True)  # a rank owns this block of keys, so it is never foreign
        full = np.count_nonzero(mask.tiles == 2, axis=1)
        loads = full + workload.rates.partial * (np.count_nonzero(seen, axis=1) - full)
        sizes = shares(workload.tokens if mask.key_tokens is None else mask.key_tokens, workload.block)
        needs, closed = pack(seen), pack(reach)
        loads = loads.astype(np.float64)
        reach_float = reach.astype(np.float32)
        loads_of_masks.append(
            MaskLoads(mask.layers, loads, needs, reach.view(np.int8), reach_float, closed, sizes, mask.owners)
        )
    return Prepared(workload, tuple(loads_of_masks))


def unions(columns: np.ndarray, ranks_of_blocks: np.ndarray, ranks: int) -> np.ndarray:
    """uint64 [W, P]: the union of the sets of each rank's blocks; a rank without blocks has none."""
    order = np.argsort(ranks_of_blocks, kind="stable")
    counts = np.bincount(ranks_of_blocks, minlength=ranks)
    some = np.flatnonzero(counts)
    result = np.zeros((len(columns), ranks), np.uint64)
    result[:, some] = np.bitwise_or.reduceat(columns[:, order], (np.cumsum(counts) - counts)[some], axis=1)
    return result


def volumes(needed: np.ndarray, owners: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 [P] received and float64 [P] sent, from needed bool [P, nK] and the owner of each block of keys."""
    keys = np.arange(len(owners))
    remote = needed.copy()
    remote[owners, keys] = False
    received = remote @ sizes
    sent = np.bincount(owners, weights=np.count_nonzero(remote, axis=0) * sizes, minlength=len(needed))
    return received, sent


def measure(prepared: Prepared, ranks_of_blocks: np.ndarray) -> list[Measured]:
    """Loads, needs and volumes of each mask. Counts of blocks need not be equal: rivals may be measured too."""
    ranks = prepared.workload.ranks
    result = []
    for mask in prepared.masks:
        needed = unpack(unions(mask.needs, ranks_of_blocks, ranks), len(mask.shares))
        owners = ranks_of_blocks if mask.owners is None else mask.owners
        loads = np.bincount(ranks_of_blocks, weights=mask.loads, minlength=ranks)
        result.append(Measured(loads, needed, *volumes(needed, owners, mask.shares)))
    return result


def seconds(prepared: Prepared, measured: list[Measured]) -> float:
    """Forward and backward of all layers: in each layer, ranks wait for the last one."""
    rates = prepared.workload.rates
    return sum(mask.layers * rates.seconds(m.load, m.volume) for mask, m in zip(prepared.masks, measured))


# --- Three ways to bring keys to queries, and which is cheapest by the model -----------------------------------------
#
# Terms: volumes are in blocks of K and V, as everywhere.
#
#     exact       every rank receives the blocks that its queries see, and no other
#     all-gather  every rank receives everything
#     heads       all-to-all before and after attention: a rank has all tokens and its share of the heads (Ulysses)


ALL_GATHER, EXACT, HEADS = "all-gather", "exact", "heads"


def heads_volume(prepared: Prepared) -> float | None:
    """Blocks that a rank moves for the all-to-all over heads, one direction, forward; None where it is not possible.

    (2H + 2Hkv) D bytes of T/P tokens to the P - 1 others, over the 2 Hkv D bytes of K and V. With more ranks than key
    heads, each rank gets a copy of one.
    """
    work = prepared.workload
    heads, groups, ranks = work.heads, work.kv_heads, work.ranks
    if heads == 0 or groups == 0 or heads % ranks or (groups % ranks and ranks % groups):
        return None
    if any(mask.owners is not None for mask in prepared.masks):
        return None
    copies = max(groups, ranks)
    return (heads + copies) / groups * work.tokens / work.block / ranks * (ranks - 1) / ranks


def compare(prepared: Prepared, measured: list[Measured]) -> dict[str, float]:
    """Seconds of all layers, forward and backward.

    Exact sets and the all-gather overlap with the tiles of a rank's own keys; attention over heads cannot start before
    its heads are there nor end before its output leaves, so there both add up.
    """
    work, rates = prepared.workload, prepared.workload.rates
    result = {ALL_GATHER: 0.0, EXACT: seconds(prepared, measured)}
    for mask, m in zip(prepared.masks, measured):
        everything = float(mask.shares.sum() - (m.needed.shape[1] // work.ranks if mask.owners is None else 0))
        result[ALL_GATHER] += mask.layers * rates.seconds(m.load, max(everything, m.volume))
    volume = heads_volume(prepared)
    if volume is not None:
        result[HEADS] = sum(
            mask.layers * (rates.seconds(mask.loads.sum() / work.ranks, 0.0) + rates.seconds(0.0, volume))
            for mask in prepared.masks
        )
    return result


def cheapest(compared: dict[str, float], measured: list[Measured]) -> str:
    """The fastest; where times are equal, exact sets if they move less than everything, else the all-gather."""
    best = min(compared.values())
    saved = any(not m.needed.all() for m in measured)
    order = (EXACT, ALL_GATHER, HEADS) if saved else (ALL_GATHER, EXACT, HEADS)
    return next(name for name in order if compared.get(name) == best)


# --- What no dispatch with equal counts can beat ---------------------------------------------------------------------
#
# Terms: w_1 >= w_2 >= ... are the sorted loads of blocks, P ranks, each with at least `low` and at most `high` blocks.


def load_bound(loads: np.ndarray, ranks: int) -> float:
    """The larger of the mean (rounded up where loads are whole) and of (j + 1) w_{jP+1} + the low - j - 1 smallest."""
    w = np.sort(loads)[::-1]
    low = len(w) // ranks
    largest = w[::ranks]  # w_{jP+1}
    many = np.arange(1, len(largest) + 1)
    smallest = np.concatenate([[0.0], np.cumsum(w[::-1])])
    mean = w.sum() / ranks
    if (w == np.floor(w)).all():
        mean = np.ceil(mean)
    return float(max(mean, np.max(many * largest + smallest[np.maximum(low - many, 0)])))


def volume_bound(prepared: Prepared, mask: MaskLoads) -> float:
    """A rank receives what one of its blocks needs and it cannot own: the largest over all blocks."""
    keys = len(mask.shares)
    if mask.owners is None:
        short = (mask.closed[(keys - 1) // 64] >> np.uint64((keys - 1) % 64)) & np.uint64(1)
        wanted = size(mask.closed) - (1 - mask.shares[-1]) * short
        return float(max(0.0, wanted.max() - prepared.workload.quotas.max()))
    reach = unpack(mask.closed, keys)
    held = np.zeros((keys, prepared.workload.ranks))
    held[np.arange(keys), mask.owners] = mask.shares
    return float((reach @ mask.shares - (reach @ held).max(axis=1)).max())


def lower_bound(prepared: Prepared) -> float:
    """Seconds of all layers, forward and backward, that every dispatch with equal counts takes."""
    rates, ranks = prepared.workload.rates, prepared.workload.ranks
    bounds = [(mask.layers, load_bound(mask.loads, ranks), volume_bound(prepared, mask)) for mask in prepared.masks]
    return sum(layers * rates.seconds(load, volume) for layers, load, volume in bounds)
