"""When ranks encode for the step to come: in the time in which they wait, as the simulator knows it.

Terms
  encode   run a frozen encoder forward on a microbatch of the next step; any rank can do it, at any time
  place    (a rank's position, how many of its computes came before)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from csc.ir.schedule import Schedule
from csc.simulation.pipeline import Pipeline
from csc.simulation.simulate import simulate


@dataclass(frozen=True)
class AheadPlan:
    """orders[rank][computes before]: the microbatches of the next step that it encodes there. seconds: of the step with
    them. waits: how many of them take only time in which their rank would wait.
    """

    orders: tuple[dict[int, tuple[int, ...]], ...]
    seconds: float
    waits: int


def fit_ahead(
    pipeline: Pipeline, schedule: Schedule, seconds: float, readers: Collection[int], room: Sequence[float]
) -> AheadPlan:
    """Which rank encodes which microbatch of the next step, and after how many of its own computes.

    seconds: of one microbatch. readers: ranks that read what is made; their own waits are filled first, since what they
    make is not sent. room: how many microbatches' features each rank has memory for. What no wait is long enough for
    goes to the end of whichever rank is free first.
    """
    timeline = simulate(pipeline, schedule)
    left = min(schedule.microbatches, *(_whole(room[reader]) for reader in readers))
    free = [_whole(room_of_rank) for room_of_rank in room]
    counts: list[dict[int, int]] = [{} for _ in timeline.ranks]
    ends = [0.0] * len(counts)
    for rank in sorted(range(len(counts)), key=lambda rank: (rank not in readers, rank)):
        now = 0.0
        events = timeline.ranks[rank]
        for place, until in enumerate([*(event.start for event in events), timeline.makespan]):
            count = _times(until - now, seconds, min(left, free[rank]))
            if count:
                counts[rank][place] = count
                left, free[rank] = left - count, free[rank] - count
            if place < len(events):
                now = events[place].end
        ends[rank] = now + seconds * counts[rank].get(len(events), 0)
    waits = sum(count for order in counts for count in order.values())
    while left and any(free):
        rank = min((rank for rank in range(len(counts)) if free[rank]), key=lambda rank: (ends[rank], rank))
        last = len(timeline.ranks[rank])
        counts[rank][last] = counts[rank].get(last, 0) + 1
        ends[rank] += seconds
        left, free[rank] = left - 1, free[rank] - 1
    return AheadPlan(_numbered(counts), max(timeline.makespan, *ends), waits)


def _whole(room: float) -> int:
    return int(max(0.0, min(room, 2.0**31)))


def _times(gap: float, seconds: float, most: int) -> int:
    """How often it fits."""
    return most if seconds * most <= gap else max(0, int(gap // seconds))


def _numbered(counts: Sequence[dict[int, int]]) -> tuple[dict[int, tuple[int, ...]], ...]:
    """Microbatches in order, rank after rank."""
    orders, first = [], 0
    for counts_of_rank in counts:
        order = {}
        for place, count in sorted(counts_of_rank.items()):
            order[place] = tuple(range(first, first + count))
            first += count
        orders.append(order)
    return tuple(orders)
