"""Partition: cut a row of regions into stages.

Terms: a *cost* is a region's time in any whole unit (say, nanoseconds); a *cut* is the first region of a
stage. The *makespan* of a stage is the sum of its regions' costs; pipelines run at the pace of the largest.

    balance(costs, stages) -> [first region of each stage]      the largest stage is as small as it can be
    at_cuts(names, cuts)   -> [first region of each stage]      cut before the named regions
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from csc.errors import InputError


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
