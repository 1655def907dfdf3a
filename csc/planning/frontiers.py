"""Exact search for stages: from the last stage to the first, over all frontiers of the units that are left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from csc.planning.problem import Branches, Ints, Problem, Stages
from csc.planning.segment_bounds import (
    EXACT,
    ChainTables,
    Extension,
    Room,
    bounds,
    depths_of,
    extend,
    fitting,
    labels_after,
    segments,
    stages_between,
    targets,
    undominated,
)

# --- Exact search for stages: from the last stage to the first, over all frontiers of the units that are left --------
#
# Terms: see csc.planning.problem, csc.planning.segment_bounds and csc.planning.segment_bounds.
#
# Why it is exact. A stage is what lies between two frontiers, so the assignments of units to stages are the chains of
# frontiers from "all left" to "none left". If frontier E leaves a subset of what D leaves, after the same number of
# stages, any continuation of D serves E with each stage a part of the stage of D, and no part has a larger bound: D
# can be forgotten, and of all stages that could come next only those matter to which nothing can be added. Stages that
# lost all their units take one from a stage ahead. With a memory limit E must also have no larger label; a stage that
# takes a unit of another to be non-empty may then become deeper, so where branches and memory meet `feasible` asks the
# search that admits empty stages, and only if that finds some tries all frontiers (`_every`).


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
            complete = np.zeros_like(state)
            ends = np.flatnonzero(fitting(step, complete, state, labels))
            if len(ends):
                last = int(ends[np.argmin(bounds(tables, complete[ends], state[ends]))])
                return _trace(levels, last, complete[0])
        if left == 0:
            return None
        state, parents, labels = extend(step, state, labels, left, empty)
        if not len(state):
            return None
        levels.append((state, parents))
    return None


def _trace(levels: list[tuple[Ints, Ints]], index: int, end: Ints) -> Frontiers:
    path = [end]
    for state, parents in reversed(levels):
        path.append(state[index])
        index = int(parents[index])
    return path[::-1]


def feasible(
    tables: ChainTables, ranks: int, cap: float, room: Room | None = None, parts: Ints | None = None
) -> Frontiers | None:
    """Frontiers of exactly `ranks` stages that keep the cap and the memory, if there are any."""
    frontiers = search(tables, ranks, cap, room, parts)
    if frontiers is not None or room is None or len(tables.lengths) == 1:
        return frontiers
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

    result = narrow(floor, most, lambda cap: search(tables, ranks, cap, room, parts), reached, within, share)
    if room is None or len(tables.lengths) == 1 or within > EXACT or (result is not None and result[0] <= floor):
        return result
    below = most if result is None else result[0] * (1 - EXACT)
    if search(tables, ranks, below, room, parts, empty=True) is None:
        return result
    return narrow(floor, most, lambda cap: feasible(tables, ranks, cap, room, parts), reached) or result


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
        result = find(probe)
        if result is not None:
            best = (reached(result), result)
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
            complete = np.zeros_like(state)
            ends = np.flatnonzero(fitting(step, complete, state, labels))
            return _trace(levels, int(ends[0]), complete[0]) if len(ends) else None
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
    steps: list[tuple[Ints, Ints]] = []
    while len(low):
        grown = []
        for c in range(len(tables.lengths)):
            lower = low[low[:, c] > 0].copy()
            lower[:, c] -= 1
            grown.append(np.concatenate([lower, rows[low[:, c] > 0][:, None]], axis=1))
        both = np.unique(np.concatenate(grown), axis=0)
        low, rows = both[:, :-1], both[:, -1]
        valid = (tables.need[tables.start + low].max(axis=1) <= low).all(axis=1) & (low.sum(axis=1) >= left)
        low, rows = low[valid], rows[valid]
        good = fitting(step, low, state[rows], labels[rows])
        low, rows = low[good], rows[good]
        steps.append((low, rows))
    return np.concatenate([f[0] for f in steps]), np.concatenate([f[1] for f in steps])


# --- The search for stages where ranks are of several kinds: which units, and which kind of rank, for each stage -----
#
# Terms: see csc.planning.problem, csc.planning.problem and csc.planning.frontiers. A *lot* is the ranks of one kind:
# what a segment costs there, what fits, and how many there are. A *cell* is how many ranks of each kind have a stage.
#
# The search is that of csc.planning.frontiers with the states of every cell apart: from each of them the next stage
# may be of any kind that has ranks left. The ways to a stage and back are those of the fastest ranks, so that they are
# none too long; its own work is that of its kind. A part of a stage then still has no larger bound on the same rank
# (docs/planning-bound.md), and states are forgotten within their cell alone. `empty` admits ranks without a stage:
# what dominance needs to be exact, as a unit that fills an empty stage may be slower there.


Cell = tuple[int, ...]


@dataclass(frozen=True)
class Lot:
    """count: ranks of this kind. room: what one of them may hold; None: anything. fastest: the tables of ranks on which
    every unit takes the least that it takes on any.
    """

    tables: ChainTables
    fastest: ChainTables
    room: Room | None
    count: int


@dataclass(frozen=True)
class Chosen:
    """Frontiers behind every stage and the kind of its rank, the last stage's first."""

    frontiers: list[Ints]
    kinds: list[int]


@dataclass(frozen=True)
class _States:
    """Of one cell: frontiers, labels, and of each state the kind of the stage that led to it, and the row before."""

    low: Ints
    labels: Ints
    kinds: Ints
    parents: Ints


def lots(problem: Problem, found: Branches, in_flight: Sequence[float] | None = None, share: float = 1.0) -> list[Lot]:
    """One for each kind. in_flight: as of csc.planning.segment_bounds.Room, if the memory is to be kept; share: what
    the ways
    to a stage and back are multiplied by.
    """
    least = segments(problem, found)
    scale = max(problem.scale or (1.0,))
    listed = []
    for number, kind in enumerate(problem.kinds):
        sums = least.sums.copy()
        for c, chain in enumerate(found.chains):
            seconds = np.array([kind.seconds[u] for u in chain])
            sums[least.start[c] + 1 : least.start[c] + 1 + len(chain), :3] = np.cumsum(seconds, axis=0)
        limit = problem.limit_of(number)
        room = None if in_flight is None or limit is None else Room(limit, tuple(in_flight), scale)
        own_least = replace(least, sums=sums, ramp=least.ramp * share)
        listed.append(Lot(own_least, replace(own_least, sums=least.sums), room, len(kind.ranks)))
    return listed


def search_of_kinds(
    listed: Sequence[Lot], cap: float, order: Sequence[int] | None = None, empty: bool = False
) -> Chosen | None:
    """Stages of which none has a bound above `cap` on its rank or lacks room, one for each rank (`empty`: at most one).

    order: the kind of each stage, the last stage's first; None: any.
    """
    ranks = sum(lot.count for lot in listed)
    steps = _steps(listed, cap)
    tables = listed[0].tables
    start = tables.lengths[None, :].copy()
    labelled = listed[0].room is not None
    width = len(tables.lengths) + len(steps[0].targets) if labelled else 0
    none = np.zeros(1, dtype=np.int64)
    cells = {(0,) * len(listed): _States(start, np.zeros((1, width), dtype=np.int64), none, none)}
    trail: list[dict[Cell, _States]] = []
    for used in range(ranks):
        trail.append(cells)
        left = ranks - used - 1
        follows = [
            (cell, kind)
            for cell in sorted(cells)
            for kind in (range(len(listed)) if order is None else [order[used]])
            if cell[kind] < listed[kind].count
        ]
        if left == 0 or empty:
            ended = _ended(steps, cells, follows)
            if ended is not None:
                return _traced(trail, *ended)
        if left == 0:
            return None
        grown: dict[Cell, list[_States]] = {}
        for cell, kind in follows:
            states = cells[cell]
            low, parents, labels = extend(steps[kind], states.low, states.labels, left, empty)
            if len(low):
                after = tuple(n + (k == kind) for k, n in enumerate(cell))
                grown.setdefault(after, []).append(_States(low, labels, np.full(len(low), kind), parents))
        cells = {cell: _merged(tables, group) for cell, group in grown.items()}
        if not cells:
            return None
    return None


def _steps(listed: Sequence[Lot], cap: float) -> list[Extension]:
    """What a segment of each kind has to respect; what comes after may be as fast, and hold as much, as any."""
    roomy = max((lot.room for lot in listed if lot.room), key=lambda room: room.memory, default=None)
    among = targets(listed[0].tables) if roomy else ()
    after = Extension(listed[0].fastest, cap, roomy, None, among)
    return [Extension(lot.tables, cap, lot.room, None, among, after) for lot in listed]


def _merged(tables: ChainTables, groups: Sequence[_States]) -> _States:
    """The states of a cell, whatever led to them, without those that another dominates."""
    low, labels, kinds, parents = (
        np.concatenate([getattr(states, name) for states in groups]) for name in ("low", "labels", "kinds", "parents")
    )
    kept = undominated(tables, low, labels)
    return _States(low[kept], labels[kept], kinds[kept], parents[kept])


def _ended(
    steps: Sequence[Extension], cells: dict[Cell, _States], follows: Sequence[tuple[Cell, int]]
) -> tuple[Cell, int, int] | None:
    """The cell, the row and the kind of the first stage, with the least bound, where all that is left can be one."""
    best: tuple[float, Cell, int, int] | None = None
    for cell, kind in follows:
        states, step = cells[cell], steps[kind]
        complete = np.zeros_like(states.low)
        rows = np.flatnonzero(fitting(step, complete, states.low, states.labels))
        if len(rows):
            costs = bounds(step.tables, complete[rows], states.low[rows])
            best_end = int(np.argmin(costs))
            if best is None or costs[best_end] < best[0]:
                best = (float(costs[best_end]), cell, int(rows[best_end]), kind)
    return None if best is None else best[1:]


def _traced(trail: Sequence[dict[Cell, _States]], cell: Cell, row: int, kind: int) -> Chosen:
    frontiers, kinds = [np.zeros_like(trail[0][(0,) * len(cell)].low[0])], [kind]
    for cells in reversed(trail[1:]):
        states = cells[cell]
        frontiers.append(states.low[row])
        kind_here = int(states.kinds[row])
        kinds.append(kind_here)
        cell, row = tuple(n - (k == kind_here) for k, n in enumerate(cell)), int(states.parents[row])
    return Chosen(frontiers[::-1], kinds[::-1])


def least_cap(
    listed: Sequence[Lot],
    floor: float,
    order: Sequence[int] | None = None,
    empty: bool = False,
    within: float = EXACT,
) -> tuple[float, Chosen] | None:
    """The least cap, not below `floor`, for which `search` finds stages, to a relative `within`, and those stages."""
    tables = listed[0].tables
    zero, full = np.zeros((1, len(tables.lengths)), dtype=np.int64), tables.lengths[None, :]
    most = max(floor, *(float(bounds(lot.tables, zero, full)[0]) for lot in listed))

    def reached(chosen: Chosen) -> float:
        return max(floor, *_costs(listed, chosen))

    return narrow(floor, most, lambda cap: search_of_kinds(listed, cap, order, empty), reached, within)


def _costs(listed: Sequence[Lot], chosen: Chosen) -> list[float]:
    """The bound of each stage on its rank."""
    low = np.array(chosen.frontiers)
    high = np.concatenate([listed[0].tables.lengths[None, :], low[:-1]])
    return [
        float(bounds(listed[kind].tables, low[i : i + 1], high[i : i + 1])[0]) for i, kind in enumerate(chosen.kinds)
    ]


def on_ranks(problem: Problem, found: Branches, tables: ChainTables, chosen: Chosen) -> tuple[Stages, tuple[int, ...]]:
    """The stages, numbered, and the rank of each: those of a kind take its ranks in turn."""
    stages = stages_between(tables, chosen.frontiers)
    cuts = np.array(chosen.frontiers)
    waiting = [iter(kind.ranks) for kind in problem.kinds]
    home = []
    for members in stages:
        c, position = found.place[members[0]]
        home.append(next(waiting[chosen.kinds[int((position < cuts[:, c]).sum())]]))
    return stages, tuple(home)
