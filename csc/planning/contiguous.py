"""The best cuts of the units in their order, by what memory leaves possible in each stage.

Terms: see csc.planning.branches. *Early* is the work that a rank can do before its first B: F's whose saved bytes fit;
*late* is what it can do after its last B: W's whose stashed bytes fit. The larger memory is, the more of the ways there
and back is filled with them.

    contiguous(problem, home) -> stages, or None      one stage on a rank; needs problem.memory

For a stage with summed times F, B, W, and with the longest paths of csc.planning.partition_bound: f up to its F, b up
to its B, y after its B; m and r as there:

    need(S) = max( r f + m (F + B + W),  r b + m (F + B + W) - early,
                   r b + m (F + B + W) - early - late + r y,  r f + m (F + B + W) - late + r y )

The bounds of csc.planning.partition_bound take all of early and late for granted. With little memory the last stages,
which have no early work, should have less to do than those say.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from csc.planning.branches import Stages, branches, numbered
from csc.planning.partition_bound import check_ranks
from csc.planning.problem import Problem
from csc.planning.segment_bounds import ChainTables, bounds, largest_fused, largest_working, segments, totals, ways

Floats = npt.NDArray[np.float64]
SLACK = 1 + 1e-9


def contiguous(problem: Problem, home: Sequence[int] | None = None) -> Stages | None:
    """Of all cuts of the units in their order the one whose largest `need` is least. None if nothing fits. home: the
    rank of each stage, in order, where ranks differ.

    Time and memory are quadratic in the units.
    """
    check_ranks(problem)
    assert problem.memory is not None
    found = branches(problem)
    count = len(problem.units)
    alike = [problem.alike(kind) for kind in range(max(1, len(problem.kinds)))]
    every = [_needs(one, segments(one, found)) for one in alike]
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    starts = []
    for stage in range(problem.ranks):
        costs = every[problem.kind_of[stage if home is None else home[stage]]]
        through = np.maximum(best[:, None], costs)  # [first unit, end]
        starts.append(through.argmin(axis=0))
        best = through.min(axis=0)
    if not np.isfinite(best[count]):
        return None
    home = [0] * count
    end = count
    for stage in reversed(range(problem.ranks)):
        first = int(starts[stage][end])
        home[first:end] = [stage] * (end - first)
        end = first
    return numbered(found, home)


def _needs(problem: Problem, tables: ChainTables) -> Floats:
    """(units + 1, units + 1): `need` of the stage from one unit up to another; infinite if it does not fit."""
    count = len(problem.units)
    reached = np.zeros((count + 1, len(tables.lengths)), dtype=np.int64)  # by unit, the place on every chain
    for u, (c, _) in enumerate(tables.branches.place):
        reached[u + 1] = reached[u]
        reached[u + 1, c] += 1
    first, end = np.triu_indices(count + 1, 1)
    low, high = reached[first], reached[end]
    forward, backward, weight, state, saved, stashed = np.maximum(totals(tables, low, high).T, 0.0)
    before_f, into_b, after_b, out_of_f = ways(tables, low, high)
    m, r = tables.work, tables.ramp
    largest = max(problem.scale or (1.0,))
    assert problem.memory is not None
    space = problem.memory * SLACK - state - largest * largest_working(tables, low, high)
    saved, stashed = saved * largest, stashed * largest
    moment = np.minimum(np.maximum(stashed - saved, 0.0), largest * largest_fused(tables, low, high))
    turns = _turning(problem, first, end)
    microbatches = float(problem.microbatches)
    before_b = r * np.maximum(before_f + forward, into_b)
    in_flight = _fitting(space - moment, saved, microbatches)
    early = np.minimum(in_flight / microbatches * m * forward, before_b - r * before_f)
    late = _fitting(space, stashed, microbatches) / microbatches * m * weight
    work = m * (forward + backward + weight)
    way = r * before_f + work
    back = r * after_b
    there = np.maximum.reduce([way, before_b + work - early, before_b + work - early - late + back, way - late + back])
    need = np.maximum(bounds(tables, low, high), np.where(turns, there, r * (before_f + out_of_f) + m * forward))
    need[turns & (in_flight < 1)] = np.inf
    need[space < 0] = np.inf
    result = np.full((count + 1, count + 1), np.inf)
    result[first, end] = need
    return result


def _turning(problem: Problem, first: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which of these stages take part in the backward pass."""
    running = np.concatenate([[0], np.cumsum([unit.has_b for unit in problem.units])])
    found: npt.NDArray[np.bool_] = running[end] > running[first]
    return found


def _fitting(space: Floats, each: Floats, most: float) -> Floats:
    """How many of so many bytes fit, at most `most`."""
    space = np.maximum(space, 0.0)
    count: Floats = np.floor(np.divide(space, each, out=np.full_like(space, most), where=each * most > space))
    return np.minimum(count, most)
