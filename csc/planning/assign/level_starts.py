"""Where an assignment starts: samples given to replicas, and each replica's microbatches filled equally full.

Terms
  division   of a step: the samples of each replica
  filling    from targets of microbatches, by position, to the samples of each

    divisions_of(step) -> [division]               starts(score, shapes) -> a Start of each replica, of the best one
    members(own, bins, count) -> the samples of each bin
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from csc.planning.assign.filling import filled, fillings
from csc.planning.assign.fluid import Shape
from csc.planning.assign.layout import Floats
from csc.planning.assign.runs import SampleRuns
from csc.planning.assign.score import Figures, Lists, Score
from csc.planning.assign.step import SampleCosts

ORDERINGS = 3  # shapes that equal microbatches are ordered by
Filling = Callable[[Sequence[Floats]], list[Lists]]


@dataclass(frozen=True)
class Start:
    """A replica's samples. groups: the best of what fills its microbatches without a ramp; filling: from targets to
    groups.
    """

    figures: Figures
    groups: list[list[int]]
    filling: Filling


def starts(score: Score, shapes: Sequence[Shape]) -> list[Start]:
    """By replica, of the division in which the slowest one is the fastest. shapes: the first of them are orders that
    equal microbatches may come in.
    """
    divisions = divisions_of(score.step)
    ways = [_ways(score.step, own, shapes[:ORDERINGS]) for division in divisions for own in division]
    best = iter(score.best_of_each([[groups for groups, _ in own] for own in ways]))
    each = iter(ways)
    found = []
    for division in divisions:
        own = [(next(best), next(each)) for _ in division]
        found.append([Start(figures, groups, them[place][1]) for (groups, figures, place), them in own])
    return min(found, key=lambda division: max(start.figures for start in division))


def _ways(step: SampleCosts, own: Sequence[int], orderings: Sequence[Shape]) -> list[tuple[Lists, Filling]]:
    """To fill a replica's microbatches equally full, each with the filling that it is of or stands nearest to."""
    equal, loads, ranks = [np.ones(step.microbatches)], step.shares, len(step.orders)
    kinds = [(kind(equal)[0], kind) for kind in _fillings(step, own)]
    ways = [*kinds, *((_smallest_outside(groups, loads, ranks), kind) for groups, kind in kinds)]
    ways += [(groups, kinds[0][1]) for groups in _by_whole(step, own)]
    return ways + [(_as_shape(groups, loads, shape), kind) for groups, kind in kinds for shape in orderings]


def _fillings(step: SampleCosts, own: Sequence[int]) -> list[Filling]:
    """Ways to fill a replica's microbatches to targets: by load, and by length where rows are padded."""
    loads, count = step.shares[list(own)], step.microbatches

    def by_load(ways: Sequence[Floats]) -> list[Lists]:
        return [members(own, bins, count) for bins in fillings(loads, np.array(ways))]

    if step.layout is None or step.layout.packed:
        return [by_load]
    runs = SampleRuns(step, own)

    def by_length(ways: Sequence[Floats]) -> list[Lists]:
        return [members(own, runs.bins(targets), count) for targets in ways]

    return [by_load, by_length]


def divisions_of(step: SampleCosts) -> list[list[list[int]]]:
    """Ways to give samples to replicas: by what loads a rank the most, then by the seconds of all ranks together."""
    if step.replicas == 1:
        return [[list(range(len(step.samples)))]]
    found = [_replicas(step, step.shares), _replicas(step, _whole(step)[:, None])]
    return found[:1] if found[0] == found[1] else found


def _replicas(step: SampleCosts, loads: Floats) -> list[list[int]]:
    """The samples of each replica, each with at least one for every microbatch."""
    bins = filled(loads, np.ones(step.replicas))
    found = [[i for i, b in enumerate(bins) if b == r] for r in range(step.replicas)]
    for own in found:  # a replica of few large samples takes small ones of the one that has the most
        while len(own) < step.microbatches:
            most = max(found, key=len)
            own.append(most.pop(min(range(len(most)), key=lambda k: loads[most[k]].max())))
    return found


def _whole(step: SampleCosts) -> Floats:
    """[sample]: seconds of all ranks together."""
    return (step.samples @ step.rank_rates[1:]).sum(axis=1)


def members(own: Sequence[int], bins: Sequence[int], count: int) -> list[list[int]]:
    """[bin]: those of these samples that are in it."""
    found: list[list[int]] = [[] for _ in range(count)]
    for item, place in zip(own, bins):
        found[place].append(item)
    return found


def _smallest_outside(groups: list[list[int]], loads: Floats, ranks: int) -> list[list[int]]:
    """The smallest microbatch first, the next ones last, as many as make the drain: where they are nearly equal that is
    worth more than another filling. loads: of each sample.
    """
    ascending = sorted(groups, key=lambda group: float(loads[group].sum()))
    return [ascending[0], *reversed(ascending[ranks:]), *reversed(ascending[1:ranks])]


def _as_shape(groups: list[list[int]], loads: Floats, shape: Shape) -> list[list[int]]:
    """The smallest microbatch where the shape is the smallest, and so on: of unequal ones neighbours differ little."""
    found: list[list[int]] = [[] for _ in groups]
    ascending = sorted(groups, key=lambda group: float(loads[group].sum(axis=0).max()))
    for place, group in zip(np.argsort(shape, kind="stable"), ascending):
        found[place] = group
    return found


def _by_whole(step: SampleCosts, own: Sequence[int]) -> list[list[list[int]]]:
    """What others make of a replica's samples by the seconds that each takes of all ranks together: longest first, and
    as many samples in each microbatch, both reordered (DistTrain, arXiv 2408.04275); so no step is longer than theirs.
    """
    whole = _whole(step)
    count, ranks, mine = step.microbatches, len(step.orders), whole[list(own)]
    longest_first = members(own, filled(mine[:, None] / (mine.sum() or 1.0), np.ones(count)), count)
    ordered = sorted(own, key=lambda one: -whole[one])
    as_many = [part.tolist() for part in np.array_split(np.array(ordered), count)]
    return [longest_first, *(_smallest_outside(groups, whole, ranks) for groups in (longest_first, as_many))]
