"""An assignment brought to sizes that have programs already: samples change places until every microbatch has one.

    settled(step, groups, fits, efforts) -> groups of one replica    the same if all sizes are known or none can be had

A microbatch of an unknown size gives a sample to another one, takes one, or swaps two; of all changes that leave both
with known sizes those that move the least load are timed, and the fastest is made, unless the step becomes much longer
for it: a program is compiled once, and a step that is longer is paid for every time. What that leaves is tried with any
other microbatch and more samples, and for more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from math import comb, prod

import numpy as np

from csc.planning.assign.layout import BatchLayout, Floats
from csc.planning.assign.step import SampleCosts

Lists = list[list[int]]


@dataclass(frozen=True)
class Effort:
    """load: of a microbatch's, more is not moved. others: microbatches that it is tried with, of the nearest load.
    samples: that each of the two gives at most. longer: by how much of itself a step may become for a known size.
    tries: changes that are looked at, over all microbatches of unknown sizes; of large ones there are too many.
    """

    load: float
    others: int
    samples: int
    longer: float
    tries: int = 2**14


CHEAP = (Effort(0.3, 12, 1, 0.01), Effort(0.8, 12, 1, 0.01))
EVERY = (*CHEAP, Effort(4.0, 1000, 2, 0.05))


def settled(
    step: SampleCosts, groups: Sequence[Sequence[int]], fits: Callable[[Lists], bool], efforts: Sequence[Effort] = EVERY
) -> Lists:
    """fits: whether the groups' activations do. efforts: one after the other, for what is left."""
    layout = step.layout
    assert layout is not None
    found = [list(group) for group in groups]
    for effort in efforts if layout.known else ():
        unknown = [place for place in range(len(found)) if not layout.knows(layout.size(found[place]))]
        for place in unknown:
            if layout.knows(layout.size(found[place])):  # it took part in another's change
                continue
            ways = list(_ways(found, place, layout, step.shares, effort, effort.tries // len(unknown)))
            now, *seconds = step.seconds_of_ways([found, *ways])
            for took, way in sorted(zip(seconds, ways), key=lambda one: one[0]):
                if took > now * (1 + effort.longer):
                    break
                if fits(way):
                    found = way
                    break
    return found


def _ways(found: Lists, place: int, layout: BatchLayout, shares: Floats, effort: Effort, tries: int) -> Iterator[Lists]:
    """With each of the other microbatches, as far as tries go, the change that moves the least load."""
    for other in _partners(found, place, shares)[: effort.others]:
        samples = next((n for n in range(effort.samples, 0, -1) if _tries(found[place], found[other], n) <= tries), 0)
        if not samples:
            return
        tries -= _tries(found[place], found[other], samples)
        change = _least_change(found[place], found[other], layout, shares, effort.load, samples)
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
    own: list[int], theirs: list[int], layout: BatchLayout, shares: Floats, load: float, samples: int
) -> tuple[list[int], list[int]] | None:
    """What both have after the change that moves the least load, where both have known sizes then, or the other one had
    none before either.
    """
    demanding = layout.knows(layout.size(theirs))
    best: tuple[float, tuple[list[int], list[int]]] | None = None
    most = load * float(shares[own].sum(axis=0).max())
    for given in _parts(own, samples):
        for taken in _parts(theirs, samples):
            mine, left = _exchanged(own, given, theirs, taken)
            if not mine or not left or not layout.knows(layout.size(mine)):
                continue
            if demanding and not layout.knows(layout.size(left)):
                continue
            moved = float(np.abs(shares[list(given)].sum(axis=0) - shares[list(taken)].sum(axis=0)).max())
            if moved <= most and (best is None or moved < best[0]):
                best = moved, (mine, left)
    return best[1] if best is not None else None


def _tries(own: list[int], theirs: list[int], samples: int) -> int:
    """How many changes there are between the two, of at most so many samples of each."""
    return prod(sum(comb(len(group), count) for count in range(samples + 1)) for group in (own, theirs))


def _parts(group: list[int], most: int) -> list[tuple[int, ...]]:
    """None of it, single ones, and so on."""
    return list(chain.from_iterable(combinations(group, count) for count in range(most + 1)))


def _exchanged(
    own: list[int], given: tuple[int, ...], theirs: list[int], taken: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """Both, with what one gives and takes."""
    mine = [*(one for one in own if one not in given), *taken]
    left = [*(one for one in theirs if one not in taken), *given]
    return mine, left
