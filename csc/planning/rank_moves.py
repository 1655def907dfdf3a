"""Small changes of a placement: two ranks that differ, or stand on different nodes, change places.

Terms: see csc.planning.screen.

    swapped(problem, trial, budget) -> Trial
"""

from __future__ import annotations

from collections.abc import Iterator

from csc.planning.budget import Budget
from csc.planning.problem import Problem
from csc.planning.screen import Trial, screen


def swapped(problem: Problem, trial: Trial, budget: Budget) -> Trial:
    """The trial after the swaps that shorten its step, until the budget is spent. Nothing where ranks are alike and
    in a row.
    """
    better = True
    while better:
        better = False
        for one, other in _pairs(problem):
            if budget.spent:
                return trial
            change = {one: other, other: one}
            home = [change.get(rank, rank) for rank in trial.placement]
            tried = screen(problem, trial.stages, home, (trial.style,), trial.seconds, budget)
            if tried is not None and tried.seconds < trial.seconds * (1 - 1e-6):
                trial, better = tried, True
    return trial


def _pairs(problem: Problem) -> Iterator[tuple[int, int]]:
    places = problem.network.places
    for one in range(problem.ranks):
        for other in range(one + 1, problem.ranks):
            apart = bool(places) and places[one].nodes != places[other].nodes
            if apart or problem.kind_of[one] != problem.kind_of[other]:
                yield one, other
