"""The published schedules as they are: what a plan has to be at least as good as.

Terms: see csc.planning.ways and csc.planning.screen. A search makes its own orders of these, with B and W apart
wherever there is room. As published, they may hold less; and they are few, so all of them are looked at, whatever
else a search has time for.

    published(problem, ways, fixed, budget) -> [Trial]      those that fit, the fastest first, FEW at most
    splits(problem, home)                   -> [Stages]     blind to what is frozen, by work, by csc's bound
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from csc.errors import InputError
from csc.planning.branches import Stages
from csc.planning.budget import Budget
from csc.planning.contiguous import contiguous
from csc.planning.problem import Problem, pipeline
from csc.planning.schedules.named import ORDERS
from csc.planning.schedules.work import WorkTables, excess, makespan, peaks, reserve, room
from csc.planning.screen import Trial
from csc.planning.ways import Placement, even

FEW = 2
# With one stage on each rank, and with more; GPipe is never faster than those that hold less.
ALONE, NAMES = ("1f1b", "zb-h1", "zb-h2", "eager-1f1b"), ("interleaved-1f1b", "interleaved-zb", "zb-v")
CUTS = 20_000  # stages times units up to which cuts by csc's bound are made


def published(problem: Problem, ways: Sequence[Placement], fixed: Stages | None, budget: Budget) -> list[Trial]:
    """Of every placement, every schedule that runs on it and every split, as long as the budget allows it."""
    found: list[Trial] = []
    for home in ways:
        for stages in [fixed] if fixed else splits(problem, home):
            found += _on(problem, stages, home, budget)
            if found and budget.spent:
                return _best(problem, found)
    return _best(problem, found)


def _best(problem: Problem, found: Sequence[Trial]) -> list[Trial]:
    kept: list[Trial] = []
    for trial in sorted(found, key=lambda each: each.seconds):
        if len(kept) < FEW and trial.seconds < math.inf and _fits(problem, trial):
            kept.append(trial)
    return kept


def splits(problem: Problem, home: Placement) -> list[Stages]:
    """In order of execution."""
    found = even(problem, home)
    if not problem.kinds and len(home) * len(problem.units) <= CUTS:
        aware = contiguous(replace(problem, ranks=len(home), memory=math.inf))
        found += [] if aware is None else [aware]
    return list(dict.fromkeys(found))


def _on(problem: Problem, stages: Stages, home: Placement, budget: Budget) -> Iterator[Trial]:
    work = WorkTables.of(pipeline(problem, stages, home), home, problem.microbatches)
    try:
        allowed = room(work, problem.limits)
    except InputError:
        return
    for name in NAMES if len(home) > problem.ranks else ALONE:
        if budget.spent and name not in (ALONE[0], NAMES[0]):
            return
        try:
            orders = ORDERS[name](work, allowed)
        except InputError:
            continue  # it wants its stages elsewhere
        budget.spend(len(work.lanes) * work.microbatches)
        yield Trial(stages, home, makespan(work, orders), name, work, orders, _held(work, orders, allowed))


def _held(work: WorkTables, orders: Sequence[Sequence[int]], allowed: Sequence[float] | None) -> list[float] | None:
    """What the orders hold themselves, so that changes of them leave the rest to messages; enough for other orders."""
    if allowed is None:
        return None
    needed = (reserve(work, rank).most for rank in range(work.ranks))
    return [min(has, max(each)) for has, *each in zip(allowed, peaks(work, orders), needed)]


def _fits(problem: Problem, trial: Trial) -> bool:
    allowed = room(trial.work, problem.limits)
    if allowed is None:
        return True
    if problem.waiting:
        return excess(trial.work, trial.orders, allowed) is None
    return all(most <= has * (1 + 1e-9) for most, has in zip(peaks(trial.work, trial.orders), allowed))
