"""Partition: cut regions into stages."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from csc.errors import InputError
from csc.planning.frontiers import feasible, least, least_cap, lots, narrow, on_ranks, parts_of
from csc.planning.partition_bound import check_ranks, floor_of, spread_over_kinds, weights
from csc.planning.problem import Branches, Problem, Stages, Value, branches, lumped, numbered
from csc.planning.segment_bounds import (
    ChainTables,
    Room,
    bounds,
    largest_fused,
    largest_working,
    segments,
    stage_bounds,
    stages_between,
    totals,
    ways,
)
from csc.simulation.page import bytes_text

# --- Small changes of a partition: one unit goes to a neighbouring stage ---------------------------------------------
#
# Terms: see csc.planning.problem. A *neighbour* of a unit is a stage that holds a unit right before or after it.


ROUNDS = 20  # over all units; what is left to gain after a few is little


def homes_of(stages: Sequence[Sequence[int]]) -> list[int]:
    """The stage of each unit."""
    home = [0] * sum(len(units) for units in stages)
    for s, units in enumerate(stages):
        for unit in units:
            home[unit] = s
    return home


def neighbours(found: Branches, stages: Sequence[Sequence[int]], home: Sequence[int], unit: int) -> list[int]:
    """Where a unit can go from home[unit]. One with its stage's units on both sides stays, as does one alone."""
    stage = home[unit]
    if len(stages[stage]) == 1:
        return []
    ahead = {home[a] for a in found.before[unit]}
    behind = {home[a] for a in found.after[unit]}
    targets = (ahead if stage not in ahead else set()) | (behind if stage not in behind else set())
    return sorted(targets - {stage})


def moves(found: Branches, stages: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    """Every (unit, its stage, a neighbour), by unit."""
    home = homes_of(stages)
    for unit, stage in enumerate(home):
        yield from ((unit, stage, target) for target in neighbours(found, stages, home, unit))


def moved(found: Branches, stages: Sequence[Sequence[int]], unit: int, to: int) -> Stages | None:
    """The stages after the move, numbered anew."""
    home = homes_of(stages)
    home[unit] = to
    try:
        return numbered(found, home)
    except InputError:
        return None


def depths(found: Branches, stages: Sequence[Sequence[int]]) -> list[int]:
    """The number of stages on the longest path from each stage to the end, itself included. Stages are numbered."""
    home = homes_of(stages)
    depth = [1] * len(stages)
    for s in range(len(stages) - 1, -1, -1):
        later = {home[after] for unit in stages[s] for after in found.after[unit]} - {s}
        depth[s] = 1 + max((depth[t] for t in later), default=0)
    return depth


def held(problem: Problem, found: Branches, stages: Sequence[Sequence[int]], room: Room) -> list[float]:
    """Bytes that the rank of each stage needs; see csc.planning.segment_bounds.Room."""
    needs = []
    for members, depth in zip(stages, depths(found, stages)):
        units = [problem.units[u] for u in members]
        saved = sum(unit.saved for unit in units if unit.has_b)
        stashed = sum(unit.stashed for unit in units if unit.has_w)
        working = max(unit.working for unit in units)
        moment = min(max(unit.fused for unit in units), max(0.0, stashed - saved))
        needs.append(
            sum(unit.state for unit in units) + room.scale * (room.in_flight[depth] * saved + moment + working)
        )
    return needs


def settle(
    problem: Problem, tables: ChainTables, stages: Stages, cap: float, room: Room | None, part: Sequence[int]
) -> Stages:
    """Move single units while no bound goes above `cap`, the memory is kept, no stage mixes parts, and it gets better.

    Better: fewer bytes of messages; else the two stages' bounds are smaller, the larger one first; else their state
    and saved bytes are more even.
    """
    branching = tables.branches
    touching: list[list[Value]] = [[] for _ in problem.units]
    for value in problem.values:
        for unit in {value.maker, *value.readers}:
            touching[unit].append(value)
    total = 1e-9 * sum(value.size + value.gradient_size for value in problem.values)
    limit = cap * (1 + 1e-12)
    for _ in range(ROUNDS):
        better = False
        for unit, source, target in list(moves(branching, stages)):
            if len(stages[source]) == 1 or unit not in stages[source] or part[unit] != part[stages[target][0]]:
                continue
            home = homes_of(stages)
            before = sum(message_bytes(value, home) for value in touching[unit])
            home[unit] = target
            change = sum(message_bytes(value, home) for value in touching[unit]) - before
            if change > total:
                continue
            pair = [stages[source], stages[target]]
            other = [[u for u in pair[0] if u != unit], sorted([*pair[1], unit])]
            old, new = stage_bounds(tables, pair), stage_bounds(tables, other)
            if max(new) > limit:
                continue
            if change >= -total and not _smaller(new, old, cap):
                continue
            after = moved(branching, stages, unit, target)
            if after is None or (room and max(held(problem, branching, after, room)) > room.memory * (1 + 1e-12)):
                continue
            if [set(units) for units in after] != [
                set(other[0] if s == source else other[1] if s == target else units) for s, units in enumerate(stages)
            ]:
                better, stages = True, after
                break  # the stages have new numbers
            better, stages = True, after
        if not better:
            break
    return stages


def _smaller(new: Sequence[float], old: Sequence[float], cap: float) -> bool:
    for a, b in zip(sorted(new, reverse=True), sorted(old, reverse=True)):
        if abs(a - b) > 1e-9 * cap:
            return a < b
    return False


def message_bytes(value: Value, home: Sequence[int]) -> float:
    """Bytes that one value sends between stages, forward and back, when unit u is in stage home[u]."""
    maker = home[value.maker]
    size = value.size * len({home[reader] for reader in value.readers} - {maker})
    visits = [home[reader] for reader, has_gradient in zip(value.readers, value.gradient) if has_gradient]
    hops = sum(a != b for a, b in zip([maker, *visits], visits))
    return size + value.gradient_size * hops


# --- The best cuts of the units in their order, by what memory leaves possible in each stage -------------------------
#
# Terms: see csc.planning.problem. *Early* is the work that a rank can do before its first B: F's whose saved bytes fit;
# *late* is what it can do after its last B: W's whose stashed bytes fit. The larger memory is, the more of the ways
# there and back is filled with them.
#
# For a stage with summed times F, B, W, and with the longest paths of csc.planning.partition_bound: f up to its F, b
# up to its B, y after its B; m and r as there:
#
#     need(S) = max( r f + m (F + B + W),  r b + m (F + B + W) - early,
#                    r b + m (F + B + W) - early - late + r y,  r f + m (F + B + W) - late + r y )
#
# The bounds of csc.planning.partition_bound take all of early and late for granted. With little memory the last
# stages, which have no early work, should have less to do than those say.


Floats = npt.NDArray[np.float64]
SLACK = 1 + 1e-9


def contiguous(problem: Problem, home: Sequence[int] | None = None) -> Stages | None:
    """Of all cuts of the units in their order the one whose largest `need` is least. None if nothing fits. home: the
    rank of each stage, in order, where ranks differ.

    Time and memory are quadratic in the units.
    """
    check_ranks(problem)
    assert problem.memory is not None
    branching = branches(problem)
    count = len(problem.units)
    alike = [problem.alike(kind) for kind in range(max(1, len(problem.kinds)))]
    every = [_needs(run, segments(run, branching)) for run in alike]
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    starts = []
    for stage in range(problem.ranks):
        costs = every[problem.kind_of[stage if home is None else home[stage]]]
        through = np.maximum(best[:, None], costs)  # [first unit, end]
        starts.append(through.argmin(axis=0))
        best = through.min(axis=0)
    if not np.isfinite(best[count]):
        return None
    home = [0] * count
    end = count
    for stage in reversed(range(problem.ranks)):
        first = int(starts[stage][end])
        home[first:end] = [stage] * (end - first)
        end = first
    return numbered(branching, home)


def _needs(problem: Problem, tables: ChainTables) -> Floats:
    """(units + 1, units + 1): `need` of the stage from one unit up to another; infinite if it does not fit."""
    count = len(problem.units)
    reached = np.zeros((count + 1, len(tables.lengths)), dtype=np.int64)  # by unit, the place on every chain
    for u, (c, _) in enumerate(tables.branches.place):
        reached[u + 1] = reached[u]
        reached[u + 1, c] += 1
    first, end = np.triu_indices(count + 1, 1)
    low, high = reached[first], reached[end]
    forward, backward, weight, state, saved, stashed = np.maximum(totals(tables, low, high).T, 0.0)
    before_f, into_b, after_b, out_of_f = ways(tables, low, high)
    m, r = tables.work, tables.ramp
    largest = max(problem.scale or (1.0,))
    assert problem.memory is not None
    space = problem.memory * SLACK - state - largest * largest_working(tables, low, high)
    saved, stashed = saved * largest, stashed * largest
    moment = np.minimum(np.maximum(stashed - saved, 0.0), largest * largest_fused(tables, low, high))
    turns = _turning(problem, first, end)
    microbatches = float(problem.microbatches)
    before_b = r * np.maximum(before_f + forward, into_b)
    in_flight = _fitting(space - moment, saved, microbatches)
    early = np.minimum(in_flight / microbatches * m * forward, before_b - r * before_f)
    late = _fitting(space, stashed, microbatches) / microbatches * m * weight
    work = m * (forward + backward + weight)
    there_and_back = r * before_f + work
    back = r * after_b
    needed = np.maximum.reduce(
        [there_and_back, before_b + work - early, before_b + work - early - late + back, there_and_back - late + back]
    )
    need = np.maximum(bounds(tables, low, high), np.where(turns, needed, r * (before_f + out_of_f) + m * forward))
    need[turns & (in_flight < 1)] = np.inf
    need[space < 0] = np.inf
    result = np.full((count + 1, count + 1), np.inf)
    result[first, end] = need
    return result


def _turning(problem: Problem, first: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which of these stages take part in the backward pass."""
    running = np.concatenate([[0], np.cumsum([unit.has_b for unit in problem.units])])
    turns: npt.NDArray[np.bool_] = running[end] > running[first]
    return turns


def _fitting(space: Floats, size: Floats, most: float) -> Floats:
    """How many of so many bytes fit, at most `most`."""
    space = np.maximum(space, 0.0)
    count: Floats = np.floor(np.divide(space, size, out=np.full_like(space, most), where=size * most > space))
    return np.minimum(count, most)


# --- Partitions and the order of ranks where ranks are of several kinds, one stage on each ---------------------------
#
# Terms: see csc.planning.frontiers. An *order* is the rank of each stage. Which rank of a kind has which of its
# stages matters to links alone.


Order = tuple[int, ...]

SHARES_OF_KINDS = (
    0.25,
    0.5,
    1.0,
)  # of the ways to a stage and back; the first is the best one where there is time for one
MANY = 8_000  # ranks times units beyond which that is so, and orders are not searched for
FREE = 0.5  # the share for orders
FRONTIERS = 300  # of the short chains, and 3,000 with the cells; where there are more, units are taken together
CELLS = 3_000
CLOSE = 2e-3


def orders(problem: Problem) -> list[Order]:
    """At most four, without those that are the same."""
    listed = range(problem.ranks)
    slow = weights(problem)  # a second of a fast rank counts more
    by_speed = sorted(listed, key=lambda rank: (-slow[problem.kind_of[rank]], rank))
    orders_found: list[Order] = [*_searched(problem), tuple(listed), tuple(by_speed)]
    orders_found.append(tuple(sorted(listed, key=lambda rank: (slow[problem.kind_of[rank]], rank))))
    return list(dict.fromkeys(orders_found))


def _searched(problem: Problem) -> list[Order]:
    """The order that the search for stages takes if it may choose; none where that would take too long."""
    cells = 1
    for kind in problem.kinds:
        cells *= len(kind.ranks) + 1
    if cells > CELLS or problem.ranks > len(problem.units) or _large(problem):
        return []
    lumps = lumped(problem, max(1, min(FRONTIERS, CELLS // cells)))
    branching = branches(lumps.problem)
    even_share = [1.0] * (problem.ranks + 1)
    best = least_cap(lots(lumps.problem, branching, even_share, FREE), spread_over_kinds(problem), within=CLOSE)
    return [] if best is None else [on_ranks(lumps.problem, branching, segments(lumps.problem, branching), best[1])[1]]


def partitions(
    problem: Problem, home: Sequence[int], limits: Sequence[Callable[[int], float] | None]
) -> list[Stages]:  # fmt: skip
    """Stages whose largest bound is least, the ways counted in several shares; limits: as of csc.planning.ways. Then
    cuts of the units in their order by what memory leaves possible. Empty if nothing fits.
    """
    lumps = lumped(problem, FRONTIERS)
    branching = branches(lumps.problem)
    tables = segments(lumps.problem, branching)
    order = [problem.kind_of[rank] for rank in reversed(home)]
    listed: list[Stages] = []
    floor = spread_over_kinds(problem)
    for limit in limits:
        depth_limit = limit or (lambda depth: float(min(problem.microbatches, depth)))
        in_flight = (
            None if problem.memory is None else [float(depth_limit(depth)) for depth in range(problem.ranks + 1)]
        )
        for share in SHARES_OF_KINDS[: 1 if _large(problem) else None]:
            best = least_cap(lots(lumps.problem, branching, in_flight, share), floor, order, within=CLOSE)
            if best is not None:
                listed.append(lumps.stages(on_ranks(lumps.problem, branching, tables, best[1])[0]))
        if listed or problem.memory is None:
            break
    roomy = problem if problem.memory is not None else replace(problem, memory=float("inf"))
    cuts = contiguous(roomy, home)
    listed += [] if cuts is None else [cuts]
    return list(dict.fromkeys(listed))


def _large(problem: Problem) -> bool:
    return problem.ranks * len(problem.units) > MANY


# --- Partition: cut regions into stages ------------------------------------------------------------------------------
#
# Terms: a *cost* is a region's time in any whole unit (say, nanoseconds); a *cut* is the first region of a
# stage. The *makespan* of a stage is the sum of its regions' costs; pipelines run at the pace of the largest.
# A *unit* is a region in numbers, the *depth* of a stage is the number of stages from it to the end (1: the last), the
# *trunk* is the component that the last unit belongs to.


Layout = Literal["any", "apart", "colocated"]
InFlight = Callable[[int], float]

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the ways to a stage and back, for candidates
MIDDLE = 0.5  # the share for the other layouts
# of the short chains, for candidates; where there are more, units of encoders are taken together
# how near a candidate's largest bound is to the least of its kind


def balance(costs: Sequence[int], stages: int) -> list[int]:
    """First region of each of `stages` contiguous, non-empty stages whose largest sum of costs is least.

    Exact: searches the least cap for which packing greedily needs at most `stages` stages, in O(n log(sum of
    costs)). Among the partitions with that cap it packs the later stages full: early stages hold more
    microbatches in flight, so what room there is goes to them. The same costs always give the same cuts.
    InputError if there are fewer regions than stages or a cost is negative.
    """
    if stages < 1:
        raise InputError(f"there cannot be {stages} stages", "partition", "Ask for at least 1")
    if stages > len(costs):
        raise InputError(
            f"{len(costs)} regions cannot fill {stages} stages",
            "partition",
            f"Ask for at most {len(costs)} stages",
        )
    for region, cost in enumerate(costs):
        if cost < 0 or cost != int(cost):
            raise InputError(
                f"region {region} costs {cost}",
                "partition",
                "Costs are whole numbers of at least 0, in any unit",
            )
    low = max(max(costs), -(-sum(costs) // stages))
    high = sum(costs)
    while low < high:
        cap = (low + high) // 2
        if _stages_needed(costs, cap, stages) <= stages:
            high = cap
        else:
            low = cap + 1
    return _pack_from_the_end(costs, low, stages)


def _stages_needed(costs: Sequence[int], cap: int, enough: int) -> int:
    """Stages that greedy packing fills under `cap`; stops counting above `enough`."""
    count, load = 1, 0
    for cost in costs:
        load += cost
        if load > cap:
            count, load = count + 1, cost
            if count > enough:
                break
    return count


def _pack_from_the_end(costs: Sequence[int], cap: int, stages: int) -> list[int]:
    """Fill stages from the last to the first, leaving at least one region for each stage before."""
    firsts = [0] * stages
    end = len(costs)
    for stage in range(stages - 1, 0, -1):
        first, load = end - 1, costs[end - 1]
        while first - 1 >= stage and load + costs[first - 1] <= cap:
            first -= 1
            load += costs[first]
        firsts[stage] = end = first
    return firsts


def at_cuts(names: Sequence[str], cuts: Sequence[str]) -> list[int]:
    """First region of each stage when a stage begins at region 0 and at each region named in `cuts`.

    `names` are all regions in order. InputError for an unknown name (with close matches), a name twice, or
    region 0.
    """
    index = {name: i for i, name in enumerate(names)}
    firsts = [0]
    for cut in cuts:
        if cut not in index:
            close = difflib.get_close_matches(cut, names, 3, 0.5) or list(names[:3])
            raise InputError(f"there is no region {cut!r} to cut before", "cuts", f"Close names: {', '.join(close)}")
        if index[cut] == 0:
            raise InputError(f"{cut!r} is the first region, stage 0 begins there anyway", "cuts", "Leave it out")
        if index[cut] in firsts:
            raise InputError(f"{cut!r} is named twice", "cuts", "Name it once")
        firsts.append(index[cut])
    return sorted(firsts)


def partition(problem: Problem, in_flight: InFlight | None = None, layout: Layout = "any") -> Stages:
    """The units of each of `problem.ranks` stages, numbered so that values go to higher stages.

    Exact: of all acyclic assignments of units to that many non-empty stages one with the least largest bound
    (csc.planning.partition_bound.stage_bound, and one microbatch's round trip). With problem.memory every stage keeps
    state + n * saved, n = in_flight(depth), and what B keeps for W of one microbatch at a time within it (see
    csc.planning.segment_bounds.Room); in_flight must not fall, the default min(microbatches, depth) is what 1F1B
    holds. Of
    partitions with equal bounds those with fewer bytes of messages, then smaller bounds of the other stages are
    preferred, as far as moving single units leads to them. The same problem always gives the same stages.

    layout: "apart" admits only stages whose units are all of the trunk or all of one encoder with its projector,
    "colocated" only such whose units are all of the trunk or none.

    InputError for more ranks than units, and for a memory limit that nothing fits: it says the least that would.
    """
    check_ranks(problem)
    branching = branches(problem)
    tables = segments(problem, branching)
    part = parts(problem, branching, layout)
    counts = None if layout == "any" else parts_of(tables, part)
    room = _room(problem, in_flight)
    best = least(tables, problem.ranks, floor_of(problem, tables), room, counts)
    if best is None:
        raise _nothing_fits(problem, tables, layout, in_flight)
    return settle(problem, tables, stages_between(tables, best[1]), best[0], room, part)


def candidates(
    problem: Problem, in_flight: InFlight | None = None, shares: Sequence[float] = SHARES, layouts: bool = True
) -> list[Stages]:
    """Good partitions that differ, some such that weigh the ways to a stage and back less than its work.

    shares: what the ways are multiplied by, rising; at 1 the partition is that of `partition` up to CLOSE, at 0 it has
    the most even work. layouts: also one that is "apart" and one that is "colocated", if those differ. Which is best
    depends on the order of work and the messages: simulate them. All keep problem.memory. Deterministic. InputError as
    `partition`.
    """
    check_ranks(problem)
    lumps = lumped(problem, FRONTIERS)
    problem = lumps.problem
    branching = branches(problem)
    tables = segments(problem, branching)
    room = _room(problem, in_flight)
    results: list[Stages] = []
    floor = sum(unit.work for unit in problem.units) * tables.work / problem.ranks
    low = floor
    for share in shares:  # the least cap rises with the share
        best = least(replace(tables, ramp=tables.ramp * share), problem.ranks, low, room, within=CLOSE)
        if best is None:
            raise _nothing_fits(problem, tables, "any", in_flight)
        low = best[0] / (1 + 2 * CLOSE)
        results.append(stages_between(tables, best[1]))
    seen: list[list[int]] = []
    for layout in ("apart", "colocated") if layouts else ():
        part = parts(problem, branching, layout)
        if part in seen:
            continue
        seen.append(part)
        weighed = replace(tables, ramp=tables.ramp * MIDDLE)
        best = least(weighed, problem.ranks, floor, room, parts_of(tables, part), within=CLOSE)
        if best is not None:
            results.append(stages_between(tables, best[1]))
    return [lumps.stages(stages) for stages in dict.fromkeys(results)]


def parts(problem: Problem, found: Branches, layout: Layout) -> list[int]:
    """The part of each unit: stages will not mix parts. The trunk is part 0."""
    trunk = problem.units[-1].component
    outside = [unit.component != trunk and layout != "any" for unit in problem.units]
    part = [int(share) for share in outside]
    if layout == "colocated":
        return part
    number = 0
    for first in range(len(part)):
        if not outside[first]:
            continue
        number += 1
        waiting = [first]
        while waiting:  # everything outside the trunk that is connected gets one number
            u = waiting.pop()
            if outside[u]:
                outside[u], part[u] = False, number
                waiting += [v for v in (*found.before[u], *found.after[u]) if outside[v]]
    return part


def _room(problem: Problem, in_flight: InFlight | None, memory: float | None = None) -> Room | None:
    limit = problem.memory if memory is None else memory
    if limit is None:
        return None
    depth_limit = in_flight or (lambda depth: min(problem.microbatches, depth))
    return Room(
        limit, tuple(float(depth_limit(depth)) for depth in range(problem.ranks + 1)), max(problem.scale or (1.0,))
    )


def _no_such_layout(problem: Problem) -> InputError:
    return InputError(
        f"no partition into {problem.ranks} stages keeps the components apart", "partition", "Let stages share them"
    )


def _nothing_fits(problem: Problem, tables: ChainTables, layout: Layout, in_flight: InFlight | None) -> InputError:
    """The sentence for a memory limit that is too small, with the least that is not."""
    branching = tables.branches
    counts = None if layout == "any" else parts_of(tables, parts(problem, branching, layout))
    room = _room(problem, in_flight)
    if room is None:
        return _no_such_layout(problem)
    units = problem.units
    floor = max(u.state for u in units)
    most = sum(u.state + room.scale * (room.in_flight[-1] * u.saved + u.stashed + u.working) for u in units)

    def find(memory: float) -> Stages | None:
        frontiers = feasible(tables, problem.ranks, math.inf, _room(problem, in_flight, memory), counts)
        return None if frontiers is None else stages_between(tables, frontiers)

    best = narrow(floor, most, find, lambda stages: max(held(problem, branching, stages, room)))
    if best is None:
        return _no_such_layout(problem)
    needs = held(problem, branching, best[1], room)
    worst = max(range(len(needs)), key=lambda s: needs[s])
    count = room.in_flight[depths(branching, best[1])[worst]]
    members = [units[u] for u in best[1][worst]]
    stashed, saved = sum(u.stashed for u in members if u.has_w), sum(u.saved for u in members if u.has_b)
    fullest = max(members, key=lambda unit: unit.fused)
    apart = stashed - saved <= fullest.fused  # then B of all units may run before W of any
    space: dict[str, float] = {}
    largest = max(members, key=lambda unit: unit.working)
    for unit in members:
        here = unit.saved if unit.has_b else 0.0
        moment = (unit.stashed if unit.has_w else 0.0) - here if apart and stashed > saved else 0.0
        if not apart and unit is fullest:
            moment = unit.fused
        activations = room.scale * (count * here + moment + (unit.working if unit is largest else 0.0))
        for kind, size in (("state", unit.state), ("activations", activations)):
            name = f"{kind} of {unit.component}"
            space[name] = space.get(name, 0.0) + size
    taken = sorted((name for name in space if space[name]), key=lambda name: -space[name])
    return InputError(
        f"nothing fits in {bytes_text(room.memory)} on each of {problem.ranks} ranks: the fullest holds "
        + ", ".join(f"{bytes_text(space[name])} for {name}" for name in taken)
        + f" ({count:g} microbatches in flight), with the partition that needs the least",
        "partition",
        f"Allow {bytes_text(best[0])} ({math.ceil(best[0])} bytes) or more, or take more ranks",
    )


def describe(problem: Problem, stages: Sequence[Sequence[int]]) -> str:
    """How components share the stages, in words: stages of their own, shared ones, and branches side by side."""
    branching = branches(problem)
    units = problem.units
    names = list(dict.fromkeys(unit.component for unit in units))
    inside = [list(dict.fromkeys(units[u].component for u in members)) for members in stages]
    alone = {name: sum(components == [name] for components in inside) for name in names}
    text = [f"{name} on {_stages(alone[name])}" for name in names if alone[name]]
    shared: dict[str, int] = {}
    for components in inside:
        if len(components) > 1:
            shared[", ".join(components)] = shared.get(", ".join(components), 0) + 1
    text += [f"{names} together on {_stages(count)}" for names, count in shared.items()]
    part = parts(problem, branching, "apart")
    branch = [{part[u] for u in members if part[u]} for members in stages]
    title = {part[u]: units[u].component for u in range(len(units) - 1, -1, -1)}
    together = sorted(set().union(*(components for components in branch if len(components) > 1)))
    if together:
        text.append(f"{' and '.join(title[p] for p in together)} colocated, one after the other")
    ahead = _ahead(branching, stages)
    beside: set[int] = set()
    for s in range(len(stages)):
        for t in range(s):
            if t not in ahead[s] and branch[s] and branch[t] and branch[s] != branch[t]:
                beside |= branch[s] | branch[t]
    if beside:
        text.append(f"{' and '.join(title[p] for p in sorted(beside))} side by side")
    return "; ".join(text)


def _stages(count: int) -> str:
    return f"{count} stage" if count == 1 else f"{count} stages"


def _ahead(branching: Branches, stages: Sequence[Sequence[int]]) -> list[set[int]]:
    """For each stage all that it waits for, at first or second hand."""
    home = homes_of(stages)
    ahead: list[set[int]] = []
    for s, members in enumerate(stages):
        direct = {home[a] for u in members for a in branching.before[u]} - {s}
        ahead.append(direct.union(*(ahead[t] for t in direct)))
    return ahead


# --- Stages of which some belong to one component alone --------------------------------------------------------------


NANOSECOND = 1e-9


def own_stages(
    problem: Problem, own: Sequence[tuple[str, int]], first: Sequence[tuple[str, object]] = ()
) -> list[list[int]]:  # fmt: skip
    """The units of each of `problem.ranks` stages: those of a named component in as many stages of its own, in front of
    the stages of all others. If no stage is left for the others, they share those of the last component. Components
    that read the others stand behind them, if what reads these in turn has no weights (a loss): the last has it. Within
    both the largest sum of F, B and W is as small as it can be. first: components whose stages stand in front of those
    of the others, with how many ranks each has; in this order, if these differ.

    InputError for a component that is not there, has fewer units than stages, or reads what stages behind make.
    """
    of: dict[str, list[int]] = {name: [] for name, _ in own}
    elsewhere: list[int] = []
    for place, unit in enumerate(problem.units):
        of.get(unit.component, elsewhere).append(place)
    missing = next((name for name, units in of.items() if not units), None)
    if missing is not None:
        raise InputError(
            f"the mesh gives {missing} pipeline stages of its own, and nothing of it runs for the example batch",
            "mesh", f"components: {', '.join(sorted({unit.component for unit in problem.units}))}",
        )  # fmt: skip
    ahead = dict(first)
    turn = {name: i for i, name in enumerate(ahead)} if len({*ahead.values()}) > 1 else {}
    front = sorted(own, key=lambda pair: (pair[0] not in ahead, turn.get(pair[0], 0), of[pair[0]][0]))
    left = problem.ranks - sum(stages for _, stages in own)
    rest = "all that has no stages of its own"
    if left == 0:
        rest, left = front.pop()
        elsewhere = sorted([*elsewhere, *of.pop(rest)])
    of[rest] = elsewhere
    after_rest = _reach(problem, elsewhere)
    behind = {name for name, _ in front if name not in ahead and not after_rest.isdisjoint(of[name])}
    last = _reach(problem, [unit for name in behind for unit in of[name]]).intersection(elsewhere)
    if any(problem.units[unit].state for unit in last):
        behind = set()
    order = [pair for pair in front if pair[0] not in behind]
    order += [(rest, left), *(pair for pair in front if pair[0] in behind)]
    if behind:
        of[rest] = [unit for unit in elsewhere if unit not in last]
        of[order[-1][0]] = sorted([*of[order[-1][0]], *last])
    stages_found: list[list[int]] = []
    for name, stages in order:
        stages_found += _balanced(problem, name, of[name], stages)
        _refuse_readers(problem, name, set().union(*stages_found), ahead)
    return stages_found


def _reach(problem: Problem, units: Iterable[int]) -> set[int]:
    """The units that read what these make, at first or second hand."""
    readers: dict[int, set[int]] = {}
    for value in problem.values:
        readers.setdefault(value.maker, set()).update(value.readers)
    reached: set[int] = set()
    waiting = list(units)
    while waiting:
        new = readers.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    return reached


def _refuse_readers(problem: Problem, name: str, in_front: Collection[int], ahead: Collection[str]) -> None:
    """InputError if the units up to those of a component read what others make, further back. ahead: components whose
    stages stand in front.
    """
    for value in problem.values:
        if value.maker not in in_front and any(reader in in_front for reader in value.readers):
            maker = problem.units[value.maker]
            remedy = f"give stages to the components that {name} reads in its place, and leave the rest to it"
            if name in ahead:
                remedy = (
                    f"components on another number of ranks than the mesh's stand in front: let the mesh's be those of "
                    f"{name} (of a dict those of the component named last), or put what it reads on another number too"
                )
            if maker.component in ahead:
                remedy = f"name dp of {maker.component} in front of that of {name}: so do their stages stand"
            raise InputError(
                f"the mesh gives {name} pipeline stages in front of others, and it reads what {maker.name} of "
                f"{maker.component} makes", "mesh", remedy,
            )  # fmt: skip


def _balanced(problem: Problem, subject: str, units: Sequence[int], stages: int) -> list[list[int]]:
    if len(units) < stages:
        raise InputError(
            f"the mesh has {stages} pipeline stages for {subject}, which has {len(units)} regions", "mesh",
            f"give it pp={max(1, len(units))}, or less",
        )  # fmt: skip
    cuts = balance([round(problem.units[unit].work / NANOSECOND) for unit in units], stages)
    return [list(units[start:stop]) for start, stop in pairwise([*cuts, len(units)])]
