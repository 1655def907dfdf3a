"""Shapes that steps of some lengths are filled to, learned before the first one from a few that are like them.

    learned(steps, room) -> shapes, the one that shortens these steps the most first

Candidates are what samples would make if they could be divided like water, some powers of that (where samples are large
a steeper shape leaves room for them), and ramps with drains. Learned once for a plan, on one rank: solvers of linear
programs may end elsewhere on another machine, and every rank must decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from csc.planning.assign.fluid import Shape, fluid_shapes
from csc.planning.assign.layout import Floats
from csc.planning.assign.level_starts import starts
from csc.planning.assign.ramps import PARTS, ramps
from csc.planning.assign.score import Score
from csc.planning.assign.step import SampleCosts

SHAPES = 16  # that are kept: each is tried for every replica of every step
POWERS = (0.5, 0.75, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0)


def learned(steps: Sequence[SampleCosts], room: Sequence[float] | None, most: int = SHAPES) -> list[Shape]:
    """At most so many shapes that together make these steps the shortest, picked greedily. steps: alike but for their
    samples; room: bytes for activations by rank, None: no limit.
    """
    candidates = _candidates(steps[0], room)
    if not candidates:
        return []
    table = np.array([row for step in steps for row in _gains(Score(step, room), candidates)])
    chosen: list[int] = []
    best = np.ones(len(table))
    while len(chosen) < most:
        means = np.minimum(best[:, None], table).mean(axis=0)
        pick = int(means.argmin())
        if means[pick] >= best.mean():
            break
        chosen.append(pick)
        best = np.minimum(best, table[:, pick])
    return [tuple(candidates[pick].tolist()) for pick in chosen]


def _candidates(step: SampleCosts, room: Sequence[float] | None) -> list[Floats]:
    fluid = [np.array(one) ** power for one in fluid_shapes(step, room) for power in POWERS]
    rising = [np.ones(step.microbatches), *ramps(step.microbatches, len(step.orders))]
    both = [np.minimum(ramp, drain[::-1]) for ramp in rising for drain in rising][1:]
    return [np.maximum(one, min(PARTS)) for one in (*fluid, *both)]


def _gains(score: Score, candidates: Sequence[Floats]) -> list[list[float]]:
    """By replica what filling to each candidate makes of its seconds, in times those of equal microbatches."""
    found = []
    for start in starts(score, ()):
        ways = start.filling(candidates)
        row = [figures[1] / start.figures[1] if not figures[0] else 1.0 for figures in score.each(ways)]
        found.append([min(1.0, gain) for gain in row])
    return found
