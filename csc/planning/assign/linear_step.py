"""A step under its orders as a linear program over what its microbatches hold.

Terms
  kind     something that microbatches hold any amount of: a row of features that one of it adds
  amount   of a kind, at a position: a variable

    program = LinearStep(step, kinds, room)        kinds: [kind][feature], without the constant one
    program.amount(position, kind), program.end    columns
    program.variable(), at_most(terms, most), equal(terms, value)
    program.solved(floors) -> value of each column, or None

An action starts after the one before it on its rank and after the messages that it waits for; its seconds and its
bytes are a fixed part and rates of amounts. Messages of one link go one after the other, in the order of their
rank's actions. Solved by HiGHS (scipy.optimize.linprog).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from csc.planning.assign.layout import Floats
from csc.planning.assign.step import SampleCosts
from csc.planning.schedules.work import WorkTables, positions

NOTHING = 1e-9  # of the room: what is left of sums that should be none
Terms = Iterable[tuple[int, float]]
Rates = tuple[float, list[float]]  # a fixed part, and what one of each kind adds


class LinearStep:
    """room: bytes for activations by rank; None: no limit."""

    def __init__(self, step: SampleCosts, kinds: Floats, room: Sequence[float] | None = None) -> None:
        self._step, self._count, self._kinds = step, step.microbatches, len(kinds)
        self._fixed = _with(step, np.zeros(kinds.shape[1]))
        self._whole = [_with(step, kind) for kind in kinds]
        self.end = self._count * self._kinds
        self.columns = self.end + 1
        self._most, self._equal = _Rows(), _Rows()
        self._time()
        if room is not None:
            self._bytes(room)

    def amount(self, position: int, kind: int) -> int:
        return position * self._kinds + kind

    def variable(self) -> int:
        """A new column, at least 0."""
        self.columns += 1
        return self.columns - 1

    def at_most(self, terms: Terms, most: float) -> None:
        self._most.add(terms, most)

    def equal(self, terms: Terms, value: float) -> None:
        self._equal.add(terms, value)

    def solved(self, floors: Mapping[int, float] | None = None, method: str = "highs-ds") -> Floats | None:
        """The columns where the step is the shortest. floors: the least that a column is. None if nothing fits."""
        costs = np.zeros(self.columns)
        costs[self.end] = 1.0
        bounds = np.tile([0.0, np.inf], (self.columns, 1))
        for column, least in (floors or {}).items():
            bounds[column, 0] = least
        most, equal = self._most.matrix(self.columns), self._equal.matrix(self.columns)
        found = linprog(costs, most, self._most.right, equal, self._equal.right or None, bounds, method)
        return found.x if found.success else None

    def _time(self) -> None:
        seconds = self._rates(lambda work: [row[0] for row in work.seconds])
        starts: dict[tuple[int, int], int] = {}
        for order in self._step.orders:
            before: tuple[int, int, Rates] | None = None
            for entry, lane, k in positions(self._fixed, order):
                starts[lane, k] = start = self.variable()
                if before is not None:
                    self._after(start, *before)
                before = start, k, seconds[entry]
            if before is not None:
                self._after(self.end, *before)
        wires = iter(self._rates(lambda work: [feed[3][0] for row in work.feeds for feed in row]))
        wires_of = [[next(wires) for _ in row] for row in self._fixed.feeds]
        for order in self._step.orders:
            self._messages(order, starts, seconds, wires_of)

    def _messages(
        self,
        order: Sequence[int],
        starts: Mapping[tuple[int, int], int],
        seconds: Sequence[Rates],
        wires: Sequence[Sequence[Rates]],
    ) -> None:
        """Those that this rank sends; what waits for one within the rank does so by its order."""
        last: dict[int, tuple[int, int, Rates]] = {}  # by link: its last message's start, position and seconds
        for entry, lane, k in positions(self._fixed, order):
            for (fed, slot, latency, _), wire in zip(self._fixed.feeds[entry], wires[entry]):
                if slot < 0:
                    continue
                sent = self.variable()
                self._after(sent, starts[lane, k], k, seconds[entry])
                if slot in last:
                    self._after(sent, *last[slot])
                last[slot] = sent, k, wire
                if (fed, k) in starts:
                    self._after(starts[fed, k], sent, k, (wire[0] + latency, wire[1]))

    def _after(self, late: int, early: int, position: int, seconds: Rates) -> None:
        """late is no earlier than early and these seconds of the position's microbatch behind it."""
        self.at_most([(early, 1.0), (late, -1.0), *self._terms(position, seconds)], -seconds[0])

    def _terms(self, position: int, rates: Rates) -> list[tuple[int, float]]:
        return [(self.amount(position, kind), rate) for kind, rate in enumerate(rates[1]) if rate]

    def _rates(self, figures: Callable[[WorkTables], Sequence[float]]) -> list[Rates]:
        """Of each of these figures."""
        fixed, *whole = map(figures, (self._fixed, *self._whole))
        return [(none, [one - none for one in each]) for none, *each in zip(fixed, *whole)]

    def _bytes(self, room: Sequence[float]) -> None:
        """A rank's activations, at each of its actions that makes them grow."""
        growth = self._rates(lambda work: [row[0] for row in work.growth])
        moment = self._rates(lambda work: [row[0] for row in work.moment])
        for order, most in zip(self._step.orders, room):
            alive: dict[int, float] = {}
            held = 0.0
            for entry, lane, k in positions(self._fixed, order):
                if entry != lane:
                    during = moment[lane // 3]
                    self._fits(self._grown(alive, k, during), held + during[0], most)
                grows = growth[entry]
                alive, held = self._grown(alive, k, grows), held + grows[0]
                alive = {column: size for column, size in alive.items() if size > NOTHING * most}
                if max(grows[1]) > 0:
                    self._fits(alive, held, most)

    def _grown(self, alive: Mapping[int, float], position: int, rates: Rates) -> dict[int, float]:
        found = dict(alive)
        for column, rate in self._terms(position, rates):
            found[column] = found.get(column, 0.0) + rate
        return found

    def _fits(self, alive: Mapping[int, float], held: float, most: float) -> None:
        self.at_most([(column, size / most) for column, size in alive.items()], 1.0 - held / most)


class _Rows:
    """Sums of columns, and what is on their right."""

    def __init__(self) -> None:
        self._places: list[tuple[int, int]] = []
        self._values: list[float] = []
        self.right: list[float] = []

    def add(self, terms: Terms, right: float) -> None:
        for column, value in terms:
            self._places.append((len(self.right), column))
            self._values.append(value)
        self.right.append(right)

    def matrix(self, columns: int) -> Any:
        """Sparse; None without rows."""
        if not self.right:
            return None
        rows, own = zip(*self._places)
        return coo_matrix((self._values, (rows, own)), shape=(len(self.right), columns)).tocsr()


def _with(step: SampleCosts, features: Floats) -> WorkTables:
    """Of microbatches that all have these features."""
    return step.work(np.tile([1.0, *features], (step.microbatches, 1)))
