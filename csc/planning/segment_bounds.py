"""What any segment of a problem's units costs as a stage.

Terms: see csc.planning.branches for chains and ramps.
  frontier   for each chain how many of its units, from the first one on, are left to be put into stages
  segment      the units between two frontiers: on chain c the positions low[c] up to high[c]

    segments(problem, branches)  -> ChainTables    tables by which the bounds of many segments are found at once
    bounds(tables, low, high)    -> seconds of each segment: see csc.planning.partition_bound for the proof
    measures(tables, low, high)  -> Measures       what they follow from: bounds_of(tables, measures)
    stage_bounds(tables, stages) -> seconds of each stage
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from csc.planning.branches import Branches, Floats, Ints, Ramps, Stages, numbered, ramps
from csc.planning.problem import Problem


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


def _largest(found: Branches, sizes: Sequence[float], start: Ints, places: int) -> Floats:
    """(levels, places): the largest size among 2**level units of a chain, for queries of any range in one step."""
    flat = np.zeros(places)
    for c, chain in enumerate(found.chains):
        flat[start[c] : start[c] + len(chain)] = [sizes[u] for u in chain]
    rows = [flat]
    while 2 ** len(rows) < places:
        half = 2 ** (len(rows) - 1)
        ahead = np.concatenate([rows[-1][half:], np.zeros(half)])
        rows.append(np.maximum(rows[-1], ahead))
    return np.array(rows)


def _edges(found: Branches, paths: Ramps, start: Ints, places: int) -> tuple[Floats, tuple[Crossing, ...]]:
    """The ramps that come over the chains' own links, and over all other edges."""
    links = np.zeros((4, places))
    inner: dict[tuple[int, int], list[int]] = {}
    seconds = (paths.to_forward, paths.to_backward, paths.from_backward, paths.from_forward)
    for where, edges in ((0, paths.forward_edges), (2, paths.backward_edges)):
        linked = {(u, v) for u, v in edges if found.place[u][0] == found.place[v][0]}
        whole = [0] * len(found.place)  # how many links of the chain in a row lead to this unit
        for chain in found.chains:
            for u, v in itertools.pairwise(chain):
                there = (u, v) in linked if where == 0 else (v, u) in linked
                whole[v] = whole[u] + 1 if there else 0
        for u, v in edges:
            # F goes up the chain from u to v, B comes down from u to v.
            first, last = (u, v) if where == 0 else (v, u)
            (c, i), (d, j) = found.place[first], found.place[last]
            ahead, behind = (0, 3) if where == 0 else (2, 1)
            if c == d and j == i + 1:
                links[ahead, start[c] + j] = seconds[ahead][first]
                links[behind, start[c] + j] = seconds[behind][last]
            elif c != d or whole[last] < j - i:  # else the links between them say at least as much
                inner.setdefault((ahead, first), []).append(last)
                inner.setdefault((behind, last), []).append(first)
    crossings = []
    for (where, unit), ends in sorted(inner.items()):
        count = np.zeros(places, dtype=np.int64)
        for end in ends:
            c, position = found.place[end]
            count[start[c] + position + 1] += 1
        c, position = found.place[unit]
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
    found: Floats = np.where(length > 0, both, 0.0).max(axis=1)
    return found


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
    there = high > low
    ramp = np.empty((4, len(low)))
    ramp[0::2] = np.where(there, tables.links[0::2, at_low], 0.0).max(axis=2)
    ramp[1::2] = np.where(there, tables.links[1::2, at_high], 0.0).max(axis=2)
    for crossing in tables.crossings:
        inside = (crossing.count[at_high] - crossing.count[at_low]).sum(axis=1) > 0
        c = crossing.chain
        inside &= (crossing.position < low[:, c]) | (crossing.position >= high[:, c])
        np.maximum(ramp[crossing.where], crossing.seconds, out=ramp[crossing.where], where=inside)
    return ramp
