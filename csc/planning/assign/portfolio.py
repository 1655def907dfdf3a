"""An assignment of a step's samples: replicas first, then a portfolio of ways to fill microbatches, scored in full.

    assign(step, room, moves) -> Assignment

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
from functools import partial

import numpy as np

from csc.errors import InputError
from csc.planning.assign.filling import filled
from csc.planning.assign.polish import polished
from csc.planning.assign.step import Floats, Groups, Step
from csc.planning.schedules.memory import reserve
from csc.planning.schedules.timing import makespan, peaks

MOVES = 24  # a move takes as long as a candidate of the portfolio
PARTS = (0.05, 0.2, 0.5)  # of the others' size, for the first microbatch
LENGTHS = (1, 2, 4, 6)  # of a ramp, in p - 1
Figures = tuple[float, float]  # by how many bytes the room is exceeded, seconds
Cost = Callable[[Groups, Figures | None], Figures]  # the figures to be beaten: of what does not, bytes are left out


@dataclass(frozen=True)
class Assignment:
    """groups[replica][position]: samples, ascending. seconds: of the slowest replica."""

    groups: tuple[tuple[tuple[int, ...], ...], ...]
    seconds: float
    peaks: tuple[float, ...]


def assign(step: Step, room: Sequence[float] | None = None, moves: int = MOVES) -> Assignment:
    """The fastest assignment of the portfolio whose activations fit. room: bytes by rank, None: no limit; moves: how
    many local changes are tried afterwards.

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
        _check_alone(step, room)
    of_replica = _replicas(step)
    found = []
    for own in of_replica:
        cost = partial(_cost, step, room)
        found.append(polished(_best(step, own, cost), moves, cost))
    taken = step.peaks(found)
    if room is not None and any(peak > limit for peak, limit in zip(taken, room)):
        raise InputError(
            f"no assignment was found whose activations fit: {max(taken):.4g} bytes where there is room for "
            f"{min(room):.4g}", "memory", "take more microbatches, or a schedule that holds fewer of them",
        )  # fmt: skip
    groups = tuple(tuple(tuple(sorted(group)) for group in own) for own in found)
    return Assignment(groups, max(step.seconds(groups)), tuple(taken))


def _replicas(step: Step) -> list[list[int]]:
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


def _best(step: Step, own: Sequence[int], cost: Cost) -> list[list[int]]:
    """The fastest filling of a replica's microbatches: with equal targets, then with a ramp, then with a drain too."""
    loads = step.shares[list(own)]

    def filling(targets: Floats) -> list[list[int]]:
        bins = filled(loads, targets)
        return [[own[i] for i, b in enumerate(bins) if b == place] for place in range(step.microbatches)]

    count = step.microbatches
    even = filling(np.ones(count))
    best, targets = _first(cost, [(even, np.ones(count)), (_smallest_outside(even, step), np.ones(count))])
    ramps = list(_ramps(count, len(step.orders)))
    best, targets = _first(cost, [(best, targets), *((filling(one), one) for one in ramps)])
    drains = [np.minimum(targets, one[::-1]) for one in ramps]
    best, _ = _first(cost, [(best, targets), *((filling(one), one) for one in drains)])
    return best


def _first(cost: Cost, ways: Sequence[tuple[list[list[int]], Floats]]) -> tuple[list[list[int]], Floats]:
    """The way that costs the least, the first of equal ones."""
    best, least = ways[0], cost(ways[0][0], None)
    for way in ways[1:]:
        figures = cost(way[0], least)
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


def _smallest_outside(groups: list[list[int]], step: Step) -> list[list[int]]:
    """The smallest microbatch first, the next ones last, as many as make the drain: where they are nearly equal that is
    worth more than another filling.
    """
    ascending = sorted(groups, key=lambda group: float(step.shares[group].sum()))
    ranks = len(step.orders)
    return [ascending[0], *reversed(ascending[ranks:]), *reversed(ascending[1:ranks])]


def _cost(step: Step, room: Sequence[float] | None, groups: Groups, least: Figures | None) -> Figures:
    work = step.work(step.features(groups))
    seconds = makespan(work, step.orders)
    if room is None:
        return 0.0, seconds
    if least is not None and not least[0] and seconds > least[1]:
        return math.inf, seconds
    return max(0.0, *(peak - limit for peak, limit in zip(peaks(work, step.orders), room))), seconds


def _check_alone(step: Step, room: Sequence[float]) -> None:
    """InputError for a sample that a rank has no room for even alone."""
    alone = step.samples.max(axis=0)
    if all(peak <= limit for peak, limit in zip(_peaks_of(step, alone), room)):
        return
    for index, sample in enumerate(step.samples):
        for rank, (peak, limit) in enumerate(zip(_peaks_of(step, sample), room)):
            if peak > limit:
                raise InputError(
                    f"sample {index} alone takes {peak:.4g} bytes on rank {rank}, which has room for {limit:.4g}",
                    "memory", f"allow {peak:.4g} bytes for activations or more, cut the sample, or leave it out",
                )  # fmt: skip


def _peaks_of(step: Step, sample: Floats) -> list[float]:
    """What a microbatch of one sample takes, by rank."""
    work = step.work(np.tile([1.0, *sample], (step.microbatches, 1)))
    return [reserve(work, rank).most for rank in range(work.ranks)]
