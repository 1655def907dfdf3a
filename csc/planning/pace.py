"""A sharper lower bound: microbatches reach a stage no faster than the slowest F ahead of it.

Terms: see csc.planning.branches. The *main chain* is the last one, the longest. The *pace* of a partition is the
largest F of a stage with units of the main chain.

    paced(problem, tables, ranks, seconds) -> seconds      at least as high a bound as the one given

Take a stage S behind a stage P on the main chain whose F takes p. The k-th F on S starts at c + (k - 1) p or later, c
the F's of the main chain ahead of S. Before t, when the first B on S can start at all, S can only run F's; whatever of
them has not come by then is left for afterwards. So with e(p) = sum over k of min(F, t - max(f, c + (k - 1) p)), and no
more than t - f, the step takes at least t + m (F + B) - e(p) + max(y, m W). (f, y and m as in
csc.planning.partition_bound, for microbatches of equal size.)

How the minimum over partitions is found. The pace lies in one of a few intervals (p, q]. For each of them the search
runs from the last stage on: stages with F up to p, which all have to keep the bound above; then the last stage with F
in (p, q]; then any stages with F up to q. A state may still be forgotten for one that leaves less: what becomes of its
continuation is a partition as good, either with that pace or with a slower one, which its own interval covers.
"""

from __future__ import annotations

import itertools

import numpy as np

from csc.planning.branches import Floats, Ints, ramps
from csc.planning.dominance import best_frontiers
from csc.planning.extension import Bools, Extension, extend, fitting
from csc.planning.problem import Problem
from csc.planning.segment_bounds import ChainTables, Measures, totals

INTERVALS = 14
WITHIN = 2e-3  # how near the bound comes to the best of its kind
STATES = 20_000  # frontiers of the short chains times ranks; beyond that the search would take too long


def paced(problem: Problem, tables: ChainTables, ranks: int, seconds: float) -> float:
    """Seconds that no plan with one stage on each rank can beat, at least `seconds`, itself such a bound.

    `seconds` unchanged for microbatches of different sizes, where the main chain is not one of forward edges, and for
    problems too large to search.
    """
    chain = tables.branches.chains[-1]
    edges = set(ramps(problem).forward_edges)
    count = problem.microbatches
    if (
        len(set(problem.scale or (1.0,))) > 1
        or any(pair not in edges for pair in itertools.pairwise(chain))
        or np.prod(tables.lengths[:-1] + 1.0) * ranks > STATES
    ):
        return seconds
    forward = np.array([problem.units[u].forward for u in chain])
    ahead = np.concatenate([[0.0], np.cumsum(forward)])
    least = max(float(forward.max()), float(ahead[-1]) / ranks) * (1 - 1e-9)
    if least <= 0:
        return seconds
    ratio = max(2.0, seconds / tables.work / least) ** (1 / (INTERVALS - 1))
    grid = [least * ratio**i for i in range(INTERVALS)]
    intervals = list(zip(grid, [*grid[1:], float("inf")]))
    tried = 0

    def find(cap: float) -> bool:
        nonlocal tried
        for i in [*range(tried, len(intervals)), *range(tried)]:
            pace, most = intervals[i]
            if _possible(tables, ranks, cap, pace, most, ahead, count):
                tried = i  # the next cap is near, so probably the interval is the same
                return True
        return False

    if find(seconds * (1 + 1e-9)):
        return seconds
    low, high = seconds, seconds * 1.02
    while not find(high):
        low, high = high, high * 1.04
    while high > low * (1 + WITHIN):
        middle = (low + high) / 2
        low, high = (low, middle) if find(middle) else (middle, high)
    return low


def _possible(tables: ChainTables, ranks: int, cap: float, pace: float, most: float, ahead: Floats, count: int) -> bool:
    """Whether exactly `ranks` stages can keep the cap with a pace above `pace`, up to `most`."""
    last = len(tables.lengths) - 1

    def main_forward(low: Ints, high: Ints, amounts: Floats) -> Floats:
        return np.where(high[:, last] > low[:, last], amounts[:, 0], 0.0)

    def behind(low: Ints, high: Ints, measured: Measures) -> Bools:
        good: Bools = main_forward(low, high, measured.amounts) <= pace * (1 + 1e-12)
        good &= _bound(tables, low, high, measured, pace, ahead, count) <= cap * (1 + 1e-12)
        return good

    def before(low: Ints, high: Ints, measured: Measures) -> Bools:
        good: Bools = main_forward(low, high, measured.amounts) <= most * (1 + 1e-12)
        return good

    slow = Extension(tables, cap, check=behind)
    free = Extension(tables, cap, check=before)
    none = np.zeros((1, 0), dtype=np.int64)

    def extended(step: Extension, state: Ints, left: int) -> tuple[Ints, Ints]:
        if not len(state):
            return state, np.zeros(0, dtype=np.int64)
        low, rows, _ = extend(step, state, np.repeat(none, len(state), axis=0), left, False)
        return low, rows

    waiting = tables.lengths[None, :].copy()  # states without a stage of this pace
    passed = waiting[:0]
    for left in range(ranks - 1, 0, -1):
        direct, rows = extended(free, waiting, left)
        at = waiting[rows]
        direct = direct[main_forward(direct, at, totals(tables, direct, at)) > pace]
        on, _ = extended(free, passed, left)
        passed = np.concatenate([direct, on])
        passed = passed[best_frontiers(tables, passed)] if len(passed) else passed
        waiting, _ = extended(slow, waiting, left)
        if not len(waiting) and not len(passed):
            return False
    ends = np.concatenate([passed, waiting])
    zero = np.zeros_like(ends)
    good = fitting(free, zero, ends, np.repeat(none, len(ends), axis=0))
    rest = zero[len(passed) :]
    good[len(passed) :] &= main_forward(rest, waiting, totals(tables, rest, waiting)) > pace
    return bool(good.any())


def _bound(
    tables: ChainTables, low: Ints, high: Ints, measured: Measures, pace: float, ahead: Floats, count: int
) -> Floats:
    """The bound of each segment behind a stage of this pace; 0 for segments that it says nothing about."""
    forward, backward, weight = np.maximum(measured.amounts[:, :3].T, 0.0)
    before_f, into_b, after_b, _ = measured.ways
    start = np.maximum(before_f + forward, into_b)
    first = ahead[low[:, -1]]
    whole = np.clip(np.floor((start - forward - first) / pace) + 1, 0, count)
    part = np.where(whole < count, np.clip(start - first - whole * pace, 0.0, forward), 0.0)
    early = np.minimum(start - before_f, whole * forward + part)
    end = np.maximum(tables.ramp * after_b, tables.work * weight)
    bound = tables.ramp * (start - early) + tables.work * (forward + backward) + end
    there = (low[:, -1] > 0) & (high[:, -1] > low[:, -1]) & (backward > 0)
    return np.where(there, bound, 0.0)
