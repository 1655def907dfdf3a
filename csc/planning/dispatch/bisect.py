"""Recursive bisection: equal counts, nearly equal loads, few stretches, few foreign keys.

Terms: a *window* is so many consecutive blocks of a list that is closed to a circle. To give n blocks to p ranks, the
list is cut into a window of the first ranks' quota and the rest, and both are cut again. The mean load of all windows
of one length is exactly their share of the whole, and neighbouring windows differ by two blocks; so some window is
within one block's load of its share, and cuts that balance always exist (docs/dispatch.md). Among windows within
`tolerance` the one is taken whose two sides need the fewest keys.

    bisect(prepared, order, tolerance) -> int64 [nQ], the rank of each block
    by_reach(prepared) -> int64 [nQ]: blocks that need few keys, then those that need many, each in order
"""

from __future__ import annotations

import numpy as np

from csc.planning.dispatch import bits
from csc.planning.dispatch.evaluate import Prepared


def by_reach(prepared: Prepared) -> np.ndarray:
    """An order: blocks that need less than the mean first, in their order, then the others."""
    reach = sum(mask.layers * bits.size(mask.needs) for mask in prepared.masks)
    return np.argsort(reach >= np.mean(reach), kind="stable")


def bisect(prepared: Prepared, order: np.ndarray, tolerance: float) -> np.ndarray:
    """Cut the order in two until each piece is one rank's.

    tolerance: how far a side's load per rank may be over the mean of all ranks, as a share of it. 0: the best balance.
    """
    result = np.empty(len(order), np.int64)
    ranks = prepared.workload.ranks
    closed = [mask.closed for mask in prepared.masks]
    loads = np.stack([mask.loads for mask in prepared.masks])
    weights = np.array([mask.layers for mask in prepared.masks])
    means = np.maximum(loads.sum(axis=1) / ranks, 1e-30)
    _cut(result, order, 0, ranks, prepared, closed, loads, weights, means, tolerance)
    return result


def _cut(
    result: np.ndarray,
    blocks: np.ndarray,
    first: int,
    ranks: int,
    prepared: Prepared,
    closed: list[np.ndarray],
    loads: np.ndarray,
    weights: np.ndarray,
    means: np.ndarray,
    tolerance: float,
) -> None:
    if ranks == 1:
        result[blocks] = first
        return
    left = ranks // 2
    quotas = prepared.workload.quotas
    length, n = int(quotas[first : first + left].sum()), len(blocks)
    running = np.concatenate([np.zeros((len(loads), 1)), np.cumsum(np.tile(loads[:, blocks], 2), axis=1)], axis=1)
    inside = running[:, length : length + n] - running[:, :n]
    outside = running[:, n : n + 1] - inside
    over = np.maximum(inside / left, outside / (ranks - left)) / means[:, None] - 1
    foreign = np.zeros(n)
    for weight, columns in zip(weights, closed):
        sets = columns[:, blocks]
        one = bits.size(bits.windows(sets, length))
        other = one if 2 * length == n else bits.size(bits.windows(sets, n - length))
        foreign += weight * (one + np.roll(other, -length))
    excess = np.maximum(over - tolerance, 0).T @ weights
    start = int(np.lexsort((over.T @ weights, foreign, excess))[0])
    chosen = np.zeros(n, bool)
    chosen[np.arange(start, start + length) % n] = True
    # Both sides keep the order of the whole, so that their windows are stretches of it.
    for piece, place, count in ((blocks[chosen], first, left), (blocks[~chosen], first + left, ranks - left)):
        _cut(result, piece, place, count, prepared, closed, loads, weights, means, tolerance)
