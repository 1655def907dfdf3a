"""Where a schedule makes parameters whole that data-parallel ranks divide (zero=3), and where it drops them.

Terms: a *use* is an action that computes with a stage; see csc.ir.schedule for GATHER and FREE. A gather is *ahead* if
the action before its use computes meanwhile; so there are at most two stages whole on a rank: that at work, and the
next. A stage is *kept* if it stays whole to its last use, over all microbatches; it is gathered at the start of the
step, those that are used first first.

A pipeline of one rank takes equally long in every order but for its gathers. With a microbatch after the other there
are gathers for each of them, and little is saved; with a stage after the other there are two for all of them (Lamy-
Poirier, Breadth-First Pipeline Parallelism, 2023), and all of them are saved at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from csc.errors import InputError
from csc.ir.schedule import WHOLE, Action, Schedule, doable, with_messages
from csc.planning.partition import balance
from csc.planning.problem import Problem, Stages, pipeline
from csc.planning.schedules import SCHEDULES
from csc.planning.ways import Placement
from csc.simulation.pipeline import Pipeline, peak_memory
from csc.simulation.simulate import makespan

Limits = Sequence[float] | float | None

SIMULATED = 300_000  # actions in all, beyond which stages are not tried one by one: there are as many steps as stages
STAGES = 8  # of a rank, if nobody says: two of them, whole, are a quarter of its parameters


def with_gathers(
    work: Pipeline, schedule: Schedule, memory: Limits = None, one_by_one: bool = True
) -> Schedule:  # fmt: skip
    """GATHER and FREE around the uses of every divided stage. memory: bytes that a rank may hold, or each. If given,
    stages are kept as far as there is room and the step gets shorter by it, those first whose gathers take longest for
    their bytes; else none is. one_by_one: a step is simulated for each stage; else, and where steps are large, all or
    none are kept that there is room for.
    """
    if not any(work.divided) or any(action.kind in WHOLE for actions in schedule.ranks for action in actions):
        return schedule
    home = schedule.placement
    kept: set[int] = set()
    best = _gathering(schedule, work.divided)
    if memory is None:
        return best
    seconds, least = makespan(work, best), makespan(work, schedule)
    stages = [stage for stage, divided in enumerate(work.divided) if divided and stage in home]
    stages.sort(key=lambda stage: -work.stages[stage].gather / work.stages[stage].gathered)
    one_by_one = one_by_one and len(stages) * sum(map(len, schedule.ranks)) <= SIMULATED
    for stage in stages if one_by_one else ():
        if seconds <= least * (1 + 1e-9):  # no gather is waited for
            return best
        rank = home[stage]
        actions = _of_rank(schedule.ranks[rank], work.divided, kept | {stage})
        if actions == best.ranks[rank] or not _fits(work, rank, actions, memory):
            continue
        tried = Schedule(best.name, (*best.ranks[:rank], actions, *best.ranks[rank + 1 :]))
        faster = makespan(work, tried)
        if faster < seconds * (1 - 1e-9):
            kept.add(stage)
            best, seconds = tried, faster
    roomy = _keeping(work, schedule, stages, memory)  # where ranks wait for each other, one stage that stays is no gain
    return roomy if roomy != best and makespan(work, roomy) < seconds * (1 - 1e-9) else best


def _keeping(
    work: Pipeline, schedule: Schedule, stages: Sequence[int], memory: Sequence[float] | float
) -> Schedule:  # fmt: skip
    """With all of these stages kept that their ranks have room for, the first ones first."""
    ranks = []
    for rank, plain in enumerate(schedule.ranks):
        stages_here = [stage for stage in stages if schedule.placement[stage] == rank]
        every = _of_rank(plain, work.divided, stages_here)
        ranks.append(every if _fits(work, rank, every, memory) else _with_room(work, rank, plain, stages_here, memory))
    return Schedule(schedule.name, tuple(ranks))


def _with_room(
    work: Pipeline, rank: int, plain: Sequence[Action], stages: Sequence[int], memory: Sequence[float] | float
) -> tuple[Action, ...]:  # fmt: skip
    kept: set[int] = set()
    best = _of_rank(plain, work.divided, kept)
    for stage in stages:
        actions = _of_rank(plain, work.divided, kept | {stage})
        if _fits(work, rank, actions, memory):
            kept.add(stage)
            best = actions
    return best


def seconds_waited_for(work: Pipeline, schedule: Schedule) -> float:
    """By which a step is longer than if all that is gathered were there."""
    if not any(work.divided):
        return 0.0
    bare = (tuple(action for action in actions if action.kind not in WHOLE) for actions in schedule.ranks)
    return makespan(work, schedule) - makespan(work, Schedule(schedule.name, tuple(bare)))


def held_whole(problem: Problem) -> Problem:
    """An order that was searched for it leaves room to keep every stage."""
    units = (replace(unit, state=unit.state + unit.gathered, gathered=0.0) for unit in problem.units)
    return replace(problem, units=tuple(units))


def _fits(work: Pipeline, rank: int, actions: tuple[Action, ...], memory: Sequence[float] | float) -> bool:
    """Whether a rank has room for what it holds if it runs these actions."""
    alone = Schedule("", (*((),) * rank, actions))
    return peak_memory(work, alone)[rank] <= (memory if isinstance(memory, (int, float)) else memory[rank])


def _gathering(schedule: Schedule, divided: Sequence[bool]) -> Schedule:
    """With no stage kept."""
    return Schedule(schedule.name, tuple(_of_rank(actions, divided, ()) for actions in schedule.ranks))


def _of_rank(actions: Sequence[Action], divided: Sequence[bool], kept: Collection[int]) -> tuple[Action, ...]:
    """A rank's actions with its gathers. A FREE stands right behind the last use; a GATHER before the action that
    computes ahead of the first, and before the receives that this one waits in; those of kept stages before all.
    """
    uses = [i for i, action in enumerate(actions) if action.computes]
    ends: dict[int, int] = {}  # by stage, the number of its last use so far
    gathers: dict[int, list[int]] = {}  # by the number of the action before which they stand, stages
    frees: dict[int, list[int]] = {}
    for number, i in enumerate(uses):
        stage = actions[i].stage
        if not divided[stage]:
            continue
        before = ends.get(stage)
        if before is None or (stage not in kept and _several(actions, uses[before + 1 : number], divided)):
            if before is not None:
                frees.setdefault(uses[before], []).append(stage)
            gathers.setdefault(0 if stage in kept else max(number - 1, 0), []).append(stage)
        ends[stage] = number
    for stage, last in sorted(ends.items()):
        frees.setdefault(uses[last], []).append(stage)
    stages_at = {_start(actions, uses[number]): stages for number, stages in gathers.items()}
    actions_made: list[Action] = []
    for i, action in enumerate(actions):
        actions_made += [Action("GATHER", stage) for stage in stages_at.get(i, ())]
        actions_made.append(action)
        actions_made += [Action("FREE", stage) for stage in frees.get(i, ())]
    return tuple(actions_made)


def _several(actions: Sequence[Action], uses: Sequence[int], divided: Sequence[bool]) -> bool:
    """Whether these compute with more than one stage: beside one, another can stay whole."""
    return len({actions[i].stage for i in uses if divided[actions[i].stage]}) > 1


def _start(actions: Sequence[Action], use: int) -> int:
    """The first of the receives right before an action."""
    while use and actions[use - 1].kind == "RECV":
        use -= 1
    return use


def on_one_rank(problem: Problem, chunks: int | None, stages: Stages | None) -> tuple[Stages, Placement, Schedule]:
    """The plan of a pipeline of one rank. chunks: stages; None: STAGES, or a unit in each. stages: those, if they are
    given. With a memory limit the faster order of two that fits; without one that which holds least.
    """
    if stages is None:
        stages = _even(problem, chunks)
    numbers, home = pipeline(problem, stages), (0,) * len(stages)
    in_turn = with_gathers(numbers, _in_turn(numbers, problem.microbatches), problem.memory)
    if problem.memory is None:
        return stages, home, in_turn
    with suppress(InputError):  # all that is saved has no room
        breadth = SCHEDULES["gpipe"](numbers, home, problem.microbatches, problem.memory)
        breadth = with_gathers(numbers, replace(breadth, name="auto"), problem.memory)
        if max(peak_memory(numbers, breadth)) <= problem.memory and makespan(numbers, breadth) < makespan(
            numbers, in_turn
        ):
            return stages, home, breadth
    return stages, home, in_turn


def _even(problem: Problem, chunks: int | None) -> Stages:
    """The units in their order in stages of which the largest gathers as little as it can."""
    count = len(problem.units)
    starts = list(range(count)) if chunks is not None else _starts(problem)
    lumps = list(pairwise([*starts, count]))
    sizes = [round(sum(unit.gathered for unit in problem.units[a:b])) for a, b in lumps]
    firsts = balance(sizes, min(STAGES, len(lumps)) if chunks is None else chunks)
    return tuple(tuple(range(a, b)) for a, b in pairwise([*(starts[first] for first in firsts), count]))


def _starts(problem: Problem) -> list[int]:
    """The units that may open a stage: none between a value's maker and a reader without parameters that makes another
    of its size, such as what puts pictures into text. A program for microbatches without pictures does not have that:
    there the value goes on from its maker, and has to leave the same stage.
    """
    produced = {(value.maker, value.size) for value in problem.values}
    inside = {
        unit
        for value in problem.values
        for reader in value.readers
        if not problem.units[reader].gathered and (reader, value.size) in produced
        for unit in range(value.maker + 1, reader + 1)
    }
    return [unit for unit in range(len(problem.units)) if unit not in inside]


def _in_turn(work: Pipeline, microbatches: int) -> Schedule:
    """All stages forward and back again with a microbatch before the next one comes: no order holds less."""
    stages = range(len(work.stages))
    order = []
    for microbatch in range(microbatches):
        order += [Action("F", stage, microbatch) for stage in stages]
        for stage in reversed(stages):
            kind = doable("BW", work.has_b[stage], work.has_w[stage])
            order += [Action(kind, stage, microbatch)] if kind else []
    return with_messages("auto", [order], work.messages)
