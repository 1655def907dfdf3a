"""An assignment brought to sizes that have programs already: samples change places until every microbatch has one.

    settled(groups, layout, shares) -> groups of one replica       the same if all sizes are known, or none can be met

A microbatch of an unknown size gives a sample to another one, takes one, or swaps two; of all changes that leave both
with known sizes the one that moves the least load is made. A compilation takes seconds, a sample that is a little
larger microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from csc.planning.assign.layout import BatchLayout, Floats

Lists = list[list[int]]
DEAR = (0.3, 0.8)  # of a microbatch's load: more is not moved; a program is compiled once, load is paid every step
MOST = 64  # changes of which it is asked whether they fit


def settled(
    groups: Sequence[Sequence[int]], layout: BatchLayout, shares: Floats, fits: Callable[[Lists], bool]
) -> Lists:
    """shares: [sample][rank], what a sample takes of each rank's work; fits: whether the groups' activations do."""
    found = [list(group) for group in groups]
    left = MOST
    for dear in DEAR if layout.known else ():
        for place in range(len(found)):
            if layout.knows(layout.size(found[place])):
                continue
            for other in _partners(found, place, shares):
                change = _least_change(found[place], found[other], layout, shares, dear)
                if change is None or not left:
                    continue
                left -= 1
                tried = list(found)
                tried[place], tried[other] = change
                if fits(tried):
                    found = tried
                    break
    return found


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
