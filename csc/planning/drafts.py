"""Drafts: what even cuts come to on every placement, each under the orders that do best there.

Terms: see csc.planning.ways and csc.planning.screen.

    drafts(problem, ways, fixed, budget) -> [Trial]      those that fit, the fastest first

Where a step has many actions, the search of partitions takes so long that few of them are ever ordered, and most of the
time on few placements. A draft searches for nothing: units evened out by work over all stages of a placement, and
a greedy order in the turns of the published schedule with B and W apart. It takes a small part of the time, and where
stages are many it is often the better plan. Of the placements on which that is fastest more cuts are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from csc.planning.branches import Stages
from csc.planning.budget import Budget
from csc.planning.contiguous import contiguous
from csc.planning.problem import Problem
from csc.planning.screen import NamedScheduleGreedy, Style, Trial, screen
from csc.planning.ways import Placement, even, spread

CLOSER = 3  # placements of which more cuts are looked at
LARGE = 10_000  # actions of a step, beyond which only these numbers of stages on a rank are looked at
SOME = (1, 2, 4, 6, 8, 12)
ALONE: tuple[Style, ...] = ("1f1b", "zb-h1", "eager-1f1b", ((0, 1, 2), None, 0.0, False))
TURNS: tuple[Style, ...] = (NamedScheduleGreedy("interleaved-zb", fused=False),)
FOLDED: tuple[Style, ...] = ("zb-v",)


def drafts(problem: Problem, ways: Sequence[Placement], fixed: Stages | None, budget: Budget) -> list[Trial]:
    """fixed: the stages, if they are given. Once something is found it ends when the budget is spent."""
    found: dict[Placement, list[Trial]] = {}

    def look(home: Placement, cuts: Sequence[Stages]) -> None:
        for stages in cuts:
            best = min((each.seconds for listed in found.values() for each in listed), default=math.inf)
            if found and budget.spent:
                return
            trial = screen(problem, stages, home, _styles(problem, home), best, budget)
            if trial is not None:
                found.setdefault(home, []).append(trial)

    for home in ways if fixed else _some(problem, ways):
        look(home, [fixed] if fixed else _first(problem, home))
    if not fixed and not problem.kinds:
        for home in sorted(found, key=lambda each: found[each][0].seconds)[:CLOSER]:
            look(home, spread(problem, home))
    return sorted((trial for listed in found.values() for trial in listed), key=lambda each: each.seconds)


def _some(problem: Problem, ways: Sequence[Placement]) -> list[Placement]:
    actions = 3 * problem.microbatches
    return [home for home in ways if actions * len(home) <= LARGE or len(home) // problem.ranks in SOME]


def _first(problem: Problem, home: Placement) -> list[Stages]:
    found = even(problem, home)[-1:]  # by all work
    if len(home) == problem.ranks and problem.memory is not None and not problem.kinds:
        roomy = contiguous(problem)
        found += [] if roomy is None else [roomy]
    return list(dict.fromkeys(found))


def _styles(problem: Problem, home: Placement) -> Sequence[Style]:
    ranks = problem.ranks
    if len(home) == ranks:
        return ALONE
    return TURNS if home == home[:ranks] * (len(home) // ranks) else FOLDED
