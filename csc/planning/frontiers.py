"""Exact search for stages: from the last stage to the first, over all frontiers of the units that are left.

Terms: see csc.planning.branches. A *cap* is the largest bound that a stage may have. The *depth* of a stage is the
number of stages on the longest path from it to the end, 1 for a stage that no other waits for; by it its rank holds
microbatches in flight. A *label* is the depth of the stage that holds a certain unit which units ahead wait for.

    Room(memory, in_flight, scale)                          what a rank may hold
    search(tables, ranks, cap, room, parts)                 -> frontiers behind every stage, last stage first, or None
    feasible(tables, ranks, cap, room, parts)               -> the same, sure of its None also where memory is short
    least(tables, ranks, floor, room, parts)                -> (least cap, its frontiers), or None
    narrow(floor, most, find, reached)                      -> (least limit, what was found for it), or None

Why it is exact. A stage is what lies between two frontiers, so the assignments of units to stages are the chains of
frontiers from "all left" to "none left". If frontier E leaves a subset of what D leaves, after the same number of
stages, any continuation of D serves E with each stage a part of the stage of D, and no part has a larger bound: D can
be forgotten, and of all stages that could come next only those matter to which nothing can be added. Stages that lost
all their units take one from a stage ahead. With a memory limit E must also have no larger label; a stage that takes a
unit of another to be non-empty may then become deeper, so where branches and memory meet `feasible` asks the search
that admits empty stages, and only if that finds some tries all frontiers (`_every`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from csc.planning.branches import Ints, Pieces, bounds, largest_fused, totals

Bools = npt.NDArray[np.bool_]
Frontiers = list[Ints]
Found = TypeVar("Found")

EXACT = 1e-9  # relative difference below which two caps are the same
ROWS = 200_000  # pieces looked at in one go; only a matter of memory
FEW = 20_000  # states that the search without dominance may have


@dataclass(frozen=True)
class Room:
    """memory: bytes of a rank. in_flight[d]: microbatches that a stage of depth d holds, d from 0 (unused), at least 1
    and never falling. scale: of the largest microbatch.

    A stage holds its state, what its microbatches in flight saved, and for a moment what B of one of them keeps for W:
    of all its units, or, with B and W fused, of one unit at a time, whichever is less:
    state + scale * (in flight * saved + min(max(0, kept - saved), largest `fused` of a unit)).
    """

    memory: float
    in_flight: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class Step:
    """One extension of the search: what its pieces have to respect."""

    tables: Pieces
    cap: float
    room: Room | None = None
    parts: Ints | None = None
    targets: tuple[tuple[int, int, Ints], ...] = ()  # units with edges from other chains: chain, position, sources
    check: Callable[[Ints, Ints], Bools] | None = (
        None  # whatever else pieces have to be; never lost by taking units away
    )


def parts_of(tables: Pieces, part: list[int]) -> Ints:
    """Running counts, by place, of the units of each part; a stage will be allowed units of one part only."""
    counts = np.zeros((len(tables.sums), max(part) + 1), dtype=np.int64)
    for c, chain in enumerate(tables.branches.chains):
        for position, unit in enumerate(chain):
            place = tables.start[c] + position
            counts[place + 1] = counts[place]
            counts[place + 1, part[unit]] += 1
    return counts


def search(
    tables: Pieces, ranks: int, cap: float, room: Room | None = None, parts: Ints | None = None, empty: bool = False
) -> Frontiers | None:
    """Frontiers of exactly `ranks` stages (`empty`: at most) of which none has a bound above `cap` or lacks room."""
    step = Step(tables, cap, room, parts, _targets(tables) if room else ())
    state = tables.lengths[None, :].copy()
    labels = np.zeros((1, len(tables.lengths) + len(step.targets) if room else 0), dtype=np.int64)
    levels: list[tuple[Ints, Ints]] = []
    for left in range(ranks - 1, -1, -1):
        if left == 0 or empty:
            whole = np.zeros_like(state)
            ends = np.flatnonzero(fitting(step, whole, state, labels))
            if len(ends):
                last = int(ends[np.argmin(bounds(tables, whole[ends], state[ends]))])
                return _trace(levels, last, whole[0])
        if left == 0:
            return None
        state, parents, labels = extend(step, state, labels, left, empty)
        if not len(state):
            return None
        levels.append((state, parents))
    return None


def _trace(levels: list[tuple[Ints, Ints]], at: int, end: Ints) -> Frontiers:
    found = [end]
    for state, parents in reversed(levels):
        found.append(state[at])
        at = int(parents[at])
    return found[::-1]


def extend(step: Step, state: Ints, labels: Ints, left: int, empty: bool) -> tuple[Ints, Ints, Ints]:
    """The states after one more stage that nothing dominates, their parents and labels; `left` stages come after."""
    tables = step.tables
    charges, limits = _charges(step, state)
    found: list[tuple[Ints, Ints, Ints]] = []
    options = np.ones(len(state))
    for c in range(len(tables.lengths) - 1):
        options *= state[:, c] - _lowest(tables, charges, limits, c, state[:, c]) + 1
    for first, last in _batches(options):
        rows = np.arange(first, last)
        low, rows = _choices(step, state, rows, charges, limits)
        low, high_end, rows = _ends(step, state, low, rows, charges, limits, 0 if empty else left)
        found += _reach(step, state, labels, low, high_end, rows, left)
    low = np.concatenate([f[0] for f in found]) if found else state[:0]
    rows = np.concatenate([f[1] for f in found]) if found else np.zeros(0, np.int64)
    after = np.concatenate([f[2] for f in found]) if found else labels[:0]
    kept = _best(tables, low, after)
    return low[kept], rows[kept], after[kept]


def _batches(options: npt.NDArray[np.float64]) -> list[tuple[int, int]]:
    """Runs of states whose choices together are at most ROWS, or single states."""
    edges, total = [0], 0.0
    for i, count in enumerate(options):
        if total + count > ROWS and i > edges[-1]:
            edges.append(i)
            total = 0.0
        total += count
    return list(zip(edges, [*edges[1:], len(options)]))


def _charges(step: Step, state: Ints) -> tuple[list[npt.NDArray[np.float64]], list[npt.NDArray[np.float64]]]:
    """Running sums that bound a piece's extent, and their limits for a piece of what each state leaves."""
    tables = step.tables
    sums = tables.sums
    rest = tables.least_rest[tables.start + state].min(axis=1)
    tail = np.where(np.isfinite(rest), rest, 0.0) * tables.ramp
    charges = [sums[:, :3].sum(axis=1) * tables.work, sums[:, 0] * tables.work]
    limits = [np.full(len(state), step.cap), step.cap - tail]
    if step.room:
        charges.append(sums[:, 3] + step.room.in_flight[1] * step.room.scale * sums[:, 4])
        limits.append(np.full(len(state), step.room.memory))
    return charges, limits


def _lowest(
    tables: Pieces, charges: list[npt.NDArray[np.float64]], limits: list[npt.NDArray[np.float64]], c: int, high: Ints
) -> Ints:
    """For each row the lowest position on chain c down to which a piece from `high` keeps within the limits."""
    lowest = np.zeros(len(high), dtype=np.int64)
    first = tables.start[c]
    for charge, limit in zip(charges, limits):
        sums = charge[first : first + tables.lengths[c] + 1]
        slack = 1e-9 * max(float(charge.max()), 1e-300)
        found = np.searchsorted(sums, sums[high] - limit - slack, side="left") if np.isfinite(limit).all() else lowest
        np.maximum(lowest, np.minimum(found, high), out=lowest)
    return lowest


def _choices(
    step: Step,
    state: Ints,
    rows: Ints,
    charges: list[npt.NDArray[np.float64]],
    limits: list[npt.NDArray[np.float64]],
) -> tuple[Ints, Ints]:
    """All ends of the next piece on every chain but the last: (pieces, chains), with the row of its state."""
    tables = step.tables
    low = state[rows].copy()
    limit = [each[rows] for each in limits]
    for c in range(len(tables.lengths) - 1):
        lowest = _lowest(tables, charges, limit, c, low[:, c])
        count = low[:, c] - lowest + 1
        places = np.repeat(np.arange(len(rows)), count)
        end = lowest[places] + np.arange(len(places)) - np.repeat(np.cumsum(count) - count, count)
        used = [charge[tables.start[c] + low[places, c]] - charge[tables.start[c] + end] for charge in charges]
        limit = [each[places] - spent for each, spent in zip(limit, used)]
        low, rows = low[places], rows[places]
        low[:, c] = end
    return low, rows


def _ends(
    step: Step,
    state: Ints,
    low: Ints,
    rows: Ints,
    charges: list[npt.NDArray[np.float64]],
    limits: list[npt.NDArray[np.float64]],
    left: int,
) -> tuple[Ints, Ints, Ints]:
    """Between which positions of the last chain the piece can end so that a frontier comes out: least in `low`, largest
    in the second result. `left` units at least stay for the stages ahead.
    """
    tables = step.tables
    last = len(tables.lengths) - 1
    need = tables.need[tables.start + low]  # (pieces, chain, what it needs of each chain)
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
    limit = [each[rows] for each in limits]
    for c in range(last):
        high = tables.start[c] + state[rows, c]
        limit = [each - charge[high] + charge[tables.start[c] + low[:, c]] for each, charge in zip(limit, charges)]
    least = np.maximum(least, _lowest(tables, charges, limit, last, low[:, last]))
    fine &= (least <= largest) & (largest >= 0)
    low[:, last] = least
    return low[fine], largest[fine], rows[fine]


def _reach(
    step: Step, state: Ints, labels: Ints, low: Ints, largest: Ints, rows: Ints, left: int
) -> list[tuple[Ints, Ints, Ints]]:
    """The longest pieces that fit, for every depth that they may have: their frontiers, rows and labels."""
    last = len(step.tables.lengths) - 1
    found = []
    limits: list[Ints | None] = [None]
    if step.room:
        every = np.sort(labels[rows], axis=1)
        limits = [every[:, i] + 1 for i in range(every.shape[1]) if i == 0 or (every[:, i] > every[:, i - 1]).any()]
    for limit in limits:

        def fits(end: Ints, which: Ints, limit: Ints | None = limit) -> Bools:
            at = low[which].copy()
            at[:, last] = end
            at_most = None if limit is None else limit[which]
            return fitting(step, at, state[rows[which]], labels[rows[which]], at_most)

        which = np.flatnonzero(fits(largest, np.arange(len(low))))
        bottom, top = low[which, last], largest[which].copy()
        while True:
            open_ = np.flatnonzero(bottom < top)
            if not len(open_):
                break
            middle = (bottom[open_] + top[open_]) // 2
            good = fits(middle, which[open_])
            top[open_[good]] = middle[good]
            bottom[open_[~good]] = middle[~good] + 1
        at = low[which].copy()
        at[:, last] = top
        enough = _enough(step, at, left)
        at, parents = at[enough], rows[which[enough]]
        found.append((at, parents, _labels(step, at, state[parents], labels[parents])))
    return found


def _enough(step: Step, low: Ints, left: int) -> Bools:
    """False where `left` stages cannot hold what is left, whatever they are."""
    tables = step.tables
    charges, limits = _charges(step, low)
    good = np.ones(len(low), dtype=bool)
    for charge, limit in zip(charges, limits):
        amount = charge[tables.start + low].sum(axis=1)
        good &= amount <= left * limit * (1 + EXACT) + 1e-12 * float(charge.max())
    return good


def fitting(step: Step, low: Ints, high: Ints, labels: Ints, at_most: Ints | None = None) -> Bools:
    """Which pieces keep under the cap, the memory, the parts and a depth `at_most`; never lost by taking units away."""
    tables = step.tables
    good: Bools = bounds(tables, low, high) <= step.cap * (1 + 1e-12)
    if step.check is not None:
        good &= step.check(low, high)
    if step.parts is not None:
        counts = (step.parts[tables.start + high] - step.parts[tables.start + low]).sum(axis=1)
        good &= (counts > 0).sum(axis=1) <= 1
    if step.room is not None:
        depth = _depth(step, low, high, labels)
        good &= need_of(tables, low, high, step.room, depth) <= step.room.memory * (1 + 1e-12)
        if at_most is not None:
            good &= depth <= at_most
    return good


def need_of(tables: Pieces, low: Ints, high: Ints, room: Room, depth: Ints) -> npt.NDArray[np.float64]:
    """Bytes that the rank of each piece holds at most; see `Room`."""
    _, _, _, state, saved, kept = totals(tables, low, high).T
    count = np.array(room.in_flight)[depth]
    moment = np.minimum(np.maximum(kept - saved, 0.0), largest_fused(tables, low, high))
    need: npt.NDArray[np.float64] = state + room.scale * (count * saved + moment)
    return need


def _targets(tables: Pieces) -> tuple[tuple[int, int, Ints], ...]:
    """Units that come after units of other chains."""
    found = []
    place = tables.branches.place
    for unit, before in enumerate(tables.branches.before):
        c, position = place[unit]
        count = np.zeros(len(tables.sums), dtype=np.int64)
        for other in before:
            if place[other][0] != c:
                count[tables.start[place[other][0]] + place[other][1] + 1] += 1
        if count.any():
            found.append((c, position, np.cumsum(count)))
    return tuple(found)


def _depth(step: Step, low: Ints, high: Ints, labels: Ints) -> Ints:
    """Depth of each piece as the next stage, given the labels of the state behind it."""
    tables, chains = step.tables, len(step.tables.lengths)
    depth: Ints = np.where((high > low) & (high < tables.lengths), labels[:, :chains], 0).max(axis=1)
    for i, (c, position, count) in enumerate(step.targets):
        source = (count[tables.start + high] - count[tables.start + low]).sum(axis=1) > 0
        depth = np.maximum(depth, np.where(source & (position >= high[:, c]), labels[:, chains + i], 0))
    return depth + 1


def _labels(step: Step, low: Ints, high: Ints, labels: Ints) -> Ints:
    """The labels after these pieces became stages; 0 where nothing left depends on them.

    For a target that is not in a stage yet: the label of the front of its chain, which its own cannot be below.
    """
    if step.room is None:
        return labels
    tables, chains = step.tables, len(step.tables.lengths)
    depth = _depth(step, low, high, labels)
    after = labels.copy()
    after[:, :chains] = np.where(high > low, depth[:, None], labels[:, :chains])
    for i, (c, position, count) in enumerate(step.targets):
        now = (position >= low[:, c]) & (position < high[:, c])
        done = position >= high[:, c]
        pending = count[tables.start + low].sum(axis=1) > 0
        label = np.where(now, depth, np.where(done, labels[:, chains + i], after[:, c]))
        after[:, chains + i] = np.where(pending, label, 0)
    after[:, :chains] = np.where(low > 0, after[:, :chains], 0)
    saved = tables.sums[tables.start + low, 4].sum(axis=1) > 0
    return np.where(saved[:, None], after, 0)


def _best(tables: Pieces, low: Ints, labels: Ints) -> Ints:
    """Positions of the states that no other dominates; of equal ones the first."""
    if not len(low):
        return np.zeros(0, dtype=np.int64)
    if not labels.shape[1] or (labels == labels[0]).all():
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


def best_frontiers(tables: Pieces, low: Ints) -> Ints:
    """The same without labels: the least position on the last chain by a table over the positions on the others."""
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


def largest_bound(tables: Pieces, frontiers: Frontiers) -> float:
    """The largest bound of the stages between these frontiers."""
    low = np.array(frontiers)
    high = np.concatenate([tables.lengths[None, :], low[:-1]])
    return float(bounds(tables, low, high).max())


def feasible(
    tables: Pieces, ranks: int, cap: float, room: Room | None = None, parts: Ints | None = None
) -> Frontiers | None:
    """Frontiers of exactly `ranks` stages that keep the cap and the memory, if there are any."""
    found = search(tables, ranks, cap, room, parts)
    if found is not None or room is None or len(tables.lengths) == 1:
        return found
    if search(tables, ranks, cap, room, parts, empty=True) is None:
        return None
    return _every(tables, ranks, cap, room, parts)


def least(
    tables: Pieces,
    ranks: int,
    floor: float,
    room: Room | None = None,
    parts: Ints | None = None,
    within: float = EXACT,
) -> tuple[float, Frontiers] | None:
    """The least cap, not below `floor`, that exactly `ranks` stages can keep, and frontiers that keep it.

    Exact by default; with a larger `within` the cap is at most (1 + within) times the least that `search` finds.
    """
    zero, all_ = np.zeros((1, len(tables.lengths)), dtype=np.int64), tables.lengths[None, :]
    most = max(floor, float(bounds(tables, zero, all_)[0]))

    def reached(frontiers: Frontiers) -> float:
        return max(floor, largest_bound(tables, frontiers))

    found = narrow(floor, most, lambda cap: search(tables, ranks, cap, room, parts), reached, within)
    if room is None or len(tables.lengths) == 1 or within > EXACT or (found is not None and found[0] <= floor):
        return found
    below = most if found is None else found[0] * (1 - EXACT)
    if search(tables, ranks, below, room, parts, empty=True) is None:
        return found
    return narrow(floor, most, lambda cap: feasible(tables, ranks, cap, room, parts), reached) or found


def narrow(
    floor: float,
    most: float,
    find: Callable[[float], Found | None],
    reached: Callable[[Found], float],
    within: float = EXACT,
) -> tuple[float, Found] | None:
    """The least limit from `floor` to `most` for which `find` finds something, as least; None if it never does.

    Bisection between a limit found impossible and one that was reached, which mostly lies below the one asked for.
    """
    low, probe, growth, best = floor, floor, 0.02, None
    polished = False
    while True:
        found = find(probe)
        if found is not None:
            best = (reached(found), found)
            polished = False
        elif best is None and probe >= most:
            return None
        else:
            low = probe
        if best is None:
            probe, growth = min(most, probe * (1 + growth)), 2 * growth
        elif best[0] <= max(floor, low * (1 + within)):
            return best
        elif best[0] - low < 1e-3 * best[0] and not polished:
            polished, probe = True, best[0] * (1 - EXACT)
        else:
            probe = (low + best[0]) / 2


def _every(tables: Pieces, ranks: int, cap: float, room: Room | None, parts: Ints | None) -> Frontiers | None:
    """As `search`, forgetting a state only for one with the same frontier; None too where they are more than FEW."""
    step = Step(tables, cap, room, parts, _targets(tables))
    state = tables.lengths[None, :].copy()
    labels = np.zeros((1, len(tables.lengths) + len(step.targets)), dtype=np.int64)
    levels: list[tuple[Ints, Ints]] = []
    for left in range(ranks - 1, -1, -1):
        if left == 0:
            whole = np.zeros_like(state)
            ends = np.flatnonzero(fitting(step, whole, state, labels))
            return _trace(levels, int(ends[0]), whole[0]) if len(ends) else None
        low, rows = _single_steps(step, state, labels, left)
        after = _labels(step, low, state[rows], labels[rows])
        _, kept = np.unique(np.concatenate([low, after], axis=1), axis=0, return_index=True)
        state, labels = low[kept], after[kept]
        levels.append((state, rows[kept]))
        if not len(state) or len(state) > FEW:
            return None
    return None


def _single_steps(step: Step, state: Ints, labels: Ints, left: int) -> tuple[Ints, Ints]:
    """Every piece that fits ahead of each state, grown one unit at a time."""
    tables = step.tables
    low, rows = state, np.arange(len(state))
    found: list[tuple[Ints, Ints]] = []
    while len(low):
        grown = []
        for c in range(len(tables.lengths)):
            at = low[low[:, c] > 0].copy()
            at[:, c] -= 1
            grown.append(np.concatenate([at, rows[low[:, c] > 0][:, None]], axis=1))
        both = np.unique(np.concatenate(grown), axis=0)
        low, rows = both[:, :-1], both[:, -1]
        valid = (tables.need[tables.start + low].max(axis=1) <= low).all(axis=1) & (low.sum(axis=1) >= left)
        low, rows = low[valid], rows[valid]
        good = fitting(step, low, state[rows], labels[rows])
        low, rows = low[good], rows[good]
        found.append((low, rows))
    return np.concatenate([f[0] for f in found]), np.concatenate([f[1] for f in found])
