"""Plans beside a plan: the same problem under other schedules, and changed problems, each really planned.

Terms
  variation   what is planned instead: a problem, a schedule, and what of the partition is given
  outcome     the plan of a variation, or the sentence that says why there is none; cut: its time was over before its
              search was, so there may be a better one

    tried(variations, seconds, tell) -> [Outcome, ...]      in their order; what there was no time for has no outcome
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from csc.errors import CscError
from csc.ir.schedule import Schedule
from csc.planning.pipeline_plan import PipelinePlan
from csc.planning.plan import plan
from csc.planning.problem import Problem

EFFORT = 0.2  # of the search for each: within half a percent of the full one where both were tried


@dataclass(frozen=True)
class Variation:
    """name: in words. problem: made when its turn comes, as that may take a compilation. schedule, chunks, stages,
    placement: as of csc.planning.plan.plan. same: the plan beside which this stands would do here as it is.
    """

    name: str
    problem: Callable[[], Problem]
    schedule: str | Schedule = "auto"
    chunks: int | None = None
    stages: Sequence[Sequence[int]] | None = None
    placement: Sequence[int] | None = None
    same: bool = False


@dataclass(frozen=True)
class Outcome:
    """plan: None if there is none, for the reason `why`. microbatches: of the step that was planned."""

    variation: Variation
    plan: PipelinePlan | None
    microbatches: int = 0
    why: str = ""
    cut: bool = False


def tried(variations: Sequence[Variation], seconds: float, tell: Callable[[str], None]) -> list[Outcome]:
    """Plan each of them, in `seconds` of wall clock: each may take its share of what is left, and what it does not
    take is there for those after it. tell: called with the name of each.
    """
    end = time.monotonic() + seconds
    found: list[Outcome] = []
    for number, variation in enumerate(variations):
        left = end - time.monotonic()
        if left <= 0:
            break
        tell(variation.name)
        found.append(_outcome(variation, left / (len(variations) - number)))
    return found


def _outcome(variation: Variation, limit: float) -> Outcome:
    began = time.monotonic()
    try:
        problem = variation.problem()
        began = time.monotonic()
        found = plan(
            problem, variation.schedule, variation.chunks, variation.stages, variation.placement, EFFORT, limit
        )  # fmt: skip
    except CscError as error:
        return Outcome(variation, None, why=error.what)
    late = time.monotonic() - began >= limit
    return Outcome(variation, found, problem.microbatches, cut=late and variation.schedule == "auto")
