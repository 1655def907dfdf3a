"""What limits a planned step: the lower bound and what it comes from, the busiest rank, idle seconds by cause.

Terms: causes as in csc.simulation.idle. The *busiest* rank is the one with the most work: the step is its work and the
seconds in which it is idle. The *longest path* is what the end of the step waited for (csc.simulation.idle).

    limits(problem, pipeline, schedule, timeline, several) -> Limits
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from csc.ir.schedule import Schedule
from csc.planning.partition_bound import lower_bound, shared_lower_bound
from csc.planning.problem import Problem
from csc.simulation.idle import CAUSES, Causes, idle, longest_path
from csc.simulation.idle import Path as LongestPath
from csc.simulation.pipeline import Pipeline
from csc.simulation.timeline import Timeline


@dataclass(frozen=True)
class Limits:
    """term: which part of the lower bound is the largest, in words. work: seconds of each rank. idle: of each rank."""

    term: str
    makespan: float
    work: tuple[float, ...]
    idle: tuple[Causes, ...]
    path: LongestPath

    @property
    def busiest(self) -> int:
        """The rank with the most work; the first of several."""
        return max(range(len(self.work)), key=lambda rank: self.work[rank])

    @property
    def causes(self) -> Causes:
        """Seconds of all ranks by cause."""
        return {cause: sum(one[cause] for one in self.idle) for cause in CAUSES}

    def as_dict(self) -> dict[str, Any]:
        return {
            "bound_term": self.term,
            "busiest_rank": self.busiest,
            "longest_path": {
                "work": dict(sorted(self.path.work.items())),
                "messages": self.path.messages,
                "gathers": self.path.gathers,
            },
            "idle": [
                {"rank": rank, "work": work, "causes": dict(one)}
                for rank, (work, one) in enumerate(zip(self.work, self.idle))
            ],
        }


def limits(
    problem: Problem, pipeline: Pipeline, schedule: Schedule, timeline: Timeline, several: bool
) -> Limits:  # fmt: skip
    """Of a run that the simulator made of the schedule. several: a rank runs several stages, for which another bound
    holds.
    """
    limits = problem.limits
    memory = (limits,) * problem.ranks if isinstance(limits, (int, float)) else limits
    return Limits(
        term=(shared_lower_bound if several else lower_bound)(problem).term,
        makespan=timeline.makespan,
        work=timeline.busy,
        idle=tuple(idle(pipeline, schedule, timeline, memory)),
        path=longest_path(schedule, timeline),
    )
