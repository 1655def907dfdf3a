"""A plan before it runs: what limits it, what each rank will hold, and timelines beside each other."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from csc.analysis.costs import stored_dtypes, variant_cost
from csc.driver.compiled import CompiledModel
from csc.errors import CscError, InputError
from csc.ir.groups import Group
from csc.ir.program import Options, Program
from csc.ir.schedule import PARTS, Schedule
from csc.passes.pipeline_problem import problem, recorded
from csc.passes.step_end import StepEnd, step_ends
from csc.planning.gathers import with_gathers
from csc.planning.partition import balance
from csc.planning.partition_bound import lower_bound, shared_lower_bound
from csc.planning.plan import plan
from csc.planning.problem import Problem
from csc.planning.schedules import SCHEDULES
from csc.planning.schedules.named import ORDERS
from csc.planning.schedules.robust import mean_makespan, robust
from csc.runtime.loaded_program import load
from csc.simulation.idle import CAUSES, Causes, idle, longest_path
from csc.simulation.idle import Path as LongestPath
from csc.simulation.page import bytes_text
from csc.simulation.pipeline import Pipeline, peak_memory, states
from csc.simulation.pipeline import from_json as read_pipeline
from csc.simulation.pipeline import peaks as peaks_of_run
from csc.simulation.simulate import Jitter, makespan, simulate
from csc.simulation.timeline import Timeline, from_json

# --- What limits a planned step: the lower bound and what it comes from, the busiest rank, idle seconds by cause -----
#
# Terms: causes as in csc.simulation.idle. The *busiest* rank is the one with the most work: the step is its work and
# the seconds in which it is idle. The *longest path* is what the end of the step waited for (csc.simulation.idle).


@dataclass(frozen=True)
class Limits:
    """term: which part of the lower bound is the largest, in words. work: seconds of each rank. idle: of each rank."""

    term: str
    makespan: float
    work: tuple[float, ...]
    idle: tuple[Causes, ...]
    path: LongestPath

    @property
    def busiest(self) -> int:
        """The rank with the most work; the first of several."""
        return max(range(len(self.work)), key=lambda rank: self.work[rank])

    @property
    def causes(self) -> Causes:
        """Seconds of all ranks by cause."""
        return {cause: sum(idle[cause] for idle in self.idle) for cause in CAUSES}

    def as_dict(self) -> dict[str, Any]:
        return {
            "bound_term": self.term,
            "busiest_rank": self.busiest,
            "longest_path": {
                "work": dict(sorted(self.path.work.items())),
                "messages": self.path.messages,
                "gathers": self.path.gathers,
            },
            "idle": [
                {"rank": rank, "work": work, "causes": dict(idle)}
                for rank, (work, idle) in enumerate(zip(self.work, self.idle))
            ],
        }


def limits(
    problem: Problem, pipeline: Pipeline, schedule: Schedule, timeline: Timeline, several: bool
) -> Limits:  # fmt: skip
    """Of a run that the simulator made of the schedule. several: a rank runs several stages, for which another bound
    holds.
    """
    limits = problem.limits
    memory = (limits,) * problem.ranks if isinstance(limits, (int, float)) else limits
    return Limits(
        term=(shared_lower_bound if several else lower_bound)(problem).term,
        makespan=timeline.makespan,
        work=timeline.busy,
        idle=tuple(idle(pipeline, schedule, timeline, memory)),
        path=longest_path(schedule, timeline),
    )


# --- What each pipeline rank will hold at its fullest moment, by kind, before anything runs --------------------------
#
# Terms: sizes are bytes of one rank, as the plan accounts for them (csc.analysis.costs, csc.simulation.pipeline).
# Ranks of one pipeline position hold the same.


@dataclass(frozen=True)
class RankMemory:
    """parameters, gradients, optimizer: there for the whole step; the optimizer's are AdamW's two moments.
    activations: the most that microbatches in flight keep for their backward, with what is gathered meanwhile (zero=3).
    working: what one region takes while it runs, what it computes again included. messages: the most that wait here for
    their turn, or to be sent, at once. recorded: what cuda_graphs holds besides.
    """

    rank: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    messages: int
    recorded: int = 0

    @property
    def total(self) -> int:
        """All of it at one moment, which is the most that there can be."""
        return sum(value for name, value in asdict(self).items() if name != "rank")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def memory_forecast(program: Program, options: Options) -> list[RankMemory]:
    """Of a planned Program; empty without a plan."""
    if program.plan is None or program.schedule is None:
        return []
    pipeline = read_pipeline(program.plan.pipeline)
    schedule = program.schedule
    peaks, held = peak_memory(pipeline, schedule), states(pipeline, schedule)
    waiting = [most - peak for most, peak in zip(peaks_of_run(pipeline, schedule, simulate(pipeline, schedule)), peaks)]
    stored = stored_dtypes(program)
    costs = {name: variant_cost(v, False, stored[name]) for name, v in program.variants.items()}
    ranks = math.prod(options.mesh.sizes(Group.DATA))
    variant, besides = {region.name: region.variant for region in program.regions}, recorded(program, options)
    rows = []
    for rank in range(options.mesh.pp):
        stages = [stage for stage in program.stages if stage.rank == rank]
        region_costs = [costs[variant[name]] for stage in stages for name in stage.regions]
        replicas = ranks // options.mesh.sharers(rank)
        parameters, gradients, optimizer = (
            sum(size) for size in zip(*(cost.held(options.zero, replicas) for cost in region_costs))
        )
        here = {stage.index for stage in stages}
        rows.append(
            RankMemory(
                rank,
                parameters=parameters,
                gradients=gradients,
                optimizer=optimizer,
                activations=round(peaks[rank] - held[rank]),
                working=round(max(pipeline.stages[stage].working for stage in here)),
                messages=round(waiting[rank]),
                recorded=sum(besides[variant[name]] for stage in stages for name in stage.regions),
            )
        )
    return rows


# --- What `csc simulate` and `csc timeline` show: a plan before it runs, and timelines beside each other -------------
#
# Terms
#   baseline   the split that most people make by hand: stages of equal forward time in order of execution, whatever is
#              frozen, under a schedule of one's choice


FAR = 1.5  # a measured makespan over the plan's, or the plan's over it, that calls for a remedy


@dataclass(frozen=True)
class Forecast:
    """The plan's timeline and the baseline's. Times are seconds of one step, sizes bytes of one rank.

    bound: no plan of its kind takes less: one stage a rank, or (`shared`) several.
    """

    schedule: str
    layout: str
    costs: str
    bound: float
    shared: bool
    plan: Timeline
    limits: Limits
    baseline: Timeline | None
    holds: tuple[str, ...]  # per rank, the regions of its stages
    memory: float | None
    devices: tuple[str, ...] = ()  # per rank, what it is and may hold, where ranks differ
    ends: tuple[StepEnd, ...] = ()  # per rank, what follows its last action

    @property
    def step(self) -> float:
        """Seconds until the last rank has added gradients and stepped the optimizer."""
        last = (max((event.end for event in events), default=0.0) for events in self.plan.ranks)
        return max((done + end.seconds for done, end in zip(last, self.ends)), default=self.plan.makespan)

    @property
    def gap(self) -> float:
        """How much longer than the bound the plan takes, as a share of the bound."""
        return self.plan.makespan / self.bound - 1

    @property
    def speedup(self) -> float | None:
        """Makespan of the baseline over that of the plan."""
        return self.baseline.makespan / self.plan.makespan if self.baseline is not None else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule,
            "layout": self.layout,
            "costs": self.costs,
            "makespan": self.plan.makespan,
            "step": self.step,
            "bound": self.bound,
            "bound_of": "several stages a rank" if self.shared else "one stage a rank",
            "gap": self.gap,
            "limits": self.limits.as_dict(),
            "memory_limit": self.memory,
            "peak_memory": max(self.plan.peak_memory),
            "ranks": [
                {
                    "rank": rank,
                    "holds": held,
                    "reduce": self.ends[rank].reduce,
                    "optimizer": self.ends[rank].optimizer,
                    **({"device": self.devices[rank]} if self.devices else {}),
                    "busy": self.plan.busy[rank],
                    "bubble": self.plan.bubble[rank],
                    "bubble_share": self.plan.bubble_share[rank],
                    "peak_memory": self.plan.peak_memory[rank],
                    "peak_activations": self.plan.peak_activations[rank],
                }
                for rank, held in enumerate(self.holds)
            ],
            "baseline": None
            if self.baseline is None
            else {
                "name": self.baseline.name,
                "makespan": self.baseline.makespan,
                "speedup": self.speedup,
                "peak_memory": max(self.baseline.peak_memory),
            },
        }


def forecast(compiled: CompiledModel, baseline: str | None = "1f1b", jitter: Jitter | None = None) -> Forecast:
    """Simulate the plan of a compiled model; and, unless `baseline` is None, a frozen-agnostic split under it."""
    program, options = compiled.program, compiled.options
    assert program.plan is not None and program.schedule is not None
    numbers = problem(program, options)
    pipeline = read_pipeline(program.plan.pipeline)
    timeline = simulate(pipeline, program.schedule, jitter, f"plan: {program.schedule.name}")
    return Forecast(
        schedule=program.schedule.name,
        layout=program.plan.layout,
        costs=program.plan.costs,
        bound=program.plan.shared_bound if program.plan.bound is None else program.plan.bound,
        shared=program.plan.bound is None,
        plan=timeline,
        limits=limits(numbers, pipeline, program.schedule, timeline, several=program.plan.bound is None),
        baseline=_baseline(program, options, baseline, jitter) if baseline is not None else None,
        holds=tuple(_held(program, rank) for rank in range(options.mesh.pp)),
        memory=numbers.memory,
        devices=devices_of(numbers),
        ends=tuple(step_ends(program, options)),
    )


@dataclass(frozen=True)
class JitteredSchedule:
    """A schedule of the plan's stages. mean: seconds over seeded delays; calm: without; peak_memory: of the fullest
    rank, in bytes.
    """

    name: str
    mean: float
    calm: float
    peak_memory: float


def jittered(compiled: CompiledModel, jitter: Jitter) -> tuple[tuple[JitteredSchedule, ...], Schedule]:
    """What jitter does to the plan and to other orders on its stages, the fastest first, all within the memory limit.

    Returns:
        A row for the plan's schedule, for each named one that takes these stages where they are and fits, and for the
        one of `csc.planning.schedules.robust`; and that one, which can be given as a schedule file.
    """
    program, options = compiled.program, compiled.options
    assert program.plan is not None and program.schedule is not None
    limits = problem(program, options).limits
    pipeline = read_pipeline(program.plan.pipeline)
    plans, home = program.schedule, tuple(program.schedule.placement.values())
    count = plans.microbatches
    tried = {f"plan: {plans.name}": plans}
    for name in ORDERS:
        with suppress(CscError):
            tried[name] = with_gathers(pipeline, SCHEDULES[name](pipeline, home, count, limits), limits)
    best = with_gathers(pipeline, robust(pipeline, home, count, limits, jitter), limits)
    tried[f"for this jitter: {best.name}"] = best
    rows = [
        JitteredSchedule(
            name,
            mean_makespan(pipeline, schedule, jitter),
            makespan(pipeline, schedule),
            max(peak_memory(pipeline, schedule)),
        )
        for name, schedule in tried.items()
    ]
    return tuple(sorted(rows, key=lambda row: row.mean)), best


def devices_of(numbers: Problem) -> tuple[str, ...]:
    """By rank its device and what it may hold; nothing where all are alike."""
    kinds = numbers.kinds
    limits = ["" if kind.memory is None else f", {bytes_text(kind.memory)}" for kind in kinds]
    return tuple(f"{kinds[kind].name}{limits[kind]}" for kind in numbers.kind_of) if kinds else ()


def _baseline(program: Program, options: Options, schedule: str, jitter: Jitter | None) -> Timeline:
    numbers = replace(problem(program, options), memory=None)
    starts = balance([round(1e9 * unit.forward) for unit in numbers.units], numbers.ranks)
    bounds = [*starts, len(numbers.units)]
    stages = [list(range(bounds[i], bounds[i + 1])) for i in range(numbers.ranks)]
    planned = plan(numbers, schedule=schedule, stages=stages)
    return simulate(planned.pipeline, planned.schedule, jitter, f"baseline: equal forward time, {schedule}")


def _held(program: Program, rank: int) -> str:
    """`vision_tower x 12, projector` for the regions of a rank's stages; stages parted by a semicolon."""
    component = {region.name: region.component or region.name for region in program.regions}
    parts = []
    for stage in program.stages:
        if stage.rank == rank:
            counts: dict[str, int] = {}
            for name in stage.regions:
                counts[component[name]] = counts.get(component[name], 0) + 1
            parts.append(", ".join(f"{name} x {n}" if n > 1 else name for name, n in counts.items()))
    return "; ".join(parts)


def read(path: Path) -> Timeline:
    """A timeline file, or, for the directory of a compiled program, what its plan expects of its schedule."""
    if path.is_dir():
        program = load(path, ranks=())
        figures = read_pipeline(program.manifest.plan.get("pipeline"), f"{path / 'program.json'}, plan")
        return simulate(figures, program.schedule, name=f"expected: {program.schedule.name}")
    try:
        return from_json(json.loads(path.read_text()), str(path))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(
            f"this is no timeline: {error}", str(path),
            "give files that csc simulate -o or csc.run --timeline wrote, or a compiled program's directory",
        ) from None  # fmt: skip


@dataclass(frozen=True)
class TimelineRatio:
    """One timeline beside the first: seconds of the whole and, on average, of one F, B, W and BW."""

    name: str
    makespan: float
    over_first: float
    bubble_share: float
    seconds: dict[str, float]


def comparison(timelines: Sequence[Timeline]) -> list[TimelineRatio]:
    """Each timeline with its makespan over that of the first."""
    rows = []
    for timeline in timelines:
        by_kind: dict[str, list[float]] = {kind: [] for kind in PARTS}
        for events in timeline.ranks:
            for event in events:
                if event.action.kind in by_kind:
                    by_kind[event.action.kind].append(event.seconds)
        mean = {kind: sum(seconds) / len(seconds) for kind, seconds in by_kind.items() if seconds}
        shares = timeline.bubble_share
        first = timelines[0].makespan
        rows.append(
            TimelineRatio(
                timeline.name,
                timeline.makespan,
                timeline.makespan / first if first else 1.0,
                sum(shares) / len(shares) if shares else 0.0,
                mean,
            )
        )
    return rows


def cost_note(sources: Sequence[Path], timelines: Sequence[Timeline]) -> str:
    """A sentence on the costs of the first source's plan, if that is a compiled program, and the remedy, if another
    timeline takes far more or less than it; else nothing. sources, timelines: in the same order.
    """
    if not sources or not sources[0].is_dir() or timelines[0].makespan <= 0:
        return ""
    ratios = [(timeline.makespan / timelines[0].makespan, timeline.name) for timeline in timelines[1:]]
    far = [(ratio, name) for ratio, name in ratios if ratio > FAR or 0 < ratio < 1 / FAR]
    if not far:
        return ""
    ratio, name = max(far, key=lambda item: abs(math.log(item[0])))
    costs = str(load(sources[0], ranks=()).manifest.plan.get("costs", ""))
    start = f"{name} takes {ratio:.3g} times as long as the plan expects"
    measure = "csc profile TARGET -o mine.toml measures the machine it runs on, --hardware mine.toml plans with that."
    if costs.startswith("measured on "):
        return f"{start} by costs {costs}: is it that machine, with a core or device for each rank? Else {measure}"
    return f"{start} by {f'a {costs}' if costs else 'its costs'}, not by measured costs. {measure}"
