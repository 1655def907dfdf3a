"""Fewer units for a search: some that are planned as one.

Terms: see csc.planning.branches. A *lump* is a few units that stay together. The *frontiers* of a problem are as many
as the product of its chains' lengths but the longest; the search for stages takes about as long.

    lumped(problem, most) -> Lumped            with at most so many frontiers, or nearly; the same problem if it has
    together(problem, home) -> Lumped          with the unit u in the lump of home[u], its last one
    Lumped.stages(stages) -> Stages            stages of lumps as stages of units

`lumped` takes runs of units of one chain and one component of which only the first reads from outside and only the last
is read from outside. With one encoder beside the language model there are none. With three, the frontiers of all layers
are tens of thousands, and a cut one layer further on makes little difference; moves of single units make up for it
afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from csc.planning.branches import Branches, Stages, branches
from csc.planning.problem import Problem, RankKind, Unit, Value


@dataclass(frozen=True)
class Lumped:
    """problem: the one with fewer units; members[u]: the units that its unit u stands for."""

    problem: Problem
    members: tuple[tuple[int, ...], ...]

    def stages(self, stages: Stages) -> Stages:
        """The stages with the units themselves, in order."""
        return tuple(tuple(sorted(u for lump in stage for u in self.members[lump])) for stage in stages)


def lumped(problem: Problem, most: int) -> Lumped:
    """The problem with lumps as small as `most` frontiers allow."""
    found = branches(problem)
    short = found.chains[:-1]
    frontiers = math.prod(len(chain) + 1 for chain in short)
    size = 1 if frontiers <= most else math.ceil((frontiers / most) ** (1 / len(short)))
    home = list(range(len(problem.units)))
    for chain in short if size > 1 else ():
        for run in _runs(problem, found, chain):
            for i, unit in enumerate(run):
                home[unit] = run[min(i - i % size + size, len(run)) - 1]
    return together(problem, home)


def together(problem: Problem, home: Sequence[int]) -> Lumped:
    """home[u]: the last unit of u's lump, and the first that reads what others of it make. The same problem if every
    unit is alone, or there would be fewer lumps than ranks.
    """
    lasts = sorted(set(home))
    if len(lasts) == len(home) or len(lasts) < problem.ranks:
        return Lumped(problem, tuple((u,) for u in range(len(home))))
    number = {last: i for i, last in enumerate(lasts)}
    members: list[list[int]] = [[] for _ in lasts]
    for unit, last in enumerate(home):
        members[number[last]].append(unit)
    units = tuple(_together([problem.units[u] for u in lump]) for lump in members)
    values = tuple(kept for value in problem.values if (kept := _between(value, [number[h] for h in home])) is not None)
    kinds = tuple(replace(kind, seconds=_taken(kind, members)) for kind in problem.kinds)
    return Lumped(replace(problem, units=units, values=values, kinds=kinds), tuple(map(tuple, members)))


def _taken(kind: RankKind, members: Sequence[Sequence[int]]) -> tuple[tuple[float, float, float], ...]:
    """What lumps take on a rank of this kind."""
    return tuple(tuple(sum(kind.seconds[u][i] for u in lump) for i in range(3)) for lump in members)  # type: ignore[misc]


def _runs(problem: Problem, found: Branches, chain: Sequence[int]) -> list[list[int]]:
    """The chain in runs that may be lumped."""
    runs = [[chain[0]]]
    for unit in chain[1:]:
        last = runs[-1][-1]
        same = problem.units[unit].component == problem.units[last].component
        if same and found.before[unit] == (last,) and found.after[last] == (unit,):
            runs[-1].append(unit)
        else:
            runs.append([unit])
    return runs


def _together(units: Sequence[Unit]) -> Unit:
    """One unit that does and keeps what these do. It stands where the last one does."""
    return Unit(
        name=units[-1].name,
        component=units[-1].component,
        forward=sum(unit.forward for unit in units),
        backward_input=sum(unit.backward_input for unit in units),
        backward_weight=sum(unit.backward_weight for unit in units),
        has_b=any(unit.has_b for unit in units),
        has_w=any(unit.has_w for unit in units),
        saved=sum(unit.saved for unit in units if unit.has_b),
        stashed=sum(unit.stashed for unit in units if unit.has_w),
        state=sum(unit.state for unit in units),
        gathered=sum(unit.gathered for unit in units),
        working=max(unit.working for unit in units),
    )


def _between(value: Value, home: Sequence[int]) -> Value | None:
    """The value among lumps; None if it stays inside one."""
    made = home[value.maker]
    gradient: dict[int, bool] = {}
    for reader, given in zip(value.readers, value.gradient):
        if home[reader] != made:
            gradient[home[reader]] = gradient.get(home[reader], False) or given
    if not gradient:
        return None
    return replace(value, maker=made, readers=tuple(gradient), gradient=tuple(gradient.values()))
