"""A quick look at what a partition can do: greedy orders under a few rules, and small changes of the partition.

Terms: see csc.planning.schedules.work and greedy. A *trial* is a partition on its ranks with the best order found.

    screen(problem, stages, placement)     -> Trial, or None if nothing fits
    climb(problem, trial, effort)          -> Trial: after moving units between neighbouring stages
    polish(problem, trial, effort)         -> Trial: after local search on the order itself
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from csc.errors import InputError
from csc.ir.schedule import Schedule
from csc.planning.branches import Stages, branches
from csc.planning.moves import moved, moves
from csc.planning.problem import Problem, pipeline
from csc.planning.schedules.finish import finish
from csc.planning.schedules.greedy import Rule, run
from csc.planning.schedules.memory import room
from csc.planning.schedules.named import depths
from csc.planning.schedules.search import improve
from csc.planning.schedules.work import Work

# Urgency of F, of B and of W (the least goes first); in flight as a multiple of the depth (None: as memory allows);
# patience as in csc.planning.schedules.greedy.
Style = tuple[tuple[int, int, int], float | None, float]
FEW: tuple[Style, ...] = (
    ((0, 1, 2), None, 0.0),
    ((0, 1, 2), 1.0, 0.0),
    ((0, 1, 2), 1.0, 0.5),
    ((0, 1, 2), 2.0, 0.0),
    ((1, 0, 2), None, 0.5),
)
STYLES: tuple[Style, ...] = tuple(product(((0, 1, 2), (1, 0, 2)), (None, 1.0, 1.5, 2.0), (0.0, 0.5)))

CLIMB = 120_000  # actions put in order while moving units, by default
POLISH = 500_000  # actions simulated while changing the order, by default


@dataclass(frozen=True)
class Trial:
    """stages, the rank of each, and for each rank the lanes it runs in order; seconds: their makespan."""

    stages: Stages
    placement: tuple[int, ...]
    seconds: float
    style: Style
    work: Work
    orders: list[list[int]]

    def schedule(self, problem: Problem) -> Schedule:
        """The orders with their messages."""
        return finish("auto", self.work, self.orders, problem.memory)


def screen(problem: Problem, stages: Stages, placement: Sequence[int], styles: Sequence[Style] = FEW) -> Trial | None:
    """The best of the greedy orders. None if a rank's memory cannot hold one microbatch at a time."""
    work = Work.of(pipeline(problem, stages), placement, problem.microbatches)
    try:
        allowed = room(work, problem.memory)
    except InputError:
        return None
    depth, best = depths(work), None
    for style in styles:
        urgency, ahead, patience = style
        priority = [
            [urgency[kind] * work.microbatches * 2.0 + k for k in range(work.microbatches)] for kind in range(3)
        ]
        orders, seconds = run(
            work,
            Rule(
                [priority[kind] for _ in stages for kind in range(3)],
                in_flight=None if ahead is None else [max(1, round(ahead * d)) for d in depth],
                memory=allowed,
                patience=patience,
            ),
        )
        if best is None or seconds < best.seconds * (1 - 1e-9):
            best = Trial(stages, tuple(placement), seconds, style, work, orders)
    return best


def climb(problem: Problem, trial: Trial, effort: float = 1.0) -> Trial:
    """Move one unit at a time to a neighbouring stage while that shortens the step under the trial's own rule."""
    found = branches(problem)
    left = max(4, int(CLIMB * effort / (len(trial.work.lanes) * problem.microbatches)))
    better = True
    while better and left > 0:
        better = False
        for unit, source, target in list(moves(found, trial.stages)):
            if left <= 0:
                break
            if source >= len(trial.stages) or unit not in trial.stages[source] or len(trial.stages[source]) == 1:
                continue
            stages = moved(found, trial.stages, unit, target)
            if stages is None:
                continue
            left -= 1
            other = screen(problem, stages, trial.placement, (trial.style,))
            if other is not None and other.seconds < trial.seconds * (1 - 1e-6):
                trial, better = other, True
    return trial


def polish(problem: Problem, trial: Trial, enough: float, effort: float = 1.0) -> Trial:
    """Local search on the order (csc.planning.schedules.search), until the makespan is `enough`."""
    allowed = room(trial.work, problem.memory)
    trials = int(POLISH * effort / (len(trial.work.lanes) * problem.microbatches))
    orders, seconds = improve(trial.work, trial.orders, allowed, trials, random.Random(0), enough)
    return Trial(trial.stages, trial.placement, seconds, trial.style, trial.work, orders)
