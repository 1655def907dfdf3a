"""Losses of ranks in simulated jobs: coverage of every number of ranks, and the ways back.

    coverage() -> (cases that are covered, cases)
    plan_seconds(quick) -> CPU seconds of csc.planning.survive.templates.survival
    rerouted_steps(quick) -> [LossCell]    a rank is lost, and its microbatches run in bubbles of its peers
    ways(quick) -> [WayCell]               a rank is lost, and csc chooses among all ways back

A lost rank's work *fits the bubbles* if its peers' share of it is no more than what they idle in a step of 1F1B behind
their first forward: work cannot begin before that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from csc.errors import InputError
from csc.planning.problem import Problem, Unit, Value
from csc.planning.survive.reroute import rerouted
from csc.planning.survive.templates import (
    ReplicaArrangement,
    arranged,
    arrangements,
    covered,
    depths,
    survival,
    templates,
)
from csc.planning.survive.ways_back import HORIZON, layout_of, ways_back
from csc.simulation.pipeline import Link, Network

RANKS, LEAST, FAILURES = 40, 6, 3  # up to which cases are counted
LAYER = 0.010  # seconds of F, of B and of W of one layer and microbatch
STATE = 2e9  # bytes of a layer's parameters, gradients and optimizer state
SAVED = 2e8  # bytes of a layer's activations, and half as many between B and W
LINK = Link(1e-5, 25e9)


def coverage() -> tuple[int, int]:
    """Jobs of 1 to 40 ranks, replicas of 1 to 6 ranks or more, 0 to 3 failures at once, each number of ranks left that
    has room for one replica more than failures: is it a sum of that many depths of templates?
    """
    good = cases = 0
    for ranks in range(1, RANKS + 1):
        for least in range(1, LEAST + 1):
            for failures in range(FAILURES + 1):
                for left in range((failures + 1) * least, ranks + 1):
                    cases += 1
                    try:
                        found = covered(left, depths(ranks, least, failures), failures + 1)
                    except InputError:
                        continue
                    good += sum(found) == left and len(found) > failures
    return good, cases


def layers(count: int, memory: float | None = None) -> Problem:
    """A chain of equal layers."""
    units = tuple(
        Unit(f"layer {i}", "llm", LAYER, LAYER, LAYER, saved=SAVED, stashed=SAVED / 2, state=STATE)
        for i in range(count)
    )  # fmt: skip
    values = tuple(Value(i, (i + 1,), (True,), 3.3e7, 3.3e7) for i in range(count - 1))
    return Problem(units, values, 1, 1, memory, Network(LINK))


def plan_seconds(quick: bool = False) -> float:
    """64 ranks, 48 layers, and every number of ranks down to half (quick: 16 ranks and 12 layers)."""
    start = time.process_time()
    ranks, count = (16, 12) if quick else (64, 48)
    survival(layers(count), ranks, ranks, ranks // 2 - 1)
    return time.process_time() - start


@dataclass(frozen=True)
class LossCell:
    """after: seconds of a step behind the loss; ideal: of the step before, times N / (N - 1)."""

    replicas: int
    stages: int
    microbatches: int
    lost_stage: int
    before: float
    after: float
    fits: bool
    peak_over_before: float

    @property
    def ideal(self) -> float:
        ranks = self.replicas * self.stages
        return self.before * ranks / (ranks - 1)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"over_ideal": self.after / self.ideal}


def rerouted_steps(quick: bool = False) -> list[LossCell]:
    """Replicas of 1F1B; microbatches of each from as many as stages to more than bubbles have room for."""
    found = []
    for replicas, stages in ((4, 4),) if quick else ((2, 4), (3, 4), (4, 4), (4, 8), (8, 4), (8, 8)):
        most = (replicas - 1) * (stages - 1)
        for microbatches in sorted({stages, 2 * stages, most}) if not quick else (stages, most):
            template = templates(layers(stages), [stages], microbatches, ["1f1b"])[stages]
            before = template.seconds(microbatches)
            held = max(stage.state + stages * stage.saved for stage in template.pipeline.stages)
            for stage in sorted({0, stages // 2, stages - 1}):
                run = rerouted(template, [microbatches] * replicas, [(0, stage)])
                assert run is not None
                work = microbatches * template.pipeline.stages[stage].work
                first = sum(each.forward for each in template.pipeline.stages[:stage])
                fits = work / (replicas - 1) <= before - work - first
                found.append(
                    LossCell(
                        replicas, stages, microbatches, stage, before, run.seconds, fits, max(run.peaks) / held
                    )
                )  # fmt: skip
    return found


@dataclass(frozen=True)
class WayCell:
    """What csc chose behind the loss of one rank, and a fresh plan of as many ranks. Steps are those of an hour, the
    time until state has moved among it.
    """

    depths: tuple[int, ...]
    memory: float | None
    lost: int
    chosen: str
    seconds: float
    moved: float
    fresh: float
    ways: dict[str, float]

    @property
    def over_fresh(self) -> float:
        return (HORIZON - self.moved) / self.seconds * self.fresh / HORIZON

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"over_fresh": self.over_fresh}


def ways(quick: bool = False) -> list[WayCell]:
    """Jobs of equal and unequal replicas, with and without a limit on memory that forbids smaller ones."""
    cases: Sequence[tuple[tuple[int, ...], int, float | None]] = (
        ((4, 4), 12, None), ((4, 4), 12, 9e9), ((5, 4), 12, 9e9), ((4, 4, 4), 12, None), ((8, 8), 24, None),
        ((8, 8, 8, 8), 32, None), ((6, 5, 5), 24, None), ((5, 4, 4), 12, 10.5e9), ((8, 7, 6), 32, None),
    )  # fmt: skip
    found = []
    for depths_of, count, memory in cases[:4] if quick else cases:
        problem = layers(count, memory)
        microbatches = 8 * len(depths_of)
        ranks = sum(depths_of)
        made = templates(problem, range(1, min(count, ranks) + 1), microbatches // len(depths_of))
        start = arranged(made, ranks, depths_of, microbatches)
        assert start is not None
        before = layout_of(start, made)
        fresh: ReplicaArrangement = arrangements(made, [ranks - 1], microbatches)[ranks - 1]
        for lost in (0, ranks // 2, ranks - 1):
            listed = ways_back(problem, made, before, [lost])
            best = listed[0]
            each: dict[str, float] = {way.kind: way.seconds for way in listed}
            found.append(
                WayCell(depths_of, memory, lost, best.kind, best.seconds, best.moved, fresh.seconds, each)
            )  # fmt: skip
    return found
