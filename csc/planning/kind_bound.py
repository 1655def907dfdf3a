"""Lower bounds where ranks are of several kinds.

Terms: see csc.planning.rank_kinds and docs/planning-bound.md. A *weight* of a kind is what a second of one of its ranks
counts; the weights of all ranks add up to 1.

    lower_bound(problem)                    -> (seconds, stages), of plans with one stage on each rank, or on fewer
    weights(problem, work)                  -> [kind], for which `spread` is largest without the ways
    spread(problem, work, ways)             -> seconds of work and ways that the ranks share, whatever the plan

All ranks together have T seconds each. Count those of a rank with its weight: T is at least the weighted sum of what
they do. A unit counts no less than where its seconds, so weighted, are the fewest:

    T >= m * sum over u of min over kinds k of w_k * work of u on k  +  r * sum over ranks of w * way of the rank

Any weights make this a bound; those that make the first sum the largest solve the dual of the linear program that
divides units among ranks like water (Lenstra, Shmoys, Tardos 1990).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog

from csc.planning.branches import Floats, Stages, branches, ramps
from csc.planning.problem import Problem
from csc.planning.rank_kinds import least_cap, lots, on_ranks
from csc.planning.segment_bounds import segments

SEARCHED = 3_000  # cells times frontiers of the short chains up to which partitions are searched
WITHIN = 1e-6


def weights(problem: Problem) -> list[float]:
    """By kind; they need not be the best ones for `spread` to be a bound."""
    kinds = problem.kinds
    work = _work(problem)
    count, units = work.shape
    scale = work.max() or 1.0
    costs = np.concatenate([np.zeros(count), -np.ones(units)])
    rows = np.zeros((count * units, count + units))
    for k in range(count):
        own = slice(k * units, (k + 1) * units)
        rows[own, k] = -work[k] / scale
        rows[own, count:] = np.eye(units)
    ranks = np.concatenate([[float(len(kind.ranks)) for kind in kinds], np.zeros(units)])[None, :]
    found = linprog(costs, rows, np.zeros(len(rows)), ranks, [1.0], bounds=(0, None), method="highs")
    chosen = np.maximum(found.x[:count], 0.0) if found.success else np.ones(count)
    return [float(each) for each in chosen / (chosen * ranks[0, :count]).sum()]


def _work(problem: Problem) -> Floats:
    """[kind, unit]: seconds of F, B and W."""
    return np.array([[sum(seconds) for seconds in kind.seconds] for kind in problem.kinds])


def spread(problem: Problem, ways: Sequence[float] = ()) -> float:
    """Seconds that no plan can beat. ways: the least seconds of one microbatch in which a rank has nothing to do, one
    for each rank, of which it is not known whose they are.
    """
    scale = problem.scale or (1.0,) * problem.microbatches
    own = weights(problem)
    counted = (np.array(own)[:, None] * _work(problem)).min(axis=0).sum()
    by_rank = sorted((own[kind] for kind in problem.kind_of), reverse=True)
    idle = sum(weight * way for weight, way in zip(by_rank, sorted(ways)))  # least: large weights beside short ways
    return float(sum(scale) * counted + min(scale) * idle)


def lower_bound(problem: Problem) -> tuple[float, Stages]:
    """What no plan with one stage on each rank can beat, wherever its stages stand, and stages for which the bound is
    as low as that; none for problems too large to search, where only what holds for every plan is proven.
    """
    found = branches(problem)
    tables = segments(problem, found)
    floor = max(ramps(problem).round_trip * max(problem.scale or (1.0,)), spread(problem))
    cells = math.prod(len(kind.ranks) + 1 for kind in problem.kinds)
    if cells * math.prod(int(n) + 1 for n in tables.lengths[:-1]) > SEARCHED:
        return floor, ()
    least = least_cap(lots(problem, found), floor, empty=True, within=WITHIN)
    assert least is not None  # without a memory limit every partition has a finite bound
    stages, _ = on_ranks(problem, found, tables, least[1])
    return max(floor, least[0] / (1 + WITHIN)), stages
