"""Small changes of stages and of where they stand: what a search for free placements tries next.

Terms: see csc.planning.branches. An *arrangement* is stages with the rank of each. Every rank keeps a stage.

    Arrangement(stages, placement)
    changes(found, arrangement, ranks) -> arrangements: a stage, or a part of one, stands on another rank; two stages
                                          change places; two stages of a rank become one; a unit goes to a stage beside
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from csc.errors import InputError
from csc.planning.branches import Branches, Stages, numbered
from csc.planning.unit_moves import homes, moves


class Arrangement(NamedTuple):
    """stages[s]: its units; placement[s]: its rank."""

    stages: Stages
    placement: tuple[int, ...]


def changes(found: Branches, now: Arrangement, ranks: int) -> Iterator[Arrangement]:
    """Every small change, those that move the least first."""
    home, where = homes(now.stages), dict(enumerate(now.placement))
    for stage, rank in where.items():
        for other in range(ranks):
            if other != rank:
                yield from _arranged(found, home, {**where, stage: other}, ranks)
    for stage, rank in where.items():
        for other in range(stage):
            if where[other] != rank:
                yield from _arranged(found, home, {**where, stage: where[other], other: rank}, ranks)
    for unit, _, target in moves(found, now.stages):
        yield from _arranged(found, [target if u == unit else s for u, s in enumerate(home)], where, ranks)
    new = len(where)
    for stage in range(new):
        for part in parts(found, now.stages[stage]):
            split = [new if u in part else s for u, s in enumerate(home)]
            for other in range(ranks):
                yield from _arranged(found, split, {**where, new: other}, ranks)
    for stage, rank in where.items():
        for other in range(stage):
            if where[other] == rank:
                yield from _arranged(found, [other if s == stage else s for s in home], where, ranks)


def parts(found: Branches, units: Sequence[int]) -> list[frozenset[int]]:
    """What a stage can be divided into: its first units, the others, and those of one chain."""
    listed = sorted(units)
    cuts = [frozenset(listed[:cut]) for cut in range(1, len(listed))]
    cuts += [frozenset(listed[cut:]) for cut in range(1, len(listed))]
    chains = sorted({found.place[u][0] for u in listed})
    cuts += [frozenset(u for u in listed if found.place[u][0] == chain) for chain in chains if len(chains) > 1]
    return list(dict.fromkeys(cuts))


def _arranged(found: Branches, home: Sequence[int], where: dict[int, int], ranks: int) -> Iterator[Arrangement]:
    """The arrangement, if every rank has a stage and no stages wait for each other in a circle."""
    if len({where[stage] for stage in home}) < ranks:
        return
    try:
        stages = numbered(found, home)
    except InputError:
        return
    yield Arrangement(stages, tuple(where[home[units[0]]] for units in stages))
