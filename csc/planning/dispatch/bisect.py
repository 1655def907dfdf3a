"""Recursive bisection: equal counts, nearly equal loads, few stretches, few foreign keys.

Terms: a *window* is so many consecutive blocks of a list that is closed to a circle. To give n blocks to p ranks, the
list is cut into a window of the first ranks' quota and the rest, and both are cut again. The mean load of all windows
of one length is exactly their share of the whole, and neighbouring windows differ by two blocks; so some window is
within one block's load of its share, and cuts that balance always exist (docs/dispatch.md). Among windows within
`tolerance` the one is taken whose two sides need the fewest keys.

    Bisector(prepared, order).cut(tolerance) -> int64 [nQ], the rank of each block
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


class Bisector:
    """Cuts one order, with several tolerances; what it knows of a list of blocks serves all of them."""

    def __init__(self, prepared: Prepared, order: np.ndarray) -> None:
        self.prepared, self.order = prepared, order
        self.loads = np.stack([mask.loads for mask in prepared.masks])
        self.weights = np.array([mask.layers for mask in prepared.masks])
        self.means = np.maximum(self.loads.sum(axis=1) / prepared.workload.ranks, 1e-30)
        self.known: dict[tuple[bytes, int], tuple[np.ndarray, np.ndarray]] = {}

    def cut(self, tolerance: float) -> np.ndarray:
        """Cut the order in two until each piece is one rank's.

        tolerance: how far a side's load per rank may be over the mean of all ranks, as a share of it. 0: the best
            balance.
        """
        result = np.empty(len(self.order), np.int64)
        self._cut(result, self.order, 0, self.prepared.workload.ranks, tolerance)
        return result

    def _cut(self, result: np.ndarray, blocks: np.ndarray, first: int, ranks: int, tolerance: float) -> None:
        if ranks == 1:
            result[blocks] = first
            return
        left, n = ranks // 2, len(blocks)
        length = int(self.prepared.workload.quotas[first : first + left].sum())
        key = (blocks.tobytes(), first)
        if key not in self.known:
            self.known[key] = self._windows(blocks, length, left, ranks)
        over, foreign = self.known[key]
        excess = np.maximum(over - tolerance, 0).T @ self.weights
        start = int(np.lexsort((over.T @ self.weights, foreign, excess))[0])
        chosen = np.zeros(n, bool)
        chosen[np.arange(start, start + length) % n] = True
        # Both sides keep the order of the whole, so that their windows are stretches of it.
        self._cut(result, blocks[chosen], first, left, tolerance)
        self._cut(result, blocks[~chosen], first + left, ranks - left, tolerance)

    def _windows(self, blocks: np.ndarray, length: int, left: int, ranks: int) -> tuple[np.ndarray, np.ndarray]:
        """Of all windows of this length: the excess of the heavier side by mask, and the keys that both sides need."""
        n = len(blocks)
        twice = np.cumsum(np.tile(self.loads[:, blocks], 2), axis=1)
        running = np.concatenate([np.zeros((len(self.loads), 1)), twice], axis=1)
        inside = running[:, length : length + n] - running[:, :n]
        outside = running[:, n : n + 1] - inside
        over = np.maximum(inside / left, outside / (ranks - left)) / self.means[:, None] - 1
        foreign = np.zeros(n)
        for weight, mask in zip(self.weights, self.prepared.masks):
            sets = mask.closed[:, blocks]
            one = bits.size(bits.windows(sets, length))
            other = one if 2 * length == n else bits.size(bits.windows(sets, n - length))
            foreign += weight * (one + np.roll(other, -length))
        return over, foreign
