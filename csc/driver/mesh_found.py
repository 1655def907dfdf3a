"""What a search for a mesh has found so far.

Terms: see csc.driver.mesh_search.

    found.add(candidate, row)        found.best -> seconds of the fastest row that fits
    found.fastest() -> {layout: seconds}
    found.hear() -> best                     of all workers, where there are several
    found.told() -> FoundMeshes              what a worker says to another, who merges it: found.merge(told)
    found.answer(devices, step, memory, told) -> MeshChoice
    fitting_first(row) -> key        of rows: what fits, then the fastest
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from csc.driver.mesh_candidates import MeshCandidate
from csc.driver.mesh_rows import MeshChoice, MeshIfRoom, MeshRow
from csc.planning.meshes import MeshDivision, MeshLayout

GAIN = 1e-3  # what another order of ranks, form, stages of their own, or more memory have to save
NEAR = 1.15  # times the best: layouts of which other forms are looked at
ROOM = 1.02  # times its bound: a plan this near gains nothing from ZeRO-3, which makes room


class BestOfWorkers:
    """The seconds of the best that any of several processes has found, which were forked from the first."""

    def __init__(self) -> None:
        self._seconds = multiprocessing.get_context("fork").RawValue("d", math.inf)

    def least(self, seconds: float) -> float:
        """Without a lock: what one process overwrites, the other says again the next time."""
        found = min(seconds, self._seconds.value)
        self._seconds.value = found
        return float(found)


@dataclass
class FoundMeshes:
    """best: seconds of the fastest row that fits; rows: by candidate; bytes: that those need at least which do not fit;
    slow: layouts on which nothing can be faster; far: those that are expected to be far behind; settled: layouts with a
    recomputation for which more room brings nothing; refused: why csc cannot divide so; expected: of each layout that
    was bounded with its memory the candidate that may take the least; left: seconds that layouts take at least for
    which there was no time.
    """

    best: float = math.inf
    rows: dict[MeshCandidate, MeshRow] = field(default_factory=dict)
    bytes: dict[MeshCandidate, float] = field(default_factory=dict)
    slow: set[MeshLayout] = field(default_factory=set)
    far: set[MeshLayout] = field(default_factory=set)
    settled: set[tuple[MeshLayout, str]] = field(default_factory=set)
    refused: dict[MeshDivision, str] = field(default_factory=dict)
    expected: dict[MeshLayout, MeshCandidate] = field(default_factory=dict)
    left: dict[MeshLayout, float] = field(default_factory=dict)
    heard: BestOfWorkers | None = None

    def add(self, one: MeshCandidate, row: MeshRow) -> None:
        self.rows[one] = row
        self.best = min(self.best, row.seconds)
        if row.seconds <= ROOM * one.seconds:
            self.settled.add((one.layout, row.recompute))

    def hear(self) -> float:
        if self.heard is not None:
            self.best = self.heard.least(self.best)
        return self.best

    def told(self) -> FoundMeshes:
        return replace(self, expected={}, heard=None)

    def merge(self, other: FoundMeshes) -> None:
        self.best = min(self.best, other.best)
        for own, others in ((self.rows, other.rows), (self.bytes, other.bytes), (self.refused, other.refused)):
            own |= others  # type: ignore[operator]
        self.slow |= other.slow
        self.far |= other.far
        for layout, seconds in other.left.items():
            self.left[layout] = min(seconds, self.left.get(layout, math.inf))

    def expect(self, one: MeshCandidate) -> None:
        known = self.expected.get(one.layout)
        if known is None or one.expected < known.expected:
            self.expected[one.layout] = one

    def fastest(self) -> dict[MeshLayout, float]:
        """Seconds of each layout on which something fits."""
        seconds: dict[MeshLayout, float] = {}
        for one, row in self.rows.items():
            if row.fits:
                seconds[one.layout] = min(row.seconds, seconds.get(one.layout, math.inf))
        return seconds

    def answer(self, devices: int, step: int, memory: float | None, told: Mapping[str, str]) -> MeshChoice:
        """told: why there is none, by division."""
        by_layout: dict[MeshLayout, MeshRow] = {}
        for one, row in self.rows.items():
            before = by_layout.get(one.layout, row)
            by_layout[one.layout] = min(before, row, key=fitting_first)
        rows = tuple(sorted(by_layout.values(), key=fitting_first))
        left = {layout: least for layout, least in self.left.items() if layout not in by_layout}
        known = by_layout.keys() | left.keys()
        far = self.far - known
        rest = self.slow - known - far
        large = {one.layout for one in self.bytes} - known - far - rest
        return MeshChoice(
            devices, step, memory, rows, len(rest), len(large), told, len(left), self._room(rows[0], memory or 0.0),
            min(left.values(), default=math.inf), len(far),
        )  # fmt: skip

    def _room(self, best: MeshRow, memory: float) -> tuple[MeshIfRoom, ...]:
        """What may be faster than the best with more memory, each at least as much faster as it needs more."""
        found: list[MeshIfRoom] = []
        for one, size in sorted(self.bytes.items(), key=lambda each: (each[1], each[0].seconds)):
            least = min([best.seconds * (1 - GAIN), *(each.seconds * (1 - GAIN) for each in found)])
            if best.fits and one.seconds < least and memory < size < math.inf:
                layout = one.layout
                found.append(
                    MeshIfRoom(
                        str(layout.mesh), layout.microbatches, one.options.zero, one.choice, one.seconds, size,
                        layout.sequence, layout.context,
                    )
                )  # fmt: skip
        return tuple(found)


def fitting_first(row: MeshRow) -> tuple[bool, float]:
    """What comes first."""
    return not row.fits, row.seconds
