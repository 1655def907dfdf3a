"""The planning problems of the benchmark, and what baselines need to know of their units.

    problem(configuration, frozen, hardware, ranks, microbatches) -> Problem
    units_of(problem)    -> component: positions of its units, in order     (vision, vision_projector, audio, ..., llm)
    encoder_share(configuration) -> the encoders' part of the forward FLOPs, 0 to 1

Every region recomputes its forward in B ("checkpointing on"). A unit's component is the one of the model that it
belongs to; the concatenation of features and text belongs to the llm.
"""

from __future__ import annotations

from dataclasses import asdict

from csc.passes.problem import network, values

from benchmarks.mllm.configurations import Configuration
from benchmarks.mllm.models import ENCODERS
from benchmarks.mllm.trace import program
from csc.analysis.costs import region_costs
from csc.analysis.hardware import Hardware
from csc.planning.problem import Problem, Unit


def problem(
    configuration: Configuration,
    frozen: str,
    hardware: Hardware,
    ranks: int,
    microbatches: int,
    memory: float | None = None,
) -> Problem:
    """The configuration in numbers. frozen: one of trace.FROZEN; memory: bytes of one rank, None for no limit."""
    whole = program(configuration, frozen)
    units = tuple(Unit(**asdict(cost)) for cost in region_costs(whole, hardware, recompute=True))
    return Problem(units, values(whole), ranks, microbatches, memory, network(hardware))


def units_of(problem: Problem) -> dict[str, tuple[int, ...]]:
    """The positions of the units of each component, in order of execution."""
    found: dict[str, list[int]] = {}
    for position, unit in enumerate(problem.units):
        found.setdefault(unit.component, []).append(position)
    return {component: tuple(positions) for component, positions in found.items()}


def encoder_share(configuration: Configuration) -> float:
    """The encoders' part of the forward FLOPs of one microbatch, from 0 to 1; projectors count as neither."""
    whole = program(configuration, "all trainable")
    flops = dict.fromkeys((*ENCODERS, "llm"), 0)
    for region in whole.regions:
        if region.component in flops:
            flops[region.component] += whole.variants[region.variant].flops[0]
    return 1 - flops["llm"] / sum(flops.values())
