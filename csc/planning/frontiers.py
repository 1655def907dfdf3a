"""Exact search for stages: from the last stage to the first, over all frontiers of the units that are left.

Terms: see csc.planning.branches, csc.planning.room and csc.planning.extension.

    search(tables, ranks, cap, room, parts)                 -> frontiers behind every stage, last stage first, or None
    feasible(tables, ranks, cap, room, parts)               -> the same, sure of its None also where memory is short
    least(tables, ranks, floor, room, parts)                -> (least cap, its frontiers), or None
    narrow(floor, most, find, reached)                      -> (least limit, what was found for it), or None
    parts_of(tables, part)                                  -> what keeps stages from mixing parts

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
from typing import TypeVar

import numpy as np

from csc.planning.branches import Ints
from csc.planning.extension import EXACT, Extension, extend, fitting
from csc.planning.room import Room, depths_of, labels_after, targets
from csc.planning.segment_bounds import ChainTables, bounds

Frontiers = list[Ints]
Found = TypeVar("Found")

FEW = 20_000  # states that the search without dominance may have


def parts_of(tables: ChainTables, part: list[int]) -> Ints:
    """Running counts, by place, of the units of each part; a stage will be allowed units of one part only."""
    counts = np.zeros((len(tables.sums), max(part) + 1), dtype=np.int64)
    for c, chain in enumerate(tables.branches.chains):
        for position, unit in enumerate(chain):
            place = tables.start[c] + position
            counts[place + 1] = counts[place]
            counts[place + 1, part[unit]] += 1
    return counts


def search(
    tables: ChainTables,
    ranks: int,
    cap: float,
    room: Room | None = None,
    parts: Ints | None = None,
    empty: bool = False,
) -> Frontiers | None:
    """Frontiers of exactly `ranks` stages (`empty`: at most) of which none has a bound above `cap` or lacks room."""
    step = Extension(tables, cap, room, parts, targets(tables) if room else ())
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


def feasible(
    tables: ChainTables, ranks: int, cap: float, room: Room | None = None, parts: Ints | None = None
) -> Frontiers | None:
    """Frontiers of exactly `ranks` stages that keep the cap and the memory, if there are any."""
    found = search(tables, ranks, cap, room, parts)
    if found is not None or room is None or len(tables.lengths) == 1:
        return found
    if search(tables, ranks, cap, room, parts, empty=True) is None:
        return None
    return _every(tables, ranks, cap, room, parts)


def least(
    tables: ChainTables,
    ranks: int,
    floor: float,
    room: Room | None = None,
    parts: Ints | None = None,
    within: float = EXACT,
    share: float = 0.5,
) -> tuple[float, Frontiers] | None:
    """The least cap, not below `floor`, that exactly `ranks` stages can keep, and frontiers that keep it.

    Exact by default; with a larger `within` the cap is at most (1 + within) times the least that `search` finds.
    share: see `narrow`.
    """
    zero, all_ = np.zeros((1, len(tables.lengths)), dtype=np.int64), tables.lengths[None, :]
    most = max(floor, float(bounds(tables, zero, all_)[0]))

    def reached(frontiers: Frontiers) -> float:
        return max(floor, largest_bound(tables, frontiers))

    found = narrow(floor, most, lambda cap: search(tables, ranks, cap, room, parts), reached, within, share)
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
    share: float = 0.5,
) -> tuple[float, Found] | None:
    """The least limit from `floor` to `most` for which `find` finds something, as least; None if it never does.

    Bisection between a limit found impossible and one that was reached, which mostly lies below the one asked for.
    share: where between the two the next one lies; nearer to the first where it is soon known that nothing is found.
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
            probe, growth = min(most, probe * (1 + growth)), max(1.0, 4 * share) * growth
        elif best[0] <= max(floor, low * (1 + within)):
            return best
        elif best[0] - low < 1e-3 * best[0] and not polished:
            polished, probe = True, best[0] * (1 - EXACT)
        else:
            probe = low + share * (best[0] - low)


def largest_bound(tables: ChainTables, frontiers: Frontiers) -> float:
    """The largest bound of the stages between these frontiers."""
    low = np.array(frontiers)
    high = np.concatenate([tables.lengths[None, :], low[:-1]])
    return float(bounds(tables, low, high).max())


def _every(tables: ChainTables, ranks: int, cap: float, room: Room, parts: Ints | None) -> Frontiers | None:
    """As `search`, forgetting a state only for one with the same frontier; None too where they are more than FEW."""
    step = Extension(tables, cap, room, parts, targets(tables))
    state = tables.lengths[None, :].copy()
    labels = np.zeros((1, len(tables.lengths) + len(step.targets)), dtype=np.int64)
    levels: list[tuple[Ints, Ints]] = []
    for left in range(ranks - 1, -1, -1):
        if left == 0:
            whole = np.zeros_like(state)
            ends = np.flatnonzero(fitting(step, whole, state, labels))
            return _trace(levels, int(ends[0]), whole[0]) if len(ends) else None
        low, rows = _single_steps(step, state, labels, left)
        high, before = state[rows], labels[rows]
        depth = depths_of(tables, step.targets, low, high, before)
        after = labels_after(tables, step.targets, low, high, before, depth)
        _, kept = np.unique(np.concatenate([low, after], axis=1), axis=0, return_index=True)
        state, labels = low[kept], after[kept]
        levels.append((state, rows[kept]))
        if not len(state) or len(state) > FEW:
            return None
    return None


def _single_steps(step: Extension, state: Ints, labels: Ints, left: int) -> tuple[Ints, Ints]:
    """Every segment that fits ahead of each state, grown one unit at a time."""
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
