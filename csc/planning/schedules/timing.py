"""When given orders finish: the same model of time as `greedy`, without choices.

Terms: see work.py.

    makespan(work, orders) -> seconds; inf for a deadlock
    start_times(work, orders) -> [lane][position], or None for a deadlock
    peaks(work, orders) -> for each rank the most bytes of activations
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from csc.planning.schedules.work import WorkTables


def start_times(work: WorkTables, orders: Sequence[Sequence[int]]) -> list[list[float]] | None:
    """Start of every action when each rank runs its order without a pause; None if the orders deadlock, or if a fused
    action stands before the W of an earlier position. W of a fused action starts when its B is done.

    The times do not depend on the order in which ranks are looked at: only one rank sends over a directed pair.
    """
    count, seconds, feeds, lane_of = work.microbatches, work.seconds, work.feeds, work.lane_of
    left = [[n] * count for n in work.needs]
    when = [[0.0] * count for _ in left]
    head = [0] * len(left)
    free = [0.0] * work.slots
    clock = [0.0] * len(orders)
    place = [0] * len(orders)
    blocked = [-1] * len(left)
    ready = list(range(len(orders)))
    todo = sum(len(order) for order in orders)
    while ready:
        rank = ready.pop()
        now, order, i = clock[rank], orders[rank], place[rank]
        first = i
        size = len(order)
        while i < size:
            entry = order[i]
            lane = lane_of[entry]
            k = head[lane]
            if left[lane][k]:
                blocked[lane] = rank
                break
            row = when[lane]
            if row[k] > now:
                now = row[k]
            else:
                row[k] = now
            if entry != lane:
                if head[lane + 1] != k:
                    return None
                when[lane + 1][k] = now + seconds[lane][k]
                head[lane + 1] = k + 1
            now += seconds[entry][k]
            head[lane] = k + 1
            i += 1
            for fed, slot, latency, wire in feeds[entry]:
                at = now
                if slot >= 0:
                    if free[slot] > at:
                        at = free[slot]
                    at += wire[k]
                    free[slot] = at
                    at += latency
                row = when[fed]
                if at > row[k]:
                    row[k] = at
                waits = left[fed]
                waits[k] -= 1
                if not waits[k] and blocked[fed] >= 0 and head[fed] == k:
                    ready.append(blocked[fed])
                    blocked[fed] = -1
        clock[rank], place[rank] = now, i
        todo -= i - first
    return None if todo else when


def makespan(work: WorkTables, orders: Sequence[Sequence[int]]) -> float:
    """Seconds until the last action ends; inf if the orders deadlock."""
    starts = start_times(work, orders)
    if starts is None:
        return math.inf
    return max(starts[lane][-1] + work.seconds[lane][-1] for lane in work.lanes)


def peaks(work: WorkTables, orders: Sequence[Sequence[int]]) -> list[float]:
    """For each rank the most bytes of activations that are alive at once: it depends on the order alone."""
    result = []
    for order in orders:
        head = dict.fromkeys(work.lanes, 0)
        alive = peak = 0.0
        for entry in order:
            lane = work.lane_of[entry]
            k = head[lane]
            head[lane] += 1
            if entry != lane:
                head[lane + 1] += 1
                peak = max(peak, alive + work.moment[lane // 3][k])
            alive += work.growth[entry][k]
            peak = max(peak, alive)
        result.append(peak)
    return result
