"""Sizes of microbatches that make a step the shortest if samples could be divided like water.

Terms
  shape   of a step: by position what a microbatch has of the samples, in times the mean one

    fluid_shapes(step, room) -> shapes

Every microbatch is a part of the mean one here. The best sizes grow over the first half of the step and shrink over the
second: an action that takes a little longer than the one before hides the way there and back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from csc.planning.assign.layout import Floats
from csc.planning.assign.linear_step import LinearStep
from csc.planning.assign.step import SampleCosts

Shape = tuple[float, ...]
PEAKS = (0.2, 0.35, 0.5, 0.65)  # of the step: where the largest samples stand
LEAST = 1e-3  # of the mean microbatch: targets are above 0


def fluid_shapes(step: SampleCosts, room: Sequence[float] | None = None) -> list[Shape]:
    """Of any samples, and such as have room for the largest ones, whole, beside each other in several places. room:
    bytes for activations by rank; None: no limit. None of a step of one microbatch, or if no sizes fit.
    """
    count = step.microbatches
    if count < 2:
        return []
    sizes = np.sort(step.shares.max(axis=1) * count * step.replicas)
    largest = sizes[::-1][step.replicas // 2 :: step.replicas][:count]  # those that a replica has
    mean = step.samples.sum(axis=0) / (count * step.replicas)
    program = LinearStep(step, mean[None], room)
    program.equal([(program.amount(k, 0), 1.0) for k in range(count)], float(count))
    ways = [np.full(count, min(1.0, float(least))) for least in (sizes[0], sizes.mean())]
    ways += [_beside_each_other(largest, count, peak, min(1.0, sizes[0])) for peak in PEAKS if largest[0] > 1]
    solutions = [program.solved({program.amount(k, 0): least for k, least in enumerate(way)}) for way in ways]
    return list(dict.fromkeys(_shape(one[:count]) for one in solutions if one is not None))


def _shape(amounts: Floats) -> Shape:
    return tuple(np.maximum(amounts, LEAST).tolist())


def _beside_each_other(largest: Floats, count: int, peak: float, least: float) -> Floats:
    """By position the least size, so that each of the largest samples has a microbatch, the nearer to the peak the
    larger.
    """
    floors = np.full(count, least)
    near = np.argsort(np.abs(np.arange(count) - peak * (count - 1)), kind="stable")
    for place, size in zip(near, largest[largest > 1]):
        floors[place] = size
    return floors * min(1.0, 0.98 * count / floors.sum())
