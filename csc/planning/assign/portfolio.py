"""An assignment of a step's samples: replicas first, then a portfolio of ways to fill microbatches, scored in full.

    assign(step, room, moves, numbers) -> Assignment
    with_known_sizes(step, assignment, room) -> Assignment
    even(step) -> groups[replica][position]          of loads as equal as longest first makes them

Microbatches at the two ends of a step make its ramp and drain: with small ones there the pipeline fills and empties
sooner. So the targets of the first and last positions grow from a part of the others' up to it: over p - 1 positions
and multiples of that, from several parts. Which ramp pays is told by the schedule's own times, then which drain. The
microbatches between get larger for it, so it is memory that ends this. The same samples give the same assignment on
every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from csc.errors import InputError
from csc.planning.assign.filling import filled, fillings
from csc.planning.assign.known_sizes import EVERY, Effort, settled
from csc.planning.assign.layout import Floats
from csc.planning.assign.polish import polished
from csc.planning.assign.runs import SampleRuns
from csc.planning.assign.step import Groups, SampleCosts
from csc.planning.schedules.activations import reserve

MOVES = 24  # a move takes as long as a candidate of the portfolio
SIZE = 128  # microbatches times stages from which on there are fewer, so that a decision takes no longer
PARTS = (0.05, 0.2, 0.5)  # of the others' size, for the first microbatch
LENGTHS = (1, 2, 4, 6)  # of a ramp, in p - 1
Figures = tuple[float, float]  # by how many bytes the room is exceeded, seconds


@dataclass(frozen=True)
class Assignment:
    """groups[replica][position]: samples, ascending. seconds: of the slowest replica."""

    groups: tuple[tuple[tuple[int, ...], ...], ...]
    seconds: float
    peaks: tuple[float, ...]


@dataclass(frozen=True)
class Score:
    """Of ways to fill a replica's microbatches. room: bytes by rank; None: no limit."""

    step: SampleCosts
    room: Sequence[float] | None

    def cost(self, groups: Groups, least: Figures | None) -> Figures:
        """least: what is to be beaten; of what does not, bytes are left out."""
        return self.figures(groups, self.step.seconds_of(self.step.features(groups)), least)

    def figures(self, groups: Groups, seconds: float, least: Figures | None) -> Figures:
        """The same of groups that take so many seconds."""
        if self.room is None:
            return 0.0, seconds
        if least is not None and not least[0] and seconds > least[1]:
            return math.inf, seconds
        taken = self.step.activations(self.step.features(groups))
        return max(0.0, *(peak - limit for peak, limit in zip(taken, self.room))), seconds


def assign(
    step: SampleCosts, room: Sequence[float] | None = None, moves: int = MOVES, numbers: Sequence[int] | None = None
) -> Assignment:
    """The fastest assignment of the portfolio whose activations fit. room: bytes by rank, None: no limit; moves: how
    many local changes are tried afterwards; numbers: what samples are called in errors.

    InputError if there are fewer samples than microbatches, or for a sample that does not fit alone: which, and what
    would do.
    """
    count = step.replicas * step.microbatches
    if len(step.samples) < count:
        raise InputError(
            f"{len(step.samples)} samples do not fill {count} microbatches", "batch_size",
            f"take {count} samples a step or more, or fewer microbatches",
        )  # fmt: skip
    if room is not None:
        _check_alone(step, room, numbers or range(len(step.samples)))
    score = Score(step, room)
    divisions = [[_start(score, own) for own in division] for division in _divisions(step)]
    starts = min(divisions, key=lambda division: max(one.figures for one in division))
    tries = (1 + step.replicas) // 2 * (moves * SIZE // max(SIZE, _size(step)))
    found = polished([_ramped(score, one) for one in starts], tries, score.cost)
    taken = step.peaks(found)
    if room is not None and any(peak > limit for peak, limit in zip(taken, room)):
        raise InputError(
            f"no assignment was found whose activations fit: {max(taken):.4g} bytes where there is room for "
            f"{min(room):.4g}", "memory", "take more microbatches, or a schedule that holds fewer of them",
        )  # fmt: skip
    return _assignment(step, found)


def _size(step: SampleCosts) -> int:
    """What a candidate's simulation takes grows with it."""
    return step.microbatches * len(step.placement)


def _assignment(step: SampleCosts, found: Sequence[Groups]) -> Assignment:
    groups = tuple(tuple(tuple(sorted(group)) for group in own) for own in found)
    return Assignment(groups, max(step.seconds(groups)), tuple(step.peaks(groups)))


def even(step: SampleCosts) -> list[list[list[int]]]:
    """What equal loads make of a step, where nothing is tried."""
    count = step.microbatches
    return [_members(own, filled(step.shares[own], np.ones(count)), count) for own in _divisions(step)[0]]


def _divisions(step: SampleCosts) -> list[list[list[int]]]:
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


@dataclass(frozen=True)
class _Start:
    """The best of what fills a replica's microbatches without a ramp. filling: from targets to groups."""

    figures: Figures
    groups: list[list[int]]
    filling: Callable[[Sequence[Floats]], list[list[list[int]]]]


def _start(score: Score, own: Sequence[int]) -> _Start:
    """Of a replica's samples: with equal targets, and what others make of them."""
    step, count = score.step, score.step.microbatches
    loads = step.shares[list(own)]

    def by_load(ways: Sequence[Floats]) -> list[list[list[int]]]:
        return [_members(own, bins, count) for bins in fillings(loads, np.array(ways))]

    def by_length(ways: Sequence[Floats]) -> list[list[list[int]]]:
        return [_members(own, runs.bins(targets), count) for targets in ways]

    equal = np.ones(count)
    kinds = [by_load]
    if step.layout is not None and not step.layout.packed:
        runs = SampleRuns(step, own)
        kinds.append(by_length)
    level, filling = min(((kind([equal])[0], kind) for kind in kinds), key=lambda one: score.cost(one[0], None))
    ways = [level, _smallest_outside(level, step.shares, len(step.orders)), *_by_whole(step, own)]
    best, _, figures = _first(score, [(groups, equal) for groups in ways])
    return _Start(figures, best, filling)


def _ramped(score: Score, start: _Start) -> list[list[int]]:
    """The same or faster: with a ramp, then with a drain too."""
    count = score.step.microbatches
    best, targets = start.groups, np.ones(count)
    ramps = list(_ramps(count, len(score.step.orders)))
    if not ramps:
        return best
    best, targets, _ = _first(score, [(best, targets), *zip(start.filling(ramps), ramps)])
    drains = [np.minimum(targets, one[::-1]) for one in ramps]
    return _first(score, [(best, targets), *zip(start.filling(drains), drains)])[0]


def _members(own: Sequence[int], bins: Sequence[int], count: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(count)]
    for item, place in zip(own, bins):
        found[place].append(item)
    return found


def with_known_sizes(
    step: SampleCosts, found: Assignment, room: Sequence[float] | None = None, efforts: Sequence[Effort] = EVERY
) -> Assignment:
    """The assignment, changed as little as it takes for microbatches to have sizes that the step's layout knows, as far
    as they can be had with these efforts and fit.
    """
    layout = step.layout
    if layout is None or not layout.known:
        return found

    def fits(groups: Groups) -> bool:
        return room is None or all(peak <= limit for peak, limit in zip(step.peaks([groups]), room))

    return _assignment(step, [settled(step, own, fits, efforts) for own in found.groups])


def _first(
    score: Score, ways: Sequence[tuple[list[list[int]], Floats]]
) -> tuple[list[list[int]], Floats, Figures]:  # fmt: skip
    """The way that costs the least, the first of equal ones, and what it costs."""
    seconds = score.step.seconds_of_ways([groups for groups, _ in ways])
    best, least = ways[0], score.figures(ways[0][0], seconds[0], None)
    for way, took in zip(ways[1:], seconds[1:]):
        figures = score.figures(way[0], took, least)
        if figures < least:
            best, least = way, figures
    return (*best, least)


def _ramps(count: int, ranks: int) -> Iterator[Floats]:
    """Targets that rise at the front."""
    for length in dict.fromkeys(min(many * (ranks - 1), count - 1) for many in LENGTHS):
        for part in PARTS if length > 0 else ():
            rising = np.ones(count)
            rising[:length] = np.linspace(part, 1.0, length, endpoint=False)
            yield rising


def _smallest_outside(groups: list[list[int]], loads: Floats, ranks: int) -> list[list[int]]:
    """The smallest microbatch first, the next ones last, as many as make the drain: where they are nearly equal that is
    worth more than another filling. loads: of each sample.
    """
    ascending = sorted(groups, key=lambda group: float(loads[group].sum()))
    return [ascending[0], *reversed(ascending[ranks:]), *reversed(ascending[1:ranks])]


def _by_whole(step: SampleCosts, own: Sequence[int]) -> list[list[list[int]]]:
    """What others make of a replica's samples by the seconds that each takes of all ranks together: longest first, and
    as many samples in each microbatch, both reordered (DistTrain, arXiv 2408.04275); so no step is longer than theirs.
    """
    whole = _whole(step)
    count, ranks, mine = step.microbatches, len(step.orders), whole[list(own)]
    longest_first = _members(own, filled(mine[:, None] / (mine.sum() or 1.0), np.ones(count)), count)
    ordered = sorted(own, key=lambda one: -whole[one])
    as_many = [part.tolist() for part in np.array_split(np.array(ordered), count)]
    return [longest_first, *(_smallest_outside(groups, whole, ranks) for groups in (longest_first, as_many))]


def _check_alone(step: SampleCosts, room: Sequence[float], numbers: Sequence[int]) -> None:
    """InputError for a sample that a rank has no room for even alone."""
    alone = step.samples.max(axis=0)
    if all(peak <= limit for peak, limit in zip(_peaks_of(step, alone), room)):
        return
    for index, sample in enumerate(step.samples):
        for rank, (peak, limit) in enumerate(zip(_peaks_of(step, sample), room)):
            if peak > limit:
                raise InputError(
                    f"sample {numbers[index]} alone takes {peak:.4g} bytes on rank {rank}, which has room for "
                    f"{limit:.4g}", "memory",
                    f"allow {peak:.4g} bytes for activations or more, cut the sample, or leave it out",
                )  # fmt: skip


def _peaks_of(step: SampleCosts, sample: Floats) -> list[float]:
    """What a microbatch of one sample takes, by rank."""
    work = step.work(np.tile([1.0, *sample], (step.microbatches, 1)))
    return [reserve(work, rank).most for rank in range(work.ranks)]
