"""What no plan on a mesh beats, told without planning: so that few layouts have to be planned.

    least_seconds(problem) -> float      of its makespan; inf if nothing fits. The step's end is not in it
    least_memory(problem) -> float       of what the fullest rank holds
    expected_seconds(problem) -> float   a guess: with stages of equal time, state and bytes

Before the first B of a microbatch all of its F have run, so a rank then holds what all of its units saved of it, beside
its parameters, gradients and optimizer state; the fullest rank holds at least the mean of that. Whoever runs a unit
holds what it takes while it runs, and its parameters whole.

What a unit saves is held from the start of its F to the end of its B, and meanwhile at least the *way* passes: F of all
that follows it and B of that, on the longest path. Bytes times seconds that all microbatches take so are no more than
what all ranks have, beside what they hold anyhow, times the makespan.
"""

from __future__ import annotations

import math
from dataclasses import replace

from csc.planning.partition_bound import round_trip, shared_lower_bound
from csc.planning.problem import Problem, Unit
from csc.simulation.pipeline import Network


def least_seconds(problem: Problem) -> float:
    """Messages and gathers take no time. See csc.planning.partition_bound for what leaves memory out."""
    work = shared_lower_bound(replace(problem, network=Network())).seconds
    if problem.memory is None:
        return work
    held = sum(unit.saved * way for unit, way in zip(problem.units, _ways(problem)) if unit.has_b)
    scales = problem.scale or (1.0,) * problem.microbatches
    needed = held * sum(scale * scale for scale in scales)
    room = problem.ranks * problem.memory - sum(unit.state for unit in problem.units)
    if not needed:
        return work if room >= 0 else math.inf
    return max(work, needed / room) if room > 0 else math.inf


def expected_seconds(problem: Problem) -> float:
    """No bound: with room for k microbatches a rank starts one whenever the first of k has come back. inf: for none."""
    least = least_seconds(problem)
    if problem.memory is None:
        return least
    held = sum(unit.state + unit.gathered for unit in problem.units) / problem.ranks
    saved = sum(unit.saved for unit in problem.units if unit.has_b) / problem.ranks
    room = problem.memory - held - max(unit.working for unit in problem.units)
    if room < saved:
        return math.inf
    waves = problem.microbatches / math.floor(room / saved) if saved else 0.0
    return max(least, waves * round_trip(problem))


def least_memory(problem: Problem) -> float:
    """In bytes. Microbatches are of one size, or the smallest counts."""
    scale = min(problem.scale or (1.0,))

    def held(unit: Unit) -> float:
        return unit.state + (unit.saved * scale if unit.has_b else 0.0)

    mean = sum(map(held, problem.units)) / problem.ranks
    return max(mean, *(held(unit) + unit.gathered + unit.working * scale for unit in problem.units))


def _ways(problem: Problem) -> list[float]:
    """By unit: seconds from the start of its F to the end of its B of one microbatch of scale 1, at least."""
    units = problem.units
    after = [0.0] * len(units)
    for value in sorted(problem.values, key=lambda each: -each.maker):  # units stand in an order in which they can run
        for reader, needed in zip(value.readers, value.gradient):
            if needed:
                through = units[reader].forward + after[reader] + units[reader].backward_input
                after[value.maker] = max(after[value.maker], through)
    return [unit.forward + way + unit.backward_input for unit, way in zip(units, after)]
