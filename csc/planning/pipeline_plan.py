"""A plan: stages, the rank of each, the order of work, and what the simulator says about them.

finished(problem, stages, placement, schedule, bound=None, bounded=True) -> PipelinePlan
excess(problem, plan) -> bytes                 by which the rank that exceeds its limit the most does
check_room(problem, peaks, when, remedy)       InputError if a rank holds more at its peak than the limit
verified(numbers, schedule, microbatches)      ScheduleError unless it does the work of these stages
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from csc.errors import InputError
from csc.ir.schedule import Schedule, verify
from csc.planning.branches import Stages
from csc.planning.gathers import with_gathers
from csc.planning.partition import describe
from csc.planning.partition_bound import Bound, lower_bound, shared_lower_bound
from csc.planning.problem import Problem, pipeline
from csc.planning.ways import Placement
from csc.simulation.pipeline import Pipeline, peak_memory
from csc.simulation.pipeline import peaks as peaks_of_run
from csc.simulation.simulate import makespan, simulate


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
        bubble=tuple(1 - each / seconds if seconds else 0.0 for each in busy),
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
