"""The units of a problem as a few chains.

Terms
  before     unit a comes before unit b: b reads what a makes, or both give a gradient of one value and a reads it first
             (the gradient visits b, then a). A set of units can be a stage if nothing outside lies between two of them
  chain      units each of which comes right before the next; every unit stands on one chain, the longest chain is last
  ramps      longest paths of one microbatch, in seconds: up to the end of F or B of a unit, and from their start to the
             end of everything
For frontiers and segments see csc.planning.segment_bounds.

    branches(problem)            -> Branches
    ramps(problem)               -> Ramps
    numbered(branches, home)     -> stages     in an order in which values go forward
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from csc.errors import InputError
from csc.planning.problem import Problem

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Stages = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Branches:
    """chains[c]: its units in order. place[u]: (chain, position) of unit u. after[u], before[u]: what has to be in the
    same or a later, an earlier stage.
    """

    chains: tuple[tuple[int, ...], ...]
    place: tuple[tuple[int, int], ...]
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Ramps:
    """Seconds of the longest paths of one microbatch of scale 1, by unit.

    to_forward, to_backward: until the end of its F, its B. from_forward, from_backward: from the start of its F, its B,
    until nothing is left to do. forward_edges, backward_edges: (u, v) where F of v waits for F of u, B of v for B of u.
    """

    to_forward: Floats
    to_backward: Floats
    from_forward: Floats
    from_backward: Floats
    forward_edges: tuple[tuple[int, int], ...]
    backward_edges: tuple[tuple[int, int], ...]

    @property
    def round_trip(self) -> float:
        """Seconds of one microbatch of scale 1 alone."""
        return float(self.from_forward.max(initial=0.0))


def orders(problem: Problem) -> list[tuple[int, int]]:
    """Every (a, b) such that unit a comes before unit b."""
    found = set()
    for value in problem.values:
        found |= {(value.maker, reader) for reader in value.readers}
        giving = [reader for reader, given in zip(value.readers, value.gradient) if given]
        found |= set(itertools.pairwise(giving))
    return sorted(found)


def branches(problem: Problem) -> Branches:
    """Cover the units with chains: the longest path first, then the longest of what is left, and so on."""
    count = len(problem.units)
    before: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for a, b in orders(problem):
        before[b].append(a)
        after[a].append(b)
    free = [True] * count
    chains: list[tuple[int, ...]] = []
    while any(free):
        length, previous = [0] * count, [-1] * count
        for u in range(count):
            if free[u]:
                best = max((a for a in before[u] if free[a]), key=lambda a: (length[a], a), default=-1)
                length[u], previous[u] = (length[best] if best >= 0 else 0) + 1, best
        u = max(range(count), key=lambda u: (length[u], -u))
        path: list[int] = []
        while u >= 0:
            path.append(u)
            free[u] = False
            u = previous[u]
        chains.append(tuple(reversed(path)))
    chains.reverse()
    place = [(0, 0)] * count
    for c, chain in enumerate(chains):
        for position, u in enumerate(chain):
            place[u] = (c, position)
    return Branches(tuple(chains), tuple(place), tuple(map(tuple, before)), tuple(map(tuple, after)))


def ramps(problem: Problem) -> Ramps:
    """Longest paths over F, B and W of one microbatch; messages take no time. Linear in the units and edges."""
    units, count = problem.units, len(problem.units)
    forward = sorted({(value.maker, reader) for value in problem.values for reader in value.readers})
    backward = set()
    for value in problem.values:
        visits = [reader for reader, given in reversed(list(zip(value.readers, value.gradient))) if given]
        backward |= set(zip(visits, [*visits[1:], value.maker]))
    makers: list[list[int]] = [[] for _ in units]
    readers: list[list[int]] = [[] for _ in units]
    for u, v in forward:
        makers[v].append(u)
        readers[u].append(v)
    later: list[list[int]] = [[] for _ in units]
    earlier: list[list[int]] = [[] for _ in units]
    for u, v in sorted(backward):
        later[v].append(u)
        earlier[u].append(v)
    to_forward, to_backward, from_forward, from_backward = (np.zeros(count) for _ in range(4))
    for u, unit in enumerate(units):
        to_forward[u] = max((to_forward[v] for v in makers[u]), default=0.0) + unit.forward
        rest = max((from_backward[v] for v in earlier[u]), default=0.0)
        from_backward[u] = unit.backward_input + max(rest, unit.backward_weight)
    for u, unit in reversed(list(enumerate(units))):
        ready = max((to_backward[v] for v in later[u]), default=0.0)
        to_backward[u] = max(ready, to_forward[u]) + unit.backward_input
        rest = max((from_forward[v] for v in readers[u]), default=0.0)
        from_forward[u] = unit.forward + max(rest, from_backward[u])
    return Ramps(to_forward, to_backward, from_forward, from_backward, tuple(forward), tuple(sorted(backward)))


def numbered(found: Branches, home: Sequence[int]) -> Stages:
    """The stages of units that go to the same `home`, in an order in which values go from lower to higher stages.

    Of stages that do not wait for each other the one with the first unit comes first; units are in order. InputError
    if stages wait for each other in a circle.
    """
    members: dict[int, list[int]] = {}
    for unit, stage in enumerate(home):
        members.setdefault(stage, []).append(unit)
    edges = {(home[a], home[u]) for u, before in enumerate(found.before) for a in before if home[a] != home[u]}
    waits = dict.fromkeys(members, 0)
    readers: dict[int, list[int]] = {stage: [] for stage in members}
    for a, b in edges:
        waits[b] += 1
        readers[a].append(b)
    ready = [(units[0], stage) for stage, units in members.items() if not waits[stage]]
    heapq.heapify(ready)
    stages = []
    while ready:
        _, stage = heapq.heappop(ready)
        stages.append(tuple(members[stage]))
        for reader in readers[stage]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, (members[reader][0], reader))
    if len(stages) < len(members):
        raise InputError(
            "these stages wait for each other in a circle", "partition", "Move the units between them into one of them"
        )
    return tuple(stages)
