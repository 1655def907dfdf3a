"""Small changes to an assignment, kept where the step is not longer for them.

polished(replicas, moves, cost) -> groups by replica
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from csc.planning.assign.step import Groups

Lists = list[list[int]]


def polished(replicas: Sequence[Groups], moves: int, cost: Callable[[Groups, Any], Any]) -> list[Lists]:
    """After so many tries of moving a sample, swapping two, or exchanging two groups' places, each in the replica that
    costs the most: the step lasts as long as that one. The same arguments give the same result. cost: of a replica's
    groups, given what is to be beaten.
    """
    best = [[list(group) for group in groups] for groups in replicas]
    if moves < 1 or len(best[0]) < 2:
        return best
    costs, random = [cost(groups, None) for groups in best], Random(0)
    for _ in range(moves):
        slowest = costs.index(max(costs))
        tried = _changed(best[slowest], random)
        if tried is None:
            continue
        now = cost(tried, costs[slowest])
        if now <= costs[slowest]:
            best[slowest], costs[slowest] = tried, now
    return best


def _changed(groups: Sequence[Sequence[int]], random: Random) -> Lists | None:
    """None where the change would leave a microbatch empty."""
    found = [list(group) for group in groups]
    a, b = random.sample(range(len(found)), 2)
    kind = random.randrange(3)
    if kind == 0:
        found[a], found[b] = found[b], found[a]
        return found
    i = random.randrange(len(found[a]))
    if kind == 1:
        if len(found[a]) == 1:
            return None
        found[b].append(found[a].pop(i))
        return found
    j = random.randrange(len(found[b]))
    found[a][i], found[b][j] = found[b][j], found[a][i]
    return found
