"""Dispatch blocks of tokens to context-parallel ranks."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from csc.errors import InputError
from csc.planning.dispatch import workload
from csc.planning.dispatch.workload import (
    Measured,
    Prepared,
    Rates,
    Workload,
    lower_bound,
    measure,
    prepare,
    seconds,
    volumes,
)

# --- One mask under a dispatch that changes --------------------------------------------------------------------------
#
# It counts how many blocks of each rank need each block of keys, and tells what follows.
#
# Terms: *freed* keys are those that only the leaving block needed, *added* ones those that nobody on the rank needed
# before; with counts of needs both are sums over bits. In self-attention a block's own keys count as needed by it, so
# what a rank owns is never foreign, and swaps stay additive although keys move with their blocks. *Hidden*
# communication: even all keys to all ranks take less time than the mean load, so that volumes change no time.


class Pairs(NamedTuple):
    """What a swap would lead to, for every pair of a block of rank a and one of another; float32 [mine, theirs]."""

    time_a: np.ndarray
    time_b: np.ndarray
    added: np.ndarray


class Undo(NamedTuple):
    """What `restore` needs besides the swaps taken back."""

    received: np.ndarray
    sent: np.ndarray
    readers: np.ndarray


def seconds_of_many(rates: Rates, load: np.ndarray, volume: np.ndarray) -> np.ndarray:
    """Rates.seconds for arrays; the arguments stay as they are."""
    compute, communication = load * rates.tile_seconds, volume * rates.block_seconds
    forward = np.maximum(compute, communication)
    compute *= rates.backward_compute
    communication *= rates.backward_communication
    forward += np.maximum(compute, communication, out=compute)
    return forward


class MaskState:
    """Counts, loads and volumes of one mask, by rank."""

    def __init__(self, prepared: Prepared, number: int, ranks_of_blocks: np.ndarray) -> None:
        mask, n = prepared.masks[number], len(ranks_of_blocks)
        self.layers, self.loads, self.shares, self.fixed = mask.layers, mask.loads, mask.shares, mask.owners
        self.rates, self.ranks = prepared.workload.rates, prepared.workload.ranks
        self.needs, self.sets = mask.reach, mask.closed
        self.factor = self.layers * self.rates.seconds(1.0, 0.0)  # of a full tile, where communication is hidden
        chosen = np.zeros((self.ranks, n), np.float32)
        chosen[ranks_of_blocks, np.arange(n)] = 1
        self.counts = (chosen @ mask.reach_float).astype(np.int16)
        self.load = np.bincount(ranks_of_blocks, weights=mask.loads, minlength=self.ranks)
        self.received = self.sent = self.readers = np.zeros(self.ranks)
        owners = ranks_of_blocks if self.fixed is None else self.fixed
        mean, most = mask.loads.sum() / self.ranks, np.bincount(owners, minlength=self.ranks).max() * (self.ranks - 1)
        self.hidden = self.rates.seconds(mean, max(most, len(mask.shares))) == self.rates.seconds(mean, 0)
        self.refresh(ranks_of_blocks)

    def refresh(self, ranks_of_blocks: np.ndarray) -> None:
        """Volumes after swaps."""
        if self.hidden:
            return
        owners = ranks_of_blocks if self.fixed is None else self.fixed
        self.received, self.sent = volumes(self.counts > 0, owners, self.shares)
        self.readers = np.count_nonzero(self.counts, axis=0) - (1 if self.fixed is None else 0)

    def keep(self) -> Undo:
        return Undo(self.received, self.sent, self.readers)

    def restore(self, kept: Undo) -> None:
        self.received, self.sent, self.readers = kept

    def times(self) -> np.ndarray:
        """Seconds of each rank, if it ran alone."""
        return self.layers * seconds_of_many(self.rates, self.load, np.maximum(self.received, self.sent))

    def seconds(self) -> float:
        """Of all layers with this mask."""
        volume = max(self.received.max(), self.sent.max())
        return self.layers * self.rates.seconds(float(self.load.max()), float(volume))

    def swap(self, a: int, b: int, i: int, j: int) -> None:
        """Block i of a and block j of b change places; volumes are stale until `refresh`."""
        change = self.needs[j] - self.needs[i]
        self.counts[a] += change
        self.counts[b] -= change
        shift = self.loads[i] - self.loads[j]
        self.load[a] -= shift
        self.load[b] += shift

    def pairs(self, a: int, mine: np.ndarray, theirs: np.ndarray, owner: np.ndarray) -> Pairs:
        """All swaps of one of `mine`, blocks of a, with one of `theirs`, blocks of the ranks `owner`.

        As if the two blocks had no key in common and a short block were whole: close, not exact.
        """
        present = np.zeros(self.ranks, bool)
        present[owner] = True
        partners, place = np.flatnonzero(present), (np.cumsum(present) - 1)[owner]
        zero, one = self._foreign(np.concatenate([[a], partners]))
        sets_mine, sets_theirs = self.sets[:, mine], self.sets[:, theirs]
        freed_a = workload.size(sets_mine & one[:, 0, None]).astype(np.float32)
        added_a = workload.size(sets_theirs & zero[:, 0, None]).astype(np.float32)
        freed_b = workload.size(sets_theirs & one[:, 1 + place]).astype(np.float32)
        added_b = workload.size(sets_mine[:, None] & zero[:, 1:, None]).astype(np.float32)  # [partners, mine]
        received_a = added_a - freed_a[:, None]
        received_b = (added_b.T if len(partners) == 1 else added_b[place].T) - freed_b
        added = received_a + received_b
        unit = self.factor if self.hidden else 1.0  # seconds at once where loads alone decide
        shift = (unit * self.loads[mine]).astype(np.float32)[:, None] - (unit * self.loads[theirs]).astype(np.float32)
        load_a = np.float32(unit * self.load[a]) - shift
        load_b = np.add(shift, (unit * self.load[owner]).astype(np.float32), out=shift)
        if self.hidden:
            return Pairs(load_a, load_b, added)
        received_a += np.float32(self.received[a])
        received_b += self.received[owner].astype(np.float32)
        sent_a, sent_b = self._sent(a, mine, theirs, owner, partners, place)
        volume_a = np.maximum(received_a, sent_a, out=received_a)
        volume_b = np.maximum(received_b, sent_b, out=received_b)
        layers = np.float32(self.layers)
        time_a, time_b = seconds_of_many(self.rates, load_a, volume_a), seconds_of_many(self.rates, load_b, volume_b)
        return Pairs(np.multiply(layers, time_a, out=time_a), np.multiply(layers, time_b, out=time_b), added)

    def _sent(
        self, a: int, mine: np.ndarray, theirs: np.ndarray, owner: np.ndarray, partners: np.ndarray, place: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """What a and the others would send. A block's keys move with it: to its readers less the new owner, plus the
        old one if that still reads them."""
        sent_a, sent_b = np.float32(self.sent[a]), self.sent[owner].astype(np.float32)
        if self.fixed is not None:
            return np.asarray(sent_a), sent_b
        readers, counts = self.readers, self.counts
        mine_b = readers[mine] - (counts[partners][:, mine] > 0) + (counts[a, mine] > 1)  # [partners, mine]
        theirs_a = readers[theirs] - (counts[a, theirs] > 0) + (counts[owner, theirs] > 1)
        sent_a = sent_a - readers[mine].astype(np.float32)[:, None] + theirs_a.astype(np.float32)
        sent_b = (sent_b - readers[theirs].astype(np.float32)) + mine_b.astype(np.float32)[place].T
        return sent_a, sent_b

    def _foreign(self, ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Columns of the keys that none, and that exactly one of these ranks' blocks needs, owned ones left out."""
        counts = self.counts[ranks]
        if self.fixed is not None:
            counts[self.fixed == ranks[:, None]] = 2
        return workload.pack(counts == 0), workload.pack(counts == 1)


# --- Swaps of two blocks: what is left to balance, with few keys moved -----------------------------------------------
#
# Terms: the *critical* rank is the one that would take longest if every rank ran alone. A step swaps blocks of it with
# as many of a less busy rank, so counts stay; where that finds nothing, the rank with most room takes load from
# others, or two swaps are tried together. All pairs of blocks are valued at once, approximately; the best are counted
# exactly, and a step is taken only if the slowest of the ranks that change gets faster and none gets slower than the
# critical one was.


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


# --- Recursive bisection: equal counts, nearly equal loads, few stretches, few foreign keys --------------------------
#
# Terms: a *window* is so many consecutive blocks of a list that is closed to a circle. To give n blocks to p ranks,
# the list is cut into a window of the first ranks' quota and the rest, and both are cut again. The mean load of all
# windows of one length is exactly their share of the whole, and neighbouring windows differ by two blocks; so some
# window is within one block's load of its share, and cuts that balance always exist (docs/dispatch.md). Among windows
# within `tolerance` the one is taken whose two sides need the fewest keys.


def by_reach(prepared: Prepared) -> np.ndarray:
    """An order: blocks that need less than the mean first, in their order, then the others."""
    reach = sum(mask.layers * workload.size(mask.needs) for mask in prepared.masks)
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
            one = workload.size(workload.windows(sets, length))
            other = one if 2 * length == n else workload.size(workload.windows(sets, n - length))
            foreign += weight * (one + np.roll(other, -length))
        return over, foreign


# --- Dispatches in closed form: where the search starts, and what it must not fall behind ----------------------------
#
# Each gives every rank its quota of blocks (they differ by at most one) and returns int64 [nQ], the rank of each
# block.


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


# --- Dispatch blocks of tokens to context-parallel ranks -------------------------------------------------------------
#
# Terms: see workload.py and evaluate.py. A *start* is a dispatch in closed form or by bisection; the most promising
# ones are improved by swaps; the best of everything seen is the plan, so it is never worse than a start.


STEPS = 20  # swaps for 1024 blocks on 8 ranks; fewer blocks make a step cheaper, so there are more
CLOSE = 1.0005  # so near to the lower bound, no other start is taken up
ROOM = 1.03  # imbalance of loads that swaps are expected to remove, when starts are compared
TRIED = 2  # starts that are improved
LEAST = 8  # steps that make it worth while to take up another one, or the best once more
LOOSE = (0.3, 1.0)  # imbalances that are allowed to bisections where links are what takes long
WAITS = 1.1  # a dispatch waits for links if they make it take so many times as long
UNEVEN = 1.5  # what swaps are expected to leave of the busiest link over the mean


@dataclass(frozen=True, eq=False)
class Dispatch:
    """Which rank computes which block, and what that takes by the model.

    ranks_of_blocks: int64 [nQ]. origin: what made it. seconds: of all layers, forward and backward, with exact sets.
    measured: of each mask, loads, needed sets (bool [P, nK]) and volumes by rank.
    """

    prepared: Prepared
    ranks_of_blocks: np.ndarray
    measured: tuple[Measured, ...]
    seconds: float
    origin: str

    @property
    def blocks(self) -> list[np.ndarray]:
        """Of each rank, its blocks in ascending order: the order of its tokens."""
        return [np.flatnonzero(self.ranks_of_blocks == rank) for rank in range(self.prepared.workload.ranks)]

    @cached_property
    def lower_bound(self) -> float:
        """Seconds that every dispatch with equal counts takes (docs/dispatch.md)."""
        return lower_bound(self.prepared)

    @property
    def imbalance(self) -> float:
        """Load of the heaviest rank over the mean; the worst mask."""
        return max(m.load / max(float(m.loads.mean()), 1e-30) for m in self.measured)

    @property
    def volume_over_all_gather(self) -> float:
        """Foreign keys that all ranks need, over those that an all-gather moves; all layers."""
        masks = list(zip(self.prepared.masks, self.measured))
        moved = sum(mask.layers * float(m.received.sum()) for mask, m in masks)
        ranks = self.prepared.workload.ranks
        return moved / max(sum(mask.layers * float(mask.shares.sum()) * (ranks - 1) for mask, _ in masks), 1e-30)

    @cached_property
    def collectives(self) -> dict[str, float]:
        """Seconds by collective."""
        return workload.compare(self.prepared, list(self.measured))

    @property
    def collective(self) -> str:
        """The cheapest one."""
        return workload.cheapest(self.collectives, list(self.measured))


def evaluate(workload: Workload, ranks_of_blocks: np.ndarray) -> Dispatch:
    """The report of a given dispatch: int [nQ], a rank for each block. Counts need not be equal.

    Raises InputError where a block has no rank of this workload.
    """
    owners = np.asarray(ranks_of_blocks)
    if owners.shape != (workload.blocks,) or owners.min() < 0 or owners.max() >= workload.ranks:
        fault = f"{workload.blocks} blocks need a rank below {workload.ranks} each, and what was given is not that"
        raise InputError(fault, "evaluate", "Give one rank for each block")
    return _report(prepare(workload), owners.astype(np.int64), "given")


def _report(prepared: Prepared, ranks_of_blocks: np.ndarray, origin: str) -> Dispatch:
    measured = measure(prepared, ranks_of_blocks)
    return Dispatch(prepared, ranks_of_blocks, tuple(measured), seconds(prepared, measured), origin)


def starts(prepared: Prepared, slack: float) -> dict[str, np.ndarray]:
    """Name -> int64 [nQ]: the closed forms, and bisections of two orders."""
    n, ranks = prepared.workload.blocks, prepared.workload.ranks
    loads = np.sum([mask.layers * mask.loads for mask in prepared.masks], axis=0)
    natural = Bisector(prepared, np.arange(n))
    partitions = {
        "contiguous": contiguous(n, ranks),
        "zigzag": zigzag(n, ranks),
        "by load": by_load(loads, ranks),
        "round robin": round_robin(loads, ranks),
        "bisection": natural.cut(slack / 2),
    }
    if _waits(prepared, partitions["bisection"]):
        partitions |= {f"bisection within {tolerance:.0%}": natural.cut(tolerance) for tolerance in LOOSE}
    elif (np.diff(reach := by_reach(prepared)) < 0).any():
        partitions["bisection by reach"] = Bisector(prepared, reach).cut(slack / 2)
    return partitions


def _waits(prepared: Prepared, ranks_of_blocks: np.ndarray) -> bool:
    """Whether this dispatch waits for its links, so that a worse balance may be worth fewer keys."""
    measured = measure(prepared, ranks_of_blocks)
    rates = prepared.workload.rates
    computed = sum(mask.layers * rates.seconds(m.load, 0.0) for mask, m in zip(prepared.masks, measured))
    return seconds(prepared, measured) > WAITS * computed


def _promise(dispatch: Dispatch) -> tuple[float, float]:
    """What is to be expected once swaps have balanced it; then what its busiest link and what all links move."""
    work = dispatch.prepared.workload
    time = moved = 0.0
    for mask, m in zip(dispatch.prepared.masks, dispatch.measured):
        load, mean = max(float(m.loads.mean()), m.load / ROOM), float(m.received.mean())
        time += mask.layers * work.rates.seconds(load, min(m.volume, UNEVEN * mean))
        moved += mask.layers * (m.volume + mean)
    return time, moved


def plan(workload: Workload, slack: float = 0.0) -> Dispatch:
    """Minimise the modelled time; among equal times, what is moved.

    slack: a share of the time that may be given up where that moves less: 0.02 takes, of what the search has seen
        within 2 % of the best, the dispatch that moves least, and lets the search end that near to the lower bound.
    Deterministic. With 1024 blocks and 8 ranks under 20 ms of one core (docs/measurements.md).
    Raises InputError for a negative slack.
    """
    if not slack >= 0:
        raise InputError(f"a slack of {slack} is no share of the time", "plan", "Give 0 or a little more, such as 0.02")
    prepared = prepare(workload)
    seen = [_report(prepared, ranks, name) for name, ranks in starts(prepared, slack).items()]
    enough = lower_bound(prepared) * (1 + slack)
    left = STEPS * min(max(1024 // workload.blocks, 1), 4) * max(workload.ranks // 8, 1)
    improved: list[Dispatch] = []
    for start in sorted(seen, key=_promise)[:TRIED]:
        if not improved or (left >= LEAST and improved[0].seconds > enough * CLOSE):
            left -= _swap(prepared, start, enough, left, improved)
    best = min(improved, key=_merit)
    if left >= LEAST and best.seconds > enough * CLOSE:
        _swap(prepared, best, enough, left, improved)
    seen += improved
    best = min(seen, key=_merit)
    near = [dispatch for dispatch in seen if dispatch.seconds <= best.seconds * (1 + slack)]
    return min(near, key=lambda dispatch: _merit(dispatch)[::-1]) if slack > 0 else best


def _merit(dispatch: Dispatch) -> tuple[float, float]:
    return dispatch.seconds, dispatch.volume_over_all_gather


def _swap(prepared: Prepared, start: Dispatch, enough: float, steps: int, improved: list[Dispatch]) -> int:
    """Improve one dispatch, add the result to `improved` and return how many steps were tried."""
    result = improve(prepared, start.ranks_of_blocks, enough, steps)
    origin = f"{start.origin}, {result.steps} swaps" if result.steps else start.origin
    improved.append(_report(prepared, result.ranks_of_blocks, origin))
    return result.tried
