"""Small changes to an assignment, kept where the step is not longer for them.

polished(groups, moves, cost) -> groups of one replica
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from csc.planning.assign.step import Groups

Lists = list[list[int]]


def polished(groups: Groups, moves: int, cost: Callable[[Groups, Any], Any]) -> Lists:
    """After so many tries of moving a sample, swapping two, or exchanging two groups' places. The same arguments give
    the same result. cost: of groups, given what is to be beaten.
    """
    best = [list(group) for group in groups]
    if moves < 1 or len(best) < 2:
        return best
    least, random = cost(best, None), Random(0)
    for _ in range(moves):
        tried = _changed(best, random)
        if tried is None:
            continue
        now = cost(tried, least)
        if now <= least:
            best, least = tried, now
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
