"""Which B's and W's run as one: BW holds what W needs of one region at a time, B alone lets its gradient go earlier.

Terms: see work.py. A B whose W is the next action of its rank can be fused with it: the rank does the same in the same
time, holds less in between, and sends the gradient when W is done, too.

    joined(work, order) -> order            every such B fused, unless BW would hold more than B and W do
    settled(work, order, room) -> order     only those that have to be, to keep to the room; None if that is not enough
    settled_all(work, orders, room)         the same for all ranks
    hastened(work, rule, best)              settled orders of a greedy rule, and their makespan
    spared(work, orders) -> orders          those too that nobody waits for
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from csc.planning.schedules.greedy import Rule, run
from csc.planning.schedules.timing import makespan, start_times
from csc.planning.schedules.work import WorkTables

HOPELESS = 1.02  # dividing BW's makes up for less than this


def joined(work: WorkTables, order: Sequence[int]) -> list[int]:
    """The order of a rank with every B fused whose W is the next action, unless BW would hold more than the two."""
    head = [0] * work.size
    found: list[int] = []
    i, count = 0, len(order)
    while i < count:
        entry = order[i]
        i += 1
        lane = work.lane_of[entry]
        k = head[lane]
        head[lane] = k + 1
        weight = lane + 1
        if entry != lane:
            head[weight] = k + 1
        elif lane % 3 == 1 and i < count and order[i] == weight and head[weight] == k and work.shrinks[lane // 3][k]:
            head[weight] = k + 1
            entry = work.size + lane // 3
            i += 1
        found.append(entry)
    return found


def _steps(work: WorkTables, order: Sequence[int]) -> Iterator[tuple[int, int, bool]]:
    """(entry, position, whether it is a B to be fused with the W behind it, which then has no step)."""
    head = [0] * work.size
    skip = False
    for entry, behind in zip(order, [*order[1:], -1]):
        lane = work.lane_of[entry]
        k = head[lane]
        head[lane] = k + 1
        if entry != lane:
            head[lane + 1] = k + 1
        paired = entry == lane and entry % 3 == 1 and behind == entry + 1 and head[behind] == k
        paired = paired and work.shrinks[entry // 3][k]
        if not skip:
            yield entry, k, paired
        skip = paired


def settled(work: WorkTables, order: Sequence[int], room: float) -> list[int] | None:
    """The order of a rank, of whose B's with their W right behind them only those are fused for which what all their
    regions keep does not fit into the room, by what is alive there. None if an action does not fit either way.

    It is the fastest choice for this order: to divide a BW delays nothing, and lets its gradient leave earlier.
    """
    if room == math.inf:
        return [lane for entry in order for lane in _divided(work, entry)]
    growth, moment, lane_of, size = work.growth, work.moment, work.lane_of, work.size
    limit = room * (1 + 1e-9)
    head = [0] * size
    alive = 0.0
    found: list[int] = []
    i, count = 0, len(order)
    while i < count:
        entry = order[i]
        i += 1
        lane = lane_of[entry]
        k = head[lane]
        head[lane] = k + 1
        grown = alive + growth[lane][k]
        if lane % 3 != 1:
            if grown > limit:
                return None
            alive = grown
            found.append(entry)
            continue
        weight = lane + 1
        paired = head[weight] == k and (entry != lane or (i < count and order[i] == weight))
        if paired:
            i += entry == lane
            head[weight] = k + 1
            if grown <= limit:
                found += (lane, weight)
            elif alive + moment[lane // 3][k] <= limit:
                found.append(size + lane // 3)
            else:
                return None
            alive += growth[size + lane // 3][k]
        elif entry != lane or grown > limit:
            return None
        else:
            alive = grown
            found.append(lane)
    return found


def _divided(work: WorkTables, entry: int) -> tuple[int, ...]:
    """The lanes of an entry."""
    lane = work.lane_of[entry]
    return (entry,) if entry == lane else (lane, lane + 1)


def settled_all(
    work: WorkTables, orders: Sequence[Sequence[int]], room: Sequence[float] | None
) -> list[list[int]] | None:
    """The orders of all ranks, settled; None if one of them does not fit. room: bytes by rank, None for no limit."""
    found = []
    for rank, order in enumerate(orders):
        new = settled(work, order, math.inf if room is None else room[rank])
        if new is None:
            return None
        found.append(new)
    return found


def hastened(work: WorkTables, rule: Rule, best: float = math.inf) -> tuple[list[list[int]], float]:
    """The orders of a greedy rule, with those BW's divided that need not be one, and their makespan.

    best: seconds that it has to beat. Where it is far from that, the makespan is inf and the orders are not whole.
    """
    orders, seconds = run(work, rule, best * HOPELESS)
    if seconds == math.inf or max(map(max, orders)) < work.size:
        return orders, seconds
    found = settled_all(work, orders, rule.memory)
    return (orders, seconds) if found is None else (found, makespan(work, found))


def spared(work: WorkTables, orders: Sequence[Sequence[int]]) -> list[list[int]]:
    """The orders with those B's fused, too, whose gradient comes early enough when W is done: less is held, and the
    makespan is the same.
    """
    best = [list(order) for order in orders]
    least = makespan(work, best) * (1 + 1e-12)
    return _spared_among(work, best, range(len(best)), least)


def _spared_among(work: WorkTables, orders: list[list[int]], among: Sequence[int], least: float) -> list[list[int]]:
    """All of these ranks at once; where their messages then get into each other's way, one half after the other."""
    starts = start_times(work, orders)
    assert starts is not None
    tried = [_spared(work, order, starts) if rank in among else order for rank, order in enumerate(orders)]
    if tried == orders or makespan(work, tried) <= least:
        return tried
    if len(among) == 1:
        return orders
    half = len(among) // 2
    return _spared_among(work, _spared_among(work, orders, among[:half], least), among[half:], least)


def _spared(work: WorkTables, order: Sequence[int], starts: Sequence[Sequence[float]]) -> list[int]:
    """The order of a rank with those B's fused that feed nobody before their W is done."""
    found: list[int] = []
    for entry, k, paired in _steps(work, order):
        if not paired:
            found.append(entry)
            continue
        fused = work.fused(entry // 3)
        end = starts[entry + 1][k] + work.seconds[entry + 1][k]
        awaited = any(
            end + (latency + wire[k] if slot >= 0 else 0.0) > starts[fed][k] * (1 + 1e-12)
            for fed, slot, latency, wire in work.feeds[fused]
        )
        found += [entry, entry + 1] if awaited else [fused]
    return found
