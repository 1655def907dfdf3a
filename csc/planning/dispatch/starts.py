"""Dispatches in closed form: where the search starts, and what it must not fall behind.

Each gives every rank its quota of blocks (they differ by at most one) and returns int64 [nQ], the rank of each block.

    contiguous(n, ranks)                 equal stretches
    zigzag(n, ranks)                     chunk i and chunk 2P - 1 - i of 2P
    by_load(loads, ranks)                longest first to the lightest rank that has room (LPT with equal counts)
    round_robin(loads, ranks)            longest first, ranks in turns back and forth (PTRR)
"""

from __future__ import annotations

import heapq

import numpy as np


def contiguous(n: int, ranks: int) -> np.ndarray:
    """Rank r gets the r-th of equal stretches."""
    return np.repeat(np.arange(ranks), np.diff(np.arange(ranks + 1) * n // ranks))


def zigzag(n: int, ranks: int) -> np.ndarray:
    """2P chunks; rank r gets the r-th from the front and the r-th from the back, so that causal loads are equal."""
    base, more = divmod(n, 2 * ranks)
    lengths = np.full(2 * ranks, base)
    pairs = np.minimum(np.arange(2 * ranks), np.arange(2 * ranks)[::-1])
    # The longer chunks: one in each pair first, then the other one, so that counts differ by at most one.
    longer = np.lexsort((pairs, np.arange(2 * ranks) < ranks))[:more]
    lengths[longer] += 1
    return np.repeat(pairs, lengths)


def by_load(loads: np.ndarray, ranks: int) -> np.ndarray:
    """Heaviest block first, to the rank with the least load among those whose quota is not full."""
    n = len(loads)
    low, more = divmod(n, ranks)
    heap = [(0.0, rank) for rank in range(ranks)]
    counts = [0] * ranks
    result = [0] * n
    weights = loads.tolist()
    for block in np.argsort(-loads, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        result[block] = rank
        counts[rank] += 1
        # A rank is full at the lower quota, unless one more is still to be given: `more` ranks get one more.
        if counts[rank] < low or (counts[rank] == low and more > 0):
            heapq.heappush(heap, (load + weights[block], rank))
        elif counts[rank] > low:
            more -= 1
            if more == 0:
                heap = [(load, other) for load, other in heap if counts[other] < low]
                heapq.heapify(heap)
    return np.array(result, np.int64)


def round_robin(loads: np.ndarray, ranks: int) -> np.ndarray:
    """Heaviest first, dealt to ranks 0..P-1, P-1..0, 0..P-1, and so on."""
    turn, place = np.divmod(np.arange(len(loads)), ranks)
    result = np.empty(len(loads), np.int64)
    result[np.argsort(-loads, kind="stable")] = np.where(turn % 2 == 0, place, ranks - 1 - place)
    return result
