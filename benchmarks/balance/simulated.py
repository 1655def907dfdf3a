"""The cells of the benchmark, simulated: one step's samples divided by csc and by every rival.

Terms
  cell    a model, what of it is frozen, lengths, a shape, a schedule; each for several batches
  shape   ranks in a pipeline, microbatches, replicas, samples of a step
  equal   every microbatch the mean: what no samples are, for scale

    cells(quick) -> [Cell]
    measure(cell, batches) -> Row
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.balance.lengths import SETS, drawn
from benchmarks.balance.models import MODELS, rates_of
from benchmarks.balance.rivals import RIVALS, Question, equal
from benchmarks.mllm.trace import FROZEN
from csc.planning.assign.portfolio import Shape, assign, learned
from csc.planning.assign.step import Floats, SampleCosts, bound
from csc.planning.plan import PipelinePlan, plan
from csc.planning.problem import Problem, SizeRates, loads, mean
from csc.planning.schedules.work import orders_of, peaks

HARDWARE = "h100"
OURS = "csc"
SHAPES = (  # ranks, microbatches, replicas, samples
    (4, 8, 1, 32), (4, 32, 1, 128), (4, 32, 2, 256), (4, 16, 4, 256), (8, 32, 1, 128), (8, 64, 1, 256), (8, 32, 4, 256),
)  # fmt: skip
MULTIPLE = (1.0, 1.0, 64.0, 1.0)  # text is padded to this
ROOM = 1.5  # for csc, times the most activations of equal microbatches, or what LPT takes; others take what they do
DRAWS = 4  # steps of other samples that shapes are learned from
QUICK_SHAPES = SHAPES[1:3]


@dataclass(frozen=True)
class Cell:
    """One row of the benchmark. memory: of activations, in times what 1F1B takes of mean microbatches; None: no
    limit.
    """

    model: str
    frozen: str
    lengths: str
    shape: tuple[int, int, int, int]
    schedule: str = "1f1b"
    memory: float | None = None

    @property
    def name(self) -> str:
        ranks, microbatches, replicas, samples = self.shape
        limit = "" if self.memory is None else f" at {self.memory:g}x"
        return (
            f"{self.model}, {self.frozen}, {self.lengths}, p{ranks} m{microbatches} dp{replicas} N{samples}, "
            f"{self.schedule}{limit}"
        )


@dataclass(frozen=True)
class Row:
    """Seconds by way, the mean of the batches; decision: CPU seconds of csc's, the most. taken: by way the most bytes
    of activations of any rank, in times those of equal microbatches.
    """

    cell: Cell
    seconds: dict[str, float]
    bound: float
    equal: float
    decision: float
    taken: dict[str, float]


def cells(quick: bool = False) -> list[Cell]:
    """All cells: every model, frozen set and lengths in every shape under 1F1B; some under csc's own schedule."""
    models = ("VLM-S",) if quick else tuple(MODELS)
    found = [
        Cell(model, frozen, lengths, shape)
        for model in models
        for frozen in FROZEN
        for lengths in SETS
        for shape in (QUICK_SHAPES if quick else SHAPES)
    ]
    searched = [
        Cell(model, "encoder frozen", lengths, shape, "auto", memory)
        for model in models[:2]
        for lengths in ("mixture", "tail")
        for shape in QUICK_SHAPES[: 1 if quick else None]
        for memory in (1.0, 2.0)
    ]
    return found + searched


def measure(
    cell: Cell, batches: int, ilp_seconds: float = 0.0, bound_of: Callable[[SampleCosts], float] = bound
) -> Row:
    """The cell with so many batches of samples."""
    rates, whole, planned, typical = _whole(cell)
    ranks, _, _, count = cell.shape
    lengths = SETS[cell.lengths]()
    sums: dict[str, float] = dict.fromkeys((OURS, *RIVALS), 0.0)
    taken, took = dict.fromkeys(sums, 0.0), {}
    bounds, equals, decisions = 0.0, 0.0, []
    draws = [_step(cell, rates, whole, planned, drawn(lengths, count, number), typical) for number in range(DRAWS)]
    planned_shapes = _shapes(draws)
    for seed in range(batches):
        step = _step(cell, rates, whole, planned, drawn(lengths, count, 100 + seed), typical)
        even = equal(step)
        held = max(peaks(step.work(even[0]), step.orders))
        asked = Question(step, *_loads_of(step, rates), seed, ilp_seconds)
        for name, divide in RIVALS.items():
            divided = divide(asked)
            sums[name] += max(map(step.seconds_of, divided))
            took[name] = max(max(peaks(step.work(one), step.orders)) for one in divided) / held
        gc.freeze()  # as a loader's workers do
        start = time.process_time()
        own = assign(step, [max(ROOM, took["LPT"]) * held] * ranks, shapes=planned_shapes)
        decisions.append(time.process_time() - start)
        sums[OURS] += own.seconds
        took[OURS] = max(own.peaks) / held
        taken = {name: max(taken[name], bytes_) for name, bytes_ in took.items()}
        bounds += bound_of(step)
        equals += max(map(step.seconds_of, even))
    return Row(
        cell, {name: total / batches for name, total in sums.items()}, bounds / batches, equals / batches,
        max(decisions), taken,
    )  # fmt: skip


def _shapes(steps: Sequence[SampleCosts]) -> list[Shape]:
    """Of a plan, from samples that are not those of any step which is measured."""
    held = max(max(peaks(step.work(one[0]), step.orders)) for step in steps for one in [equal(step)])
    return learned(steps, [ROOM * held] * len(steps[0].orders))


def prepared(cell: Cell, samples: Floats) -> tuple[PipelinePlan, SampleCosts, Floats]:
    """The cell's plan, a step of these samples, and the features of a mean microbatch."""
    rates, whole, planned, typical = _whole(cell)
    return planned, _step(cell, rates, whole, planned, samples, typical), typical


def _whole(cell: Cell) -> tuple[SizeRates, Problem, PipelinePlan, Floats]:
    """The model's rates, the problem of its mean microbatch, the plan for that, and its features."""
    rates, whole, typical = _of_mean(cell)
    return rates, whole, _planned(cell, whole), typical


def whole_problem(cell: Cell) -> Problem:
    """That of the cell's mean microbatch."""
    return _of_mean(cell)[1]


def _of_mean(cell: Cell) -> tuple[SizeRates, Problem, Floats]:
    rates, problem = rates_of(cell.model, cell.frozen, HARDWARE)
    ranks, microbatches, replicas, count = cell.shape
    lengths = SETS[cell.lengths]()
    typical = drawn(lengths, min(len(lengths), 4096), 0).mean(axis=0) * count / (microbatches * replicas)
    whole = replace(mean(rates, problem, (1.0, *typical)), ranks=ranks, microbatches=microbatches)
    return rates, whole, typical


def _planned(cell: Cell, whole: Problem) -> PipelinePlan:
    free = replace(whole, units=tuple(replace(unit, state=0.0) for unit in whole.units))
    first = plan(free, "1f1b")
    if cell.schedule == "1f1b":
        return first
    limit = None if cell.memory is None else cell.memory * max(first.peak_memory)
    return plan(replace(free, memory=limit), cell.schedule, effort=0.3)


def _step(
    cell: Cell, rates: SizeRates, whole: Problem, planned: PipelinePlan, samples: Floats, typical: Floats
) -> SampleCosts:
    _, microbatches, replicas, _ = cell.shape
    own = loads(rates, whole, planned.stages, [(1.0, *typical)] * microbatches)
    orders = tuple(map(tuple, orders_of(planned.schedule)))
    pipeline = replace(planned.pipeline, loads=own)
    return SampleCosts(samples, pipeline, planned.placement, orders, replicas, microbatches, MULTIPLE)


def _loads_of(step: SampleCosts, rates: SizeRates) -> tuple[Floats, Floats]:
    """Seconds of each sample on the encoder's units and on the others."""
    seconds = np.array([[u.work for u in units] for units in rates.units[1:]])
    encoding = np.array([unit.component.startswith("vision") for unit in rates.units[0]])
    each = step.samples @ seconds
    return each[:, encoding].sum(axis=1), each[:, ~encoding].sum(axis=1)
