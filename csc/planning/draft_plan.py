"""A plan in a tenth of the time: what even cuts come to, put in order once (csc.planning.drafts).

draft(problem, limit) -> PipelinePlan or None
drafted(problem, numbers, budget) -> Drafted or None     the best draft of `numbers`, as the problem times it
makes_room(problem) -> bool          whether it may be faster to have room to keep what ZeRO-3 has gathered
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from csc.errors import InputError
from csc.ir.schedule import Schedule
from csc.planning.budget import Budget
from csc.planning.drafts import drafts
from csc.planning.figures import check_figures
from csc.planning.gathers import held_whole, seconds_waited_for, with_gathers
from csc.planning.partition_bound import check_ranks
from csc.planning.pipeline_plan import PipelinePlan, excess, finished
from csc.planning.problem import Problem, pipeline
from csc.planning.schedules.auto import finish
from csc.planning.screen import Trial
from csc.planning.ways import placements
from csc.simulation.simulate import makespan

DRAFTED = 2e6  # actions simulated for a draft, a second or two of an idle machine
MARGIN = 1.1  # times what a draft holds too much, which the next one has less
WAITED_FOR = 0.01  # of a step: where gathers of a draft take more, another leaves room to keep all stages


@dataclass(frozen=True)
class Drafted:
    """numbers: that it is the best draft of. seconds: of a step. waits: for gathers, of these."""

    numbers: Problem
    seconds: float
    waits: float
    trial: Trial
    schedule: Schedule


def draft(problem: Problem, limit: float | None = None) -> PipelinePlan | None:
    """The best of what even cuts come to (csc.planning.drafts), which memory is looked at but not made room for; None
    if none of it fits. Without `bound`, which takes longer than the draft. limit: seconds, after which it is the best
    of what was looked at.
    """
    check_figures(problem)
    check_ranks(problem)
    budget = Budget(DRAFTED, limit)
    found: list[Drafted] = []
    for numbers in [problem, held_whole(problem)] if makes_room(problem) else [problem]:
        one = drafted(problem, numbers, budget)
        if one is not None:
            found.append(one)
            if one.waits <= WAITED_FOR * one.seconds:
                break
    for one in sorted(found, key=lambda each: each.seconds):
        made = fitting(problem, one, bounded=False)
        if made is not None:
            return made
    return None


def fitting(problem: Problem, one: Drafted, bounded: bool = True) -> PipelinePlan | None:
    """The plan of a draft; where messages that wait have no room beside it, of another that leaves them some; None if
    that has none either. bounded: as of csc.planning.pipeline_plan.finished.
    """
    made = _plan_of(problem, one, bounded)
    over = 0.0 if made is None else excess(problem, made)
    if over > 0:
        again = drafted(problem, one.numbers.less(over * MARGIN), Budget(DRAFTED))
        made = None if again is None else _plan_of(problem, again, bounded)
    return made if made is not None and excess(problem, made) <= 0 else None


def _plan_of(problem: Problem, one: Drafted, bounded: bool) -> PipelinePlan | None:
    with suppress(InputError):  # there is no room for what gathers make whole
        return finished(problem, one.trial.stages, one.trial.placement, one.schedule, bounded=bounded)
    return None


def makes_room(problem: Problem) -> bool:
    """Whether it may be faster to have room to keep what was gathered than to have more microbatches wait."""
    return problem.memory is not None and problem.ranks > 1 and any(unit.gathered for unit in problem.units)


def drafted(problem: Problem, numbers: Problem, budget: Budget) -> Drafted | None:
    """What the best draft of `numbers` comes to, which is the problem or holds more."""
    trials = drafts(numbers, placements(problem, "auto", None, None, None), None, budget)
    if not trials:
        return None
    trial = trials[0]
    own = pipeline(problem, trial.stages, trial.placement)
    schedule = finish("auto", trial.work, trial.orders, numbers.limits)
    schedule = with_gathers(own, schedule, problem.limits, one_by_one=False)
    return Drafted(numbers, makespan(own, schedule), seconds_waited_for(own, schedule), trial, schedule)
