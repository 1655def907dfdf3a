"""What else a plan could be, and what a change would bring: every row is planned or simulated.

Terms: see csc.planning.plan. An *alternative* is another schedule, number of stages on a rank or split of the
same problem; a *change* is another problem: more microbatches, ranks or memory, other links, other recomputation or
freezing. Stages that the user gave stay as they are. Where the whole schedule was given, changes are planned with
`auto`, as it holds for its own problem alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from csc.analysis.explain import explain
from csc.driver.compiled import CompiledModel
from csc.driver.mesh_search import priced_orders
from csc.ir.program import Choice, Options, Program
from csc.ir.schedule import Schedule
from csc.passes.partition import given_schedule, searched
from csc.passes.pipeline_problem import limits, problem
from csc.passes.recompute import AUTO, FULL, NONE, SELECTIVE, default_choice
from csc.planning.partition import balance
from csc.planning.plan import Outcome, Variation, tried
from csc.planning.problem import Problem
from csc.simulation.pipeline import Network
from csc.simulation.pipeline import from_json as read_pipeline

ONE_ON_A_RANK = ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2")
IN_TURNS = ("interleaved-1f1b", "interleaved-zb")
SEVERAL = (2, 4)  # stages on a rank that are looked at besides one
MORE_MEMORY = 10e9
LARGE = 0.05  # of what all regions save for B: components with less are not worth running again
SHARE = 0.5  # of the time, at most, for the alternatives
EQUAL = "equal forward time"


@dataclass(frozen=True)
class Now:
    """The plan as it is, and how others are to be planned: with `schedule`, which is `auto` where the plan's own was
    given whole, and on its stages if they were given. uneven: some stages have fewer ranks than others, so that regions
    take what they take only there.
    """

    problem: Problem
    stages: tuple[tuple[int, ...], ...]
    placement: tuple[int, ...]
    whole: Schedule
    makespan: float
    peak_memory: tuple[float, ...]
    idle: float
    schedule: str
    schedule_given: bool
    stages_given: bool
    uneven: bool
    chunks: int | None

    @property
    def on_a_rank(self) -> int:
        """Stages of a rank, rounded up."""
        return -(-len(self.placement) // self.problem.ranks)

    @property
    def kept(self) -> dict[str, Any]:
        """What of the partition other plans keep."""
        return {"stages": self.stages, "placement": self.placement} if self.stages_given else {"chunks": self.chunks}


@dataclass(frozen=True)
class Row:
    """One plan: its makespan, by how much it is faster for each microbatch than the plan as it is, the mean of its
    ranks' idle shares, the memory of its fullest rank. None: there is no plan, for the reason `why`. fits: within the
    limit. cut: the search ended early, so there may be better.
    """

    name: str
    stages: str = ""
    on_a_rank: int | None = None
    makespan: float | None = None
    speedup: float | None = None
    idle: float | None = None
    peak_memory: float | None = None
    fits: bool = True
    cut: bool = False
    why: str = ""


@dataclass(frozen=True)
class Advice:
    """alternatives: the plan itself and others, the fastest first. left: names of what there was no time for.
    with_auto: changes are planned with `auto`, as the plan's own schedule was given whole. orders: seconds of the step,
    its end included, if its ranks counted through the axes in another order, by mesh; the plan's own first.
    """

    alternatives: tuple[Row, ...]
    changes: tuple[Row, ...]
    left: tuple[str, ...]
    with_auto: bool
    orders: tuple[tuple[str, float], ...] = ()


def advice(compiled: CompiledModel, seconds: float, tell: Callable[[str], None]) -> Advice:
    """Both lists for the plan of a compiled model, in about so many seconds of wall clock."""
    end = time.monotonic() + seconds
    now = now_of(compiled.program, compiled.options)
    orders = priced_orders(
        compiled.program, compiled.options, now.problem, now.stages, now.placement, now.whole
    )  # fmt: skip
    rest, changed = (
        [as_compiled(compiled, variation) for variation in rows] for rows in (alternatives(now), changes(compiled, now))
    )
    first = tried(rest, seconds * SHARE, tell)
    second = tried(changed, end - time.monotonic(), tell)
    rows = [_itself(now), *(_row(outcome, now) for outcome in first)]
    return Advice(
        alternatives=tuple(sorted(rows, key=lambda row: math.inf if row.makespan is None else row.makespan)),
        changes=tuple(_row(outcome, now) for outcome in second),
        left=tuple(variation.name for variation in (*rest[len(first) :], *changed[len(second) :])),
        with_auto=now.schedule_given,
        orders=tuple((str(order.mesh), order.seconds) for order in orders),
    )


def as_compiled(compiled: CompiledModel, variation: Variation) -> Variation:
    """Planned as compiling it would be: regions that csc keeps in one stage are one unit there, too."""
    if variation.stages is not None:
        return variation

    def joined() -> Problem:
        numbers = variation.problem()
        mesh = replace(compiled.options.mesh, pp=numbers.ranks)
        options = replace(compiled.options, mesh=mesh, chunks=variation.chunks)
        return searched(compiled.program, numbers, options).problem

    return replace(variation, problem=joined)


def now_of(program: Program, options: Options) -> Now:
    """Of a planned Program."""
    assert program.plan is not None and program.schedule is not None
    place = {region.name: unit for unit, region in enumerate(program.regions)}
    numbers = problem(program, options)
    work = sum(stage.work for stage in read_pipeline(program.plan.pipeline).stages) * numbers.microbatches
    written, uneven = given_schedule(options) is not None, bool(options.mesh.in_front)
    return Now(
        problem=numbers,
        stages=tuple(tuple(sorted(place[name] for name in stage.regions)) for stage in program.stages),
        placement=tuple(stage.rank for stage in program.stages),
        whole=program.schedule,
        makespan=program.plan.makespan,
        peak_memory=tuple(program.plan.peak_memory),
        idle=1 - work / numbers.ranks / program.plan.makespan if program.plan.makespan else 0.0,
        schedule="auto" if written else str(options.schedule),
        schedule_given=written,
        stages_given=uneven or options.stages is not None or options.cuts is not None or options.placement is not None,
        uneven=uneven,
        chunks=options.chunks,
    )


def alternatives(now: Now) -> list[Variation]:
    """Other plans of the same problem."""
    numbers = now.problem

    def plain() -> Problem:
        return numbers

    if now.stages_given:
        names = (*ONE_ON_A_RANK, "auto") if now.on_a_rank == 1 else (*ONE_ON_A_RANK, *IN_TURNS, "auto")
        variations = [Variation(name, plain, name, **now.kept) for name in names if name != now.schedule]
        return variations if now.uneven else [*variations, Variation("auto", plain)]
    several = [n for n in SEVERAL if n * numbers.ranks <= len(numbers.units)] if numbers.ranks > 1 else []
    variations = [Variation(name, plain, name) for name in ONE_ON_A_RANK]
    variations += [Variation(name, plain, name, n) for name in IN_TURNS for n in several]
    variations += [Variation("zb-v", plain, "zb-v", 2)] if several else []
    variations += [Variation("auto", plain, "auto", n) for n in (1, *several)]
    choice = (now.schedule, now.on_a_rank)
    variations = [
        variation
        for variation in variations
        if now.schedule_given or (variation.schedule, variation.chunks or 1) != choice
    ]
    return [*variations, Variation(EQUAL, lambda: replace(numbers, memory=None), "1f1b", stages=_equal(numbers))]


def _equal(numbers: Problem) -> list[list[int]]:
    """Stages of equal forward time in order of execution, blind to what is frozen."""
    starts = balance([round(1e9 * unit.forward) for unit in numbers.units], numbers.ranks)
    bounds = [*starts, len(numbers.units)]
    return [list(range(bounds[i], bounds[i + 1])) for i in range(numbers.ranks)]


def changes(compiled: CompiledModel, now: Now) -> list[Variation]:
    """Other problems near this one."""
    numbers, schedule = now.problem, now.schedule
    variations = []
    if now.schedule_given:
        variations.append(Variation("schedule auto, nothing else", lambda: numbers, schedule, **now.kept))
    if not now.stages_given and schedule != "zb-v" and 1 < numbers.ranks <= len(numbers.units) // (now.on_a_rank + 1):
        variations.append(
            Variation(f"{now.on_a_rank + 1} stages on a rank", lambda: numbers, schedule, now.on_a_rank + 1)
        )  # fmt: skip
    twice = replace(numbers, microbatches=2 * numbers.microbatches)
    variations.append(Variation(f"{twice.microbatches} microbatches", lambda: twice, schedule, **now.kept))
    if not now.stages_given and not numbers.kinds and 2 * numbers.ranks <= len(numbers.units):
        variations.append(_wider(compiled, now))
    if numbers.memory is not None:
        variations.append(_with_more_memory(compiled, now))
    instant = replace(numbers, network=Network())
    variations.append(
        Variation("messages that take no time, same order", lambda: instant, now.whole, stages=now.stages)
    )  # fmt: skip
    if not compiled.options.fuse:
        variations.append(_compiled("functions compiled (fuse)", compiled, now, fuse=True))
    return [*variations, *recomputations(compiled, now), *_freezings(compiled, now)]


def _wider(compiled: CompiledModel, now: Now) -> Variation:
    """Twice the ranks, wherever they stand then."""
    mesh = replace(compiled.options.mesh, pp=2 * now.problem.ranks)
    options = replace(compiled.options, mesh=mesh)
    wider = replace(now.problem, ranks=mesh.pp, network=problem(compiled.program, options).network)
    return Variation(f"{mesh.pp} pipeline ranks", lambda: wider, now.schedule, **now.kept)


def _with_more_memory(compiled: CompiledModel, now: Now) -> Variation:
    """The plan as it is would do, too. With recompute="auto" less is run again, which takes a compilation."""
    name, program, options = "10 GB more memory", compiled.program, compiled.options
    most = limits(program, options)
    assert most is not None
    if any(choice == AUTO for _, choice in options.recompute):
        more = [round(limit + MORE_MEMORY) for limit in most]
        return replace(_compiled(name, compiled, now, memory=more if len(set(more)) > 1 else more[0]), same=True)
    roomy = now.problem.less(-MORE_MEMORY)
    return Variation(name, lambda: roomy, now.schedule, **now.kept, same=True)


def recomputations(compiled: CompiledModel, now: Now) -> list[Variation]:
    """All regions under another choice, and single components run again that save much."""
    chosen = compiled.options.recompute
    plain = chosen or (("*", default_choice(compiled.options)),)
    options: dict[str, tuple[tuple[str, Choice], ...]] = {}
    for choice in (NONE, SELECTIVE, FULL):
        if plain != (("*", choice),):
            options[f"recompute {choice}"] = (("*", choice),)
    saved: dict[str, float] = {}
    for unit in now.problem.units:
        saved[unit.component] = saved.get(unit.component, 0.0) + unit.saved
    if not any(choice in (AUTO, FULL) for _, choice in chosen):
        large = [name for name, size in saved.items() if LARGE * sum(saved.values()) < size < sum(saved.values())]
        options |= {f"recompute {name}=full": (*chosen, (name, FULL)) for name in large}
    return [_compiled(name, compiled, now, recompute=list(pairs)) for name, pairs in options.items()]


def _freezings(compiled: CompiledModel, now: Now) -> list[Variation]:
    """Each component frozen that trains, unless nothing else does."""
    training = [row.name for row in explain(compiled.program)[0] if row.trainable]
    frozen = compiled.options.freeze or ()
    if len(training) < 2:
        return []
    return [_compiled(f"freeze {name}", compiled, now, freeze=[*frozen, name]) for name in training]


def _compiled(name: str, compiled: CompiledModel, now: Now, **options: Any) -> Variation:
    """The problem of the model under other options, from the traces that are there."""
    return Variation(
        name,
        lambda: compiled.with_options(**options).inspected.problem(compiled.inspected.microbatch),
        now.schedule,
        **now.kept,
    )


def _itself(now: Now) -> Row:
    return Row(
        name=f"{now.whole.name}, this plan",
        stages=_stages(now.stages_given),
        on_a_rank=now.on_a_rank,
        makespan=now.makespan,
        speedup=1.0,
        idle=now.idle,
        peak_memory=max(now.peak_memory),
        fits=_fits(now.problem, now.peak_memory),
    )


def _row(outcome: Outcome, now: Now) -> Row:
    variation, plan = outcome.variation, outcome.plan
    if variation.name == EQUAL:
        name, stages = "1f1b", EQUAL
    else:
        name, stages = variation.name, _stages(variation.stages is not None and now.stages_given)
    if plan is None:
        return Row(name, stages, variation.chunks, why=outcome.why)
    if variation.same and plan.makespan > now.makespan:
        return replace(_itself(now), name=name, fits=True)
    ranks = len(plan.peak_memory)
    seconds, before = plan.makespan / outcome.microbatches, now.makespan / now.problem.microbatches
    return Row(
        name=name,
        stages=stages,
        on_a_rank=-(-len(plan.placement) // ranks),
        makespan=plan.makespan,
        speedup=before / seconds if seconds else 1.0,
        idle=sum(plan.bubble) / ranks,
        peak_memory=max(plan.peak_memory),
        fits=variation.name != EQUAL or _fits(now.problem, plan.peak_memory),
        cut=outcome.cut,
    )


def _fits(numbers: Problem, peaks: Sequence[float]) -> bool:
    """Whether every rank keeps to what it may hold."""
    limits = (numbers.limit_of(kind) for kind in numbers.kind_of)
    return all(limit is None or peak <= limit * (1 + 1e-9) for peak, limit in zip(peaks, limits))


def _stages(is_given: bool) -> str:
    return "given" if is_given else "planned"
