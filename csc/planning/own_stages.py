"""Stages of which some belong to one component alone.

own_stages(problem, own) -> [units of each stage]      own: (component, stages) pairs
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from csc.errors import InputError
from csc.planning.partition import balance
from csc.planning.problem import Problem

NANOSECOND = 1e-9


def own_stages(problem: Problem, own: Sequence[tuple[str, int]]) -> list[list[int]]:
    """The units of each of `problem.ranks` stages: those of a named component in as many stages of its own, in front of
    the stages of all others. Within both the largest sum of F, B and W is as small as it can be.

    InputError for a component that is not there, or has fewer units than stages.
    """
    of: dict[str, list[int]] = {name: [] for name, _ in own}
    others: list[int] = []
    for place, unit in enumerate(problem.units):
        of.get(unit.component, others).append(place)
    missing = next((name for name, units in of.items() if not units), None)
    if missing is not None:
        raise InputError(
            f"the mesh gives {missing} pipeline stages of its own, and nothing of it runs for the example batch",
            "mesh", f"components: {', '.join(sorted({unit.component for unit in problem.units}))}",
        )  # fmt: skip
    found: list[list[int]] = []
    for name, stages in sorted(own, key=lambda one: of[one[0]][0]):
        found += _balanced(problem, name, of[name], stages)
    return found + _balanced(problem, "all that has no stages of its own", others, problem.ranks - len(found))


def _balanced(problem: Problem, what: str, units: Sequence[int], stages: int) -> list[list[int]]:
    if len(units) < stages:
        raise InputError(
            f"the mesh has {stages} pipeline stages for {what}, which has {len(units)} regions", "mesh",
            f"give it pp={max(1, len(units))}, or less",
        )  # fmt: skip
    cuts = balance([round(problem.units[unit].work / NANOSECOND) for unit in units], stages)
    return [list(units[start:stop]) for start, stop in pairwise([*cuts, len(units)])]
