"""Partitions and the order of ranks where ranks are of several kinds, one stage on each.

Terms: see csc.planning.rank_kinds. An *order* is the rank of each stage. Which rank of a kind has which of its stages
matters to links alone.

    orders(problem)                        -> [order]: as the search likes it best, first; as the ranks are numbered;
                                              by kind, the fastest first, and the slowest first
    partitions(problem, home, limits)      -> [Stages] for one order, good ones first
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from csc.planning.branches import Stages, branches
from csc.planning.coarse import lumped
from csc.planning.contiguous import contiguous
from csc.planning.kind_bound import spread, weights
from csc.planning.problem import Problem
from csc.planning.rank_kinds import least_cap, lots, on_ranks
from csc.planning.segment_bounds import segments

Order = tuple[int, ...]

SHARES = (0.25, 0.5, 1.0)  # of the ways to a stage and back; the first is the best one where there is time for one
MANY = 8_000  # ranks times units beyond which that is so, and orders are not searched for
FREE = 0.5  # the share for orders
FRONTIERS = 300  # of the short chains, and 3,000 with the cells; where there are more, units are taken together
CELLS = 3_000
CLOSE = 2e-3


def orders(problem: Problem) -> list[Order]:
    """At most four, without those that are the same."""
    listed = range(problem.ranks)
    slow = weights(problem)  # a second of a fast rank counts more
    by_speed = sorted(listed, key=lambda rank: (-slow[problem.kind_of[rank]], rank))
    found: list[Order] = [*_searched(problem), tuple(listed), tuple(by_speed)]
    found.append(tuple(sorted(listed, key=lambda rank: (slow[problem.kind_of[rank]], rank))))
    return list(dict.fromkeys(found))


def _searched(problem: Problem) -> list[Order]:
    """The order that the search for stages takes if it may choose; none where that would take too long."""
    cells = 1
    for kind in problem.kinds:
        cells *= len(kind.ranks) + 1
    if cells > CELLS or problem.ranks > len(problem.units) or _large(problem):
        return []
    lumps = lumped(problem, max(1, min(FRONTIERS, CELLS // cells)))
    found = branches(lumps.problem)
    one = [1.0] * (problem.ranks + 1)
    best = least_cap(lots(lumps.problem, found, one, FREE), spread(problem), within=CLOSE)
    return [] if best is None else [on_ranks(lumps.problem, found, segments(lumps.problem, found), best[1])[1]]


def partitions(
    problem: Problem, home: Sequence[int], limits: Sequence[Callable[[int], float] | None]
) -> list[Stages]:  # fmt: skip
    """Stages whose largest bound is least, the ways counted in several shares; limits: as of csc.planning.ways. Then
    cuts of the units in their order by what memory leaves possible. Empty if nothing fits.
    """
    lumps = lumped(problem, FRONTIERS)
    found = branches(lumps.problem)
    tables = segments(lumps.problem, found)
    order = [problem.kind_of[rank] for rank in reversed(home)]
    listed: list[Stages] = []
    floor = spread(problem)
    for limit in limits:
        each = limit or (lambda depth: float(min(problem.microbatches, depth)))
        in_flight = None if problem.memory is None else [float(each(depth)) for depth in range(problem.ranks + 1)]
        for share in SHARES[: 1 if _large(problem) else None]:
            best = least_cap(lots(lumps.problem, found, in_flight, share), floor, order, within=CLOSE)
            if best is not None:
                listed.append(lumps.stages(on_ranks(lumps.problem, found, tables, best[1])[0]))
        if listed or problem.memory is None:
            break
    roomy = problem if problem.memory is not None else replace(problem, memory=float("inf"))
    cuts = contiguous(roomy, home)
    listed += [] if cuts is None else [cuts]
    return list(dict.fromkeys(listed))


def _large(problem: Problem) -> bool:
    return problem.ranks * len(problem.units) > MANY
