"""Where ranks encode for the next step, of a program whose frozen encoder is no part of a step (pass `features`).

encoded_ahead(program, decided, options) -> orders, by the simulator's times      needs the stages
"""

from __future__ import annotations

from dataclasses import replace

from csc.passes import pipeline_problem as numbers

from csc.analysis.costs import region_costs, value_bytes
from csc.ir.program import Options, Program
from csc.planning.encode_ahead import AheadPlan, fit_ahead
from csc.planning.plan import PipelinePlan


def encoded_ahead(program: Program, decided: PipelinePlan, options: Options) -> AheadPlan | None:
    """None: nothing is left out of the step, no stage reads what is, or replicas share ranks."""
    apart = program.features
    if apart is None or options.mesh.own_replicas:
        return None
    readers = {stage.rank for stage in program.stages if set(apart.entries).intersection(stage.inputs)}
    if not readers:
        return None
    alone = replace(program, regions=apart.regions, templates=apart.templates, variants=apart.variants)
    costs = region_costs(alone, numbers.chosen_hardware(program, options), fuse=options.fuse, mesh=options.mesh)
    sizes = value_bytes(alone)
    size = sum(sizes[value][0] for value in apart.values)
    most = numbers.limits(program, options) or [float("inf")] * options.mesh.pp
    left = [limit - peak for limit, peak in zip(most, decided.peak_memory, strict=True)]
    room = [one / size - options.microbatches * (rank in readers) for rank, one in enumerate(left)]  # the step's own
    seconds = sum(cost.forward for cost in costs)
    return fit_ahead(decided.pipeline, decided.schedule, seconds, readers, room)
