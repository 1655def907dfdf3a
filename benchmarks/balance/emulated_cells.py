"""Emulated ranks for some cells: what assignments take on real processes over gloo, beside what the simulator says.

Terms: see benchmarks.pipeline.emulated_ranks. Compute is a wait of the modelled time of its own microbatch; processes,
messages and their order are real.

    emulated(cells, steps) -> [Emulated]
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.balance.lengths import SETS, drawn
from benchmarks.balance.simulated import OURS, ROOM, Cell, prepared
from benchmarks.pipeline.emulated_ranks import TARGET, stretched, work
from csc.planning.assign.portfolio import assign
from csc.planning.assign.step import Groups, SampleCosts
from csc.planning.schedules.work import peaks
from csc.simulation.pipeline import Link, Loads, Pipeline, to_json
from csc.simulation.simulate import makespan

SEED = 100


@dataclass(frozen=True)
class Emulated:
    """Seconds of one stretched step; measured: the median of some."""

    cell: str
    way: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.measured / self.predicted - 1


def emulated(cells: Sequence[Cell], steps: int = 3) -> list[Emulated]:
    """csc's assignment and random microbatches in each of these cells, which have one replica and the same ranks."""
    (answer,) = work([{"kind": "link"}], 2)
    link = Link(answer["latency"], answer["bandwidth"])
    told, jobs = [], []
    for cell in cells:
        planned, step, typical = prepared(cell, drawn(SETS[cell.lengths](), cell.shape[3], SEED))
        held = max(peaks(step.work(np.tile([1.0, *typical], (step.microbatches, 1))), step.orders))
        ours = assign(step, [ROOM * held] * cell.shape[0]).groups[0]
        order = np.random.default_rng(SEED).permutation(len(step.samples))
        random = [part.tolist() for part in np.array_split(order, step.microbatches)]
        stretch = TARGET / step.seconds_of(step.features(ours))
        for way, groups in ((OURS, ours), ("random", random)):
            slow = stretched(_of(step, groups), planned.placement, stretch, link)
            told.append((cell.name, way, makespan(slow, planned.schedule)))
            jobs.append({"kind": "csc", "pipeline": to_json(slow), "schedule": str(planned.schedule), "steps": steps})
    found = []
    for (name, way, predicted), made in zip(told, work(jobs, cells[0].shape[0]), strict=True):
        if "makespans" not in made:
            raise RuntimeError(f"{name}, {way}: {made['error']}")
        found.append(Emulated(name, way, predicted, statistics.median(made["makespans"])))
    return found


def _of(step: SampleCosts, groups: Groups) -> Pipeline:
    """The pipeline with these microbatches."""
    loads = step.pipeline.loads
    assert loads is not None
    own = Loads(tuple(map(tuple, step.features(groups).tolist())), loads.stages, loads.messages)
    return replace(step.pipeline, loads=own)
