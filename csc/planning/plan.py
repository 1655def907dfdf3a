"""The plan: stages, the rank of each, and the order of work, with what they are expected to take.

Terms: see csc.planning.problem and csc.planning.branches. The *bound* is what no plan with one stage on each rank can
beat (csc.planning.partition_bound); the *shared bound* holds for every plan, also with several stages on a rank. The
*bubble* of a rank is the part of the makespan in which it has nothing to do.

    plan(problem, schedule, chunks, stages, placement, effort) -> Plan

Planning goes from many partitions, looked at quickly, to few, searched well: candidates of csc.planning.partition, each
simulated under a few greedy orders; units moved between stages of the best; the full search of `auto` on what is left.
Nothing depends on time or chance: the same problem gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from csc.errors import CscError, InputError
from csc.ir.schedule import Schedule
from csc.ir.schedule_verifier import verify
from csc.planning.branches import Stages, branches
from csc.planning.contiguous import contiguous
from csc.planning.paired import paired
from csc.planning.partition import MIDDLE, InFlight, balance, candidates, describe
from csc.planning.partition_bound import Bound, check_ranks, lower_bound, shared_lower_bound
from csc.planning.problem import Problem, Unit, pipeline
from csc.planning.schedules import SCHEDULES, auto, stages_per_rank, timed
from csc.planning.schedules import placement as placed
from csc.planning.screen import STYLES, Trial, climb, polish, screen
from csc.planning.unit_moves import homes, moved, neighbours
from csc.simulation.memory import peak_memory
from csc.simulation.pipeline import Pipeline
from csc.simulation.simulate import makespan

FUSED = (0.25, 0.5, 0.75, 1.0)  # shares of the ways there and back for partitions under memory limits
FINALISTS = 2  # partitions that get more than a quick look
MOVES = 60  # partitions tried around the best one under a named schedule
SHARED = 0.99  # several stages on a rank have to be this much faster, for their messages
SEARCH_GAINS = 1.05  # at most by this factor is a plan expected to get faster after a quick look
AUTO = 500  # actions that `auto` simulates for each action of the step

Placement = tuple[int, ...]


@dataclass(frozen=True)
class ScheduleChoice:
    """How a schedule follows from stages and their placement. seconds: its makespan; CscError where it does not fit."""

    seconds: Callable[[Stages, Placement], float]
    schedule: Callable[[Stages, Placement], Schedule]


@dataclass(frozen=True)
class PipelinePlan:
    """stages[s]: its units; placement[s]: its rank. Times are seconds of one step, sizes bytes of each rank.

    bubble: by rank, a part of 1. bound: None where a rank has several stages, as it does not hold for them;
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


def plan(
    problem: Problem,
    schedule: str | Schedule = "auto",
    chunks: int | None = None,
    stages: Sequence[Sequence[int]] | None = None,
    placement: Sequence[int] | None = None,
    effort: float = 1.0,
) -> PipelinePlan:
    """The plan with the least makespan found under problem.memory.

    schedule: a name of csc.planning.schedules.SCHEDULES, or a whole schedule, which is then kept. chunks: stages on
    each rank; None: as many as the schedule is made for, and with "auto" two if that is faster. stages: the units of
    each stage, kept as they are. placement: the rank of each stage, kept as it is. effort: how much to search; 1.

    InputError for more stages than units, stages that leave units out or wait for each other, and a memory limit that
    nothing fits: the least that would, and what takes the space. ScheduleError for a schedule that does not do the work
    of the stages.
    """
    if stages is None:
        check_ranks(problem)
    fixed = None if stages is None else _given(problem, stages, isinstance(schedule, Schedule))
    if isinstance(schedule, Schedule):
        home = _checked(problem, tuple(schedule.placement.values()))
        return _best(problem, [home], fixed, _kept(problem, schedule), [None, _one])
    ways = _placements(problem, schedule, chunks, fixed, placement)
    if schedule == "auto":
        return _auto(problem, ways, fixed, effort)
    return _best(problem, ways, fixed, _named(problem, schedule), _limits(problem, schedule))


def _named(problem: Problem, name: str) -> ScheduleChoice:
    """The schedule of this name."""
    count, memory = problem.microbatches, problem.memory
    return ScheduleChoice(
        lambda stages, home: timed(name, pipeline(problem, stages), home, count, memory),
        lambda stages, home: SCHEDULES[name](pipeline(problem, stages), home, count, memory),
    )


def _kept(problem: Problem, schedule: Schedule) -> ScheduleChoice:
    """A whole schedule, checked against the stages."""

    def seconds(stages: Stages, home: Placement) -> float:
        numbers = pipeline(problem, stages)
        verify(schedule, numbers.messages, numbers.has_b, numbers.has_w, problem.microbatches)
        for rank, peak in enumerate(peak_memory(numbers, schedule)):
            if problem.memory is not None and peak > problem.memory * (1 + 1e-9):
                raise InputError(
                    f"rank {rank} needs {math.ceil(peak)} bytes under schedule {schedule.name}, the limit is "
                    f"{math.floor(problem.memory)}",
                    "plan",
                    "Allow more memory, or choose schedule auto, which keeps to the limit",
                )
        return makespan(numbers, schedule)

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


def _checked(problem: Problem, home: Sequence[int]) -> tuple[int, ...]:
    """A placement that names every rank."""
    if set(home) != set(range(problem.ranks)):
        raise InputError(
            f"the placement {list(home)} does not give each of {problem.ranks} ranks a stage",
            "placement",
            f"Name the ranks 0 to {problem.ranks - 1}, each at least once",
        )
    return tuple(home)


def _placements(
    problem: Problem, schedule: str, chunks: int | None, stages: Stages | None, placement: Sequence[int] | None
) -> list[tuple[int, ...]]:
    """The placements to try."""
    ranks, units = problem.ranks, len(problem.units)
    wanted = stages_per_rank(schedule)  # also says if there is no such schedule
    if placement is not None:
        return [_checked(problem, placement)]
    if stages is not None:
        if len(stages) % ranks:
            raise InputError(
                f"{len(stages)} stages do not spread evenly over {ranks} ranks", "stages", "Give a placement too"
            )
        chunks = len(stages) // ranks
    both = schedule == "auto" and (chunks == 2 or (chunks is None and units >= 2 * ranks > 2))
    ways = [placed(schedule, ranks, wanted if chunks is None else chunks)]
    if both:
        ways += [placed(name, ranks, 2) for name in ("interleaved-1f1b", "zb-v")]
    return list(dict.fromkeys(tuple(way) for way in ways))


def _partitions(problem: Problem, home: Sequence[int], limits: Sequence[InFlight | None]) -> list[Stages]:
    """Partitions into one stage for each entry of `home`. limits: what the stages of a depth hold, tried in turn."""
    count = len(home)
    if count == problem.ranks:
        found: list[Stages] = []
        for limit in limits:
            last = limit is limits[-1]
            try:
                found += (
                    candidates(problem, limit) if not found else candidates(problem, limit, (MIDDLE,), layouts=False)
                )
            except InputError:
                if last and not found:
                    raise
            if problem.memory is None:
                break
        if problem.memory is not None:
            with suppress(InputError):
                found += candidates(_fused(problem), limits[0], FUSED, layouts=False)
            found += [stages] if (stages := contiguous(problem)) is not None else []
        return list(dict.fromkeys(found))
    # Memory is the rank's, not the stage's: look away from it here, and let the schedule say what fits.
    every = replace(problem, ranks=count, memory=None)
    found = candidates(every, shares=(0.0, MIDDLE), layouts=False)
    found += [_even(problem, count, lambda unit: unit.forward), _even(problem, count, lambda unit: unit.work)]
    if problem.memory is not None:
        with suppress(InputError):
            share = replace(every, memory=problem.memory * problem.ranks / count)
            found += candidates(share, _one, (0.0,), layouts=False)
    return list(dict.fromkeys([*found, *paired(problem, home)]))


def _even(problem: Problem, count: int, seconds: Callable[[Unit], float]) -> Stages:
    """The units in their order in so many stages, of which the longest is as short as it can be."""
    starts = balance([round(1e9 * seconds(unit)) for unit in problem.units], count)
    return tuple(tuple(range(a, b)) for a, b in pairwise([*starts, len(problem.units)]))


def _fused(problem: Problem) -> Problem:
    """The problem in which gradients come back only after W, as they do where memory lets no W wait."""
    units = (
        replace(unit, backward_input=unit.backward_input + unit.backward_weight, backward_weight=0.0)
        for unit in problem.units
    )
    return replace(problem, units=tuple(units))


def _one(depth: int) -> float:
    """In flight at the least: schedules that look at the memory slow down rather than hold more."""
    return 1.0


def _limits(problem: Problem, schedule: str) -> list[InFlight | None]:
    """What the schedule holds at most; where nothing fits so, it may with microbatches of different sizes."""
    most: InFlight | None = (lambda depth: problem.microbatches) if schedule == "gpipe" else None
    return [most, _one]


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
        for stages in [fixed] if fixed else _partitions(problem, home, limits):
            try:
                seconds = way.seconds(stages, home)
            except CscError as each:
                error = error or each
                continue
            if best is None or seconds < best[0] * (1 - 1e-9):
                best = (seconds, stages, home)
    if best is None:
        if fixed is None and len(ways[0]) == problem.ranks:
            candidates(problem, limits[0], (1.0,), layouts=False)  # says what would fit
        assert error is not None  # there is at least one partition, or _partitions raised
        raise error
    seconds, stages, home = best
    if fixed is None:
        stages = _climbed(problem, seconds, stages, home, way)
    return _finished(problem, stages, home, way.schedule(stages, home))


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


def _auto(problem: Problem, ways: Sequence[Placement], fixed: Stages | None, effort: float) -> PipelinePlan:
    """Search partitions, placements and orders together."""
    bound = lower_bound(problem) if len(problem.units) >= problem.ranks else None
    enough = bound.seconds * (1 + 1e-6) if bound else 0.0
    single: list[Trial] = []
    several: list[Trial] = []
    for home in ways:
        alone = len(home) == problem.ranks
        tried = [fixed] if fixed else _partitions(problem, home, [None, _one])
        if alone and bound and not fixed:
            tried = list(dict.fromkeys([bound.stages, *tried]))
        trials = [trial for stages in tried if (trial := screen(problem, stages, home)) is not None]
        (single if alone else several).extend(trials)
    if not single and not several:  # auto says why
        auto(pipeline(problem, fixed or candidates(problem, _one)[0]), ways[0], problem.microbatches, problem.memory)
    best_single = _searched(problem, single, enough, fixed is None, effort)
    limit = SHARED * best_single[0] if best_single else math.inf
    close = [trial for trial in several if trial.seconds < SEARCH_GAINS * limit]
    best_several = _searched(problem, close, 0.0, fixed is None, effort)
    best = best_several if best_several is not None and best_several[0] < limit else best_single
    assert best is not None
    return _finished(problem, *best[1:], bound)


def _searched(
    problem: Problem, trials: Sequence[Trial], enough: float, climbing: bool, effort: float
) -> tuple[float, Stages, Placement, Schedule] | None:
    """What the full search makes of the best of these trials."""
    ranked = sorted(trials, key=lambda trial: trial.seconds)
    if not ranked:
        return None
    finalists = [
        max(trial, screen(problem, trial.stages, trial.placement, STYLES) or trial, key=lambda each: -each.seconds)
        for trial in ranked[:FINALISTS]
    ]
    trial = min(finalists, key=lambda trial: trial.seconds)
    if climbing and trial.seconds > enough:
        trial = climb(problem, trial, effort)
    trial = polish(problem, trial, enough, effort)
    orders = [trial.schedule(problem)]
    if trial.seconds > enough:
        budget = int(AUTO * effort) * len(trial.work.lanes) * problem.microbatches
        orders.append(auto(trial.work.pipeline, trial.placement, problem.microbatches, problem.memory, budget))
    order = min(orders, key=lambda order: makespan(trial.work.pipeline, order))
    return makespan(trial.work.pipeline, order), trial.stages, trial.placement, order


def _finished(
    problem: Problem, stages: Stages, home: Placement, schedule: Schedule, bound: Bound | None = None
) -> PipelinePlan:
    """The plan, with what the simulator says about it."""
    numbers = pipeline(problem, stages)
    verify(schedule, numbers.messages, numbers.has_b, numbers.has_w, problem.microbatches)
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
        peak_memory=tuple(peak_memory(numbers, schedule)),
        bubble=tuple(1 - each / seconds if seconds else 0.0 for each in busy),
        bound=(bound or lower_bound(problem)).seconds if alone else None,
        shared_bound=shared_lower_bound(problem).seconds,
        layout=text if alone else f"{text}; {len(home)} stages on {problem.ranks} ranks",
    )
