"""Which states of the search for stages can be forgotten: those for which another leaves no more of any chain.

Terms: see csc.planning.branches and csc.planning.room.

    undominated(tables, low, labels)   -> positions of the states that are left, of equal ones the first
    best_frontiers(tables, low)        -> the same where labels do not matter
"""

from __future__ import annotations

import numpy as np

from csc.planning.branches import Ints
from csc.planning.segment_bounds import ChainTables


def undominated(tables: ChainTables, low: Ints, labels: Ints) -> Ints:
    """Positions of the states that no other dominates, in frontier and labels; of equal ones the first."""
    if not labels.shape[1] or (labels == labels[:1]).all():
        return best_frontiers(tables, low)
    kept = np.concatenate([low, labels], axis=1)
    _, first = np.unique(kept, axis=0, return_index=True)
    order = first[np.argsort(kept[first].sum(axis=1), kind="stable")]
    survivors = np.zeros(0, dtype=np.int64)
    for begin in range(0, len(order), 256):
        chunk = order[begin : begin + 256]
        among = np.concatenate([survivors, chunk])
        below = np.ones((len(chunk), len(among)), dtype=bool)
        for column in range(kept.shape[1]):
            below &= kept[among, column][None, :] <= kept[chunk, column][:, None]
        survivors = np.concatenate([survivors, chunk[below.sum(axis=1) == 1]])
    return np.sort(survivors)


def best_frontiers(tables: ChainTables, low: Ints) -> Ints:
    """The same without labels: the least position on the last chain by a table over the positions on the others."""
    if len(low) < 2:
        return np.arange(len(low))
    shape = tuple(int(n) + 1 for n in tables.lengths[:-1])
    key = np.ravel_multi_index(tuple(low[:, :-1].T), shape) if shape else np.zeros(len(low), dtype=np.int64)
    order = np.lexsort((np.arange(len(low)), low[:, -1], key))
    first = order[np.concatenate([[True], key[order][1:] != key[order][:-1]])]
    never = int(tables.lengths[-1]) + 1
    table = np.full(shape, never, dtype=np.int64)
    table.reshape(-1)[key[first]] = low[first, -1]
    for axis in range(len(shape)):
        table = np.minimum.accumulate(table, axis=axis)
    least = np.full(shape, never, dtype=np.int64)
    for axis in range(len(shape)):
        ahead = [slice(None)] * len(shape)
        behind = [slice(None)] * len(shape)
        ahead[axis], behind[axis] = slice(1, None), slice(None, -1)
        least[tuple(ahead)] = np.minimum(least[tuple(ahead)], table[tuple(behind)])
    return np.sort(first[low[first, -1] < least.reshape(-1)[key[first]]])
