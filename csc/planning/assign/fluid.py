"""Sizes of microbatches that make a step the shortest if samples could be divided like water.

Terms
  shape   of a step: by position what a microbatch has of the samples, in times the mean one
  least   the smallest part that a microbatch may have, in times the mean one: one sample's

    fluid_shapes(step, room) -> shapes

Every microbatch is a part of the mean one here, so a step under given orders is a linear program: an action starts
after the one before it on its rank and after the messages that it waits for. The best sizes grow over the first half of
the step and shrink over the second: an action that takes a little longer than the one before hides the way there and
back. That messages wait for each other on a link is left out. Solved by HiGHS (scipy.optimize.linprog).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from csc.planning.assign.layout import Floats
from csc.planning.assign.step import SampleCosts
from csc.planning.schedules.work import WorkTables, positions

Shape = tuple[float, ...]
PEAKS = (0.2, 0.35, 0.5, 0.65)  # of the step: where the largest samples stand
NOTHING = 1e-9  # of the room: what is left of sums that should be none


def fluid_shapes(step: SampleCosts, room: Sequence[float] | None = None) -> list[Shape]:
    """Of any samples, and such as have room for the largest ones, whole, beside each other in several places. room:
    bytes for activations by rank; None: no limit. None of a step of one microbatch.
    """
    count = step.microbatches
    if count < 2:
        return []
    sizes = np.sort(step.shares.max(axis=1) * count * step.replicas)
    largest = sizes[::-1][step.replicas // 2 :: step.replicas][:count]  # those that a replica has
    free = [
        _shape(step, room, np.full(count, min(1.0, least))) for least in (sizes[0], count / len(largest), sizes.mean())
    ]
    found = [one for one in free if one is not None]
    if not found or largest[0] <= max(found[0]):
        return list(dict.fromkeys(found))
    for peak in PEAKS:
        floors = np.full(count, min(1.0, sizes[0]))
        near = np.argsort(np.abs(np.arange(count) - peak * (count - 1)), kind="stable")[: len(largest)]
        for place, size in zip(near, largest):
            floors[place] = max(floors[place], size if size > 1.0 else 0.0)
        one = _shape(step, room, floors * min(1.0, 0.98 * count / floors.sum()))
        found += [] if one is None else [one]
    return list(dict.fromkeys(found))


def _shape(step: SampleCosts, room: Sequence[float] | None, floors: Floats) -> Shape | None:
    """floors: by position the least size. None if no sizes fit the room."""
    count = step.microbatches
    mean = step.samples.sum(axis=0) / (count * step.replicas)
    fixed, whole = (step.work(np.tile(one, (count, 1))) for one in (_features(mean * 0.0), _features(mean)))
    program = _Program(count)
    starts = _times(program, step, fixed, whole)
    _messages(program, step, starts, fixed, whole)
    if room is not None:
        _bytes(program, step, room, fixed, whole)
    return program.solved(floors)


def _features(one: Floats) -> Floats:
    return np.concatenate([[1.0], one])


class _Program:
    """Variables: the sizes by position, the end of the step, then starts. Rows: sums that are at most a number."""

    def __init__(self, count: int) -> None:
        self.count, self.variables = count, count + 1
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self._most: list[float] = []

    @property
    def end(self) -> int:
        return self.count

    def start(self) -> int:
        """A new one."""
        self.variables += 1
        return self.variables - 1

    def at_most(self, terms: Sequence[tuple[int, float]], most: float) -> None:
        for column, value in terms:
            self._rows.append(len(self._most))
            self._columns.append(column)
            self._values.append(value)
        self._most.append(most)

    def after(self, late: int, early: int, position: int, seconds: tuple[float, float]) -> None:
        """late starts no earlier than early and, behind it, these seconds: fixed ones, and more by the size."""
        self.at_most(((early, 1.0), (late, -1.0), (position, seconds[1])), -seconds[0])

    def solved(self, floors: Floats) -> Shape | None:
        shape = (len(self._most), self.variables)
        rows = coo_matrix((self._values, (self._rows, self._columns)), shape=shape).tocsr()
        places = np.arange(self.count)
        whole = coo_matrix((np.ones(self.count), (np.zeros_like(places), places)), shape=(1, self.variables)).tocsr()
        costs = np.zeros(self.variables)
        costs[self.end] = 1.0
        bounds = [(least, None) for least in floors.tolist()] + [(0.0, None)] * (self.variables - self.count)
        found = linprog(costs, rows, self._most, whole, [float(self.count)], bounds=bounds, method="highs-ds")
        return tuple(np.maximum(found.x[: self.count], 1e-3).tolist()) if found.success else None


def _of(fixed: WorkTables, whole: WorkTables, entry: int) -> tuple[float, float]:
    """Seconds of an action: fixed ones, and those that a mean microbatch adds."""
    return fixed.seconds[entry][0], whole.seconds[entry][0] - fixed.seconds[entry][0]


def _times(program: _Program, step: SampleCosts, fixed: WorkTables, whole: WorkTables) -> dict[tuple[int, int], int]:
    """(lane, position): its start, of a fused action's B."""
    starts: dict[tuple[int, int], int] = {}
    for order in step.orders:
        before: tuple[int, int, tuple[float, float]] | None = None
        for entry, lane, k in positions(fixed, order):
            starts[lane, k] = start = program.start()
            if before is not None:
                program.after(start, *before)
            before = start, k, _of(fixed, whole, entry)
        if before is not None:
            program.after(program.end, *before)
    return starts


def _messages(
    program: _Program, step: SampleCosts, starts: dict[tuple[int, int], int], fixed: WorkTables, whole: WorkTables
) -> None:
    """What waits for an action on another rank starts after it and the message between."""
    for order in step.orders:
        for entry, lane, k in positions(fixed, order):
            own = _of(fixed, whole, entry)
            for (fed, slot, latency, wire), (*_, full) in zip(fixed.feeds[entry], whole.feeds[entry]):
                if slot >= 0:  # within a rank the order says it
                    seconds = own[0] + latency + wire[0], own[1] + full[0] - wire[0]
                    program.after(starts[fed, k], starts[lane, k], k, seconds)


def _bytes(program: _Program, step: SampleCosts, room: Sequence[float], fixed: WorkTables, whole: WorkTables) -> None:
    """A rank's activations, at each of its actions that makes them grow."""
    for order, most in zip(step.orders, room):
        alive: dict[int, float] = {}
        held = 0.0
        for entry, lane, k in positions(fixed, order):
            if entry != lane:
                stage = lane // 3
                moment = whole.moment[stage][0] - fixed.moment[stage][0]
                during = {**alive, k: alive.get(k, 0.0) + moment}
                fixed_ones = held + fixed.moment[stage][0]
                program.at_most([(at, size / most) for at, size in during.items()], 1.0 - fixed_ones / most)
            grows = whole.growth[entry][0] - fixed.growth[entry][0]
            held += fixed.growth[entry][0]
            alive[k] = alive.get(k, 0.0) + grows
            if alive[k] <= NOTHING * most:
                del alive[k]
            if grows > 0:
                program.at_most([(at, size / most) for at, size in alive.items()], 1.0 - held / most)
