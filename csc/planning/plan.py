"""The plan: stages, the rank of each, and the order of work, with what they are expected to take.

Terms: see csc.planning.problem and csc.planning.branches. The *bound* is what no plan with one stage on each rank can
beat (csc.planning.partition_bound); the *shared bound* holds for every plan, also with several stages on a rank. The
*bubble* of a rank is the part of the makespan in which it has nothing to do.

    plan(problem, schedule, chunks, stages, placement, effort, limit, tell) -> PipelinePlan

A named schedule follows from the partition, so partitions are what is searched; with "auto" placements and orders are
searched too (csc.planning.joint). That search does not see gathers, so it leaves room to keep what was gathered; where
there is none, or a draft without that room is about as fast, it is made without, too. Nothing depends on time or
chance, unless the limit ends the search: the same problem gives the same plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from csc.errors import CscError, InputError
from csc.ir.schedule import Schedule
from csc.planning.branches import Stages, branches
from csc.planning.budget import Budget, Tell
from csc.planning.draft_plan import DRAFTED, drafted, fitting, makes_room
from csc.planning.figures import check_asked, check_figures
from csc.planning.gathers import held_whole, on_one_rank, with_gathers
from csc.planning.joint import budget_of, searched
from csc.planning.partition import InFlight, candidates
from csc.planning.partition_bound import check_ranks
from csc.planning.pipeline_plan import PipelinePlan, check_room, excess, finished, verified
from csc.planning.problem import Problem, pipeline
from csc.planning.schedules import SCHEDULES, timed
from csc.planning.unit_moves import homes, moved, neighbours
from csc.planning.ways import Placement, checked, one, partitions, placements
from csc.simulation.pipeline import peak_memory
from csc.simulation.simulate import makespan

MOVES = 60  # partitions tried around the best one under a named schedule
MARGINS = (1.1, 1.5, 2.0, 4.0)  # times what a plan holds too much, which the next one has less
ALIKE = 1.03  # times a plan's step: what takes less as a draft may be faster as a plan
LIMIT = 300.0  # seconds after which a search ends with what it has


@dataclass(frozen=True)
class ScheduleChoice:
    """How a schedule follows from stages and their placement. seconds: its makespan; CscError where it does not fit."""

    seconds: Callable[[Stages, Placement], float]
    schedule: Callable[[Stages, Placement], Schedule]


def plan(
    problem: Problem,
    schedule: str | Schedule = "auto",
    chunks: int | None = None,
    stages: Sequence[Sequence[int]] | None = None,
    placement: Sequence[int] | None = None,
    effort: float = 1.0,
    limit: float | None = LIMIT,
    tell: Tell | None = None,
) -> PipelinePlan:
    """The plan with the least makespan found under problem.memory.

    schedule: a name of csc.planning.schedules.SCHEDULES, or a whole schedule, which is then kept. chunks: stages on
    each rank; None: as many as the schedule is made for, and with "auto" as many as is fastest. stages: the units of
    each stage, kept as they are. placement: the rank of each stage, kept as it is. effort: how much to search; 1.
    limit: seconds after which the search ends with the best plan that it has; None: never. tell: as of
    csc.planning.budget.

    InputError for more stages than units, stages that leave units out or wait for each other, and a memory limit that
    nothing fits: the least that would, and what takes the space. ScheduleError for a schedule that does not do the work
    of the stages.
    """
    check_figures(problem)
    check_asked(chunks, effort, limit)
    problem = replace(problem, ranks=int(problem.ranks), microbatches=int(problem.microbatches))  # of NumPy, for one

    end = math.inf if limit is None else time.monotonic() + limit

    def planned(problem: Problem, counted: bool) -> PipelinePlan:
        budget = Budget(budget_of(problem, effort), max(0.0, end - time.monotonic()), tell)
        return _planned(problem, schedule, chunks, stages, placement, effort, budget, counted)

    if schedule != "auto" or not makes_room(problem):
        return _with_messages(problem, planned, isinstance(schedule, Schedule))
    return _with_room_or_not(problem, planned, (chunks, stages, placement) == (None, None, None), end)


def _with_room_or_not(
    problem: Problem, planned: Callable[[Problem, bool], PipelinePlan], open_: bool, end: float
) -> PipelinePlan:
    """With room to keep what was gathered; without, where there is none or a draft without is about as fast. open_:
    nothing of the plan is given, so that there are drafts. end: of the search.
    """
    found: list[PipelinePlan] = []
    with suppress(InputError):
        whole = _with_messages(held_whole(problem), planned, False)
        found.append(finished(problem, whole.stages, whole.placement, whole.schedule))
    even = drafted(problem, problem, Budget(DRAFTED, max(0.0, end - time.monotonic()))) if open_ else None
    refused: InputError | None = None
    if not (found and open_) or (even is not None and even.seconds < ALIKE * found[0].makespan):
        try:
            found.append(_with_messages(problem, planned, False))
        except InputError as error:
            refused = error
    if even is not None and all(even.seconds < other.makespan for other in found):
        made = fitting(problem, even)
        found += [] if made is None else [made]
    if not found:
        assert refused is not None
        raise refused
    return min(found, key=lambda each: each.makespan)


def _with_messages(problem: Problem, planned: Callable[[Problem, bool], PipelinePlan], given: bool) -> PipelinePlan:
    """A plan in whose memory messages that wait have room, too. planned: of a problem, and whether they are counted
    while it searches. given: the schedule is.
    """
    if problem.waiting and problem.memory is not None and not given:
        with suppress(InputError):
            return planned(problem, True)
    found = planned(problem, False)
    kept = problem
    for margin in () if given else MARGINS:
        over = excess(problem, found)
        if over <= 0:
            break
        kept = kept.less(over * margin)
        with suppress(InputError):
            found = planned(kept, False)
    check_room(problem, found.peak_memory, "with the messages that wait", "Allow more memory, or more ranks")
    return found


def _planned(
    problem: Problem,
    schedule: str | Schedule,
    chunks: int | None,
    stages: Sequence[Sequence[int]] | None,
    placement: Sequence[int] | None,
    effort: float,
    budget: Budget,
    counted: bool,
) -> PipelinePlan:
    """The plan. counted: messages that wait fit beside all else, if the problem asks for it; else they may not, for
    where nothing is found that leaves room for them.
    """
    search = problem if counted else replace(problem, waiting=False)
    if stages is None:
        check_ranks(problem)
    fixed = None if stages is None else _given(problem, stages, isinstance(schedule, Schedule))
    if isinstance(schedule, Schedule):
        home = checked(problem, tuple(schedule.placement.values()))
        return _best(problem, [home], fixed, _kept(problem, schedule), [None, one])
    if schedule == "auto" and problem.ranks == 1 and placement is None and any(u.gathered for u in problem.units):
        return finished(problem, *on_one_rank(problem, chunks, fixed))
    ways = placements(problem, schedule, chunks, fixed, placement)
    if schedule == "auto":
        open_ = placement is None and fixed is None
        found = searched(search, ways, fixed, budget, effort, swaps=open_, free=open_ and chunks is None)
        return finished(problem, found.stages, found.placement, found.schedule, found.bound)
    return _best(problem, ways, fixed, _named(search, schedule), _limits(problem, schedule))


def _named(problem: Problem, name: str) -> ScheduleChoice:
    """The schedule of this name."""
    count, memory, waiting = problem.microbatches, problem.limits, problem.waiting
    return ScheduleChoice(
        lambda stages, home: timed(name, pipeline(problem, stages, home), home, count, memory, waiting),
        lambda stages, home: SCHEDULES[name](pipeline(problem, stages, home), home, count, memory),
    )


def _kept(problem: Problem, schedule: Schedule) -> ScheduleChoice:
    """A whole schedule, checked against the stages."""

    def seconds(stages: Stages, home: Placement) -> float:
        numbers = pipeline(problem, stages, home)
        gathering = with_gathers(numbers, schedule, problem.limits)
        verified(numbers, gathering, problem.microbatches)
        check_room(
            problem,
            peak_memory(numbers, gathering),
            f"under schedule {schedule.name}",
            "Allow more memory, or choose schedule auto, which keeps to the limit",
        )
        return makespan(numbers, gathering)

    return ScheduleChoice(seconds, lambda stages, home: schedule)


def _given(problem: Problem, stages: Sequence[Sequence[int]], may_be_empty: bool = False) -> Stages:
    """The user's stages, checked and in the user's order. may_be_empty: beside a program that has work for all."""
    listed = sorted(unit for members in stages for unit in members)
    if listed != list(range(len(problem.units))) or not (may_be_empty or all(stages)):
        raise InputError("the stages do not hold every unit once, each stage at least one", "stages", "List them all")
    home = homes(stages)
    for unit, ahead in enumerate(branches(problem).before):
        for a in ahead:
            if home[a] > home[unit]:
                raise InputError(
                    f"{problem.units[unit].name} is in stage {home[unit]} and needs {problem.units[a].name} of stage "
                    f"{home[a]}",
                    "stages",
                    "Values go from lower to higher stages: number them so, or move one of the two",
                )
    return tuple(tuple(sorted(members)) for members in stages)


def _limits(problem: Problem, schedule: str) -> list[InFlight | None]:
    """What the schedule holds at most; where nothing fits so, it may with microbatches of different sizes."""
    most: InFlight | None = (lambda depth: problem.microbatches) if schedule == "gpipe" else None
    return [most, one]


def _best(
    problem: Problem,
    ways: Sequence[Placement],
    fixed: Stages | None,
    way: ScheduleChoice,
    limits: Sequence[InFlight | None],
) -> PipelinePlan:
    """The best partition for a schedule that follows from it; units are moved between the stages of the best."""
    best: tuple[float, Stages, Placement] | None = None
    error: CscError | None = None
    for home in ways:
        for stages in [fixed] if fixed else partitions(problem, home, limits):
            try:
                seconds = way.seconds(stages, home)
            except CscError as each:
                error = error or each
                continue
            if best is None or seconds < best[0] * (1 - 1e-9):
                best = (seconds, stages, home)
    if best is None:
        if fixed is None and len(ways[0]) == problem.ranks and not problem.kinds:
            candidates(problem, limits[0], (1.0,), layouts=False)  # says what would fit
        assert error is not None  # there is at least one partition, or _partitions raised
        raise error
    seconds, stages, home = best
    if fixed is None:
        stages = _climbed(problem, seconds, stages, home, way)
    return finished(problem, stages, home, way.schedule(stages, home))


def _climbed(problem: Problem, best: float, stages: Stages, home: Placement, way: ScheduleChoice) -> Stages:
    """Single units moved to neighbouring stages while the step gets shorter than `best`, MOVES tries in all."""
    found = branches(problem)
    left = MOVES
    for unit in range(len(problem.units)):
        at = homes(stages)
        for target in neighbours(found, stages, at, unit):
            if left <= 0 or unit not in stages[at[unit]]:
                continue
            other = moved(found, stages, unit, target)
            if other is None:
                continue
            left -= 1
            with suppress(CscError):
                seconds = way.seconds(other, home)
                if seconds < best * (1 - 1e-6):
                    best, stages = seconds, other
    return stages
