"""The plan: stages, the rank of each, and the order of work, with what they are expected to take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from csc.errors import CscError, InputError
from csc.ir.schedule import Schedule, verify
from csc.planning.gathers import held_whole, on_one_rank, seconds_waited_for, with_gathers
from csc.planning.joint import budget_of, drafts, searched
from csc.planning.partition import InFlight, candidates, describe, homes_of, moved, neighbours
from csc.planning.partition_bound import Bound, check_ranks, lower_bound, shared_lower_bound
from csc.planning.problem import Problem, Stages, branches, check_asked, check_figures, pipeline
from csc.planning.schedules import SCHEDULES, timed
from csc.planning.schedules.auto import finish
from csc.planning.screen import Budget, Tell, Trial
from csc.planning.ways import Placement, checked, one_in_flight, partitions, placements
from csc.simulation.pipeline import Pipeline, peak_memory
from csc.simulation.pipeline import peaks as peaks_of_run
from csc.simulation.simulate import makespan, simulate

# --- A plan: stages, the rank of each, the order of work, and what the simulator says about them ---------------------


@dataclass(frozen=True)
class PipelinePlan:
    """stages[s]: its units; placement[s]: its rank. Times are seconds of one step, sizes bytes of each rank.

    bubble: by rank, a part of 1. bound: None where a rank has several stages, as it does not hold for them, and of a
    draft;
    shared_bound: holds for every plan. layout: how the components share the ranks, in words.
    """

    stages: Stages
    placement: tuple[int, ...]
    schedule: Schedule
    pipeline: Pipeline
    makespan: float
    peak_memory: tuple[float, ...]
    bubble: tuple[float, ...]
    bound: float | None
    shared_bound: float
    layout: str

    @property
    def gap(self) -> float:
        """How much longer the step takes than the bound for plans of its kind, as a part of that bound."""
        return self.makespan / (self.shared_bound if self.bound is None else self.bound) - 1


def finished(
    problem: Problem, stages: Stages, home: Placement, schedule: Schedule, bound: Bound | None = None,
    bounded: bool = True,
) -> PipelinePlan:  # fmt: skip
    """The plan, with what the simulator says about it. bounded: with its bound. InputError if what gathers make whole
    has no room.
    """
    numbers = pipeline(problem, stages, home)
    schedule = with_gathers(numbers, schedule, problem.limits)
    verified(numbers, schedule, problem.microbatches)
    peaks = peak_memory(numbers, schedule)
    if any(numbers.divided):
        remedy = 'Ask for smaller stages with chunks=, more microbatches, recompute="auto", or more ranks'
        check_room(problem, peaks, "with the stages that are whole at once", remedy)
    if problem.waiting and problem.memory is not None:
        run = simulate(numbers, schedule)
        seconds, peaks = run.makespan, peaks_of_run(numbers, schedule, run)
    else:
        seconds = makespan(numbers, schedule)
    scale = sum(problem.scale or (1.0,) * problem.microbatches)
    busy = [0.0] * problem.ranks
    for stage, rank in zip(numbers.stages, home):
        busy[rank] += stage.work * scale
    text = describe(problem, stages)
    alone = len(home) == problem.ranks
    return PipelinePlan(
        stages=stages,
        placement=home,
        schedule=schedule,
        pipeline=numbers,
        makespan=seconds,
        peak_memory=tuple(peaks),
        bubble=tuple(1 - busy_seconds / seconds if seconds else 0.0 for busy_seconds in busy),
        bound=(bound or lower_bound(problem)).seconds if alone and bounded else None,
        shared_bound=shared_lower_bound(problem).seconds,
        layout=text if alone else f"{text}; {len(home)} stages on {problem.ranks} ranks",
    )


def excess(problem: Problem, found: PipelinePlan) -> float:
    """Less than nothing where all fit, messages that wait among it if the problem counts them."""
    limits = (problem.limit_of(kind) for kind in problem.kind_of)
    return max(0.0 if most is None else peak - most * (1 + 1e-9) for peak, most in zip(found.peak_memory, limits))


def check_room(problem: Problem, peaks: Sequence[float], when: str, remedy: str) -> None:
    """InputError if a rank holds more at its peak than the limit."""
    for rank, peak in enumerate(peaks):
        limit = problem.limit_of(problem.kind_of[rank])
        if limit is not None and peak > limit * (1 + 1e-9):
            raise InputError(
                f"rank {rank} needs {math.ceil(peak)} bytes {when}, the limit is {math.floor(limit)}",
                "plan",
                remedy,
            )


def verified(numbers: Pipeline, schedule: Schedule, microbatches: int) -> None:
    """ScheduleError unless it does the work of these stages."""
    verify(schedule, numbers.messages, numbers.has_b, numbers.has_w, microbatches, numbers.divided)


# --- A plan in a tenth of the time: what even cuts come to, put in order once (csc.planning.joint) ------------------


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
    """The best of what even cuts come to (csc.planning.joint), which memory is looked at but not made room for; None
    if none of it fits. Without `bound`, which takes longer than the draft. limit: seconds, after which it is the best
    of what was looked at.
    """
    check_figures(problem)
    check_ranks(problem)
    budget = Budget(DRAFTED, limit)
    drafts: list[Drafted] = []
    for numbers in [problem, held_whole(problem)] if makes_room(problem) else [problem]:
        draft = drafted(problem, numbers, budget)
        if draft is not None:
            drafts.append(draft)
            if draft.waits <= WAITED_FOR * draft.seconds:
                break
    for draft in sorted(drafts, key=lambda draft: draft.seconds):
        planned = fitting(problem, draft, bounded=False)
        if planned is not None:
            return planned
    return None


def fitting(problem: Problem, one: Drafted, bounded: bool = True) -> PipelinePlan | None:
    """The plan of a draft; where messages that wait have no room beside it, of another that leaves them some; None if
    that has none either. bounded: as of csc.planning.plan.finished.
    """
    plan = _plan_of(problem, one, bounded)
    over = 0.0 if plan is None else excess(problem, plan)
    if over > 0:
        again = drafted(problem, one.numbers.less(over * MARGIN), Budget(DRAFTED))
        plan = None if again is None else _plan_of(problem, again, bounded)
    return plan if plan is not None and excess(problem, plan) <= 0 else None


def _plan_of(problem: Problem, draft: Drafted, bounded: bool) -> PipelinePlan | None:
    with suppress(InputError):  # there is no room for what gathers make whole
        return finished(problem, draft.trial.stages, draft.trial.placement, draft.schedule, bounded=bounded)
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
    built = pipeline(problem, trial.stages, trial.placement)
    schedule = finish("auto", trial.work, trial.orders, numbers.limits)
    schedule = with_gathers(built, schedule, problem.limits, one_by_one=False)
    return Drafted(numbers, makespan(built, schedule), seconds_waited_for(built, schedule), trial, schedule)


# --- The plan: stages, the rank of each, and the order of work, with what they are expected to take ------------------
#
# Terms: see csc.planning.problem. The *bound* is what no plan with one stage on each rank can beat
# (csc.planning.partition_bound); the *shared bound* holds for every plan, also with several stages on a rank. The
# *bubble* of a rank is the part of the makespan in which it has nothing to do.
#
# A named schedule follows from the partition, so partitions are what is searched; with "auto" placements and orders
# are searched too (csc.planning.joint). That search does not see gathers, so it leaves room to keep what was gathered;
# where there is none, or a draft without that room is about as fast, it is made without, too. Nothing depends on time
# or chance, unless the limit ends the search: the same problem gives the same plan.


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
    csc.planning.screen.

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
    plans: list[PipelinePlan] = []
    with suppress(InputError):
        messaged = _with_messages(held_whole(problem), planned, False)
        plans.append(finished(problem, messaged.stages, messaged.placement, messaged.schedule))
    even = drafted(problem, problem, Budget(DRAFTED, max(0.0, end - time.monotonic()))) if open_ else None
    refused: InputError | None = None
    if not (plans and open_) or (even is not None and even.seconds < ALIKE * plans[0].makespan):
        try:
            plans.append(_with_messages(problem, planned, False))
        except InputError as error:
            refused = error
    if even is not None and all(even.seconds < other.makespan for other in plans):
        plan = fitting(problem, even)
        plans += [] if plan is None else [plan]
    if not plans:
        assert refused is not None
        raise refused
    return min(plans, key=lambda plan: plan.makespan)


def _with_messages(
    problem: Problem, planned: Callable[[Problem, bool], PipelinePlan], fixed_schedule: bool
) -> PipelinePlan:
    """A plan in whose memory messages that wait have room, too. planned: of a problem, and whether they are counted
    while it searches. fixed_schedule: the schedule is.
    """
    if problem.waiting and problem.memory is not None and not fixed_schedule:
        with suppress(InputError):
            return planned(problem, True)
    plan = planned(problem, False)
    kept = problem
    for margin in () if fixed_schedule else MARGINS:
        over = excess(problem, plan)
        if over <= 0:
            break
        kept = kept.less(over * margin)
        with suppress(InputError):
            plan = planned(kept, False)
    check_room(problem, plan.peak_memory, "with the messages that wait", "Allow more memory, or more ranks")
    return plan


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
        return _best(problem, [home], fixed, _kept(problem, schedule), [None, one_in_flight])
    if schedule == "auto" and problem.ranks == 1 and placement is None and any(u.gathered for u in problem.units):
        return finished(problem, *on_one_rank(problem, chunks, fixed))
    candidates = placements(problem, schedule, chunks, fixed, placement)
    if schedule == "auto":
        open_ = placement is None and fixed is None
        result = searched(search, candidates, fixed, budget, effort, swaps=open_, free=open_ and chunks is None)
        return finished(problem, result.stages, result.placement, result.schedule, result.bound)
    return _best(problem, candidates, fixed, _named(search, schedule), _limits(problem, schedule))


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
    home = homes_of(stages)
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
    return [most, one_in_flight]


def _best(
    problem: Problem,
    ways: Sequence[Placement],
    fixed: Stages | None,
    choice: ScheduleChoice,
    limits: Sequence[InFlight | None],
) -> PipelinePlan:
    """The best partition for a schedule that follows from it; units are moved between the stages of the best."""
    best: tuple[float, Stages, Placement] | None = None
    error: CscError | None = None
    for home in ways:
        for stages in [fixed] if fixed else partitions(problem, home, limits):
            try:
                seconds = choice.seconds(stages, home)
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
        stages = _climbed(problem, seconds, stages, home, choice)
    return finished(problem, stages, home, choice.schedule(stages, home))


def _climbed(problem: Problem, best: float, stages: Stages, home: Placement, choice: ScheduleChoice) -> Stages:
    """Single units moved to neighbouring stages while the step gets shorter than `best`, MOVES tries in all."""
    branching = branches(problem)
    left = MOVES
    for unit in range(len(problem.units)):
        at = homes_of(stages)
        for target in neighbours(branching, stages, at, unit):
            if left <= 0 or unit not in stages[at[unit]]:
                continue
            other = moved(branching, stages, unit, target)
            if other is None:
                continue
            left -= 1
            with suppress(CscError):
                seconds = choice.seconds(other, home)
                if seconds < best * (1 - 1e-6):
                    best, stages = seconds, other
    return stages


# --- Plans beside a plan: the same problem under other schedules, and changed problems, each really planned ----------
#
# Terms
#   variation   what is planned instead: a problem, a schedule, and what of the partition is given
#   outcome     the plan of a variation, or the sentence that says why there is none; cut: its time was over before its
#               search was, so there may be a better one


EFFORT = 0.2  # of the search for each: within half a percent of the full one where both were tried


@dataclass(frozen=True)
class Variation:
    """name: in words. problem: made when its turn comes, as that may take a compilation. schedule, chunks, stages,
    placement: as of csc.planning.plan.plan. same: the plan beside which this stands would do here as it is.
    """

    name: str
    problem: Callable[[], Problem]
    schedule: str | Schedule = "auto"
    chunks: int | None = None
    stages: Sequence[Sequence[int]] | None = None
    placement: Sequence[int] | None = None
    same: bool = False


@dataclass(frozen=True)
class Outcome:
    """plan: None if there is none, for the reason `why`. microbatches: of the step that was planned."""

    variation: Variation
    plan: PipelinePlan | None
    microbatches: int = 0
    why: str = ""
    cut: bool = False


def tried(variations: Sequence[Variation], seconds: float, tell: Callable[[str], None]) -> list[Outcome]:
    """Plan each of them, in `seconds` of wall clock: each may take its share of what is left, and what it does not
    take is there for those after it. tell: called with the name of each.
    """
    end = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    for number, variation in enumerate(variations):
        left = end - time.monotonic()
        if left <= 0:
            break
        tell(variation.name)
        outcomes.append(_outcome(variation, left / (len(variations) - number)))
    return outcomes


def _outcome(variation: Variation, limit: float) -> Outcome:
    began = time.monotonic()
    try:
        problem = variation.problem()
        began = time.monotonic()
        planned = plan(
            problem, variation.schedule, variation.chunks, variation.stages, variation.placement, EFFORT, limit
        )  # fmt: skip
    except CscError as error:
        return Outcome(variation, None, why=error.what)
    late = time.monotonic() - began >= limit
    return Outcome(variation, planned, problem.microbatches, cut=late and variation.schedule == "auto")
