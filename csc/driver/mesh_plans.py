"""The drafts and plans of a search for a mesh, each in the order of ranks in which it is the fastest.

Terms: see csc.driver.mesh_search.

    plans = MeshPlans(problems, found, clock)
    plans.draft(candidate) -> (row, candidate) or None     None: nothing of it fits; the candidate in its fastest order
    plans.plan(candidate)  -> row or None
    plans.on_own_stages(candidate, own) -> row or None     encoders on stages of their own
    plans.without_room(candidate) -> row                   as if there were no limit
    in_turn(drafted, unfit) -> [candidate]                 which to plan first
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from csc.driver.mesh_candidates import DividedProblems, MeshCandidate
from csc.driver.mesh_forms import OwnStages
from csc.driver.mesh_found import GAIN, NEAR, ROOM, FoundMeshes, fitting_first
from csc.driver.mesh_rows import MeshRow
from csc.driver.rank_orders import priced_orders
from csc.driver.search_clock import DRAFT, PLAN, SearchClock
from csc.errors import CscError
from csc.ir.mesh import Mesh
from csc.ir.program import Options
from csc.passes.pipeline_problem import problem
from csc.passes.step_end import seconds_behind
from csc.planning.partition import own_stages as staged
from csc.planning.plan import PipelinePlan, draft, plan
from csc.planning.problem import Problem

EFFORT = 0.2  # of the search for each plan, which is as good as a draft from there on
LIMIT = 20.0  # seconds of the clock for each, more than it takes: a busy machine chooses as an idle one does
LAST = 10.0  # for each that begins late

ALIKE = 1.03  # times as fast: a plan may make more of either draft

Make = Callable[[Problem], PipelinePlan | None]


class MeshPlans:
    """See the module."""

    def __init__(self, problems: DividedProblems, found: FoundMeshes, clock: SearchClock) -> None:
        self._problems, self._found, self._clock = problems, found, clock

    def draft(self, one: MeshCandidate) -> tuple[MeshRow, MeshCandidate] | None:
        return self._ordered(one, self._drafted, DRAFT)

    def plan(self, one: MeshCandidate) -> MeshRow | None:
        made = self._ordered(one, self._planned, PLAN)
        return None if made is None else made[0]

    def on_own_stages(self, one: MeshCandidate, own: OwnStages) -> MeshRow | None:
        """None where there is no such plan."""
        assert one.problem is not None
        mesh = replace(Mesh.parse(self._found.rows[one].mesh), own_stages=own)
        options = replace(one.options, mesh=mesh)
        program = self._problems.program(one.layout, options)
        numbers = replace(problem(program, options), memory=one.problem.memory)
        with self._clock.of(PLAN), suppress(CscError):
            stages = staged(numbers, own)
            return self._row(one, options, plan(numbers, "auto", stages=stages, effort=EFFORT, limit=LIMIT))
        return None

    def without_room(self, one: MeshCandidate, numbers: Problem) -> MeshRow:
        planned = plan(replace(numbers, memory=None), "1f1b", effort=EFFORT, limit=LIMIT)
        return replace(self._row(one, one.options, planned), fits=False)

    def _planned(self, numbers: Problem) -> PipelinePlan | None:
        """A plan that keeps to the limit; None if none was found."""
        limit = min(LIMIT, max(LAST, self._clock.left))
        with self._clock.of(PLAN), suppress(CscError):
            return plan(numbers, "auto", effort=EFFORT, limit=limit)
        return None

    def _drafted(self, numbers: Problem) -> PipelinePlan | None:
        """On one rank there is one plan."""
        if numbers.ranks == 1:
            return self._planned(numbers)
        with self._clock.of(DRAFT), suppress(CscError):
            return draft(numbers, LIMIT)
        return None

    def _ordered(self, one: MeshCandidate, make: Make, kind: str) -> tuple[MeshRow, MeshCandidate] | None:
        """In the order of ranks in which this plan is the fastest; made for it if that may make it the best: with
        ZeRO-3 a plan for gathers between nodes says less of one for gathers within them.
        """
        numbers = one.problem
        assert numbers is not None
        planned = make(numbers)
        if planned is None:
            return None
        best, at = self._row(one, one.options, planned), one
        program = self._problems.program(one.layout, one.options)
        orders = priced_orders(
            program, one.options, numbers, planned.stages, planned.placement, planned.schedule
        )  # fmt: skip
        room = (NEAR if one.options.zero == 3 else ROOM) * self._found.best
        for other in sorted(orders[1:], key=lambda each: each.seconds):
            gains = other.seconds < min(best.seconds, room) * (1 - GAIN)
            again = make(other.problem) if gains and self._clock.ends(kind) else None
            if again is not None:
                row = self._row(one, other.options, again)
                if fitting_first(row) < fitting_first(best):
                    best, at = row, replace(one, options=other.options, problem=other.problem)
        return best, at

    def _row(self, one: MeshCandidate, options: Options, planned: PipelinePlan) -> MeshRow:
        program = self._problems.program(one.layout, one.options)
        return MeshRow(
            mesh=str(options.mesh),
            microbatches=one.layout.microbatches,
            samples=one.layout.samples,
            zero=options.zero,
            recompute=one.choice,
            seconds=planned.makespan + seconds_behind(program, options, planned.stages, planned.placement),
            idle=sum(planned.bubble) / len(planned.bubble),
            peak_memory=max(planned.peak_memory),
            fits=True,
            sequence_parallel=one.layout.sequence,
            context=one.layout.context,
        )


def in_turn(drafted: Sequence[MeshCandidate], unfit: Collection[MeshCandidate]) -> list[MeshCandidate]:
    """The fastest first, of those about as fast the smaller step, which is planned sooner; then those of which no draft
    fits, where a plan may. Seconds of a draft are what is expected of its candidate.
    """
    fastest = min((one.expected for one in drafted if one not in unfit), default=0.0)

    def turn(one: MeshCandidate) -> tuple[bool, int, float]:
        if one in unfit:
            return True, 0, one.expected
        return False, int(math.log(one.expected / fastest, ALIKE)), one.layout.mesh.pp * one.layout.microbatches

    return sorted(drafted, key=turn)
