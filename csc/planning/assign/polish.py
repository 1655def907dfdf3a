"""Small changes to an assignment, kept where the step is not longer for them.

polished(replicas, rounds, score) -> groups by replica
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from csc.planning.assign.score import Lists, Score

TRIED = 48  # changes a round: one walk times them all


def polished(replicas: Sequence[Lists], rounds: int, score: Score) -> list[Lists]:
    """After so many rounds of changes to the replica that costs the most: the step lasts as long as that one. A change
    moves a sample, swaps two, or exchanges two groups' places; of those of a round that cost no more, the best is made,
    or all that touch different groups, if that is better still. The same arguments give the same result.
    """
    best = [[list(group) for group in groups] for groups in replicas]
    if rounds < 1 or len(best[0]) < 2:
        return best
    costs, random = score.each(best), Random(0)
    for _ in range(rounds):
        slowest = costs.index(max(costs))
        now = best[slowest]
        tried = [change for change in (_change(now, random) for _ in range(TRIED)) if change is not None]
        good = score.below([_changed(now, [change]) for change in tried], costs[slowest])
        if not good:
            continue
        costs[slowest], place = good[0]
        best[slowest] = _changed(now, [tried[place]])
        together = _apart([tried[place] for _, place in good])
        if len(together) > 1:
            way = _changed(now, together)
            for figures, _ in score.below([way], costs[slowest]):
                best[slowest], costs[slowest] = way, figures
    return best


Change = dict[int, list[int]]  # by place the samples of its group afterwards


def _changed(groups: Lists, changes: Sequence[Change]) -> Lists:
    found = list(groups)
    for change in changes:
        for place, group in change.items():
            found[place] = group
    return found


def _apart(changes: Sequence[Change]) -> list[Change]:
    """Those that touch no group which one before them touches."""
    touched: set[int] = set()
    found = []
    for change in changes:
        if touched.isdisjoint(change):
            touched.update(change)
            found.append(change)
    return found


def _change(groups: Lists, random: Random) -> Change | None:
    """None where it would leave a microbatch empty."""
    a, b = random.sample(range(len(groups)), 2)
    kind = random.randrange(3)
    if kind == 0:
        return {a: groups[b], b: groups[a]}
    i = random.randrange(len(groups[a]))
    left = groups[a][:i] + groups[a][i + 1 :]
    if kind == 1:
        return {a: left, b: [*groups[b], groups[a][i]]} if left else None
    j = random.randrange(len(groups[b]))
    return {a: [*left, groups[b][j]], b: [*groups[b][:j], *groups[b][j + 1 :], groups[a][i]]}
