"""What any segment of a problem's units costs as a stage, and which segments can be the next one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from csc.planning.problem import Branches, Floats, Ints, Problem, Ramps, Stages, numbered, ramps

# --- What any segment of a problem's units costs as a stage ----------------------------------------------------------
#
# Terms: see csc.planning.problem for chains and ramps.
#   frontier   for each chain how many of its units, from the first one on, are left to be put into stages
#   segment      the units between two frontiers: on chain c the positions low[c] up to high[c]


@dataclass(frozen=True)
class Crossing:
    """Edges between one unit and units of other chains (or of its own chain past a missing link).

    where: which of the four ramps of `Segments.links` it belongs to. The unit at (chain, position) is the outer end and
    takes `seconds` before or after a segment that holds an inner end but not it. count: inner ends before each place.
    """

    where: int
    chain: int
    position: int
    seconds: float
    count: Ints


@dataclass(frozen=True)
class ChainTables:
    """Tables over the flat places `start[c] + position`, position 0 to the chain's length.

    sums: running sums of F, B, W, state, saved and stashed. fused[j], working[j]: the largest `fused` and `working` of
    the 2**j units from each place on. links: seconds over the neighbour on the chain, by place:
    until F can start (at the low end), until B can (at the high end), after B (at the low end), after F (at the high
    end).
    need[place, d]: units of chain d that come before the units ahead of this place. work, ramp: what the work and the
    ramps are multiplied by, from the microbatches' sizes.
    """

    branches: Branches
    lengths: Ints
    start: Ints
    sums: Floats
    fused: Floats
    working: Floats
    links: Floats
    crossings: tuple[Crossing, ...]
    need: Ints
    least_rest: Floats
    work: float
    ramp: float


def segments(problem: Problem, found: Branches) -> ChainTables:
    """The tables of a problem; their size is linear in the units times the crossings between chains."""
    units, chains = problem.units, found.chains
    lengths = np.array([len(chain) for chain in chains], dtype=np.int64)
    start = np.concatenate([[0], np.cumsum(lengths + 1)[:-1]]).astype(np.int64)
    places = int((lengths + 1).sum())
    sums = np.zeros((places, 6))
    for c, chain in enumerate(chains):
        costs = [
            (
                unit.forward,
                unit.backward_input,
                unit.backward_weight,
                unit.state,
                unit.saved if unit.has_b else 0.0,
                unit.stashed if unit.has_w else 0.0,
            )
            for unit in (units[i] for i in chain)
        ]
        sums[start[c] + 1 : start[c] + 1 + len(chain)] = np.cumsum(np.array(costs), axis=0)
    paths = ramps(problem)
    links, crossings = _edges(found, paths, start, places)
    need = np.zeros((places, len(chains)), dtype=np.int64)
    least_rest = np.full(places, np.inf)
    for c, chain in enumerate(chains):
        for position, u in enumerate(chain):
            place = start[c] + position
            need[place + 1] = need[place]
            for v in found.before[u]:
                d, other = found.place[v]
                need[place + 1, d] = max(need[place + 1, d], other + 1)
            rest = paths.from_forward[u] - units[u].forward
            least_rest[place + 1] = min(least_rest[place], rest)
    scale = problem.scale or (1.0,) * problem.microbatches
    return ChainTables(
        branches=found,
        lengths=lengths,
        start=start,
        sums=sums,
        fused=_largest(found, [unit.fused for unit in units], start, places),
        working=_largest(found, [unit.working for unit in units], start, places),
        links=links,
        crossings=crossings,
        need=need,
        least_rest=least_rest,
        work=float(sum(scale)),
        ramp=float(min(scale)),
    )


def _largest(branching: Branches, sizes: Sequence[float], start: Ints, places: int) -> Floats:
    """(levels, places): the largest size among 2**level units of a chain, for queries of any range in one step."""
    flat = np.zeros(places)
    for c, chain in enumerate(branching.chains):
        flat[start[c] : start[c] + len(chain)] = [sizes[u] for u in chain]
    rows = [flat]
    while 2 ** len(rows) < places:
        half = 2 ** (len(rows) - 1)
        ahead = np.concatenate([rows[-1][half:], np.zeros(half)])
        rows.append(np.maximum(rows[-1], ahead))
    return np.array(rows)


def _edges(branching: Branches, paths: Ramps, start: Ints, places: int) -> tuple[Floats, tuple[Crossing, ...]]:
    """The ramps that come over the chains' own links, and over all other edges."""
    links = np.zeros((4, places))
    inner: dict[tuple[int, int], list[int]] = {}
    seconds = (paths.to_forward, paths.to_backward, paths.from_backward, paths.from_forward)
    for where, edges in ((0, paths.forward_edges), (2, paths.backward_edges)):
        linked = {(u, v) for u, v in edges if branching.place[u][0] == branching.place[v][0]}
        run_lengths = [0] * len(branching.place)  # how many links of the chain in a row lead to this unit
        for chain in branching.chains:
            for u, v in itertools.pairwise(chain):
                in_chain = (u, v) in linked if where == 0 else (v, u) in linked
                run_lengths[v] = run_lengths[u] + 1 if in_chain else 0
        for u, v in edges:
            # F goes up the chain from u to v, B comes down from u to v.
            first, last = (u, v) if where == 0 else (v, u)
            (c, i), (d, j) = branching.place[first], branching.place[last]
            ahead, behind = (0, 3) if where == 0 else (2, 1)
            if c == d and j == i + 1:
                links[ahead, start[c] + j] = seconds[ahead][first]
                links[behind, start[c] + j] = seconds[behind][last]
            elif c != d or run_lengths[last] < j - i:  # else the links between them say at least as much
                inner.setdefault((ahead, first), []).append(last)
                inner.setdefault((behind, last), []).append(first)
    crossings = []
    for (where, unit), ends in sorted(inner.items()):
        count = np.zeros(places, dtype=np.int64)
        for end in ends:
            c, position = branching.place[end]
            count[start[c] + position + 1] += 1
        c, position = branching.place[unit]
        crossings.append(Crossing(where, c, position, float(seconds[where][unit]), np.cumsum(count)))
    return links, tuple(crossings)


def ends(tables: ChainTables, stages: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Where each of these stages begins and ends on every chain: low and high, (stages, chains)."""
    low = np.zeros((len(stages), len(tables.lengths)), dtype=np.int64)
    high = np.zeros_like(low)
    for s, units in enumerate(stages):
        for c, position in sorted(tables.branches.place[u] for u in units):
            low[s, c] = position if high[s, c] == 0 else low[s, c]
            high[s, c] = position + 1
    return low, high


def stages_between(tables: ChainTables, frontiers: Sequence[Ints]) -> Stages:
    """The stages that frontiers, the last stage's first, cut the units into, in the order of `numbered`."""
    cuts = np.array(frontiers)
    return numbered(tables.branches, [-int((position < cuts[:, c]).sum()) for c, position in tables.branches.place])


def stage_bounds(tables: ChainTables, stages: Sequence[Sequence[int]]) -> list[float]:
    """Seconds of the step, at least, for the rank of each of these stages."""
    low, high = ends(tables, stages)
    return [float(seconds) for seconds in bounds(tables, low, high)]


def totals(tables: ChainTables, low: Ints, high: Ints) -> Floats:
    """F, B, W, state, saved and stashed between frontiers low and high, (segments, chains): (segments, 6)."""
    totals: Floats = (tables.sums[tables.start + high] - tables.sums[tables.start + low]).sum(axis=1)
    return totals


def largest_fused(tables: ChainTables, low: Ints, high: Ints) -> Floats:
    """Of each segment the largest `fused` of its units."""
    return _largest_of(tables.fused, tables, low, high)


def largest_working(tables: ChainTables, low: Ints, high: Ints) -> Floats:
    """Of each segment the largest `working` of its units."""
    return _largest_of(tables.working, tables, low, high)


def _largest_of(sizes: Floats, tables: ChainTables, low: Ints, high: Ints) -> Floats:
    length = high - low
    level = np.frexp(np.maximum(length, 1))[1] - 1  # the largest power of two that is not longer
    at_low, at_high = tables.start + low, tables.start + high - 2**level
    both = np.maximum(sizes[level, at_low], sizes[level, np.maximum(at_high, 0)])
    largest: Floats = np.where(length > 0, both, 0.0).max(axis=1)
    return largest


@dataclass(frozen=True)
class Measures:
    """Of segments: amounts (segments, 6), their `totals`; ways (4, segments), the paths to and from them."""

    amounts: Floats
    ways: Floats


def measures(tables: ChainTables, low: Ints, high: Ints) -> Measures:
    """The measures of the segments between frontiers low and high, (segments, chains)."""
    return Measures(totals(tables, low, high), ways(tables, low, high))


def bounds(tables: ChainTables, low: Ints, high: Ints) -> Floats:
    """The least time of a step in which one rank runs this segment as its only stage, for each of many segments.

    low, high: (segments, chains), frontiers; every segment must be the difference of two frontiers that can occur.
    Never larger for a part of a segment than for the segment: see csc.planning.partition_bound.
    """
    return bounds_of(tables, measures(tables, low, high))


def bounds_of(tables: ChainTables, measured: Measures) -> Floats:
    """The bounds of segments by their measures."""
    forward, backward, weight = np.maximum(measured.amounts[:, :3].T, 0.0)
    before_f, into_b, after_b, out_of_f = measured.ways
    before_b = np.maximum(before_f + forward, into_b)
    after_f = np.maximum(out_of_f, backward + np.maximum(after_b, weight))
    m, r = tables.work, tables.ramp
    return np.maximum.reduce(
        [
            r * (before_f + after_f) + m * forward,
            r * (before_f + after_b) + m * (forward + backward),
            r * before_f + m * (forward + backward + weight),
            r * (before_b + after_b) + m * backward,
            r * before_b + m * (backward + weight),
        ]
    )


def ways(tables: ChainTables, low: Ints, high: Ints) -> Floats:
    """(4, segments): seconds of the longest paths that enter F, enter B, leave B, leave F of each from outside."""
    at_low, at_high = tables.start + low, tables.start + high
    nonempty = high > low
    ramp = np.empty((4, len(low)))
    ramp[0::2] = np.where(nonempty, tables.links[0::2, at_low], 0.0).max(axis=2)
    ramp[1::2] = np.where(nonempty, tables.links[1::2, at_high], 0.0).max(axis=2)
    for crossing in tables.crossings:
        inside = (crossing.count[at_high] - crossing.count[at_low]).sum(axis=1) > 0
        c = crossing.chain
        inside &= (crossing.position < low[:, c]) | (crossing.position >= high[:, c])
        np.maximum(ramp[crossing.where], crossing.seconds, out=ramp[crossing.where], where=inside)
    return ramp


# --- What a stage holds on its rank, and the depth that it follows from ----------------------------------------------
#
# Terms: see csc.planning.problem. The *depth* of a stage is the number of stages on the longest path from it to the
# end, 1 for a stage that no other waits for; by it its rank holds microbatches in flight. A *target* is a unit that
# comes after units of other chains. A *label* is the depth of a stage that units ahead wait for: for each chain that of
# the stage with the front of what was taken of it, then for each target that of the stage that holds it.


Target = tuple[int, int, Ints]  # its chain and position; by place, how many of the units that it comes after are before


@dataclass(frozen=True)
class Room:
    """memory: bytes of a rank. in_flight[d]: microbatches that a stage of depth d holds, d from 0 (unused), at least 1
    and never falling. scale: of the largest microbatch.

    A stage holds its state, what its microbatches in flight saved, what its largest unit works with, and for a moment
    what B of one of them keeps for W: of all its units, or, with B and W fused, of one unit at a time, if that is less:
    state + scale * (in flight * saved + working + min(max(0, stashed - saved), largest `fused` of a unit)).
    """

    memory: float
    in_flight: tuple[float, ...]
    scale: float = 1.0


def need_of(tables: ChainTables, low: Ints, high: Ints, amounts: Floats, room: Room, depth: Ints) -> Floats:
    """Bytes that the rank of each segment holds at most; see `Room`. amounts: csc.planning.problem.totals of them."""
    _, _, _, state, saved, stashed = amounts.T
    count = np.array(room.in_flight)[depth]
    moment = np.minimum(np.maximum(stashed - saved, 0.0), largest_fused(tables, low, high))
    need: Floats = state + room.scale * (count * saved + moment + largest_working(tables, low, high))
    return need


def targets(tables: ChainTables) -> tuple[Target, ...]:
    """Units that come after units of other chains."""
    targets_found = []
    place = tables.branches.place
    for unit, before in enumerate(tables.branches.before):
        c, position = place[unit]
        sources = [place[other] for other in before if place[other][0] != c]
        if sources:
            count = np.zeros(len(tables.sums), dtype=np.int64)
            for d, there in sources:
                count[tables.start[d] + there + 1] += 1
            targets_found.append((c, position, np.cumsum(count)))
    return tuple(targets_found)


def depths_of(tables: ChainTables, among: tuple[Target, ...], low: Ints, high: Ints, labels: Ints) -> Ints:
    """Depth of each segment as the next stage, given the labels of the state behind it."""
    chains = len(tables.lengths)
    depth: Ints = np.where((high > low) & (high < tables.lengths), labels[:, :chains], 0).max(axis=1)
    for i, (c, position, count) in enumerate(among):
        source = (count[tables.start + high] - count[tables.start + low]).sum(axis=1) > 0
        depth = np.maximum(depth, np.where(source & (position >= high[:, c]), labels[:, chains + i], 0))
    return depth + 1


def labels_after(
    tables: ChainTables, among: tuple[Target, ...], low: Ints, high: Ints, labels: Ints, depth: Ints
) -> Ints:
    """The labels after these segments became stages of these depths; 0 where nothing left depends on them.

    For a target that is not in a stage yet: the label of the front of its chain, which its own cannot be below.
    """
    chains = len(tables.lengths)
    after = labels.copy()
    after[:, :chains] = np.where(high > low, depth[:, None], labels[:, :chains])
    for i, (c, position, count) in enumerate(among):
        now = (position >= low[:, c]) & (position < high[:, c])
        done = position >= high[:, c]
        pending = count[tables.start + low].sum(axis=1) > 0
        label = np.where(now, depth, np.where(done, labels[:, chains + i], after[:, c]))
        after[:, chains + i] = np.where(pending, label, 0)
    after[:, :chains] = np.where(low > 0, after[:, :chains], 0)
    saved = tables.sums[tables.start + low, 4].sum(axis=1) > 0
    return np.where(saved[:, None], after, 0)


# --- Which states of the search for stages can be forgotten: those for which another leaves no more of any chain -----
#
# Terms: see csc.planning.problem and csc.planning.segment_bounds.


def undominated(tables: ChainTables, low: Ints, labels: Ints) -> Ints:
    """Positions of the states that no other dominates, in frontier and labels; of equal ones the first."""
    if not labels.shape[1] or (labels == labels[:1]).all():
        return best_frontiers(tables, low)
    kept = np.concatenate([low, labels], axis=1)
    _, first = np.unique(kept, axis=0, return_index=True)
    order = first[np.argsort(kept[first].sum(axis=1), kind="stable")]
    survivors = np.zeros(0, dtype=np.int64)
    for begin in range(0, len(order), 256):
        chunk = order[begin : begin + 256]
        among = np.concatenate([survivors, chunk])
        below = np.ones((len(chunk), len(among)), dtype=bool)
        for column in range(kept.shape[1]):
            below &= kept[among, column][None, :] <= kept[chunk, column][:, None]
        survivors = np.concatenate([survivors, chunk[below.sum(axis=1) == 1]])
    return np.sort(survivors)


def best_frontiers(tables: ChainTables, low: Ints) -> Ints:
    """The same without labels: the least position on the last chain by a table over the positions on the others."""
    if len(low) < 2:
        return np.arange(len(low))
    shape = tuple(int(n) + 1 for n in tables.lengths[:-1])
    key = np.ravel_multi_index(tuple(low[:, :-1].T), shape) if shape else np.zeros(len(low), dtype=np.int64)
    order = np.lexsort((np.arange(len(low)), low[:, -1], key))
    first = order[np.concatenate([[True], key[order][1:] != key[order][:-1]])]
    never = int(tables.lengths[-1]) + 1
    table = np.full(shape, never, dtype=np.int64)
    table.reshape(-1)[key[first]] = low[first, -1]
    for axis in range(len(shape)):
        table = np.minimum.accumulate(table, axis=axis)
    least = np.full(shape, never, dtype=np.int64)
    for axis in range(len(shape)):
        ahead = [slice(None)] * len(shape)
        behind = [slice(None)] * len(shape)
        ahead[axis], behind[axis] = slice(1, None), slice(None, -1)
        least[tuple(ahead)] = np.minimum(least[tuple(ahead)], table[tuple(behind)])
    return np.sort(first[low[first, -1] < least.reshape(-1)[key[first]]])


# --- One step of the search for stages: the longest segments that can be the next stage, for many states at once -----
#
# Terms: see csc.planning.problem and csc.planning.segment_bounds. A *state* is a frontier with its labels. A *cap* is
# the largest bound that a stage may have. A *charge* is what a segment takes of something that has a limit, where that
# is a plain sum over its units: work, work and the way that follows at least, bytes.


Bools = npt.NDArray[np.bool_]

EXACT = 1e-9  # relative difference below which two caps are the same
ROWS = 200_000  # segments looked at in one go; only a matter of memory
PROBES = 512  # segments that take about as long to look at as one, so many ends are tried together


@dataclass(frozen=True)
class Extension:
    """One extension of the search: what its segments have to respect. parts: see csc.planning.frontiers.parts_of."""

    tables: ChainTables
    cap: float
    room: Room | None = None
    parts: Ints | None = None
    targets: tuple[Target, ...] = ()
    # What later stages could be at best, where they may stand on other ranks; None: the same as this one.
    after: Extension | None = None
    # Whatever else segments have to be, by their ends and measures; never lost by taking units away.
    check: Callable[[Ints, Ints, Measures], Bools] | None = None

    @cached_property
    def charges(self) -> list[tuple[Floats, float]]:
        """Running sums by place, and the largest of them, of every charge that has a limit."""
        sums, work = self.tables.sums, self.tables.work
        charges = [sums[:, :3].sum(axis=1) * work, sums[:, 0] * work] if math.isfinite(self.cap) else []
        if self.room and math.isfinite(self.room.memory):
            charges.append(sums[:, 3] + self.room.in_flight[1] * self.room.scale * sums[:, 4])
        return [(charge, float(charge.max())) for charge in charges]

    def limits(self, state: Ints) -> list[Floats]:
        """The limit of every charge for a segment of what each state leaves."""
        limits = []
        if math.isfinite(self.cap):
            rest = self.tables.least_rest[self.tables.start + state].min(axis=1)
            tail = np.where(np.isfinite(rest), rest, 0.0) * self.tables.ramp
            limits = [np.full(len(state), self.cap), self.cap - tail]
        if self.room and math.isfinite(self.room.memory):
            limits.append(np.full(len(state), self.room.memory))
        return limits


def extend(step: Extension, state: Ints, labels: Ints, left: int, empty: bool) -> tuple[Ints, Ints, Ints]:
    """The states after one more stage that nothing dominates, their parents and labels; `left` stages come after."""
    limits = step.limits(state)
    reaches = []
    for first, last in _batches(step, state, limits):
        low, rows, limit = _choices(step, state, np.arange(first, last), [bound[first:last] for bound in limits])
        low, largest, rows = _ends(step, state, low, rows, limit, 0 if empty else left)
        reaches.append(_reach(step, state, labels, low, largest, rows, left))
    low, rows, after = reaches[0] if len(reaches) == 1 else (np.concatenate(column) for column in zip(*reaches))
    kept = undominated(step.tables, low, after)
    return low[kept], rows[kept], after[kept]


def _batches(step: Extension, state: Ints, limits: list[Floats]) -> list[tuple[int, int]]:
    """Runs of states whose choices together are at most ROWS, or single states."""
    options = np.prod(state[:, :-1] + 1.0, axis=1)
    if options.sum() <= ROWS:
        return [(0, len(state))]
    options = np.ones(len(state))
    for c in range(len(step.tables.lengths) - 1):
        options *= state[:, c] - _lowest(step, limits, c, state[:, c]) + 1
    edges, total = [0], 0.0
    for i, count in enumerate(options):
        if total + count > ROWS and i > edges[-1]:
            edges.append(i)
            total = 0.0
        total += count
    return list(zip(edges, [*edges[1:], len(options)]))


def _lowest(step: Extension, limits: list[Floats], c: int, high: Ints) -> Ints:
    """For each row the lowest position on chain c down to which a segment from `high` keeps within the limits."""
    lowest = np.zeros(len(high), dtype=np.int64)
    first = step.tables.start[c]
    for (charge, most), limit in zip(step.charges, limits):
        sums = charge[first : first + step.tables.lengths[c] + 1]
        slack = 1e-9 * max(most, 1e-300)
        np.maximum(lowest, np.searchsorted(sums, sums[high] - limit - slack, side="left"), out=lowest)
    return np.minimum(lowest, high)


def _choices(step: Extension, state: Ints, rows: Ints, limits: list[Floats]) -> tuple[Ints, Ints, list[Floats]]:
    """All ends of the next segment on every chain but the last: (segments, chains), the row of the state of each, and
    what the limits leave for its end on the last chain.
    """
    tables = step.tables
    low = state[rows]
    for c in range(len(tables.lengths) - 1):
        lowest = _lowest(step, limits, c, low[:, c])
        count = low[:, c] - lowest + 1
        places = np.repeat(np.arange(len(rows)), count)
        end = lowest[places] + np.arange(len(places)) - np.repeat(np.cumsum(count) - count, count)
        high = tables.start[c] + low[places, c]
        limits = [
            limit[places] - (charge[high] - charge[tables.start[c] + end])
            for limit, (charge, _) in zip(limits, step.charges)
        ]
        low, rows = low[places], rows[places]
        low[:, c] = end
    return low, rows, limits


def _ends(
    step: Extension, state: Ints, low: Ints, rows: Ints, limits: list[Floats], left: int
) -> tuple[Ints, Ints, Ints]:
    """Between which positions of the last chain the segment can end so that a frontier comes out: least in `low`,
    largest in the second result. `left` units at least stay for the stages ahead.
    """
    tables = step.tables
    last = len(tables.lengths) - 1
    need = tables.need[tables.start + low]  # (segments, chain, what it needs of each chain)
    fine = np.ones(len(low), dtype=bool)
    for c in range(last):
        for d in range(last):
            if c != d:
                fine &= need[:, c, d] <= low[:, d]
    largest = low[:, last].copy()
    needs = tables.need[tables.start[last] : tables.start[last] + tables.lengths[last] + 1]
    for d in range(last):
        np.minimum(largest, np.searchsorted(needs[:, d], low[:, d], side="right") - 1, out=largest)
    moved = (low[:, :last] < state[rows][:, :last]).any(axis=1)
    largest = np.where(moved, largest, np.minimum(largest, low[:, last] - 1))
    least = np.maximum(need[:, :last, last].max(axis=1, initial=0), left - low[:, :last].sum(axis=1))
    least = np.maximum(least, _lowest(step, limits, last, low[:, last]))
    fine &= (least <= largest) & (largest >= 0)
    low[:, last] = least
    return low[fine], largest[fine], rows[fine]


def _reach(
    step: Extension, state: Ints, labels: Ints, low: Ints, largest: Ints, rows: Ints, left: int
) -> tuple[Ints, Ints, Ints]:
    """The longest segments that fit, for every depth that they may have: their frontiers, rows and labels."""
    last = len(step.tables.lengths) - 1
    at_most = None
    if step.room:
        every = np.sort(labels[rows], axis=1).T + 1
        depths = [limit for i, limit in enumerate(every) if i == 0 or (limit > every[i - 1]).any()]
        at_most = np.concatenate(depths)
        low, largest, rows = (np.concatenate([column] * len(depths)) for column in (low, largest, rows))

    def fits(which: Ints, end: Ints) -> Bools:
        ends, parents = low[which], rows[which]
        ends[:, last] = end
        return fitting(step, ends, state[parents], labels[parents], None if at_most is None else at_most[which])

    end = _least_that_fits(fits, low[:, last], largest)
    low[:, last] = end
    ends_possible = np.flatnonzero(end <= largest)
    ends_possible = ends_possible[_enough(step.after or step, low[ends_possible], left)]
    low, parents = low[ends_possible], rows[ends_possible]
    if step.room is None:
        return low, parents, labels[parents]
    high, before = state[parents], labels[parents]
    depth = depths_of(step.tables, step.targets, low, high, before)
    return low, parents, labels_after(step.tables, step.targets, low, high, before, depth)


def _least_that_fits(fits: Callable[[Ints, Ints], Bools], least: Ints, largest: Ints) -> Ints:
    """For each row the first end from `least` to `largest` that fits, where all behind it do; else largest + 1.

    fits(rows, ends): whether these ends of these rows do. Bisection with several ends at a time.
    """
    bottom, top = least.copy(), largest + 1
    while len(rows := np.flatnonzero(bottom < top)):
        width = top[rows] - bottom[rows]
        count = np.minimum(width, max(1, PROBES // len(rows)))
        first = np.cumsum(count) - count
        number = np.arange(int(count.sum())) - np.repeat(first, count)
        which, parts = np.repeat(rows, count), np.repeat(count, count)
        end = bottom[which] + (2 * number + 1) * np.repeat(width, count) // (2 * parts)
        good = fits(which, end)
        bottom[rows] = np.maximum.reduceat(np.where(good, bottom[which], end + 1), first)
        top[rows] = np.minimum.reduceat(np.where(good, end, top[which]), first)
    return top


def _enough(step: Extension, low: Ints, left: int) -> Bools:
    """False where `left` stages cannot hold what is left, whatever they are."""
    good = np.ones(len(low), dtype=bool)
    for (charge, most), limit in zip(step.charges, step.limits(low)):
        amount = charge[step.tables.start + low].sum(axis=1)
        good &= amount <= left * limit * (1 + EXACT) + 1e-12 * most
    return good


def fitting(step: Extension, low: Ints, high: Ints, labels: Ints, at_most: Ints | None = None) -> Bools:
    """Which segments keep under the cap, the memory, the parts and a depth `at_most`: with one, all parts of it do."""
    tables = step.tables
    measured = measures(tables, low, high)
    good: Bools = bounds_of(tables, measured) <= step.cap * (1 + 1e-12)
    if step.check is not None:
        good &= step.check(low, high, measured)
    if step.parts is not None:
        counts = (step.parts[tables.start + high] - step.parts[tables.start + low]).sum(axis=1)
        good &= (counts > 0).sum(axis=1) <= 1
    if step.room is not None:
        depth = depths_of(tables, step.targets, low, high, labels)
        need = need_of(tables, low, high, measured.amounts, step.room, depth)
        good &= need <= step.room.memory * (1 + 1e-12)
        if at_most is not None:
            good &= depth <= at_most
    return good
