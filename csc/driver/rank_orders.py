"""The same plan under other orders of the ranks: what stands within a node, and what that makes of a step.

Terms: see csc.ir.mesh. An order changes which wires messages of the pipeline, collectives of layers and sums of
gradients take, not what a rank computes.

    priced_orders(program, options, numbers, stages, placement, schedule) -> [Ordered]       the options' own first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from csc.ir.mesh import Mesh
from csc.ir.program import Options, Program
from csc.ir.schedule import Schedule
from csc.passes.pipeline_problem import problem, profiles
from csc.passes.step_end import seconds_behind
from csc.planning.gathers import with_gathers
from csc.planning.problem import Problem, Stages, pipeline
from csc.simulation.simulate import makespan


@dataclass(frozen=True)
class Ordered:
    """seconds: of a step of the plan that was given, in this order."""

    mesh: Mesh
    options: Options
    problem: Problem
    seconds: float


def priced_orders(
    program: Program, options: Options, numbers: Problem, stages: Stages, placement: Sequence[int], schedule: Schedule
) -> list[Ordered]:  # fmt: skip
    """The own one alone where all ranks stand in one node, or are of several kinds, whose places the plan decides.
    numbers: of the options' own order; their microbatches and memory are kept.
    """
    several = not numbers.kinds and options.mesh.size > profiles(program, options)[0].ranks_per_node
    found = []
    for mesh in options.mesh.orders() if several else [options.mesh]:
        other = replace(options, mesh=mesh)
        same = replace(problem(program, other), microbatches=numbers.microbatches, memory=numbers.memory)
        own = pipeline(same, stages, placement)
        run = makespan(own, with_gathers(own, schedule, same.limits))
        found.append(Ordered(mesh, other, same, run + seconds_behind(program, other, stages, placement)))
    return found
