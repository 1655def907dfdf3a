"""Stages of which some belong to one component alone.

own_stages(problem, own, first) -> [units of each stage]      own: (component, stages) pairs; first: (component, extent)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from csc.errors import InputError
from csc.planning.partition import balance
from csc.planning.problem import Problem

NANOSECOND = 1e-9


def own_stages(
    problem: Problem, own: Sequence[tuple[str, int]], first: Sequence[tuple[str, object]] = ()
) -> list[list[int]]:  # fmt: skip
    """The units of each of `problem.ranks` stages: those of a named component in as many stages of its own, in front of
    the stages of all others. If no stage is left for the others, they share those of the last component. Within both
    the largest sum of F, B and W is as small as it can be. first: components whose stages stand in front of those of
    the others, with how many ranks each has; in this order, if these differ.

    InputError for a component that is not there, has fewer units than stages, or reads what stages behind make.
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
    ahead = dict(first)
    turn = {name: i for i, name in enumerate(ahead)} if len({*ahead.values()}) > 1 else {}
    front = sorted(own, key=lambda one: (one[0] not in ahead, turn.get(one[0], 0), of[one[0]][0]))
    left = problem.ranks - sum(stages for _, stages in own)
    rest = "all that has no stages of its own"
    if left == 0:
        rest, left = front.pop()
        others = sorted([*others, *of.pop(rest)])
    found: list[list[int]] = []
    for name, stages in front:
        found += _balanced(problem, name, of[name], stages)
        _refuse_readers(problem, name, set().union(*found), ahead)
    return found + _balanced(problem, rest, others, left)


def _refuse_readers(problem: Problem, name: str, in_front: Collection[int], ahead: Collection[str]) -> None:
    """InputError if the units up to those of a component read what others make, further back. ahead: components whose
    stages stand in front.
    """
    for value in problem.values:
        if value.maker not in in_front and any(reader in in_front for reader in value.readers):
            maker = problem.units[value.maker]
            remedy = f"give stages to the components that {name} reads in its place, and leave the rest to it"
            if name in ahead:
                remedy = (
                    f"components on another number of ranks than the mesh's stand in front: let the mesh's be those of "
                    f"{name} (of a dict those of the component named last), or put what it reads on another number too"
                )
            if maker.component in ahead:
                remedy = f"name dp of {maker.component} in front of that of {name}: so do their stages stand"
            raise InputError(
                f"the mesh gives {name} pipeline stages in front of others, and it reads what {maker.name} of "
                f"{maker.component} makes", "mesh", remedy,
            )  # fmt: skip


def _balanced(problem: Problem, what: str, units: Sequence[int], stages: int) -> list[list[int]]:
    if len(units) < stages:
        raise InputError(
            f"the mesh has {stages} pipeline stages for {what}, which has {len(units)} regions", "mesh",
            f"give it pp={max(1, len(units))}, or less",
        )  # fmt: skip
    cuts = balance([round(problem.units[unit].work / NANOSECOND) for unit in units], stages)
    return [list(units[start:stop]) for start, stop in pairwise([*cuts, len(units)])]
