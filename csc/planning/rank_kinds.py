"""The search for stages where ranks are of several kinds: which units, and which kind of rank, for each stage.

Terms: see csc.planning.problem, csc.planning.branches and csc.planning.frontiers. A *lot* is the ranks of one kind:
what a segment costs there, what fits, and how many there are. A *cell* is how many ranks of each kind have a stage.

    lots(problem, found, in_flight)                 -> the lots of a problem
    search(lots, cap, order, empty)                 -> frontiers behind every stage, and its kind, or None
    least_cap(lots, floor, order, empty, within)    -> (least cap, what `search` found for it), or None
    on_ranks(problem, found, tables, chosen)        -> stages and the rank of each

The search is that of csc.planning.frontiers with the states of every cell apart: from each of them the next stage may
be of any kind that has ranks left. The ways to a stage and back are those of the fastest ranks, so that they are none
too long; its own work is that of its kind. A part of a stage then still has no larger bound on the same rank
(docs/planning-bound.md), and states are forgotten within their cell alone. `empty` admits ranks without a stage: what
dominance needs to be exact, as a unit that fills an empty stage may be slower there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from csc.planning.branches import Branches, Ints, Stages
from csc.planning.dominance import undominated
from csc.planning.extension import EXACT, Extension, extend, fitting
from csc.planning.frontiers import narrow
from csc.planning.problem import Problem
from csc.planning.room import Room, targets
from csc.planning.segment_bounds import ChainTables, bounds, segments, stages_between

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
    """One for each kind. in_flight: as of csc.planning.room.Room, if the memory is to be kept; share: what the ways
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
        own = replace(least, sums=sums, ramp=least.ramp * share)
        listed.append(Lot(own, replace(own, sums=least.sums), room, len(kind.ranks)))
    return listed


def search(listed: Sequence[Lot], cap: float, order: Sequence[int] | None = None, empty: bool = False) -> Chosen | None:
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
        cells = {cell: _merged(tables, each) for cell, each in grown.items()}
        if not cells:
            return None
    return None


def _steps(listed: Sequence[Lot], cap: float) -> list[Extension]:
    """What a segment of each kind has to respect; what comes after may be as fast, and hold as much, as any."""
    roomy = max((lot.room for lot in listed if lot.room), key=lambda room: room.memory, default=None)
    among = targets(listed[0].tables) if roomy else ()
    after = Extension(listed[0].fastest, cap, roomy, None, among)
    return [Extension(lot.tables, cap, lot.room, None, among, after) for lot in listed]


def _merged(tables: ChainTables, found: Sequence[_States]) -> _States:
    """The states of a cell, whatever led to them, without those that another dominates."""
    low, labels, kinds, parents = (
        np.concatenate([getattr(one, name) for one in found]) for name in ("low", "labels", "kinds", "parents")
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
        whole = np.zeros_like(states.low)
        rows = np.flatnonzero(fitting(step, whole, states.low, states.labels))
        if len(rows):
            costs = bounds(step.tables, whole[rows], states.low[rows])
            at = int(np.argmin(costs))
            if best is None or costs[at] < best[0]:
                best = (float(costs[at]), cell, int(rows[at]), kind)
    return None if best is None else best[1:]


def _traced(trail: Sequence[dict[Cell, _States]], cell: Cell, row: int, kind: int) -> Chosen:
    frontiers, kinds = [np.zeros_like(trail[0][(0,) * len(cell)].low[0])], [kind]
    for cells in reversed(trail[1:]):
        states = cells[cell]
        frontiers.append(states.low[row])
        own = int(states.kinds[row])
        kinds.append(own)
        cell, row = tuple(n - (k == own) for k, n in enumerate(cell)), int(states.parents[row])
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
    zero, whole = np.zeros((1, len(tables.lengths)), dtype=np.int64), tables.lengths[None, :]
    most = max(floor, *(float(bounds(lot.tables, zero, whole)[0]) for lot in listed))

    def reached(chosen: Chosen) -> float:
        return max(floor, *_costs(listed, chosen))

    return narrow(floor, most, lambda cap: search(listed, cap, order, empty), reached, within)


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
