"""A lower bound on the makespan of a pipeline whose stages stand on given ranks.

Terms: see work.py. The *head* of a lane is the least time before its first action can start, its *tail* the least time
that must pass after its last action ends: the longest chain of actions and messages before and after.

    lower_bound(work, room=None) -> seconds         room: bytes for activations by rank
    heads_and_tails(work) -> ([lane], [lane])       way_back(work, tail, lane of a B) -> its tail, its own W apart
"""

from __future__ import annotations

from collections.abc import Sequence

from csc.planning.schedules.work import WorkTables


def lower_bound(work: WorkTables, room: Sequence[float] | None = None) -> float:
    """No order of F, B and W that keeps to the room (None: any memory) can finish earlier.

    For any set of lanes of one rank: the first of their actions starts after the least of their heads, the rank runs
    them one at a time, and after the last of them the least of their tails must pass. So
    T >= min head + sum of seconds + min tail (the one-machine bound of job-shop scheduling, Carlier 1982). With
    {F, B, W} of a stage this is ramp + all work, with {F, B} ramp + work + the way back of the gradients, with {F} the
    ramp, all forwards and the round trip of the last microbatch. Heads and tails are those of the smallest microbatch.

    With limited memory: what a rank runs before its first B are F's whose saved bytes fit, and what it runs after its
    last B are W's whose stashed bytes fit. All other work stands between the two:
    T >= min head of B + (all work - those F's - those W's) + min way back, and the same without the W's and the way.
    The way back is the tail of B without its own W, which is not behind it if the two are fused.
    """
    head, tail = heads_and_tails(work)
    total = [sum(row) for row in work.seconds]
    best = 0.0
    for own in work.lanes_of:
        for first in {head[lane] for lane in own}:
            seconds = 0.0
            for lane in sorted((lane for lane in own if head[lane] >= first), key=lambda lane: -tail[lane]):
                seconds += total[lane]
                best = max(best, first + seconds + tail[lane])
    if room is None:
        return best
    for own, bytes_ in zip(work.lanes_of, room):
        backs = [lane for lane in own if lane % 3 == 1]
        if not backs:
            continue
        turning = {lane // 3 for lane in backs}
        before = [lane for lane in own if lane % 3 == 0 and lane // 3 in turning]
        after = [lane for lane in own if lane % 3 == 2 and lane // 3 in turning]
        seconds = sum(total[lane] for lane in (*before, *backs, *after))
        early = _most(work, before, [work.growth[lane] for lane in before], bytes_)
        late = _most(work, after, [[-size for size in work.growth[lane]] for lane in after], bytes_)
        ramp = min(head[lane] for lane in backs)
        back = min(way_back(work, tail, lane) for lane in backs)
        lead_in = min(head[lane] for lane in before)
        best = max(
            best,
            ramp + seconds - early,
            ramp + seconds - early - late + back,
            lead_in + seconds - late + back,
        )
    return best


def heads_and_tails(work: WorkTables) -> tuple[list[float], list[float]]:
    """[lane]: the least seconds before its first action can start, and those after its last one's end."""
    head = [0.0] * len(work.needs)
    tail = [0.0] * len(work.needs)
    for lane in work.upstream_first:
        for fed, slot, latency, wire in work.feeds[lane]:
            head[fed] = max(head[fed], head[lane] + work.least[lane] + (min(wire) + latency if slot >= 0 else 0.0))
    for lane in reversed(work.upstream_first):
        for fed, slot, latency, wire in work.feeds[lane]:
            tail[lane] = max(tail[lane], tail[fed] + work.least[fed] + (min(wire) + latency if slot >= 0 else 0.0))
    return head, tail


def way_back(work: WorkTables, tail: Sequence[float], lane: int) -> float:
    """The least time that passes after a B, its own W apart."""
    return max(
        (
            tail[fed] + work.least[fed] + (min(wire) + latency if slot >= 0 else 0.0)
            for fed, slot, latency, wire in work.feeds[work.fused(lane // 3)]
        ),
        default=0.0,
    )


def _most(work: WorkTables, lanes: Sequence[int], sizes: Sequence[Sequence[float]], room: float) -> float:
    """At most how many seconds of these lanes' actions fit into the room together. Parts of actions count, except
    where all have one size.
    """
    items = [(size, seconds) for lane, row in zip(lanes, sizes) for size, seconds in zip(row, work.seconds[lane])]
    room *= 1 + 1e-9
    free = sum(seconds for size, seconds in items if size <= 0)
    paid = sorted(
        (item for item in items if item[0] > 0), key=lambda item: item[0] / item[1] if item[1] else float("inf")
    )
    if len(set(paid)) == 1:
        size, seconds = paid[0]
        return free + min(len(paid), int(room / size)) * seconds
    for size, seconds in paid:
        free += seconds * min(1.0, room / size)
        room -= min(room, size)
    return free
