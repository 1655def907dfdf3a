"""One case: what csc chooses, and what others would, on the same costs.

    evaluate(case, seconds) -> MeshComparison        seconds: that csc's search may take

Seconds of a search are processor time of the process that it begins in: others of it run beside that one, and so may
other programs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.mesh.cases import samples
from benchmarks.mesh.components import FORMULAS, of_formula, of_simulation
from benchmarks.mesh.divided import TraceClock, divided
from benchmarks.mesh.uniform import MeshRival, Settings, best_uniform, cornstarch, least_seconds_of, megatron
from benchmarks.mllm.configurations import CONFIGURATIONS
from benchmarks.pipeline.cases import Case
from csc.analysis.hardware import hardware
from csc.driver.mesh_candidates import NOTHING_FIXED, DividedModel, MeshChoice
from csc.driver.mesh_search import MeshSearch, workers_here
from csc.planning.meshes import layouts

UNIFORM, OWN = "best uniform", "csc"


@dataclass(frozen=True)
class MeshComparison:
    """own: csc's choice as a rival is shown. left: layouts that its search had no time for. by_component: an estimate
    of what csc does not offer. least: seconds that no plan on one mesh for all components beats (`least_seconds_of`).
    """

    case: Case
    own: MeshRival
    rivals: tuple[MeshRival, ...]
    by_component: MeshRival
    search_seconds: float
    left: int
    memory: float
    least: float

    def speedup(self, rival: MeshRival) -> float | None:
        """None where one of both does not fit."""
        if rival.seconds is None or not rival.fits or self.own.seconds is None or not self.own.fits:
            return None
        return rival.seconds / self.own.seconds

    def rival(self, name: str) -> MeshRival:
        return next(one for one in self.rivals if one.name == name)


def evaluate(case: Case, seconds: float) -> MeshComparison:
    """csc first, by a clock for which nothing was traced before."""
    clock = TraceClock()
    model = divided(CONFIGURATIONS[case.configuration], case.frozen, case.hardware, clock)
    return compared(case, model, seconds, clock)


def compared(
    case: Case, model: DividedModel, seconds: float, clock: Callable[[], float] = time.process_time
) -> MeshComparison:  # fmt: skip
    """Of a divided model, whose options name the case's hardware."""
    start = clock()
    asked = case.ranks, samples(case), seconds, lambda text: None
    choice = MeshSearch(model, *asked, NOTHING_FIXED, clock, workers_here()).choice()
    searched = clock() - start
    profile = hardware(case.hardware)
    memory = float(profile.memory - profile.reserved)
    settings = Settings(model)
    regions = len(model.divided(model.options, 1).regions)
    listed = layouts(case.ranks, samples(case), model.sizes, profile.ranks_per_node, regions)
    rivals = [
        best_uniform(settings, listed, memory),
        megatron(settings, listed),
        cornstarch(settings, listed),
        *(of_formula(name, settings, case.ranks, samples(case), memory) for name in FORMULAS),
    ]
    by_component = of_simulation(settings, case.ranks, samples(case), memory)
    least = least_seconds_of(settings, listed)
    return MeshComparison(case, _own(choice), tuple(rivals), by_component, searched, choice.left, memory, least)


def _own(choice: MeshChoice) -> MeshRival:
    best = choice.rows[0]
    text = f"{best.mesh}, {best.how}"
    return MeshRival(OWN, best.seconds, best.peak_memory, best.fits, text)
