"""Partitions for two stages on each rank, balanced by what the two take together.

Terms: the *first* stages are those of which each rank runs one before any rank runs a second; the *cut* is the unit
with which the second ones begin. Units are taken in order of execution. A *load* is the time of both stages of a rank
for one microbatch. It has to be as long as that of its neighbours, the two stages do not: much of a frozen encoder may
share a rank with little of what is trained.

    paired(problem, placement, actions) -> [Stages], the best first; [] if not every rank has one of each,
                                           or there are fewer units than stages
    filled(works, loads) -> the ends of stages that even out the loads which are there
    works_of(problem, home) -> the work of the units on each of these ranks
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from csc.planning.branches import Stages
from csc.planning.problem import Problem
from csc.planning.screen import Style, cost, screen

CLOSE = 1.01  # how much larger than the least the largest load of a partition may be
TRIED = 12  # partitions of which a few orders are simulated
KEPT = 2
STYLES: tuple[Style, ...] = ("interleaved-zb", "zb-v", ((0, 1, 2), 1.0, 0.5, False))


def paired(problem: Problem, placement: Sequence[int], actions: float = math.inf) -> list[Stages]:
    """Of the partitions whose largest load is near the least, the fastest under a few orders that keep to the memory of
    the problem. actions: that may be simulated for it; if they are too few to choose, none are.
    """
    ranks = problem.ranks
    if not sorted(placement[:ranks]) == sorted(placement[ranks:]) == list(range(ranks)):
        return []
    found = list(_balanced(problem, placement))
    if not found:
        return []
    least = min(load for load, _ in found)
    close = [stages for load, stages in found if load <= CLOSE * least]
    each = 6 * ranks * problem.microbatches * sum(map(cost, STYLES))  # F, B and W of two stages on each rank
    tried = int(min(TRIED, actions // each))
    if tried <= KEPT:
        return close[:: -(-len(close) // KEPT)]
    trials = [screen(problem, stages, placement, STYLES) for stages in close[:: -(-len(close) // tried)]]
    ranked = sorted((trial for trial in trials if trial is not None), key=lambda trial: trial.seconds)
    return [trial.stages for trial in ranked[:KEPT]]


def _balanced(problem: Problem, placement: Sequence[int]) -> Iterator[tuple[float, Stages]]:
    """(largest load, partition) for every cut: the first stages even, then the second ones beside them."""
    count, ranks = len(problem.units), problem.ranks
    works = works_of(problem, placement)
    for cut in range(ranks, count - ranks + 1):
        loads = [0.0] * ranks
        ends: list[int] = []
        for part, (a, b) in enumerate(((0, cut), (cut, count))):
            homes = placement[part * ranks : (part + 1) * ranks]
            own = works[part * ranks : (part + 1) * ranks]
            ends += filled(own, [loads[rank] for rank in homes], a, b)
            for rank, work, start, end in zip(homes, own, [a, *ends[-ranks:]], ends[-ranks:]):
                loads[rank] += sum(work[start:end])
        yield max(loads), tuple(tuple(range(a, b)) for a, b in zip([0, *ends], ends))


def works_of(problem: Problem, home: Sequence[int]) -> list[list[float]]:
    """Seconds of all units, F, B and W, on each of these ranks; one list for ranks that are alike."""
    of_kind = [[unit.work for unit in units] for units in problem.units_on]
    return [of_kind[problem.kind_of[rank]] for rank in home]


def filled(
    works: Sequence[Sequence[float]], loads: Sequence[float], first: int = 0, last: int | None = None
) -> list[int]:
    """The end of each of as many non-empty stages as there are loads, in which the largest load with the stage's work
    added is least. works: of each stage what the units take on its rank, of which those from `first` up to `last` are
    divided: as many as stages, or more. Of equals, those whose early stages are the longest.
    """
    last = len(works[0]) if last is None else last
    count = last - first
    spans: dict[int, npt.NDArray[np.float64]] = {}  # [start, end]
    for work in works:
        if id(work) not in spans:
            before = np.concatenate([[0.0], np.cumsum(np.asarray(work[first:last], dtype=np.float64))])
            spans[id(work)] = np.where(np.tri(count + 1, dtype=bool), np.inf, before - before[:, None])
    best = np.where(np.arange(count + 1) == 0, 0.0, np.inf)  # [end]: the least of the largest loads so far
    starts = []
    for load, work in zip(loads, works):
        each = np.maximum(best[:, None], load + spans[id(work)])
        starts.append(count - each[::-1].argmin(axis=0))
        best = each.min(axis=0)
    ends = [count]
    for row in reversed(starts[1:]):
        ends.append(int(row[ends[-1]]))
    return [first + end for end in reversed(ends)]
