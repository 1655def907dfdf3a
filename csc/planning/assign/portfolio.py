"""An assignment of a step's samples: replicas first, then a portfolio of ways to fill microbatches, scored in full.

    assign(step, room, moves) -> Assignment

Microbatches at the two ends of a step make its ramp and drain: with small ones there the pipeline fills and empties
sooner. So the targets of the first and last p - 1 positions grow from a part of the mean up to it, by several parts;
which one pays is told by the schedule's own times. The same samples give the same assignment on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from csc.errors import InputError
from csc.planning.assign.filling import filled
from csc.planning.assign.polish import polished
from csc.planning.assign.step import Floats, Groups, Step
from csc.planning.schedules.memory import reserve

MOVES = 40  # a move takes as long as a candidate of the portfolio
PARTS = (1.0, 0.75, 0.5, 0.3, 0.15)  # of the mean, for the first microbatch


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
        best = min(_candidates(step, own), key=lambda groups: _cost(step, groups, room))
        found.append(polished(step, best, moves, lambda groups: _cost(step, groups, room)))
    peaks = step.peaks(found)
    if room is not None and any(peak > limit for peak, limit in zip(peaks, room)):
        raise InputError(
            f"no assignment was found whose activations fit: {max(peaks):.4g} bytes where there is room for "
            f"{min(room):.4g}", "memory", "take more microbatches, or a schedule that holds fewer of them",
        )  # fmt: skip
    groups = tuple(tuple(tuple(sorted(group)) for group in own) for own in found)
    return Assignment(groups, max(step.seconds(groups)), tuple(peaks))


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


def _candidates(step: Step, own: Sequence[int]) -> Iterator[list[list[int]]]:
    """The portfolio: how much the ends are graded, on which ends, by which load bins are filled."""
    loads = step.shares[list(own)]
    for by_sum in (False, True):
        for targets in _targets(step.microbatches, len(step.orders)):
            bins = filled(loads, targets, by_sum)
            groups = [[own[i] for i, b in enumerate(bins) if b == place] for place in range(step.microbatches)]
            yield groups
            if targets.min() == 1.0:
                yield _smallest_outside(groups, step)


def _smallest_outside(groups: list[list[int]], step: Step) -> list[list[int]]:
    """The smallest microbatch first, the next ones last, as many as make the drain: where they are nearly equal that is
    worth more than another filling.
    """
    ascending = sorted(groups, key=lambda group: float(step.shares[group].sum()))
    ranks = len(step.orders)
    return [ascending[0], *reversed(ascending[ranks:]), *reversed(ascending[1:ranks])]


def _targets(microbatches: int, ranks: int) -> Iterator[Floats]:
    ramp = min(ranks - 1, microbatches // 2)
    yield np.ones(microbatches)
    for part in PARTS[1:]:
        rising = np.ones(microbatches)
        rising[:ramp] = np.linspace(part, 1.0, ramp, endpoint=False)
        yield rising
        both = rising.copy()
        if ramp:
            both[-ramp:] = rising[:ramp][::-1]
        yield both


def _cost(step: Step, groups: Groups, room: Sequence[float] | None) -> tuple[float, float]:
    """(by how much the room is exceeded, seconds)."""
    features = step.features(groups)
    over = 0.0
    if room is not None:
        over = max(0.0, *(peak - limit for peak, limit in zip(step.peaks([groups]), room)))
    return over, step.seconds_of(features)


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
