"""An assignment of a step's samples: replicas first, then a portfolio of ways to fill microbatches, scored in full.

    assign(step, room, rounds, numbers, shapes) -> Assignment
    with_known_sizes(step, assignment, room) -> Assignment
    even(step) -> groups[replica][position]          of loads as equal as longest first makes them

Microbatches at the two ends of a step make its ramp and drain: with small ones there the pipeline fills and empties
sooner, and sizes that grow and shrink slowly between hide the way. So microbatches are filled to shapes that were
learned for such steps (csc.planning.assign.learned); where there are none, to ramps over p - 1 positions and multiples
of that, from several parts of the others' size, then with drains. Microbatches in the middle get larger for it, so it
is memory that ends this. The ways of all replicas are timed in one go. The same samples and shapes give the same
assignment on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from csc.errors import InputError
from csc.planning.assign.filling import filled
from csc.planning.assign.fluid import Shape
from csc.planning.assign.known_sizes import EVERY, Effort, settled
from csc.planning.assign.layout import Floats
from csc.planning.assign.level_starts import Start, divisions_of, members, starts
from csc.planning.assign.polish import polished
from csc.planning.assign.ramps import ramps
from csc.planning.assign.score import Lists, Score
from csc.planning.assign.step import Groups, SampleCosts
from csc.planning.schedules.work import reserve

ROUNDS = 12  # of local changes
SIZE = 128  # microbatches times stages from which on there are fewer, so that a decision takes no longer


@dataclass(frozen=True)
class Assignment:
    """groups[replica][position]: samples, ascending. seconds: of the slowest replica."""

    groups: tuple[tuple[tuple[int, ...], ...], ...]
    seconds: float
    peaks: tuple[float, ...]


def assign(
    step: SampleCosts,
    room: Sequence[float] | None = None,
    rounds: int = ROUNDS,
    numbers: Sequence[int] | None = None,
    shapes: Sequence[Shape] = (),
) -> Assignment:
    """The fastest assignment of the portfolio whose activations fit. room: bytes by rank, None: no limit; rounds: of
    local changes that are tried afterwards; numbers: what samples are called in errors; shapes: of the step, to fill
    microbatches to.

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
    found = _shaped(score, starts(score, shapes), shapes)
    tries = (1 + step.replicas) // 2 * (rounds * SIZE // max(SIZE, _size(step)))
    found = polished(found, max(tries, min(rounds, 1)), score)
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
    return [members(own, filled(step.shares[own], np.ones(count)), count) for own in divisions_of(step)[0]]


def _shaped(score: Score, found: Sequence[Start], shapes: Sequence[Shape]) -> list[Lists]:
    """Of each replica the same or faster: filled to shapes, or if there are none with a ramp, then with a drain too."""
    if shapes:
        targets = [np.array(shape) for shape in shapes]
        return [one[0] for one in score.best_of_each([[start.groups, *start.filling(targets)] for start in found])]
    rising = list(ramps(score.step.microbatches, len(score.step.orders)))
    if not rising:
        return [start.groups for start in found]
    targets = [np.ones(score.step.microbatches), *rising]
    first = score.best_of_each([[start.groups, *start.filling(rising)] for start in found])
    drained = [[np.minimum(targets[place], one[::-1]) for one in rising] for _, _, place in first]
    ways = [[groups, *start.filling(own)] for start, own, (groups, _, _) in zip(found, drained, first)]
    return [groups for groups, _, _ in score.best_of_each(ways)]


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
