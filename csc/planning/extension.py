"""One step of the search for stages: the longest segments that can be the next stage, for many states at once.

Terms: see csc.planning.branches and csc.planning.room. A *state* is a frontier with its labels. A *cap* is the largest
bound that a stage may have. A *charge* is what a segment takes of something that has a limit, where that is a plain sum
over its units: work, work and the way that follows at least, bytes.

    Step(tables, cap, room, parts, targets, check)      what the segments of a search have to respect
    extend(step, state, labels, left, empty)            -> states after one more stage, their parents, their labels
    fitting(step, low, high, labels, at_most)           -> which segments respect it
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from csc.planning.branches import Floats, Ints
from csc.planning.dominance import undominated
from csc.planning.room import Room, Target, depths_of, labels_after, need_of
from csc.planning.segment_bounds import ChainTables, Measures, bounds_of, measures

Bools = npt.NDArray[np.bool_]

EXACT = 1e-9  # relative difference below which two caps are the same
ROWS = 200_000  # segments looked at in one go; only a matter of memory
PROBES = 512  # segments that take about as long to look at as one, so many ends are tried together


@dataclass(frozen=True)
class Extension:
    """One extension of the search: what its segments have to respect. parts: see csc.planning.frontiers.parts_of."""

    tables: ChainTables
    cap: float
    room: Room | None = None
    parts: Ints | None = None
    targets: tuple[Target, ...] = ()
    # What later stages could be at best, where they may stand on other ranks; None: the same as this one.
    after: Extension | None = None
    # Whatever else segments have to be, by their ends and measures; never lost by taking units away.
    check: Callable[[Ints, Ints, Measures], Bools] | None = None

    @cached_property
    def charges(self) -> list[tuple[Floats, float]]:
        """Running sums by place, and the largest of them, of every charge that has a limit."""
        sums, work = self.tables.sums, self.tables.work
        found = [sums[:, :3].sum(axis=1) * work, sums[:, 0] * work] if math.isfinite(self.cap) else []
        if self.room and math.isfinite(self.room.memory):
            found.append(sums[:, 3] + self.room.in_flight[1] * self.room.scale * sums[:, 4])
        return [(charge, float(charge.max())) for charge in found]

    def limits(self, state: Ints) -> list[Floats]:
        """The limit of every charge for a segment of what each state leaves."""
        found = []
        if math.isfinite(self.cap):
            rest = self.tables.least_rest[self.tables.start + state].min(axis=1)
            tail = np.where(np.isfinite(rest), rest, 0.0) * self.tables.ramp
            found = [np.full(len(state), self.cap), self.cap - tail]
        if self.room and math.isfinite(self.room.memory):
            found.append(np.full(len(state), self.room.memory))
        return found


def extend(step: Extension, state: Ints, labels: Ints, left: int, empty: bool) -> tuple[Ints, Ints, Ints]:
    """The states after one more stage that nothing dominates, their parents and labels; `left` stages come after."""
    limits = step.limits(state)
    found = []
    for first, last in _batches(step, state, limits):
        low, rows, limit = _choices(step, state, np.arange(first, last), [each[first:last] for each in limits])
        low, largest, rows = _ends(step, state, low, rows, limit, 0 if empty else left)
        found.append(_reach(step, state, labels, low, largest, rows, left))
    low, rows, after = found[0] if len(found) == 1 else (np.concatenate(each) for each in zip(*found))
    kept = undominated(step.tables, low, after)
    return low[kept], rows[kept], after[kept]


def _batches(step: Extension, state: Ints, limits: list[Floats]) -> list[tuple[int, int]]:
    """Runs of states whose choices together are at most ROWS, or single states."""
    options = np.prod(state[:, :-1] + 1.0, axis=1)
    if options.sum() <= ROWS:
        return [(0, len(state))]
    options = np.ones(len(state))
    for c in range(len(step.tables.lengths) - 1):
        options *= state[:, c] - _lowest(step, limits, c, state[:, c]) + 1
    edges, total = [0], 0.0
    for i, count in enumerate(options):
        if total + count > ROWS and i > edges[-1]:
            edges.append(i)
            total = 0.0
        total += count
    return list(zip(edges, [*edges[1:], len(options)]))


def _lowest(step: Extension, limits: list[Floats], c: int, high: Ints) -> Ints:
    """For each row the lowest position on chain c down to which a segment from `high` keeps within the limits."""
    lowest = np.zeros(len(high), dtype=np.int64)
    first = step.tables.start[c]
    for (charge, most), limit in zip(step.charges, limits):
        sums = charge[first : first + step.tables.lengths[c] + 1]
        slack = 1e-9 * max(most, 1e-300)
        np.maximum(lowest, np.searchsorted(sums, sums[high] - limit - slack, side="left"), out=lowest)
    return np.minimum(lowest, high)


def _choices(step: Extension, state: Ints, rows: Ints, limits: list[Floats]) -> tuple[Ints, Ints, list[Floats]]:
    """All ends of the next segment on every chain but the last: (segments, chains), the row of the state of each, and
    what the limits leave for its end on the last chain.
    """
    tables = step.tables
    low = state[rows]
    for c in range(len(tables.lengths) - 1):
        lowest = _lowest(step, limits, c, low[:, c])
        count = low[:, c] - lowest + 1
        places = np.repeat(np.arange(len(rows)), count)
        end = lowest[places] + np.arange(len(places)) - np.repeat(np.cumsum(count) - count, count)
        high = tables.start[c] + low[places, c]
        limits = [
            limit[places] - (charge[high] - charge[tables.start[c] + end])
            for limit, (charge, _) in zip(limits, step.charges)
        ]
        low, rows = low[places], rows[places]
        low[:, c] = end
    return low, rows, limits


def _ends(
    step: Extension, state: Ints, low: Ints, rows: Ints, limits: list[Floats], left: int
) -> tuple[Ints, Ints, Ints]:
    """Between which positions of the last chain the segment can end so that a frontier comes out: least in `low`,
    largest in the second result. `left` units at least stay for the stages ahead.
    """
    tables = step.tables
    last = len(tables.lengths) - 1
    need = tables.need[tables.start + low]  # (segments, chain, what it needs of each chain)
    fine = np.ones(len(low), dtype=bool)
    for c in range(last):
        for d in range(last):
            if c != d:
                fine &= need[:, c, d] <= low[:, d]
    largest = low[:, last].copy()
    own = tables.need[tables.start[last] : tables.start[last] + tables.lengths[last] + 1]
    for d in range(last):
        np.minimum(largest, np.searchsorted(own[:, d], low[:, d], side="right") - 1, out=largest)
    moved = (low[:, :last] < state[rows][:, :last]).any(axis=1)
    largest = np.where(moved, largest, np.minimum(largest, low[:, last] - 1))
    least = np.maximum(need[:, :last, last].max(axis=1, initial=0), left - low[:, :last].sum(axis=1))
    least = np.maximum(least, _lowest(step, limits, last, low[:, last]))
    fine &= (least <= largest) & (largest >= 0)
    low[:, last] = least
    return low[fine], largest[fine], rows[fine]


def _reach(
    step: Extension, state: Ints, labels: Ints, low: Ints, largest: Ints, rows: Ints, left: int
) -> tuple[Ints, Ints, Ints]:
    """The longest segments that fit, for every depth that they may have: their frontiers, rows and labels."""
    last = len(step.tables.lengths) - 1
    at_most = None
    if step.room:
        every = np.sort(labels[rows], axis=1).T + 1
        depths = [limit for i, limit in enumerate(every) if i == 0 or (limit > every[i - 1]).any()]
        at_most = np.concatenate(depths)
        low, largest, rows = (np.concatenate([each] * len(depths)) for each in (low, largest, rows))

    def fits(which: Ints, end: Ints) -> Bools:
        at, parents = low[which], rows[which]
        at[:, last] = end
        return fitting(step, at, state[parents], labels[parents], None if at_most is None else at_most[which])

    end = _least_that_fits(fits, low[:, last], largest)
    low[:, last] = end
    there = np.flatnonzero(end <= largest)
    there = there[_enough(step.after or step, low[there], left)]
    low, parents = low[there], rows[there]
    if step.room is None:
        return low, parents, labels[parents]
    high, before = state[parents], labels[parents]
    depth = depths_of(step.tables, step.targets, low, high, before)
    return low, parents, labels_after(step.tables, step.targets, low, high, before, depth)


def _least_that_fits(fits: Callable[[Ints, Ints], Bools], least: Ints, largest: Ints) -> Ints:
    """For each row the first end from `least` to `largest` that fits, where all behind it do; else largest + 1.

    fits(rows, ends): whether these ends of these rows do. Bisection with several ends at a time.
    """
    bottom, top = least.copy(), largest + 1
    while len(rows := np.flatnonzero(bottom < top)):
        width = top[rows] - bottom[rows]
        count = np.minimum(width, max(1, PROBES // len(rows)))
        first = np.cumsum(count) - count
        number = np.arange(int(count.sum())) - np.repeat(first, count)
        which, parts = np.repeat(rows, count), np.repeat(count, count)
        end = bottom[which] + (2 * number + 1) * np.repeat(width, count) // (2 * parts)
        good = fits(which, end)
        bottom[rows] = np.maximum.reduceat(np.where(good, bottom[which], end + 1), first)
        top[rows] = np.minimum.reduceat(np.where(good, end, top[which]), first)
    return top


def _enough(step: Extension, low: Ints, left: int) -> Bools:
    """False where `left` stages cannot hold what is left, whatever they are."""
    good = np.ones(len(low), dtype=bool)
    for (charge, most), limit in zip(step.charges, step.limits(low)):
        amount = charge[step.tables.start + low].sum(axis=1)
        good &= amount <= left * limit * (1 + EXACT) + 1e-12 * most
    return good


def fitting(step: Extension, low: Ints, high: Ints, labels: Ints, at_most: Ints | None = None) -> Bools:
    """Which segments keep under the cap, the memory, the parts and a depth `at_most`: with one, all parts of it do."""
    tables = step.tables
    measured = measures(tables, low, high)
    good: Bools = bounds_of(tables, measured) <= step.cap * (1 + 1e-12)
    if step.check is not None:
        good &= step.check(low, high, measured)
    if step.parts is not None:
        counts = (step.parts[tables.start + high] - step.parts[tables.start + low]).sum(axis=1)
        good &= (counts > 0).sum(axis=1) <= 1
    if step.room is not None:
        depth = depths_of(tables, step.targets, low, high, labels)
        need = need_of(tables, low, high, measured.amounts, step.room, depth)
        good &= need <= step.room.memory * (1 + 1e-12)
        if at_most is not None:
            good &= depth <= at_most
    return good
