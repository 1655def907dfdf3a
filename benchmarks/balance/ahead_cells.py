"""What it gains to encode for the next step where ranks would wait: a frozen encoder in the pipeline, and out of it.

Terms
  with      csc's plan of the whole model, whose stages run the encoder
  without   that of the rest of the model, its features given; ahead: the same, encoding for the next step in its waits

    ahead_cells(quick) -> [AheadCell]       by the simulator
    figures_ahead(quick, paced) -> [row]    of both
    paced(cells) -> [(error, gain)]         the two as real processes over gloo that wait instead of computing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from benchmarks.balance.models import MODELS
from benchmarks.balance.simulated import SHAPES, Cell, whole_problem
from benchmarks.pipeline.emulated_ranks import TARGET, stretched, work
from csc.ir.schedule import Action, Schedule
from csc.planning.encode_ahead import fit_ahead
from csc.planning.plan import PipelinePlan, plan
from csc.planning.problem import Problem, Unit, Value
from csc.simulation.pipeline import Link, Pipeline, StageWork, to_json
from csc.simulation.simulate import makespan

LENGTHS = "mixture"
AHEAD_SHAPES = [shape for shape in SHAPES if shape[2] == 1]
EFFORT = 0.3


@dataclass(frozen=True)
class AheadCell:
    """Seconds of a step by way; waits: how many of `microbatches` are encoded in time in which ranks wait. encoded: the
    run of `ahead`, whose first stages are the encoder, on ranks that encode.
    """

    name: str
    seconds: Mapping[str, float]
    waits: int
    microbatches: int
    alone: tuple[Pipeline, Schedule]
    encoded: tuple[Pipeline, Schedule]

    @property
    def gain(self) -> float:
        return self.seconds["with"] / self.seconds["ahead"]


def ahead_cells(quick: bool) -> list[AheadCell]:
    """Of models whose encoder is frozen, mean microbatches; activations of `auto` as of 1F1B."""
    return [
        _cell(Cell(model, frozen, LENGTHS, shape, schedule))
        for model in (["VLM-S"] if quick else list(MODELS)[:2])
        for frozen in ("encoder frozen", "projector only")
        for shape in AHEAD_SHAPES[: 2 if quick else None]
        for schedule in ("1f1b", "auto")
    ]


def _cell(cell: Cell) -> AheadCell:
    whole = _stateless(whole_problem(cell))
    rest, seconds = without_encoder(whole)
    limit = None if cell.schedule == "1f1b" else max(plan(whole, "1f1b").peak_memory)
    one, other = (plan(replace(p, memory=limit), cell.schedule, effort=EFFORT) for p in (whole, rest))
    reader = next(other.placement[s] for s, units in enumerate(other.stages) if 0 in units)
    found = fit_ahead(other.pipeline, other.schedule, seconds, [reader], [float("inf")] * whole.ranks)
    ways = {"with": one.makespan, "without": other.makespan, "ahead": found.seconds}
    encoded = as_stages(other, found.orders, seconds)
    return AheadCell(cell.name, ways, found.waits, whole.microbatches, (one.pipeline, one.schedule), encoded)


def _stateless(problem: Problem) -> Problem:
    """Of activations alone, as all of the benchmark."""
    return replace(problem, units=tuple(replace(unit, state=0.0) for unit in problem.units))


def without_encoder(problem: Problem) -> tuple[Problem, float]:
    """The problem whose first units hand on what the encoder makes, and the seconds of that for a microbatch."""
    inside = [n for n, unit in enumerate(problem.units) if unit.component.startswith("vision") and not unit.has_b]
    rest = [n for n in range(len(problem.units)) if n not in inside]
    made = [v for v in problem.values if v.maker in inside and not set(v.readers) <= set(inside)]
    place = {old: len(made) + new for new, old in enumerate(rest)}
    values = []
    for number, value in enumerate(made):
        read = [(place[r], g) for r, g in zip(value.readers, value.gradient, strict=True) if r in place]
        readers, gradients = tuple(r for r, _ in read), tuple(g for _, g in read)
        values.append(Value(number, readers, gradients, value.size, value.gradient_size))
    for value in problem.values:
        if value.maker in place:
            values.append(replace(value, maker=place[value.maker], readers=tuple(place[r] for r in value.readers)))
    units = [Unit(f"features.{n}", "vision", 0.0, has_b=False, has_w=False) for n in range(len(made))]
    units += [problem.units[old] for old in rest]
    seconds = sum(problem.units[n].forward for n in inside)
    return replace(problem, units=tuple(units), values=tuple(values)), seconds


def as_stages(
    planned: PipelinePlan, orders: Sequence[Mapping[int, Sequence[int]]], seconds: float
) -> tuple[Pipeline, Schedule]:
    """The plan behind a stage more for each rank that encodes, which nothing waits for: F is to encode a microbatch."""
    makers = [rank for rank, order in enumerate(orders) if order]
    count, ranks = len(makers), []
    for rank, actions in enumerate(planned.schedule.ranks):
        listed, done, due = list[Action](), 0, True
        for action in [*actions, None]:
            if due and (action is None or action.kind != "SEND"):
                listed += [Action("F", makers.index(rank), mb) for mb in orders[rank].get(done, ())]
                due = False
            if action is not None:
                listed.append(_behind(action, count))
                done, due = (done + 1, True) if action.computes else (done, due)
        ranks.append(tuple(listed))
    more = (StageWork(seconds, has_b=False, has_w=False),) * count
    messages = {(kind, a + count, b + count): size for (kind, a, b), size in planned.pipeline.messages.items()}
    pipeline = replace(planned.pipeline, stages=(*more, *planned.pipeline.stages), messages=messages)
    return pipeline, Schedule(planned.schedule.name, tuple(ranks))


def _behind(action: Action, count: int) -> Action:
    """With stages that have so many before them."""
    if action.kind == "REDUCE":
        return action
    ends = count if action.message else 0
    return action._replace(
        stage=action.stage + count, source=action.source + ends, destination=action.destination + ends
    )  # fmt: skip


def paced(cells: Sequence[AheadCell], steps: int = 3) -> list[tuple[float, float]]:
    """Measured seconds over those that the simulator says, and the gain as measured, of cells with the same ranks."""
    (answer,) = work([{"kind": "link"}], 2)
    link = Link(answer["latency"], answer["bandwidth"])
    jobs, predicted = [], []
    for cell in cells:
        stretch = TARGET / cell.seconds["ahead"]
        for pipeline, schedule in (cell.alone, cell.encoded):
            slow = stretched(pipeline, list(schedule.placement.values()), stretch, link)
            predicted.append(makespan(slow, schedule))
            jobs.append({"kind": "csc", "pipeline": to_json(slow), "schedule": str(schedule), "steps": steps})
    made = [median(one["makespans"]) for one in work(jobs, len(cells[0].alone[1].ranks))]
    errors = [measured / said - 1 for measured, said in zip(made, predicted, strict=True)]
    return [
        (max(errors[2 * n : 2 * n + 2], key=abs), made[2 * n] / made[2 * n + 1]) for n in range(len(cells))
    ]  # fmt: skip


def figures_ahead(quick: bool, with_paced: bool) -> list[dict[str, Any]]:
    """A row for each cell. with_paced: those of four ranks are also measured."""
    cells = ahead_cells(quick)
    four = [cell for cell in cells if len(cell.alone[1].ranks) == 4]
    measured = dict(zip([cell.name for cell in four], paced(four) if with_paced else [], strict=False))
    return [
        {
            "cell": cell.name, **{name: round(seconds, 4) for name, seconds in cell.seconds.items()},
            "gain": round(cell.gain, 3), "in waits": f"{cell.waits} of {cell.microbatches}",
            **({"measured gain": round(measured[cell.name][1], 3), "error": round(measured[cell.name][0], 3)}
               if cell.name in measured else {}),
        }
        for cell in cells
    ]  # fmt: skip
