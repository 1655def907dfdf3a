"""The planning problems of the benchmark, and what baselines need to know of their units.

    problem(configuration, frozen, hardware, ranks, microbatches) -> Problem
    units_of(problem)    -> component: positions of its units, in order     (vision, vision_projector, audio, ..., llm)
    encoder_share(configuration) -> the encoders' part of the forward FLOPs, 0 to 1

Every region runs its whole forward again in B ("checkpointing on", as the systems compared with do it; csc's own pass
`recompute` repeats only what B reads). A unit's component is the one of the model that it
belongs to; the concatenation of features and text belongs to the llm.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from csc.passes.pipeline_problem import network, values

from benchmarks.mllm.configurations import Configuration
from benchmarks.mllm.models import ENCODERS
from benchmarks.mllm.trace import program
from csc.analysis.costs import RegionTimes, region_costs, value_bytes, working
from csc.analysis.hardware import Hardware
from csc.ir.program import Variant
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
    sizes = value_bytes(whole)
    units = tuple(
        checkpointed(cost, sum(sizes[value][0] for value in region.activations), whole.variants[region.variant])
        for cost, region in zip(region_costs(whole, hardware), whole.regions, strict=True)
    )
    return Problem(units, values(whole), ranks, microbatches, memory, network(hardware), waiting=True)


def checkpointed(cost: RegionTimes, inputs: int, variant: Variant) -> Unit:
    """A region that keeps its inputs alone and whose B starts with F; what F saves is there while B runs."""
    unit = Unit(**asdict(cost), working=working(variant, inputs if cost.has_b else None))
    return replace(unit, backward_input=cost.backward_input + cost.forward, saved=inputs) if cost.has_b else unit


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
