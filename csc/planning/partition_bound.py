"""Lower bounds of the makespan of one step: what no partition and no order of work can beat."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from csc.errors import InputError
from csc.planning.frontiers import least, least_cap, lots, on_ranks
from csc.planning.problem import Floats, Ints, Problem, Stages, branches, check_figures, numbered, ramps
from csc.planning.segment_bounds import (
    EXACT,
    Bools,
    ChainTables,
    Extension,
    Measures,
    best_frontiers,
    extend,
    fitting,
    segments,
    stage_bounds,
    stages_between,
    totals,
)

# --- A sharper lower bound: microbatches reach a stage no faster than the slowest F ahead of it ----------------------
#
# Terms: see csc.planning.problem. The *main chain* is the last one, the longest. The *pace* of a partition is the
# largest F of a stage with units of the main chain.
#
# Take a stage S behind a stage P on the main chain whose F takes p. The k-th F on S starts at c + (k - 1) p or later,
# c the F's of the main chain ahead of S. Before t, when the first B on S can start at all, S can only run F's;
# whatever of them has not come by then is left for afterwards. So with e(p) = sum over k of min(F, t - max(f, c + (k -
# 1) p)), and no more than t - f, the step takes at least t + m (F + B) - e(p) + max(y, m W). (f, y and m as in
# csc.planning.partition_bound, for microbatches of equal size.)
#
# How the minimum over partitions is found. The pace lies in one of a few intervals (p, q]. For each of them the search
# runs from the last stage on: stages with F up to p, which all have to keep the bound above; then the last stage with
# F in (p, q]; then any stages with F up to q. A state may still be forgotten for one that leaves less: what becomes of
# its continuation is a partition as good, either with that pace or with a slower one, which its own interval covers.


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
        state = waiting[rows]
        direct = direct[main_forward(direct, state, totals(tables, direct, state)) > pace]
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
    full_rounds = np.clip(np.floor((start - forward - first) / pace) + 1, 0, count)
    part = np.where(full_rounds < count, np.clip(start - first - full_rounds * pace, 0.0, forward), 0.0)
    early = np.minimum(start - before_f, full_rounds * forward + part)
    end = np.maximum(tables.ramp * after_b, tables.work * weight)
    bound = tables.ramp * (start - early) + tables.work * (forward + backward) + end
    splits = (low[:, -1] > 0) & (high[:, -1] > low[:, -1]) & (backward > 0)
    return np.where(splits, bound, 0.0)


# --- Lower bounds where ranks are of several kinds -------------------------------------------------------------------
#
# Terms: see csc.planning.frontiers and docs/planning-bound.md. A *weight* of a kind is what a second of one of its
# ranks counts; the weights of all ranks add up to 1.
#
# All ranks together have T seconds each. Count those of a rank with its weight: T is at least the weighted sum of what
# they do. A unit counts no less than where its seconds, so weighted, are the fewest:
#
#     T >= m * sum over u of min over kinds k of w_k * work of u on k  +  r * sum over ranks of w * way of the rank
#
# Any weights make this a bound; those that make the first sum the largest solve the dual of the linear program that
# divides units among ranks like water (Lenstra, Shmoys, Tardos 1990).


SEARCHED = 3_000  # cells times frontiers of the short chains up to which partitions are searched
WITHIN_OF_KINDS = 1e-6


def weights(problem: Problem) -> list[float]:
    """By kind; they need not be the best ones for `spread` to be a bound."""
    kinds = problem.kinds
    work = _work(problem)
    count, units = work.shape
    scale = work.max() or 1.0
    costs = np.concatenate([np.zeros(count), -np.ones(units)])
    rows = np.zeros((count * units, count + units))
    for k in range(count):
        of_kind = slice(k * units, (k + 1) * units)
        rows[of_kind, k] = -work[k] / scale
        rows[of_kind, count:] = np.eye(units)
    ranks = np.concatenate([[float(len(kind.ranks)) for kind in kinds], np.zeros(units)])[None, :]
    solution = linprog(costs, rows, np.zeros(len(rows)), ranks, [1.0], bounds=(0, None), method="highs")
    chosen = np.maximum(solution.x[:count], 0.0) if solution.success else np.ones(count)
    return [float(weight) for weight in chosen / (chosen * ranks[0, :count]).sum()]


def _work(problem: Problem) -> Floats:
    """[kind, unit]: seconds of F, B and W."""
    return np.array([[sum(seconds) for seconds in kind.seconds] for kind in problem.kinds])


def spread_over_kinds(problem: Problem, ways: Sequence[float] = ()) -> float:
    """Seconds that no plan can beat. ways: the least seconds of one microbatch in which a rank has nothing to do, one
    for each rank, of which it is not known whose they are.
    """
    scale = problem.scale or (1.0,) * problem.microbatches
    weight_of_kind = weights(problem)
    counted = (np.array(weight_of_kind)[:, None] * _work(problem)).min(axis=0).sum()
    by_rank = sorted((weight_of_kind[kind] for kind in problem.kind_of), reverse=True)
    idle = sum(
        weight * seconds for weight, seconds in zip(by_rank, sorted(ways))
    )  # least: large weights beside short ways
    return float(sum(scale) * counted + min(scale) * idle)


def lower_bound_of_kinds(problem: Problem) -> tuple[float, Stages]:
    """What no plan with one stage on each rank can beat, wherever its stages stand, and stages for which the bound is
    as low as that; none for problems too large to search, where only what holds for every plan is proven.
    """
    branching = branches(problem)
    tables = segments(problem, branching)
    floor = max(ramps(problem).round_trip * max(problem.scale or (1.0,)), spread_over_kinds(problem))
    cells = math.prod(len(kind.ranks) + 1 for kind in problem.kinds)
    if cells * math.prod(int(n) + 1 for n in tables.lengths[:-1]) > SEARCHED:
        return floor, ()
    least = least_cap(lots(problem, branching), floor, empty=True, within=WITHIN_OF_KINDS)
    assert least is not None  # without a memory limit every partition has a finite bound
    stages, _ = on_ranks(problem, branching, tables, least[1])
    return max(floor, least[0] / (1 + WITHIN_OF_KINDS)), stages


# --- Lower bounds of the makespan of one step: what no partition and no order of work can beat -----------------------
#
# Terms: see csc.planning.problem. The proofs are in docs/planning-bound.md. Messages take no time on their way and
# memory is left out, so the bounds hold for every network and every memory limit. Where ranks are of several kinds,
# see csc.planning.partition_bound.
#
# For a stage S with summed times F, B, W, with m the sum of the microbatches' scales and r the least of them, and with
# the longest paths of one microbatch of scale 1 that arrive from outside before its F (f) and its B (b, at least f +
# F), and that leave it after its B (y) and its F (x, at least B + y and B + W):
#
#     bound(S) = max( r (f + x) + m F,  r (f + y) + m (F + B),  r f + m (F + B + W),
#                     r (b + y) + m B,  r b + m (B + W) )


EXACTLY, NEARLY = 4_000, 1e-3  # ranks times units up to which the bound is exact, and how far it may be below elsewhere
SOON = 0.2  # of the way from a cap found impossible to one that was reached: in large problems the first costs little
ALONE = "the time that one microbatch takes through all regions and back"
THERE = "the time that one microbatch takes to get there and back"


@dataclass(frozen=True)
class Bound:
    """seconds that no plan of its kind can beat; stages: a partition for which the bound is as low as that (none for
    plans with several stages on a rank); term: which of its parts is the largest, in words.
    """

    seconds: float
    stages: tuple[tuple[int, ...], ...]
    term: str


def round_trip(problem: Problem) -> float:
    """Seconds of the largest microbatch alone: the longest path through its F, B and W."""
    return ramps(problem).round_trip * max(problem.scale or (1.0,))


def stage_bound(problem: Problem, units: Sequence[int]) -> float:
    """Seconds of the step, at least, if one rank runs `units` and nothing else as one stage.

    InputError if units outside lie between them, which makes them impossible as a stage.
    """
    branching = branches(problem)
    chosen = set(units)
    numbered(branching, [min(chosen) if u in chosen else u for u in range(len(problem.units))])
    return stage_bounds(segments(problem, branching), [units])[0]


def check_ranks(problem: Problem) -> None:
    """InputError unless every rank can have a unit."""
    if problem.ranks < 1:
        raise InputError(f"there cannot be {problem.ranks} stages", "partition", "Ask for at least 1")
    if problem.ranks > len(problem.units):
        raise InputError(
            f"{len(problem.units)} regions cannot fill {problem.ranks} stages",
            "partition",
            f"Ask for at most {len(problem.units)} stages",
        )
    if problem.microbatches < 1:
        raise InputError(f"there cannot be {problem.microbatches} microbatches", "planning", "Ask for at least 1")


def floor_of(problem: Problem, tables: ChainTables) -> float:
    """Seconds below which no partition can be, without looking at any."""
    single = max(stage_bounds(tables, [[u] for u in range(len(problem.units))]))
    work = sum(unit.work for unit in problem.units) * tables.work / problem.ranks
    return max(round_trip(problem), single, work)


def lower_bound(problem: Problem) -> Bound:
    """What no plan with one stage on each rank can beat, whatever its partition and order.

    The minimum, over every acyclic assignment of the units to exactly `ranks` non-empty stages, of the largest
    `stage_bound` of a stage, and one microbatch's whole round trip: exact to a relative 1e-9, in large problems up to
    0.1 % below that. Raised, where that is higher, to what csc.planning.partition_bound proves. InputError for more
    ranks than
    units.
    """
    check_figures(problem)
    check_ranks(problem)
    if problem.kinds:
        seconds, stages = lower_bound_of_kinds(problem)
        seconds = _with_actions(problem, seconds)
        term = f"the work of one rank at its own speed, and {THERE}"
        return Bound(seconds, stages, ALONE if seconds <= round_trip(problem) * (1 + 1e-9) else term)
    tables = segments(problem, branches(problem))
    floor = floor_of(problem, tables)
    within, share = (EXACT, 0.5) if problem.ranks * len(problem.units) <= EXACTLY else (NEARLY, SOON)
    result = least(tables, problem.ranks, floor, within=within, share=share)
    assert result is not None  # without a memory limit every partition has a finite bound
    seconds, frontiers = max(floor, result[0] / (1 + within) if within > EXACT else result[0]), result[1]
    stages = stages_between(tables, frontiers)
    seconds = _with_actions(problem, seconds)
    higher = paced(problem, tables, problem.ranks, seconds)
    if higher > seconds:
        return Bound(higher, stages, "the pace of the slowest forward, which all microbatches go through")
    costs = stage_bounds(tables, stages)
    worst = max(range(len(stages)), key=lambda s: costs[s])
    term = f"the work of stage {worst}, and {THERE}"
    if costs[worst] < round_trip(problem) * (1 - 1e-9):
        term = ALONE
    return Bound(seconds, stages, term)


def _with_actions(problem: Problem, seconds: float) -> float:
    """With what the runtime takes for actions: a stage whose own bound is above the round trip pays it in every
    microbatch, for its F or for its B, whichever its bound comes from.
    """
    above = seconds > round_trip(problem) * (1 + 1e-9)
    return seconds + problem.microbatches * problem.action if above else seconds


def _runtime_of_a_rank(problem: Problem) -> float:
    """Seconds that every rank's runtime takes at least: an F of each microbatch, and one end of a message if the units
    hang together, since others are on other ranks.
    """
    links = [(value.maker, reader) for value in problem.values for reader in value.readers]
    together = problem.ranks > 1 and len(reached(len(problem.units), links)) == len(problem.units)
    return problem.microbatches * (problem.action + together * problem.handling)


def reached(count: int, links: Sequence[tuple[int, int]]) -> set[int]:
    """Which of `count` units links lead to from the first one, whichever way."""
    beside: list[list[int]] = [[] for _ in range(count)]
    for one, other in links:
        beside[one].append(other)
        beside[other].append(one)
    reached_ranks, open_ = {0}, [0]
    while open_:
        new = [other for other in beside[open_.pop()] if other not in reached_ranks]
        reached_ranks.update(new)
        open_ += dict.fromkeys(new)
    return reached_ranks


def shared_lower_bound(problem: Problem) -> Bound:
    """What no plan can beat that runs every unit on one rank, with any number of stages on a rank.

    The largest of: one microbatch's round trip; every unit's own `stage_bound`; as each rank waits for its first action
    and has nothing to do after its last one, (all work + the `ranks` shortest ways to a first F + the `ranks` shortest
    ways on after a last action) / ranks; and, as of any k ranks + 1 units some rank has k + 1, the work of the k + 1
    least of the k ranks + 1 largest units, for every k. InputError for more ranks than units.
    """
    check_figures(problem)
    check_ranks(problem)
    paths = ramps(problem)
    tables = segments(problem, branches(problem))
    ahead = sorted(paths.to_forward[u] - unit.forward for u, unit in enumerate(problem.units))
    behind = []
    for u, unit in enumerate(problem.units):
        after_f = float(paths.from_forward[u]) - unit.forward
        after_b = float(paths.from_backward[u]) - unit.backward_input
        behind.append(0.0 if unit.has_w else after_b if unit.has_b else after_f)
    behind.sort()
    n = problem.ranks
    if problem.kinds:
        spread = spread_over_kinds(problem, [a + b for a, b in zip(ahead[:n], behind[:n])])
    else:
        work = sum(unit.work for unit in problem.units) * tables.work
        spread = (work + tables.ramp * (sum(ahead[:n]) + sum(behind[:n]))) / n
    largest = sorted((unit.work for unit in problem.units), reverse=True)
    crowded = max(sum(largest[k * n - k : k * n + 1]) for k in range((len(largest) - 1) // n + 1)) * tables.work
    runtime = _runtime_of_a_rank(problem)
    of_units = stage_bounds(tables, [[u] for u in range(len(problem.units))])
    slowest = max(range(len(of_units)), key=lambda u: of_units[u])
    terms = {
        ALONE: round_trip(problem),
        f"the work of {problem.units[slowest].name}, and {THERE}": of_units[slowest],
        "the largest regions, of which some rank has to run several": crowded + runtime,
        "all work divided equally, and the time that ranks wait for their first and after their last": spread + runtime,
    }
    term = max(terms, key=lambda name: terms[name])
    return Bound(float(terms[term]), (), term)
