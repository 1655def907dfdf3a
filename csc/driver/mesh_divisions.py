"""Divisions that no graph was traced for yet, the most promising first.

Terms: see csc.driver.mesh_search. The *extra* of a division is what its ranks take together more than one device alone
would, as a part of that: exchanges, and what is not divided.

    UntracedDivisions(problems, layouts)
    .next() -> (seconds, division) or None        .take(division) -> its layouts, no longer untraced
    .parts(candidates, count) -> [(candidates, UntracedDivisions)]      for so many workers

A rank that shares the work of a layer with more others exchanges no less, so the extra of an axis grows with its ranks
at least in proportion; and the extras of tp and of cp add up. So a few divisions tell of the others, and of most it is
known without a graph that they are far behind. Nothing is told from microbatches of other sizes, whose messages may
take longer than their latency.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from csc.driver.mesh_candidates import DividedProblems, MeshCandidate
from csc.planning.meshes import PLAIN, MeshDivision, MeshLayout

Part = tuple[list[MeshCandidate], "UntracedDivisions"]


class UntracedDivisions:
    """In the plain form, in which layouts are made."""

    def __init__(self, problems: DividedProblems, layouts: Sequence[MeshLayout]) -> None:
        self._problems, self._begun = problems, False
        self._layouts: dict[MeshDivision, list[MeshLayout]] = {}
        for layout in sorted(layouts, key=_simple):
            self._layouts.setdefault(layout.division, []).append(layout)

    def next(self) -> tuple[float, MeshDivision] | None:
        """The division that may take the least, and the seconds that are expected of its best layout; the simplest one
        before all others, with which the graph of one device has been traced.
        """
        if not self._layouts:
            return None
        if not self._begun:
            simplest = next(iter(self._layouts))
            return self._seconds(simplest), simplest
        return min(((self._seconds(each), each) for each in self._layouts), key=lambda one: one[0])

    def take(self, division: MeshDivision) -> list[MeshLayout]:
        self._begun = True
        return self._layouts.pop(division)

    def parts(self, traced: Sequence[MeshCandidate], count: int) -> list[Part]:
        """All candidates of a division are of one part, as is a division without a trace, but for layouts of whole
        layers, which have no other forms to trace. The best are in turn.
        """
        least: dict[MeshDivision | MeshLayout, float] = {}
        for one in traced:
            least[_of_one_part(one)] = min(one.seconds, least.get(_of_one_part(one), math.inf))
        every = least | {division: self._seconds(division) for division in self._layouts}
        turn = {division: i % count for i, division in enumerate(sorted(every, key=lambda each: every[each]))}
        found: list[Part] = []
        for number in range(count):
            own = UntracedDivisions(self._problems, ())
            own._begun = self._begun
            own._layouts = {one: layouts for one, layouts in self._layouts.items() if turn[one] == number}
            found.append(([one for one in traced if turn[_of_one_part(one)] == number], own))
        return found

    def _seconds(self, division: MeshDivision) -> float:
        """Those of the shortest pipeline, which has the least to wait for."""
        shortest = min(self._layouts[division], key=lambda layout: layout.mesh.pp)
        return self._problems.ideal(shortest) * (1 + self._extra(division))

    def _extra(self, division: MeshDivision) -> float:
        """At least, by what was traced in any form."""
        known = [(one, extra) for one, extra in self._problems.extras.items() if one.samples == division.samples]
        of_tp = _least((one.tp, extra) for one, extra in known if one.cp == 1 and one.tp <= division.tp)
        of_cp = _least((one.cp, extra) for one, extra in known if one.tp == 1 and one.cp <= division.cp)
        return _grown(of_tp, division.tp) + _grown(of_cp, division.cp)


def _of_one_part(one: MeshCandidate) -> MeshDivision | MeshLayout:
    """What a worker has all of."""
    layout = one.layout.in_form(PLAIN)
    return layout if layout.mesh.tp * layout.mesh.cp == 1 else layout.division


def _simple(layout: MeshLayout) -> tuple[int, int, int]:
    """Whole layers and few samples first."""
    division = layout.division
    return division.tp * division.cp * division.samples, division.cp, division.tp


def _least(extras: Iterable[tuple[int, float]]) -> dict[int, float]:
    """By ranks, of the form that takes the least."""
    found: dict[int, float] = {}
    for ranks, extra in extras:
        found[ranks] = min(extra, found.get(ranks, extra))
    return found


def _grown(extras: dict[int, float], ranks: int) -> float:
    return max([0.0, *(extra * ranks / fewer for fewer, extra in extras.items() if fewer > 1)])
