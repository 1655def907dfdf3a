"""What each pipeline rank will hold at its fullest moment, by kind, before anything runs.

Terms: sizes are bytes of one rank, as the plan accounts for them (csc.analysis.costs, csc.simulation.pipeline). Ranks of
one pipeline position hold the same.

    memory_forecast(program, options) -> [RankMemory]      one for each position on the pp axis
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from csc.analysis.costs import stored_dtypes, variant_cost
from csc.ir.groups import Group
from csc.ir.program import Options, Program
from csc.passes.pipeline_problem import recorded
from csc.simulation.pipeline import from_json as read_pipeline
from csc.simulation.pipeline import peak_memory, states
from csc.simulation.pipeline import peaks as peaks_of_run
from csc.simulation.simulate import simulate


@dataclass(frozen=True)
class RankMemory:
    """parameters, gradients, optimizer: there for the whole step; the optimizer's are AdamW's two moments.
    activations: the most that microbatches in flight keep for their backward, with what is gathered meanwhile (zero=3).
    working: what one region takes while it runs, what it computes again included. messages: the most that wait here for
    their turn, or to be sent, at once. recorded: what cuda_graphs holds besides.
    """

    rank: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    messages: int
    recorded: int = 0

    @property
    def total(self) -> int:
        """All of it at one moment, which is the most that there can be."""
        return sum(value for name, value in asdict(self).items() if name != "rank")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def memory_forecast(program: Program, options: Options) -> list[RankMemory]:
    """Of a planned Program; empty without a plan."""
    if program.plan is None or program.schedule is None:
        return []
    pipeline = read_pipeline(program.plan.pipeline)
    schedule = program.schedule
    peaks, held = peak_memory(pipeline, schedule), states(pipeline, schedule)
    waiting = [most - peak for most, peak in zip(peaks_of_run(pipeline, schedule, simulate(pipeline, schedule)), peaks)]
    stored = stored_dtypes(program)
    costs = {name: variant_cost(v, False, stored[name]) for name, v in program.variants.items()}
    ranks = math.prod(options.mesh.sizes(Group.DATA))
    variant, besides = {region.name: region.variant for region in program.regions}, recorded(program, options)
    found = []
    for rank in range(options.mesh.pp):
        stages = [stage for stage in program.stages if stage.rank == rank]
        own = [costs[variant[name]] for stage in stages for name in stage.regions]
        replicas = ranks // options.mesh.sharers(rank)
        parameters, gradients, optimizer = (
            sum(size) for size in zip(*(one.held(options.zero, replicas) for one in own))
        )
        here = {stage.index for stage in stages}
        found.append(
            RankMemory(
                rank,
                parameters=parameters,
                gradients=gradients,
                optimizer=optimizer,
                activations=round(peaks[rank] - held[rank]),
                working=round(max(pipeline.stages[stage].working for stage in here)),
                messages=round(waiting[rank]),
                recorded=sum(besides[variant[name]] for stage in stages for name in stage.regions),
            )
        )
    return found
