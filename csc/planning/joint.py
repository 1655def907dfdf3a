"""The search of schedule `auto`: partitions, placements and orders together.

Terms: see csc.planning.ways and csc.planning.screen. A *round* looks at many trials; the best of it go on to the next.

    searched(problem, ways, fixed, budget, effort) -> JointPlan

From many trials, looked at quickly, to few, searched well: the partitions of every placement under a few orders; units
moved between stages of the best; the full search of orders on what is left; stages of the best on other ranks than
those of the placements (csc.planning.free_placement). Nothing depends on time or chance, unless
the budget's clock ends the search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from csc.errors import InputError
from csc.ir.schedule import Schedule
from csc.planning.branches import Stages
from csc.planning.budget import Budget
from csc.planning.drafts import drafts
from csc.planning.free_placement import rearranged
from csc.planning.partition import candidates
from csc.planning.partition_bound import Bound, lower_bound
from csc.planning.problem import Problem, pipeline
from csc.planning.published import published
from csc.planning.rank_moves import swapped
from csc.planning.schedules.auto import auto, finish, searched_orders
from csc.planning.schedules.greedy import spared
from csc.planning.schedules.work import start_times, state
from csc.planning.screen import FEW, GREEDY, QUICK, TURNS, Style, Trial, climb, cost, fitting, polish, screen
from csc.planning.ways import Placement, one, partitions

ACTIONS = 8e6  # simulated by default, below a microsecond each
AT_LEAST = 16  # for each action of the step with one stage on a rank, however many these are
FINALISTS = 2  # trials that get more than a quick look
SHARED = 0.999  # several stages on a rank have to be this much faster
SEARCH_GAINS = 1.05  # at most by this factor is a plan expected to get faster after a quick look
AUTO = 500  # actions that the search of orders simulates for each action of the step
RULES = 30  # of these, without which it could only try published orders again, and fewer than ten rules
# Of what is left of the budget, at most this goes into: one stage on a rank and two; more of them; what becomes of the
# best with one stage on a rank, if others are as fast; and of that a closer look, moves of units, changes of the order.
FIRST, DEEP, HALF = 0.3, 0.25, 0.5
CLOSER, MOVED, CHANGED = 0.3, 0.3, 0.4
PAIRED = 0.1  # at most, into partitions for two stages on a rank, for each placement
PUBLISHED = 0.05  # at most, into schedules as they are published
DRAFTED = 0.3  # the same into drafts
SWAPPED = 0.2  # the same where ranks differ


@dataclass(frozen=True)
class JointPlan:
    """The best plan. bound: of plans with one stage on a rank, None if there are fewer units than ranks."""

    seconds: float
    stages: Stages
    placement: Placement
    schedule: Schedule
    bound: Bound | None


def budget_of(problem: Problem, effort: float) -> float:
    """Actions that a search simulates, all in all."""
    return max(ACTIONS * effort, float(AT_LEAST * 3 * problem.ranks * problem.microbatches))


def searched(
    problem: Problem,
    ways: Sequence[Placement],
    fixed: Stages | None,
    budget: Budget,
    effort: float = 1.0,
    swaps: bool = False,
    free: bool = False,
) -> JointPlan:
    """The best plan found. fixed: the stages, if they are given. swaps: ranks may change places. free: and stages may
    stand on any rank, in any number. InputError if the memory is too small for any.
    """
    bound = lower_bound(problem) if len(problem.units) >= problem.ranks else None
    enough = bound.seconds * (1 + 1e-6) if bound else 0.0
    known = published(problem, ways, fixed, budget.part(PUBLISHED))
    known += drafts(problem, ways, fixed, budget.part(DRAFTED))
    trials = [*known, *_screened(problem, ways, fixed, bound, budget)]
    if not trials and problem.waiting:
        raise InputError("nothing fits with the messages that wait", "plan", "Allow more memory, or more ranks")
    single = [trial for trial in trials if len(trial.placement) == problem.ranks]
    several = [trial for trial in trials if len(trial.placement) != problem.ranks]
    if not trials:  # auto says why
        stages = fixed or (partitions(problem, ways[0], [one]) if problem.kinds else candidates(problem, one))[0]
        auto(pipeline(problem, stages, ways[0]), ways[0], problem.microbatches, problem.limits)
    part = budget.part(HALF if several else 1.0)
    best_single = _refined(problem, single, enough, fixed is None, swaps, part, effort)
    limit = SHARED * best_single.seconds if best_single else math.inf
    close = [trial for trial in several if trial.seconds < SEARCH_GAINS * limit]
    best_several = _refined(problem, close, 0.0, fixed is None, swaps, budget, effort)
    best = best_several if best_several is not None and best_several.seconds < limit else best_single
    assert best is not None
    if free:
        best = rearranged(problem, best, trials, budget, effort)
    orders = spared(best.work, best.orders)
    fits = fitting(problem, best.work)
    if fits is not None and not fits(orders, start_times(best.work, orders) or []):
        orders = best.orders
    return JointPlan(
        best.seconds, best.stages, best.placement, finish("auto", best.work, orders, problem.limits), bound
    )


def _screened(
    problem: Problem, ways: Sequence[Placement], fixed: Stages | None, bound: Bound | None, budget: Budget
) -> list[Trial]:
    """A first look at every placement. Where the budget is small for that, first partitions come before second ones."""
    ranks = problem.ranks
    shallow = [home for home in ways if len(home) <= 2 * ranks]
    found: list[Trial] = []
    known: dict[int, list[Stages]] = {}
    for homes, share in ((shallow, FIRST), ([home for home in ways if home not in shallow], DEEP)):
        part = budget.part(share)
        tried = []  # (which of the placement's partitions, the placement, the partition)
        for home in homes:
            listed = _tried(problem, home, fixed, bound, known, PAIRED * budget.left)
            tried += [(turn, home, stages) for turn, stages in enumerate(listed)]
        size = 3 * problem.microbatches
        wanted = sum(size * len(home) * sum(map(cost, _styles(home, ranks))) for _, home, _ in tried)
        if wanted > part.left:
            tried.sort(key=lambda each: each[0])
        for _, home, stages in tried:
            if found and part.spent:
                break
            styles = _styles(home, ranks) if wanted <= part.left else QUICK
            trial = screen(problem, stages, home, styles, budget=part)
            if trial is not None:
                found.append(trial)
                budget.tell(f"{len(home) // ranks} on a rank", min(each.seconds for each in found))
    return found


def _tried(
    problem: Problem, home: Placement, fixed: Stages | None, bound: Bound | None, known: dict[int, list[Stages]],
    actions: float,
) -> list[Stages]:  # fmt: skip
    """The partitions for a placement."""
    if fixed:
        return [fixed]
    found = partitions(problem, home, [None, one], known, actions)
    if len(home) == problem.ranks and bound and not problem.kinds:
        found = [bound.stages, *found]
    return list(dict.fromkeys(found))


def _styles(home: Placement, ranks: int) -> Sequence[Style]:
    if len(home) <= 2 * ranks:
        return FEW if len(home) <= ranks else (*FEW, *TURNS)
    return TURNS if home == home[:ranks] * (len(home) // ranks) else FEW  # turns have no orders for other placements


def _refined(
    problem: Problem,
    trials: Sequence[Trial],
    enough: float,
    climbing: bool,
    swaps: bool,
    budget: Budget,
    effort: float,
) -> Trial | None:
    """What the full search makes of the best of these trials."""
    ranked = sorted(trials, key=lambda trial: trial.seconds)
    if not ranked:
        return None
    closer = budget.part(CLOSER)
    best = ranked[0]
    for trial in _finalists(ranked):
        if closer.spent:
            break
        other = screen(problem, trial.stages, trial.placement, GREEDY, trial.seconds, closer)
        best = min(best, trial, other or trial, key=lambda each: each.seconds)
    if swaps and best.seconds > enough:
        best = swapped(problem, best, budget.part(SWAPPED))
    if climbing and best.seconds > enough:
        best = climb(problem, best, budget.part(MOVED), effort)
    budget.tell("changing the order", best.seconds)
    best = polish(problem, best, enough, budget.part(CHANGED), effort)
    size = len(best.work.lanes) * problem.microbatches
    allowed = int(min(AUTO * effort * size, budget.left))
    if best.seconds > enough and allowed > RULES * size and not budget.late:
        best = _reordered(problem, best, allowed)
        budget.spend(allowed)
    return best


def _reordered(problem: Problem, trial: Trial, actions: int) -> Trial:
    """The trial under the orders that csc.planning.schedules.auto finds, if these are faster and fit."""
    memory = None if trial.room is None else [has + fixed for has, fixed in zip(trial.room, state(trial.work))]
    found = searched_orders(trial.work, memory, actions)
    fits = fitting(problem, found.work)
    if found.seconds >= trial.seconds or not (
        fits is None or fits(found.orders, start_times(found.work, found.orders) or [])
    ):
        return trial
    return replace(trial, seconds=found.seconds, work=found.work, orders=found.orders)


def _finalists(ranked: Sequence[Trial]) -> list[Trial]:
    """The best trials, and the best with half as many stages on a rank or fewer: those with fewer have shorter orders,
    of which more can be looked at.
    """
    found = list(ranked[:FINALISTS])
    found += [trial for trial in ranked if 2 * len(trial.placement) <= len(ranked[0].placement)][:1]
    return list({id(trial): trial for trial in found}.values())
