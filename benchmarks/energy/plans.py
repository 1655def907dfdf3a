"""csc's plans of multimodal LLMs with frozen parts: clocks on 1F1B alone, and the order chosen together with them.

Terms: a *case* is a configuration of benchmarks.mllm with a frozen set on A100 profiles; the step of 1F1B at the
highest clocks is the time that all of a case may take, and its fullest rank's activations are the memory. `auto` is
csc's search for orders within that memory.

    run(cases) -> [PlanRow]
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.mllm.configurations import CONFIGURATIONS
from benchmarks.mllm.problem import problem
from csc.analysis.hardware import hardware
from csc.errors import CscError
from csc.planning.energy.frontier import EnergyProblem, of_profiles, point
from csc.planning.plan import PipelinePlan, plan

DEVICE = "a100"
MICROBATCHES = 24
RANKS = 8
EFFORT = 0.3
SCHEDULES = ("1f1b", "eager-1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "auto")
CASES = tuple(
    (configuration, frozen)
    for configuration in ("VLM-S", "VLM-M", "ALM-S", "VALM-S")
    for frozen in ("encoder frozen", "projector only", "all trainable")
)
QUICK = (("VLM-S", "encoder frozen"), ("VLM-S", "projector only"))


@dataclass(frozen=True)
class ScheduleRow:
    """seconds: at the highest clocks. same_time: saved at that time, possible: what no clocks save there. saved: at
    the time of 1F1B, beside 1F1B at the highest clocks; None: it takes longer. over_promised: as of FactorRow.
    """

    schedule: str
    seconds: float
    same_time: float
    possible: float
    saved: float | None
    over_promised: float


@dataclass(frozen=True)
class PlanRow:
    """cpu_seconds: of all frontier points of the case."""

    configuration: str
    frozen: str
    schedules: tuple[ScheduleRow, ...]
    cpu_seconds: float

    @property
    def own(self) -> ScheduleRow:
        """1F1B."""
        return self.schedules[0]

    @property
    def auto(self) -> ScheduleRow | None:
        return next((row for row in self.schedules if row.schedule == "auto"), None)

    @property
    def best(self) -> ScheduleRow:
        """The most saved in the time and memory of 1F1B."""
        return max(self.schedules, key=lambda row: -math.inf if row.saved is None else row.saved)

    @property
    def points(self) -> float:
        """Percentage points that the order adds to clocks on 1F1B alone."""
        return 100 * ((self.best.saved or 0.0) - (self.own.saved or 0.0))

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "best": self.best.schedule, "points": self.points}


def run(cases: Sequence[tuple[str, str]], tell: Callable[[str], None]) -> list[PlanRow]:
    """Each case, in its order."""
    found = []
    for configuration, frozen in cases:
        tell(f"{configuration}, {frozen}")
        found.append(_case(configuration, frozen))
    return found


def _case(configuration: str, frozen: str) -> PlanRow:
    whole = problem(CONFIGURATIONS[configuration], frozen, hardware(DEVICE), RANKS, MICROBATCHES)
    units = tuple(replace(unit, state=0.0, working=0.0) for unit in whole.units)
    numbers = replace(whole, units=units, waiting=False)
    first = plan(numbers, "1f1b")
    limited = replace(numbers, memory=max(first.peak_memory))
    plans: list[tuple[str, PipelinePlan]] = [("1f1b", first)]
    for name in SCHEDULES[1:]:
        try:
            plans.append((name, plan(limited, name, effort=EFFORT)))
        except CscError:
            continue  # it does not fit into that memory
    began = time.process_time()
    base = _energy(first).usual
    rows = []
    for name, each in plans:
        energy = _energy(each)
        usual = energy.usual
        same = point(energy, usual.seconds)
        promised = [same.seconds / usual.seconds]
        saved = None
        if energy.fastest.seconds <= base.seconds:
            at = point(energy, base.seconds)
            promised.append(at.seconds / base.seconds)
            saved = 1 - at.joules / base.joules
        rows.append(
            ScheduleRow(
                name, usual.seconds, 1 - same.joules / usual.joules, 1 - same.bound / usual.joules, saved, max(promised)
            )
        )
    return PlanRow(configuration, frozen, tuple(rows), time.process_time() - began)


def _energy(found: PipelinePlan) -> EnergyProblem:
    clocks = hardware(DEVICE).clocks
    assert clocks is not None
    return of_profiles(found.pipeline, found.schedule, [clocks] * RANKS, [1] * RANKS)
