"""Whether the numbers of a problem are numbers that can be planned with.

check_figures(problem)          InputError: the first that is not, whose it is, and what to do
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from csc.errors import InputError
from csc.planning.problem import Problem

SECONDS = ("forward", "backward_input", "backward_weight")
BYTES = ("saved", "kept", "state")


def check_figures(problem: Problem) -> None:
    """Every time and size is finite and at least 0, the memory is one number, every microbatch has a size. Memory below
    0 is what a limit leaves that constants alone exceed: the partition says what would fit.
    """
    memory = problem.memory
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, (int, float))):
        raise InputError(
            f"the memory is {memory!r}, and has to be one number of bytes, the same for all ranks",
            "memory",
            "Give the bytes of the rank that has the least",
        )
    if memory is not None and math.isnan(memory):
        raise InputError(f"a rank cannot work with {memory} bytes of memory", "memory", "Give a number, or no limit")
    for what, number in _figures(problem):
        if not 0 <= number < math.inf:
            raise InputError(
                f"{what} is {number}",
                "planning",
                "Times and sizes are finite and at least 0: look at the hardware profile or the measured costs",
            )
    if problem.scale is not None and len(problem.scale) < problem.microbatches:
        raise InputError(
            f"{len(problem.scale)} microbatches have a size, the step has {problem.microbatches}",
            "planning",
            "Give one size for each microbatch",
        )


def _figures(problem: Problem) -> Iterator[tuple[str, float]]:
    """Every number that goes into a plan, and what it is."""
    for unit in problem.units:
        for name in SECONDS:
            yield f"the {name.replace('_', ' ')} time of {unit.name}", getattr(unit, name)
        for name in BYTES:
            yield f"the {name} bytes of {unit.name}", getattr(unit, name)
    for value in problem.values:
        maker = problem.units[value.maker].name
        yield f"the size of a value of {maker}", value.size
        yield f"the size of the gradient of a value of {maker}", value.gradient_size
    for number, factor in enumerate(problem.scale or ()):
        yield f"the size of microbatch {number}", factor
    for name in ("within", "between"):
        link = getattr(problem.network, name)
        yield f"the latency {name} nodes", link.latency
        yield f"the seconds for a byte {name} nodes", 1 / link.bandwidth if link.bandwidth else math.inf
