"""An assignment brought to sizes that have programs already: samples change places until every microbatch has one.

    settled(step, groups, fits) -> groups of one replica       the same if all sizes are known, or none can be met

A microbatch of an unknown size gives a sample to another one, takes one, or swaps two; of all changes that leave both
with known sizes those that move the least load are timed, and the fastest is made, unless the step becomes much longer
for it: a program is compiled once, and a step that is longer is paid for every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from csc.planning.assign.layout import BatchLayout, Floats
from csc.planning.assign.step import SampleCosts

Lists = list[list[int]]
DEAR = (0.3, 0.8)  # of a microbatch's load: more is not moved
NEAR = 12  # microbatches that it is tried with: those of the nearest load
LONGER = 0.01  # by how much of itself a step may become longer for each known size


def settled(step: SampleCosts, groups: Sequence[Sequence[int]], fits: Callable[[Lists], bool]) -> Lists:
    """fits: whether the groups' activations do."""
    layout = step.layout
    assert layout is not None
    found = [list(group) for group in groups]
    for dear in DEAR if layout.known else ():
        for place in [place for place in range(len(found)) if not layout.knows(layout.size(found[place]))]:
            if layout.knows(layout.size(found[place])):  # it took part in another's change
                continue
            ways = list(_ways(found, place, layout, step.shares, dear))
            now, *seconds = step.seconds_of_ways([found, *ways])
            for took, way in sorted(zip(seconds, ways), key=lambda one: one[0]):
                if took > now * (1 + LONGER):
                    break
                if fits(way):
                    found = way
                    break
    return found


def _ways(found: Lists, place: int, layout: BatchLayout, shares: Floats, dear: float) -> Iterator[Lists]:
    """With each of the other microbatches the change that moves the least load."""
    for other in _partners(found, place, shares)[:NEAR]:
        change = _least_change(found[place], found[other], layout, shares, dear)
        if change is not None:
            way = list(found)
            way[place], way[other] = change
            yield way


def _partners(groups: Lists, place: int, shares: Floats) -> list[int]:
    """The other microbatches, those of the nearest load first."""
    levels = np.array([shares[group].sum(axis=0) for group in groups])
    apart = np.abs(levels - levels[place]).max(axis=1)
    return [int(other) for other in np.argsort(apart, kind="stable") if other != place]


def _least_change(
    own: list[int], theirs: list[int], layout: BatchLayout, shares: Floats, dear: float
) -> tuple[list[int], list[int]] | None:
    """What both have after the change that moves the least load, where both have known sizes then, or the other one had
    none before either.
    """
    demanding = layout.knows(layout.size(theirs))
    best: tuple[float, tuple[list[int], list[int]]] | None = None
    nothing = np.zeros(shares.shape[1])
    most = dear * float(shares[own].sum(axis=0).max())
    for i in (None, *range(len(own))):
        for j in (None, *range(len(theirs))):
            mine, left = _exchanged(own, i, theirs, j)
            if not mine or not left or not layout.knows(layout.size(mine)):
                continue
            if demanding and not layout.knows(layout.size(left)):
                continue
            given, taken = nothing if i is None else shares[own[i]], nothing if j is None else shares[theirs[j]]
            moved = float(np.abs(given - taken).max())
            if moved <= most and (best is None or moved < best[0]):
                best = moved, (mine, left)
    return best[1] if best is not None else None


def _exchanged(own: list[int], i: int | None, theirs: list[int], j: int | None) -> tuple[list[int], list[int]]:
    """Both with the i-th of one and the j-th of the other exchanged; None: nothing of it."""
    mine = [*(own if i is None else own[:i] + own[i + 1 :]), *([] if j is None else [theirs[j]])]
    left = [*(theirs if j is None else theirs[:j] + theirs[j + 1 :]), *([] if i is None else [own[i]])]
    return mine, left
