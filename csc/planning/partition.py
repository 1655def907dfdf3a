"""Partition: cut regions into stages.

Terms: a *cost* is a region's time in any whole unit (say, nanoseconds); a *cut* is the first region of a
stage. The *makespan* of a stage is the sum of its regions' costs; pipelines run at the pace of the largest.
A *unit* is a region in numbers, the *depth* of a stage is the number of stages from it to the end (1: the last), the
*trunk* is the component that the last unit belongs to.

    balance(costs, stages) -> [first region of each stage]      the largest stage is as small as it can be
    at_cuts(names, cuts)   -> [first region of each stage]      cut before the named regions
    partition(problem, in_flight, layout) -> stages             the largest stage bound is as small as it can be
    candidates(problem, in_flight, shares, layouts) -> [stages] a few good and different ones
    describe(problem, stages) -> text                           which components share, alternate or run side by side
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from csc.errors import InputError
from csc.planning.branches import Branches, Stages, branches
from csc.planning.coarse import lumped
from csc.planning.frontiers import feasible, least, narrow, parts_of
from csc.planning.partition_bound import check_ranks, floor_of
from csc.planning.problem import Problem
from csc.planning.room import Room
from csc.planning.segment_bounds import ChainTables, segments, stages_between
from csc.planning.unit_moves import depths, held, homes, settle
from csc.simulation.page import bytes_text

Layout = Literal["any", "apart", "colocated"]
InFlight = Callable[[int], float]

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the ways to a stage and back, for candidates
MIDDLE = 0.5  # the share for the other layouts
FRONTIERS = 300  # of the short chains, for candidates; where there are more, units of encoders are taken together
CLOSE = 2e-3  # how near a candidate's largest bound is to the least of its kind


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
    csc.planning.room.Room); in_flight must not fall, the default min(microbatches, depth) is what 1F1B holds. Of
    partitions with equal bounds those with fewer bytes of messages, then smaller bounds of the other stages are
    preferred, as far as moving single units leads to them. The same problem always gives the same stages.

    layout: "apart" admits only stages whose units are all of the trunk or all of one encoder with its projector,
    "colocated" only such whose units are all of the trunk or none.

    InputError for more ranks than units, and for a memory limit that nothing fits: it says the least that would.
    """
    check_ranks(problem)
    found = branches(problem)
    tables = segments(problem, found)
    part = parts(problem, found, layout)
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
    found = branches(problem)
    tables = segments(problem, found)
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
        part = parts(problem, found, layout)
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
    part = [int(each) for each in outside]
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
    each = in_flight or (lambda depth: min(problem.microbatches, depth))
    return Room(limit, tuple(float(each(depth)) for depth in range(problem.ranks + 1)), max(problem.scale or (1.0,)))


def _no_such_layout(problem: Problem) -> InputError:
    return InputError(
        f"no partition into {problem.ranks} stages keeps the components apart", "partition", "Let stages share them"
    )


def _nothing_fits(problem: Problem, tables: ChainTables, layout: Layout, in_flight: InFlight | None) -> InputError:
    """The sentence for a memory limit that is too small, with the least that is not."""
    found = tables.branches
    counts = None if layout == "any" else parts_of(tables, parts(problem, found, layout))
    whole = _room(problem, in_flight)
    if whole is None:
        return _no_such_layout(problem)
    units = problem.units
    floor = max(u.state for u in units)
    most = sum(u.state + whole.scale * (whole.in_flight[-1] * u.saved + u.stashed + u.working) for u in units)

    def find(memory: float) -> Stages | None:
        frontiers = feasible(tables, problem.ranks, math.inf, _room(problem, in_flight, memory), counts)
        return None if frontiers is None else stages_between(tables, frontiers)

    best = narrow(floor, most, find, lambda stages: max(held(problem, found, stages, whole)))
    if best is None:
        return _no_such_layout(problem)
    needs = held(problem, found, best[1], whole)
    worst = max(range(len(needs)), key=lambda s: needs[s])
    count = whole.in_flight[depths(found, best[1])[worst]]
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
        activations = whole.scale * (count * here + moment + (unit.working if unit is largest else 0.0))
        for what, size in (("state", unit.state), ("activations", activations)):
            name = f"{what} of {unit.component}"
            space[name] = space.get(name, 0.0) + size
    taken = sorted((name for name in space if space[name]), key=lambda name: -space[name])
    return InputError(
        f"nothing fits in {bytes_text(whole.memory)} on each of {problem.ranks} ranks: the fullest holds "
        + ", ".join(f"{bytes_text(space[name])} for {name}" for name in taken)
        + f" ({count:g} microbatches in flight), with the partition that needs the least",
        "partition",
        f"Allow {bytes_text(best[0])} ({math.ceil(best[0])} bytes) or more, or take more ranks",
    )


def describe(problem: Problem, stages: Sequence[Sequence[int]]) -> str:
    """How components share the stages, in words: stages of their own, shared ones, and branches side by side."""
    found = branches(problem)
    units = problem.units
    names = list(dict.fromkeys(unit.component for unit in units))
    inside = [list(dict.fromkeys(units[u].component for u in members)) for members in stages]
    alone = {name: sum(each == [name] for each in inside) for name in names}
    text = [f"{name} on {_stages(alone[name])}" for name in names if alone[name]]
    shared: dict[str, int] = {}
    for each in inside:
        if len(each) > 1:
            shared[", ".join(each)] = shared.get(", ".join(each), 0) + 1
    text += [f"{names} together on {_stages(count)}" for names, count in shared.items()]
    part = parts(problem, found, "apart")
    branch = [{part[u] for u in members if part[u]} for members in stages]
    title = {part[u]: units[u].component for u in range(len(units) - 1, -1, -1)}
    together = sorted(set().union(*(each for each in branch if len(each) > 1)))
    if together:
        text.append(f"{' and '.join(title[p] for p in together)} colocated, one after the other")
    ahead = _ahead(found, stages)
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


def _ahead(found: Branches, stages: Sequence[Sequence[int]]) -> list[set[int]]:
    """For each stage all that it waits for, at first or second hand."""
    home = homes(stages)
    ahead: list[set[int]] = []
    for s, members in enumerate(stages):
        direct = {home[a] for u in members for a in found.before[u]} - {s}
        ahead.append(direct.union(*(ahead[t] for t in direct)))
    return ahead
