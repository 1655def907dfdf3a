"""One step's samples against one pipeline: what an assignment of them takes, and what none beats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from csc.planning.schedules.auto import heads_and_tails, way_back
from csc.planning.schedules.work import FixedOrders, WorkTables, growth, makespan, positions
from csc.simulation.pipeline import FIGURES, Loads, Pipeline, taken

# --- How the samples of a microbatch lie in it, and what features it has for that ------------------------------------
#
# Terms
#   length     positions that a sample takes in the language model
#   width      of a microbatch: the length of its rows, a multiple of `multiple`, or a known one of its size
#   packed     all samples in one row, each seeing itself: pairs of positions are the sum of their squared lengths
#   padded     a row for each sample, all as long as the longest: pairs are rows x width squared
#   units      what else a sample has, counted: tiles, images, frames; a microbatch has the sum
#   size       (units of each kind, rows, width): microbatches of one size have one program


Floats = npt.NDArray[np.float64]
Kind = tuple[int, ...]  # units of each kind, then rows
Size = tuple[int, ...]  # and the width
STEPS = 2  # multiples by which a microbatch is made wider, where that is more than the slack


@dataclass(frozen=True)
class BatchLayout:
    """lengths: of each sample; units: [sample][kind]. multiple: widths are multiples of it. known: by kind the widths
    that have programs, ascending: a microbatch is made as wide as one of them if that adds at most `slack` of it, or
    STEPS multiples; none with a slack of 0.
    """

    lengths: Floats
    units: Floats
    packed: bool
    multiple: int = 1
    known: Mapping[Kind, tuple[int, ...]] = field(default_factory=dict)
    slack: float = 0.05

    @cached_property
    def samples(self) -> Floats:
        """What each has alone, unpadded."""
        lengths = self.lengths[:, None]
        return np.hstack([self.units, self.units**2, lengths, lengths**2])

    def features(self, groups: Sequence[Sequence[int]]) -> Floats:
        """Returns [microbatch][feature], of each group as a microbatch: (1, units, their squares by sample, positions,
        pairs).
        """
        members = np.fromiter(chain.from_iterable(groups), np.int64)
        rows = np.array([len(group) for group in groups])
        starts = np.concatenate([[0], np.cumsum(rows)[:-1]])
        sums = np.add.reduceat(self.samples[members], starts, axis=0)
        widths = self._widths(sums, rows, np.maximum.reduceat(self.lengths[members], starts))
        if self.packed:
            sums[:, -2] = widths
        else:
            sums[:, -2], sums[:, -1] = rows * widths, rows * widths**2
        return np.hstack([np.ones((len(groups), 1)), sums])

    def _widths(self, sums: Floats, rows: npt.NDArray[np.int64], longest: Floats) -> Floats:
        least = np.ceil((sums[:, -2] if self.packed else longest) / self.multiple) * self.multiple
        if self.known:
            units = sums[:, : self.units.shape[1]].astype(np.int64).tolist()
            kinds = [(*unit_counts, 1 if self.packed else count) for unit_counts, count in zip(units, rows.tolist())]
            least = np.array([self._width(kind, width) for kind, width in zip(kinds, least.tolist())])
        return least

    def _width(self, kind: Kind, least: float) -> float:
        """A known width of the kind that is little more, else the least."""
        for width in self.known.get(kind, ()):
            if least <= width <= least + max(self.slack * least, STEPS * self.multiple * (self.slack > 0)):
                return width
        return least

    def sizes(self, groups: Sequence[Sequence[int]]) -> list[Size]:
        """Of each group."""
        return [self.size(group) for group in groups]

    @cached_property
    def _counts(self) -> tuple[list[int], list[tuple[int, ...]]]:
        """Lengths and units as Python's numbers: single ones are faster so."""
        return [int(length) for length in self.lengths.tolist()], [tuple(map(int, row)) for row in self.units.tolist()]

    def size(self, group: Sequence[int]) -> Size:
        """Of one group."""
        lengths, units = self._counts
        lengths_of_group = [lengths[i] for i in group]
        kind = (*map(sum, zip(*(units[i] for i in group))), 1 if self.packed else len(lengths_of_group))
        least = -(-(sum(lengths_of_group) if self.packed else max(lengths_of_group)) // self.multiple) * self.multiple
        return (*kind, int(self._width(kind, least)))

    def knows(self, size: Size) -> bool:
        """Whether it is a known size."""
        return size[-1] in self.known.get(size[:-1], ())


def widths_of(sizes: Iterable[Size]) -> dict[Kind, tuple[int, ...]]:
    """By kind the widths of these sizes, the least first."""
    widths: dict[Kind, list[int]] = {}
    for *kind, width in sorted(set(sizes)):
        widths.setdefault(tuple(kind), []).append(width)
    return {kind: tuple(widths) for kind, widths in widths.items()}


# --- One step's samples against one pipeline: what an assignment of them takes ---------------------------------------
#
# Terms
#   sample     what a data loader's dataset gives for one index; features of a microbatch are sums over its samples
#   group      the samples of one microbatch; groups[replica][position], positions in the order in which they are run
#   multiple   features are rounded up to multiples of these, as batches are padded, so that few programs are compiled
#   layout     how samples lie in a microbatch, where its features are no sums over them


Groups = Sequence[Sequence[int]]
FEW = 4  # ways that are timed one by one
MANY = 64  # that are timed in one walk: of more the rows do not stay in the processor's cache


@dataclass(frozen=True)
class SampleCosts:
    """samples: [sample][feature], without the constant one, which every microbatch has once. pipeline: with the rates
    of (1, *features) in its loads, whose own features are not read. orders: of each rank, over positions.
    multiple: by feature; 1 or 0 rounds nothing. layout: None: features are sums, rounded.
    """

    samples: Floats
    pipeline: Pipeline
    placement: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]
    replicas: int
    microbatches: int
    multiple: tuple[float, ...]
    layout: BatchLayout | None = None

    def features(self, groups: Groups) -> Floats:
        """[microbatch][feature] of a replica's groups, the constant one first."""
        if self.layout is not None:
            return self.layout.features(groups)
        members = np.fromiter(chain.from_iterable(groups), np.int64)
        sizes = np.array([len(group) for group in groups])
        rows = np.vstack(
            [self.samples[members], np.zeros((1, self.samples.shape[1]))]
        )  # where an empty last one begins
        sums = np.add.reduceat(rows, np.cumsum(sizes) - sizes, axis=0) * (sizes > 0)[:, None]
        return np.hstack([np.ones((len(groups), 1)), rounded(sums, self.multiple)])

    def work(self, features: Floats) -> WorkTables:
        """The tables of microbatches with these features."""
        loads = Loads(tuple(map(tuple, features.tolist())), self._loads.stages, self._loads.messages)
        return WorkTables.of(replace(self.pipeline, loads=loads), self.placement, self.microbatches)

    def seconds_of(self, features: Floats) -> float:
        """Seconds of a replica whose microbatches have these features."""
        return makespan(self.work(features), self.orders)

    def seconds_of_ways(self, ways: Sequence[Groups]) -> list[float]:
        """What `seconds_of` says of each of these ways to fill a replica's microbatches, all in one walk over the
        orders: for more than a few that takes a fraction of the time.
        """
        if len(ways) < FEW:
            return [self.seconds_of(self.features(groups)) for groups in ways]
        if len(ways) > MANY:
            return [*self.seconds_of_ways(ways[:MANY]), *self.seconds_of_ways(ways[MANY:])]
        counts = self.features(list(chain.from_iterable(ways)))
        three = [self._by_position(taken(self._rates[figure], counts), len(ways)) for figure in FIGURES[:3]]
        lanes = np.stack(three, axis=1).reshape(-1, self.microbatches, len(ways))
        seconds = np.concatenate([lanes, three[1] + three[2]])
        return self.fixed_orders.makespans(seconds, self.wires(counts, len(ways))).tolist()

    def wires(self, features: Floats, ways: int = 1) -> Floats:
        """[channel in its order][position][way]: seconds of messages on the wire, of microbatches of these features,
        those of each way behind those of the one before.
        """
        rates, speeds = self._sent
        return self._by_position(taken(rates, features), ways) / speeds[:, None, None]

    @property
    def _loads(self) -> Loads:
        loads = self.pipeline.loads
        assert loads is not None
        return loads

    @cached_property
    def _rates(self) -> dict[str, Floats]:
        """By figure [stage][feature]."""
        return {figure: self._loads.rates(figure) for figure in FIGURES}

    @cached_property
    def _sent(self) -> tuple[Floats, Floats]:
        """[channel in its order][feature]: bytes; [channel]: bytes a second."""
        channels = sorted(self.pipeline.messages)
        ends = [(self.placement[source], self.placement[end]) for _, source, end in channels]
        speeds = np.array([self.pipeline.network.link(*pair).bandwidth for pair in ends])
        return self._loads.sent(channels), speeds

    def _by_position(self, rows: Floats, columns: int) -> Floats:
        return rows.reshape(-1, columns, self.microbatches).transpose(0, 2, 1)

    @cached_property
    def fixed_orders(self) -> FixedOrders:
        """The orders, to be timed for many microbatches."""
        ones = np.ones((self.microbatches, self.samples.shape[1] + 1))
        return FixedOrders(self.work(ones), self.orders)

    def activations(self, features: Floats) -> list[float]:
        """By rank the most bytes of activations of a replica whose microbatches have these features."""
        saved, stashed, moment = (taken(self._rates[figure], features) for figure in ("saved", "stashed", "fused"))
        return self.fixed_orders.peaks(growth(self.pipeline.stages, saved, stashed), moment)

    def seconds(self, replicas: Sequence[Groups]) -> list[float]:
        """Of each replica."""
        return [self.seconds_of(self.features(groups)) for groups in replicas]

    def peaks(self, replicas: Sequence[Groups]) -> list[float]:
        """For each rank the most bytes of activations, of any replica."""
        activations = [self.activations(self.features(groups)) for groups in replicas]
        return [max(rank) for rank in zip(*activations)]

    @cached_property
    def rank_rates(self) -> Floats:
        """[feature][rank]: seconds that one of each feature adds to a rank's work, the constant one first."""
        ranks = 1 + max(self.placement)
        rates_of_ranks = np.zeros((len(self.multiple) + 1, ranks))
        for rates, rank in zip(self._loads.stages, self.placement):
            rates_of_ranks[:, rank] += [sum(getattr(rate, name) for name in FIGURES[:3]) for rate in rates]
        return rates_of_ranks

    @cached_property
    def shares(self) -> Floats:
        """[sample][rank]: what a sample takes of the rank's work for all samples."""
        seconds = self.samples @ self.rank_rates[1:]
        total = seconds.sum(axis=0)
        return np.divide(seconds, total, out=np.zeros_like(seconds), where=total > 0)


def rounded(sums: Floats, multiple: Sequence[float]) -> Floats:
    """Features as batches have them once they are padded."""
    steps = np.array([unit or 1.0 for unit in multiple])
    return np.where(steps > 1, np.ceil(sums / steps) * steps, sums)


# --- A step under its orders as a linear program over what its microbatches hold -------------------------------------
#
# Terms
#   kind     something that microbatches hold any amount of: a row of features that one of it adds
#   amount   of a kind, at a position: a variable
#
# An action starts after the one before it on its rank and after the messages that it waits for; its seconds and its
# bytes are a fixed part and rates of amounts. Messages of one link go one after the other, in the order of their
# rank's actions. Solved by HiGHS (scipy.optimize.linprog).


NOTHING = 1e-9  # of the room: what is left of sums that should be none
Terms = Iterable[tuple[int, float]]
Rates = tuple[float, list[float]]  # a fixed part, and what one of each kind adds


class LinearStep:
    """The linear program of a step. kinds: [kind][feature], without the constant one. room: bytes for activations by
    rank; None: no limit.
    """

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
        """Returns the column of the amount of a kind at a position."""
        return position * self._kinds + kind

    def variable(self) -> int:
        """A new column, at least 0."""
        self.columns += 1
        return self.columns - 1

    def at_most(self, terms: Terms, most: float) -> None:
        """Adds a row: these terms add up to at most so much."""
        self._most.add(terms, most)

    def equal(self, terms: Terms, value: float) -> None:
        """Adds a row: these terms add up to a value."""
        self._equal.add(terms, value)

    def solved(self, floors: Mapping[int, float] | None = None, method: str = "highs-ds") -> Floats | None:
        """The columns where the step is the shortest. floors: the least that a column is. None if nothing fits."""
        costs = np.zeros(self.columns)
        costs[self.end] = 1.0
        bounds = np.tile([0.0, np.inf], (self.columns, 1))
        for column, least in (floors or {}).items():
            bounds[column, 0] = least
        most, equal = self._most.matrix(self.columns), self._equal.matrix(self.columns)
        solution = linprog(costs, most, self._most.right, equal, self._equal.right or None, bounds, method)
        return solution.x if solution.success else None

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
        fixed, *rates = map(figures, (self._fixed, *self._whole))
        return [(none, [rate - none for rate in row]) for none, *row in zip(fixed, *rates)]

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
        alive_after = dict(alive)
        for column, rate in self._terms(position, rates):
            alive_after[column] = alive_after.get(column, 0.0) + rate
        return alive_after

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


# --- What no assignment of a step's samples beats under its order of work --------------------------------------------
#
# For each rank: its work for all samples, shared by the replicas, behind the fastest way in (a microbatch of the
# cheapest sample, feature by feature) and before the fastest way out. The linear program lets samples be cut, each
# part in another microbatch, but has every microbatch hold parts of one sample's worth at least; replicas are alike in
# it, which no step is shorter for, since seconds are convex in amounts. Rounding is left out: it only adds.


def bound(step: SampleCosts) -> float:
    """Seconds of the step that no assignment to these replicas and microbatches is below."""
    cheapest = np.array([1.0, *step.samples.min(axis=0)])
    work = step.work(np.tile(cheapest, (step.microbatches, 1)))
    features = np.array([step.microbatches * step.replicas, *step.samples.sum(axis=0)])
    busy = features @ step.rank_rates / step.replicas
    head, tail = heads_and_tails(work)
    return max(_before(work, order, head) + float(busy[rank]) + _after(work, order, tail)
               for rank, order in enumerate(step.orders))  # fmt: skip


def divided_bound(step: SampleCosts, room: Sequence[float] | None = None) -> float:
    """The same where samples can be cut. room: bytes for activations by rank, None: no limit; inf if nothing fits."""
    count = step.microbatches
    mean = np.maximum(step.samples.sum(axis=0) / (count * step.replicas), 1e-300)
    program = LinearStep(step, np.diag(mean), room)
    parts = [[program.variable() for _ in step.samples] for _ in range(count)]
    for sample in zip(*parts):
        program.equal([(part, 1.0) for part in sample], 1.0 / step.replicas)
    for k, part_columns in enumerate(parts):
        program.at_most([(part, -1.0) for part in part_columns], -1.0)
        for kind, column in enumerate((step.samples / mean).T):
            terms = [(part, float(size)) for part, size in zip(part_columns, column) if size]
            program.equal([*terms, (program.amount(k, kind), -1.0)], 0.0)
    solution = program.solved(method="highs-ipm")
    return math.inf if solution is None else float(solution[program.end])


def _before(work: WorkTables, order: Sequence[int], head: Sequence[float]) -> float:
    return head[work.lane_of[order[0]]]


def _after(work: WorkTables, order: Sequence[int], tail: Sequence[float]) -> float:
    """Behind the order's last action; where that is B and W in one, behind both."""
    last = order[-1]
    return way_back(work, tail, work.lane_of[last]) if last >= work.size else tail[last]


# --- From which batch size on batches drawn at random lead to the same choice ----------------------------------------
#
# The criterion is Entrain's: a size is large enough if 59 fresh batches choose alike. If more than one in twenty
# batches chose otherwise, 59 alike would be seen in one case of twenty (0.95 ** 59 = 0.048).


BATCHES = 59


@dataclass(frozen=True)
class AlikeSizes:
    """shares: by size how many of BATCHES chose alike. least: the smallest from which on all of each size did; None:
    the largest size did not.
    """

    shares: dict[int, int]
    least: int | None


def large_enough(alike: Callable[[int, int], bool], sizes: Iterable[int]) -> AlikeSizes:
    """alike: whether a batch of this size, by number, chooses as the others do; sizes: those to look at."""
    shares = {size: sum(alike(size, number) for number in range(BATCHES)) for size in sorted(set(sizes))}
    least = None
    for size, share in reversed(shares.items()):
        if share < BATCHES:
            break
        least = size
    return AlikeSizes(shares, least)
