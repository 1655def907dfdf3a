"""What a dispatch costs: loads, needed keys, volumes and seconds, exactly.

Terms: a *dispatch* gives each block of queries a rank. A rank *needs* the blocks of keys that some query of its
blocks sees; those that it does not own it *receives*, and it *sends* what it owns to every rank that needs it. A
rank's *volume* is the larger of the two: links work in both directions at once.

    Prepared: loads and needs of every block, made once per workload
    prepare(workload) -> Prepared
    measure(prepared, ranks_of_blocks) -> list[Measured], one for each mask
    seconds(prepared, measured) -> float
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csc.planning.dispatch import bits
from csc.planning.dispatch.workload import Workload, shares


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
    made = []
    for mask in workload.masks:
        seen = mask.tiles != 0
        reach = seen.copy()
        if mask.owners is None:
            np.fill_diagonal(reach, True)  # a rank owns this block of keys, so it is never foreign
        full = np.count_nonzero(mask.tiles == 2, axis=1)
        loads = full + workload.rates.partial * (np.count_nonzero(seen, axis=1) - full)
        sizes = shares(workload.tokens if mask.key_tokens is None else mask.key_tokens, workload.block)
        needs, closed = bits.pack(seen), bits.pack(reach)
        loads = loads.astype(np.float64)
        reach_float = reach.astype(np.float32)
        made.append(MaskLoads(mask.layers, loads, needs, reach.view(np.int8), reach_float, closed, sizes, mask.owners))
    return Prepared(workload, tuple(made))


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
        needed = bits.unpack(unions(mask.needs, ranks_of_blocks, ranks), len(mask.shares))
        owners = ranks_of_blocks if mask.owners is None else mask.owners
        loads = np.bincount(ranks_of_blocks, weights=mask.loads, minlength=ranks)
        result.append(Measured(loads, needed, *volumes(needed, owners, mask.shares)))
    return result


def seconds(prepared: Prepared, measured: list[Measured]) -> float:
    """Forward and backward of all layers: in each layer, ranks wait for the last one."""
    rates = prepared.workload.rates
    return sum(mask.layers * rates.seconds(m.load, m.volume) for mask, m in zip(prepared.masks, measured))
