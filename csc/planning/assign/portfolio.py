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
from collections.abc import Iterator, Sequence
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
    of_replica = _replicas(step)
    found, score = [], Score(step, room)
    for own in of_replica:
        found.append(polished(_best(score, own), moves * SIZE // max(SIZE, _size(step)), score.cost))
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
    return [_members(own, filled(step.shares[own], np.ones(count)), count) for own in _replicas(step)]


def _replicas(step: SampleCosts) -> list[list[int]]:
    """The samples of each replica, each with at least one for every microbatch."""
    if step.replicas == 1:
        return [list(range(len(step.samples)))]
    bins = filled(step.shares, np.ones(step.replicas))
    found = [[i for i, b in enumerate(bins) if b == r] for r in range(step.replicas)]
    for own in found:  # a replica of few large samples takes small ones of the one that has the most
        while len(own) < step.microbatches:
            most = max(found, key=len)
            own.append(most.pop(min(range(len(most)), key=lambda k: step.shares[most[k]].max())))
    return found


def _best(score: Score, own: Sequence[int]) -> list[list[int]]:
    """The fastest filling of a replica's microbatches: with equal targets, then with a ramp, then with a drain too."""
    step = score.step
    loads = step.shares[list(own)]

    def by_load(ways: Sequence[Floats]) -> list[list[list[int]]]:
        return [_members(own, bins, count) for bins in fillings(loads, np.array(ways))]

    def by_length(ways: Sequence[Floats]) -> list[list[list[int]]]:
        return [_members(own, runs.bins(targets), count) for targets in ways]

    count = step.microbatches
    equal = np.ones(count)
    kinds = [by_load]
    if step.layout is not None and not step.layout.packed:
        runs = SampleRuns(step, own)
        kinds.append(by_length)
    level, filling = min(((kind([equal])[0], kind) for kind in kinds), key=lambda one: score.cost(one[0], None))
    start = [level, _smallest_outside(level, step.shares, len(step.orders)), *_by_whole(step, own)]
    best, targets = _first(score, [(groups, equal) for groups in start])
    ramps = list(_ramps(count, len(step.orders)))
    best, targets = _first(score, [(best, targets), *zip(filling(ramps), ramps)] if ramps else [(best, targets)])
    drains = [np.minimum(targets, one[::-1]) for one in ramps]
    best, _ = _first(score, [(best, targets), *zip(filling(drains), drains)] if drains else [(best, targets)])
    return best


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
) -> tuple[list[list[int]], Floats]:  # fmt: skip
    """The way that costs the least, the first of equal ones."""
    seconds = score.step.seconds_of_ways([groups for groups, _ in ways])
    best, least = ways[0], score.figures(ways[0][0], seconds[0], None)
    for way, took in zip(ways[1:], seconds[1:]):
        figures = score.figures(way[0], took, least)
        if figures < least:
            best, least = way, figures
    return best


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
    whole = (step.samples @ step.rank_rates[1:]).sum(axis=1)
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
