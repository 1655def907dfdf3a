"""Stages on any ranks: what the turns and the V of published schedules leave out.

An encoder's layers on a rank of the language model that would wait, three stages on one rank and one on another: from
the best plans of fixed placements on, stages are moved, swapped, divided and put together. Every change is simulated,
with an order made for it under the memory limit, unless a bound already says that it takes too long.

    rearranged(problem, best, trials, budget, effort)   -> Trial: the best one, or a faster one found so

The search goes on from the fastest arrangement that has changes left, and keeps those that are a little slower than the
best, too: two changes may help where neither does alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from csc.errors import InputError
from csc.planning.branches import branches
from csc.planning.budget import Budget
from csc.planning.partition_bound import shared_lower_bound
from csc.planning.problem import Problem, pipeline
from csc.planning.schedules.auto import lower_bound as makespan_bound
from csc.planning.schedules.work import WorkTables, room
from csc.planning.screen import Style, Trial, polish, screen
from csc.planning.stage_moves import Arrangement, changes
from csc.planning.unit_moves import homes

# Orders that suit any placement; of these, the best few for the first arrangement are made for all that follow.
STYLES: tuple[Style, ...] = (
    ((0, 1, 2), None, 0.0, False),
    ((1, 0, 2), None, 0.5, False),
    ((0, 1, 2), 1.0, 0.5, False),
    ((0, 1, 2), 2.0, 0.0, False),
    ((0, 1, 2), None, 0.0, True),
)
TRIED = 2  # of them, where all are too many
STARTS = 2  # trials that are gone on from beside the best
SLACK = 1.1  # times the best step, up to which an arrangement is gone on from
PATIENCE = 400  # arrangements simulated without a better one
KEPT, LOOK = 10, 100  # arrangements that a closer look is worth, with so many actions for each of the step, or fewer
ACTIONS = 800_000  # simulated by default; as many microseconds
STEPS = 20  # seconds of a search for each second of a step: what a plan that is 2 % slower loses in 1,000 steps
CLOSER = 0.3  # of these for a closer look
WORTH = 400  # actions for each of the best step: with fewer, only some arrangements could be looked at
APART, SMALL = 20, 8  # units up to which each is also tried as a stage of its own, and all styles are
NEAR = 1.003  # times what no plan can beat, where it is not worth while
GAIN = 0.997  # an arrangement has to be so much faster: it may have more stages
PRICED = 2_000  # actions simulated, in time, to price an arrangement, before any order is made of it


def rearranged(problem: Problem, best: Trial, trials: Sequence[Trial], budget: Budget, effort: float = 1.0) -> Trial:
    """The best trial after changes of it, and of the first of the others, that shorten the step. Nothing where it takes
    so many actions that few changes could be tried.
    """
    size = len(best.work.lanes) * problem.microbatches
    part = budget.at_most(min(ACTIONS * effort, 1e6 * STEPS * best.seconds))
    if WORTH * size > ACTIONS * effort or part.spent:
        return best
    enough = shared_lower_bound(problem).seconds * NEAR
    if best.seconds <= enough:
        return best
    budget.tell("moving stages", best.seconds)
    starts = [best, *sorted(trials, key=lambda trial: trial.seconds)[:STARTS]]
    found = _searched(problem, starts, enough, part.part(1 - CLOSER))
    limit = GAIN * best.seconds
    found = found[: max(1, int(part.left / (LOOK * size)))]
    for number, trial in enumerate(found):
        other = polish(problem, trial, enough, part.part(1 / (len(found) - number)), effort)
        if other.seconds < limit:
            best, limit = other, other.seconds
    return best


def _searched(problem: Problem, trials: Sequence[Trial], enough: float, budget: Budget) -> list[Trial]:
    """The fastest arrangements found, the trials' own among them, KEPT at most. It ends when one takes `enough`."""
    found = branches(problem)
    styles = _styles(problem, trials[0], budget)
    open_: list[tuple[float, int, Iterator[Arrangement]]] = []
    known: dict[Arrangement, Trial | None] = {}

    def add(arrangement: Arrangement, trial: Trial) -> None:
        known[arrangement] = trial
        heappush(open_, (trial.seconds, len(known), changes(found, arrangement, problem.ranks)))

    for trial in sorted([*trials, *_apart(problem, trials[0], styles, budget)], key=lambda trial: trial.seconds):
        arrangement = Arrangement(trial.stages, trial.placement)
        if arrangement not in known:
            add(arrangement, trial)
    best, idle = open_[0][0], 0
    while open_ and open_[0][0] <= best * SLACK and best > enough and idle < PATIENCE and not budget.spent:
        other = next(open_[0][2], None)
        if other is None:
            heappop(open_)
        elif other not in known:
            known[other] = None
            if _possible(problem, other, best * SLACK, budget):
                idle += 1
                made = screen(problem, other.stages, other.placement, styles, best * SLACK, budget)
                if made is not None and made.seconds < best * SLACK:
                    add(other, made)
                    best, idle = (made.seconds, 0) if made.seconds < best * (1 - 1e-6) else (best, idle)
    kept = [trial for trial in known.values() if trial is not None]
    return sorted(kept, key=lambda trial: (trial.seconds, len(trial.stages)))[:KEPT]


def _styles(problem: Problem, trial: Trial, budget: Budget) -> tuple[Style, ...]:
    """The trial's own style, and those that suit it best."""
    made: list[tuple[float, int, Style]] = []
    for style in STYLES:
        other = screen(problem, trial.stages, trial.placement, (style,), budget=budget)
        if other is not None:
            made.append((other.seconds, len(made), style))
    count = len(STYLES) if len(problem.units) <= SMALL else TRIED
    return tuple(dict.fromkeys([trial.style, *(style for *_, style in sorted(made)[:count])]))


def _apart(problem: Problem, trial: Trial, styles: Sequence[Style], budget: Budget) -> Iterator[Trial]:
    """The trial with every unit as a stage of its own, where these are few."""
    if len(problem.units) <= APART:
        home = [trial.placement[stage] for stage in homes(trial.stages)]
        other = screen(problem, tuple((u,) for u in range(len(home))), home, styles, budget=budget)
        yield from [other] if other is not None else []


def _possible(problem: Problem, other: Arrangement, below: float, budget: Budget) -> bool:
    """Whether it may take less than `below` seconds: its ranks' work, then the ways to it and back."""
    loads = [0.0] * problem.ranks
    for units, rank in zip(other.stages, other.placement):
        own = problem.units_on[problem.kind_of[rank]]
        loads[rank] += sum(own[u].work for u in units)
    if max(loads) * sum(problem.scale or (1.0,) * problem.microbatches) >= below:
        return False
    work = WorkTables.of(pipeline(problem, other.stages, other.placement), other.placement, problem.microbatches)
    budget.spend(PRICED)
    try:
        return makespan_bound(work, room(work, problem.limits)) < below
    except InputError:  # it does not fit
        return False
