"""Swaps of two blocks: what is left to balance, with few keys moved.

Terms: the *critical* rank is the one that would take longest if every rank ran alone. A step swaps blocks of it with
as many of a less busy rank, so counts stay; where that finds nothing, the rank with most room takes load from others,
or two swaps are tried together. All pairs of blocks are valued at once, approximately; the best are counted exactly,
and a step is taken only if the slowest of the ranks that change gets faster and none gets slower than the critical
one was.

    improve(prepared, ranks_of_blocks, enough, steps) -> Improved
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from csc.planning.dispatch.evaluate import Prepared
from csc.planning.dispatch.state import MaskState, Pairs

PARTNERS = (1, 2)  # so many ranks of the other end are tried first, and so many more if that fails
AT_ONCE = 32  # swaps in one step
EXACT = 6  # pairs that are counted exactly, one by one
PATIENCE, PROGRESS = 8, 0.25  # so many steps are to close this share of what is left
SAMPLE, DOUBLES = 4096, 160  # pairs of blocks that are looked at for two swaps, and swaps of either sign among them
WORTH = 4.0  # blocks of keys: a step that adds this many must gain twice as much time as one that adds none


@dataclass(frozen=True, eq=False)
class Improved:
    """The best dispatch on the way, by seconds."""

    ranks_of_blocks: np.ndarray
    seconds: float
    steps: int  # that led to it
    tried: int  # steps of the whole search, to count against a budget


def improve(prepared: Prepared, ranks_of_blocks: np.ndarray, enough: float, steps: int) -> Improved:
    """Swap until the plan takes at most `enough` seconds, nothing helps, progress is slow, or the steps are used up."""
    state = _Search(prepared, ranks_of_blocks)
    best, best_seconds, kept, tried = state.ranks_of_blocks.copy(), state.seconds(), 0, 0
    gap = np.inf
    while tried < steps and best_seconds > enough:
        if tried % PATIENCE == 0:
            excess = float(np.maximum(state.times() - enough, 0).sum())
            if excess > gap * (1 - PROGRESS):
                break
            gap = excess
        tried += 1
        if not state.step(enough):
            break
        if state.seconds() < best_seconds:
            best, best_seconds, kept = state.ranks_of_blocks.copy(), state.seconds(), tried
    return Improved(best, best_seconds, kept, tried)


class _Search:
    """A dispatch under change."""

    def __init__(self, prepared: Prepared, ranks_of_blocks: np.ndarray) -> None:
        self.ranks_of_blocks = ranks_of_blocks.copy()
        self.masks = [MaskState(prepared, number, ranks_of_blocks) for number in range(len(prepared.masks))]
        self.loads = np.sum([mask.factor * mask.loads for mask in self.masks], axis=0)  # seconds of a block
        self.pull = False  # whether the last swap was found from the rank with most room

    def seconds(self) -> float:
        return sum(mask.seconds() for mask in self.masks)

    def times(self) -> np.ndarray:
        return np.sum([mask.times() for mask in self.masks], axis=0)

    def step(self, enough: float) -> bool:
        """Take one step; False where nothing helps. The end that found the last swap is tried first."""
        times = self.times()
        order = np.argsort(times, kind="stable")
        for pull in (self.pull, not self.pull):
            one, others = (order[0], order[:0:-1]) if pull else (order[-1], order[:-1])
            taken = 0
            for count in PARTNERS:
                group = others[taken : taken + count]
                taken += count
                if len(group) and self._swap_some(int(one), group, times, enough):
                    self.pull = pull
                    return True
        critical, partners = int(order[-1]), order[:-1][: sum(PARTNERS)].tolist()
        return any(self._swap_two(critical, partner, times, enough) for partner in partners)

    def _swap_some(self, a: int, partners: np.ndarray, times: np.ndarray, enough: float) -> bool:
        """One swap or several between rank a and these ranks."""
        chosen = np.zeros(len(times), bool)
        chosen[partners] = True
        mine, theirs = np.flatnonzero(self.ranks_of_blocks == a), np.flatnonzero(chosen[self.ranks_of_blocks])
        owner = self.ranks_of_blocks[theirs]
        before = np.maximum(times[a], times[owner]).astype(np.float32)
        pairs = self._pairs(a, mine, theirs, owner)
        after = np.maximum(pairs.time_a, pairs.time_b, out=pairs.time_a)
        gain = np.subtract(before, np.maximum(after, np.float32(enough), out=after), out=after)
        cost = np.maximum(pairs.added, 0, out=pairs.added)
        cost += np.float32(WORTH)
        value = np.divide(gain, cost, out=cost)
        column = np.argmax(value, axis=1)
        best = value[np.arange(len(mine)), column]
        order = np.argsort(-best, kind="stable")
        order = order[: np.count_nonzero(best > 0)]
        rows, columns = _disjoint(value, gain, order, (times[a] - max(times[partners].min(), enough)) / 2)
        while len(rows) > 1:
            if self._try(a, mine[rows], theirs[columns], times):
                return True
            rows, columns = rows[: len(rows) // 4], columns[: len(columns) // 4]
        return any(self._try(a, mine[[row]], theirs[column[[row]]], times) for row in order[:EXACT].tolist())

    def _swap_two(self, a: int, b: int, times: np.ndarray, enough: float) -> bool:
        """Two swaps between two ranks whose blocks differ by too much to swap one: the sum of a gain and a loss."""
        mine, theirs = np.flatnonzero(self.ranks_of_blocks == a), np.flatnonzero(self.ranks_of_blocks == b)
        added = self._pairs(a, mine, theirs, np.full(len(theirs), b)).added.ravel()
        shift = (self.loads[mine][:, None] - self.loads[theirs]).ravel()
        some = np.arange(0, len(added), len(added) // SAMPLE | 1)  # an odd stride visits all rows and columns
        cheap = some[np.argsort(added[some], kind="stable")]
        up, down = cheap[shift[cheap] > 0][:DOUBLES], cheap[shift[cheap] < 0][:DOUBLES]
        if len(up) == 0 or len(down) == 0:
            return False
        moved = shift[up][:, None] + shift[down]
        after = np.maximum(np.maximum(times[a] - moved, times[b] + moved), enough)
        value = (times[a] - after) / (WORTH + np.maximum(added[up][:, None] + added[down], 0))
        (up_row, up_column), (down_row, down_column) = np.divmod(up, len(theirs)), np.divmod(down, len(theirs))
        value[(up_row[:, None] == down_row) | (up_column[:, None] == down_column)] = 0
        first, second = np.unravel_index(np.argmax(value), value.shape)
        if value[first, second] <= 0:
            return False
        rows, columns = [up_row[first], down_row[second]], [up_column[first], down_column[second]]
        return self._try(a, mine[rows], theirs[columns], times)

    def _pairs(self, a: int, mine: np.ndarray, theirs: np.ndarray, owner: np.ndarray) -> Pairs:
        """Of all masks together; added keys count once a layer."""
        parts = [mask.pairs(a, mine, theirs, owner) for mask in self.masks]
        if len(parts) == 1 and self.masks[0].layers == 1:
            return parts[0]
        added = np.sum([mask.layers * part.added for mask, part in zip(self.masks, parts)], axis=0)
        times = [np.sum([part[end] for part in parts], axis=0) for end in (0, 1)]
        return Pairs(times[0], times[1], added / np.float32(sum(mask.layers for mask in self.masks)))

    def _try(self, a: int, mine: np.ndarray, theirs: np.ndarray, times: np.ndarray) -> bool:
        """Swap these pairs, if that makes the slowest of these ranks faster and the slowest of all no slower."""
        partners = self.ranks_of_blocks[theirs].tolist()
        swaps = list(zip(partners, mine.tolist(), theirs.tolist()))
        kept = [mask.keep() for mask in self.masks]
        for b, i, j in swaps:
            self._swap(a, b, i, j)
        for mask in self.masks:
            mask.refresh(self.ranks_of_blocks)
        touched = [a, *partners]
        now = self.times()
        if now[touched].max() < times[touched].max() * (1 - 1e-12) and now.max() <= times.max():
            return True
        for b, i, j in swaps:
            self._swap(a, b, j, i)
        for mask, old in zip(self.masks, kept):
            mask.restore(old)
        return False

    def _swap(self, a: int, b: int, i: int, j: int) -> None:
        self.ranks_of_blocks[i], self.ranks_of_blocks[j] = b, a
        for mask in self.masks:
            mask.swap(a, b, i, j)


def _disjoint(value: np.ndarray, gain: np.ndarray, order: np.ndarray, gap: float) -> tuple[list[int], list[int]]:
    """Rows in this order, each with its best free column, until they gain `gap`. Takes columns out of `value`."""
    rows: list[int] = []
    columns: list[int] = []
    for row in order[:AT_ONCE].tolist():
        column = int(np.argmax(value[row]))
        gap -= gain[row, column]
        if gap < 0 or value[row, column] <= 0:
            break
        rows.append(row)
        columns.append(column)
        value[:, column] = 0
    return rows, columns
