"""What csc's plans are held against: splits made by hand or blind to what is frozen, and torch's schedules.

Terms: `whole` is a Problem without state and memory limit; a *split* is the units of each stage, one stage on a rank.

    equal_layers(whole, layers, stages)     as many layers in each stage, in order of execution, whatever they cost
    balanced(whole, stages)                 the largest forward time of a stage is as small as it can be
    templates(whole, layers)                every encoder stages : LLM stages there is, encoders beside each other
    baselines(whole, layers) -> [Baseline]  a, b, c under 1F1B; d: torch's schedules on b's split, which is made
                                            anew where a rank has two stages; and the rivals
    rivals(whole) -> [Baseline]             fused 1F1B, interleaved 1F1B with every number of chunks, zero bubble and V,
                                            each on the best of three splits: blind, by work, aware of what is frozen

The 1F1B of a, b and c runs B and W apart, so the gradient of a stage's input leaves right after B. torch's and the
rivals', as torch and Megatron run them, are fused: it leaves after both, and W's needs are held of one unit at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from benchmarks.mllm.problem import units_of
from benchmarks.pipeline.torch_schedules import TORCH, chain, modelled, placement, without_gradients
from csc.ir.schedule import Schedule, with_messages
from csc.planning.partition import balance, contiguous
from csc.planning.problem import Problem, pipeline
from csc.planning.schedules import SCHEDULES
from csc.planning.schedules import placement as placed
from csc.simulation.pipeline import Pipeline, peak_memory
from csc.simulation.simulate import makespan

Split = tuple[tuple[int, ...], ...]
EQUAL, AGNOSTIC, TEMPLATE = "equal layers, 1F1B", "frozen-agnostic, 1F1B", "templates, 1F1B"
# (name, csc's name of the schedule, stages on a rank)
RIVALS = (
    ("rival 1F1B", "1f1b", 1),
    *((f"rival interleaved 1F1B, {n} chunks", "interleaved-1f1b", n) for n in range(2, 9)),
    ("rival ZB-H1", "zb-h1", 1),
    ("rival ZB-H2", "zb-h2", 1),
    *((f"rival interleaved ZB, {n} chunks", "interleaved-zb", n) for n in range(2, 9)),
    ("rival ZB-V", "zb-v", 2),
)


NAMES = tuple(name for name, *_ in RIVALS)


@dataclass(frozen=True)
class Baseline:
    """One of them on one case. seconds: makespan, None if it cannot express the case, for which note says why.

    activations: bytes on the fullest rank. wrong: stages whose weights get no gradient.
    """

    name: str
    seconds: float | None
    activations: float = 0.0
    stages: Split = ()
    wrong: tuple[int, ...] = ()
    note: str = ""


def equal_layers(whole: Problem, layers: Sequence[bool], stages: int, units: Sequence[int] | None = None) -> Split:
    """`units` (all of them) in order in `stages` stages, whose numbers of layers differ by one at most.

    What is no layer goes with the next layer of its component, or else with the layer before it. ValueError for fewer
    layers than stages.
    """
    listed = list(range(len(whole.units))) if units is None else list(units)
    groups: list[list[int]] = []  # each with one layer
    waiting: list[int] = []
    for u in listed:
        if waiting and whole.units[u].component != whole.units[waiting[0]].component:
            _behind(groups, waiting)
            waiting = []
        waiting.append(u)
        if layers[u]:
            groups.append(waiting)
            waiting = []
    _behind(groups, waiting)
    if len(groups) < stages:
        raise ValueError(f"{len(groups)} layers cannot fill {stages} stages")
    cuts = [round(s * len(groups) / stages) for s in range(stages + 1)]
    return tuple(tuple(u for group in groups[a:b] for u in group) for a, b in pairwise(cuts))


def _behind(groups: list[list[int]], units: list[int]) -> None:
    if groups:
        groups[-1] += units
    elif units:
        raise ValueError("a component without layers comes first")


def balanced(whole: Problem, stages: int) -> Split:
    """Contiguous in order of execution; forward time decides, as it would with everything trained."""
    starts = balance([round(1e9 * unit.forward) for unit in whole.units], stages)
    ends = [*starts[1:], len(whole.units)]
    return tuple(tuple(range(a, b)) for a, b in zip(starts, ends))


def templates(whole: Problem, layers: Sequence[bool]) -> Iterator[tuple[str, Split]]:
    """("1:5", its split) for all numbers of stages of each encoder, with its projector, and of the LLM."""
    parts: list[list[int]] = []
    for component, units in units_of(whole).items():
        if component.endswith("_projector"):
            parts[-1] += units
        else:
            parts.append(list(units))
    depths = [sum(layers[u] for u in part) for part in parts]
    for counts in _compositions(whole.ranks, depths):
        stages = [stage for part, n in zip(parts, counts) for stage in equal_layers(whole, layers, n, part)]
        yield ":".join(map(str, counts)), tuple(stages)


def _compositions(total: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as a sum with addend i between 1 and most[i]."""
    if len(most) == 1:
        if 1 <= total <= most[0]:
            yield (total,)
        return
    for first in range(1, min(most[0], total - len(most) + 1) + 1):
        for rest in _compositions(total - first, most[1:]):
            yield (first, *rest)


def baselines(whole: Problem, layers: Sequence[bool]) -> list[Baseline]:
    """All of them on one case."""
    blind = balanced(whole, whole.ranks)
    found = [
        _one_f_one_b(EQUAL, whole, equal_layers(whole, layers, whole.ranks)),
        _one_f_one_b(AGNOSTIC, whole, blind),
        min(
            (_one_f_one_b(TEMPLATE, whole, stages, f"stages {ratio}") for ratio, stages in templates(whole, layers)),
            key=lambda each: each.seconds or 0.0,
        ),
    ]
    return [*found, *(torch_baseline(name, whole) for name in TORCH), *rivals(whole)]


def rivals(whole: Problem) -> list[Baseline]:
    """For every schedule and number of chunks its fastest split. Only those that the units can fill."""
    found = []
    for title, name, chunks in RIVALS:
        home = placed(name, whole.ranks, chunks)
        if len(home) <= len(whole.units):
            tried = (_rival(title, name, home, whole, split, stages) for split, stages in _splits(whole, len(home)))
            found.append(min(tried, key=lambda each: each.seconds or 0.0))
    return found


def _rival(title: str, name: str, home: Sequence[int], whole: Problem, split: str, stages: Split) -> Baseline:
    numbers = pipeline(whole, stages)
    schedule = SCHEDULES[name](numbers, home, whole.microbatches)
    return Baseline(title, makespan(numbers, schedule), max(peak_memory(numbers, schedule)), stages, (), split)


def schedule_of(title: str, numbers: Pipeline, ranks: int, microbatches: int) -> Schedule:
    """The rival of this title."""
    _, name, chunks = next(rival for rival in RIVALS if rival[0] == title)
    return SCHEDULES[name](numbers, placed(name, ranks, chunks), microbatches)


def _splits(whole: Problem, stages: int) -> Iterator[tuple[str, Split]]:
    """In order of execution: by forward time, by all work, and by csc's own bound, which looks at what is frozen."""
    yield "frozen-agnostic", balanced(whole, stages)
    starts = balance([round(1e9 * unit.work) for unit in whole.units], stages)
    yield "by work", tuple(tuple(range(a, b)) for a, b in pairwise([*starts, len(whole.units)]))
    aware = contiguous(replace(whole, ranks=stages, memory=math.inf))
    if aware is not None:
        yield "frozen-aware", aware


def _one_f_one_b(name: str, whole: Problem, stages: Split, note: str = "") -> Baseline:
    numbers = pipeline(whole, stages)
    schedule = apart(SCHEDULES["1f1b"](numbers, tuple(range(len(stages))), whole.microbatches), numbers)
    return Baseline(name, makespan(numbers, schedule), max(peak_memory(numbers, schedule)), stages, (), note)


def apart(schedule: Schedule, numbers: Pipeline) -> Schedule:
    """The schedule with every BW as a B and, right behind it, a W."""
    orders = [[part for action in rank if action.computes for part in action.parts] for rank in schedule.ranks]
    return with_messages(schedule.name, orders, numbers.messages)


def torch_split(name: str, whole: Problem) -> tuple[Split, Pipeline]:
    """The split that a user of torch would write for this schedule: balanced, blind to what is frozen."""
    count = len(placement(name, whole.ranks))
    stages = balanced(whole, count)
    return stages, pipeline(whole, stages)


def torch_baseline(name: str, whole: Problem) -> Baseline:
    """torch's schedule on the case, simulated; without seconds if it cannot run it."""
    count = len(placement(name, whole.ranks))
    if count > len(whole.units):
        return Baseline(name, None, note=f"{len(whole.units)} regions cannot fill {count} stages")
    stages, numbers = torch_split(name, whole)
    if not chain(numbers):
        return Baseline(name, None, note="not a chain of stages")
    try:
        schedule = modelled(name, numbers, whole.ranks, whole.microbatches)
    except ValueError as error:
        return Baseline(name, None, note=str(error))
    wrong = tuple(without_gradients(name, numbers))
    note = f"no weight gradients on stage {', '.join(map(str, wrong))}" if wrong else ""
    return Baseline(name, makespan(numbers, schedule), max(peak_memory(numbers, schedule)), stages, wrong, note)
