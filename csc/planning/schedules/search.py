"""Local search on the orders themselves: move actions that the makespan hangs on.

Terms: see work.py. A *critical path* is a chain of actions, each starting because the one before it ended (on its rank,
or with a message), from the start of the step to its end. Only an order that changes on every critical path can be
better, so moves start from actions on one of them.

    improve(work, orders, room, trials, rng, enough, fits) -> (orders, seconds)
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from csc.planning.schedules.fusing import settled
from csc.planning.schedules.timing import start_times
from csc.planning.schedules.work import WorkTables

Fits = Callable[[Sequence[Sequence[int]], Sequence[Sequence[float]]], bool]  # of orders and their start times

# How far an action moves, in places of its rank's order; near ones more often.
STEPS = (1, 1, 1, 2, 2, 3, 4, 6, 9)
# Trials without a better makespan after which it is not worth going on: for each action of the step, and at least.
PATIENCE, LEAST = 10, 1000


def improve(
    work: WorkTables,
    orders: Sequence[Sequence[int]],
    room: Sequence[float] | None,
    trials: int,
    rng: random.Random,
    enough: float = 0.0,
    fits: Fits | None = None,
) -> tuple[list[list[int]], float]:
    """Orders that are at least as good, after so many evaluations, and their makespan. The given ones must be settled.
    fits: what is asked, beside the room of each rank, of orders that are kept.

    Each trial moves one critical action earlier or later on its rank and keeps the move if the makespan does not grow
    (steps aside are what leads out of plateaus). After each, B's with their W right behind them are fused where the
    room asks for it and divided where it does not. Moves that break the memory limit or deadlock are thrown away. Ends
    early when the makespan is at most `enough`, or has not become less for long (see PATIENCE).
    """
    best = [list(order) for order in orders]
    limits = [math.inf] * len(best) if room is None else room
    lasts = [(work.seconds[lane][-1], lane) for lane in work.lanes]
    starts = start_times(work, best)
    assert starts is not None
    makespan = max(starts[lane][-1] + seconds for seconds, lane in lasts)
    path = _Path(work, best)
    critical = path.walk(starts, rng)
    patience = max(LEAST, PATIENCE * len(work.lanes) * work.microbatches)
    idle = 0
    for _ in range(trials):
        if makespan <= enough or idle >= patience:
            break
        idle += 1
        rank, place = critical[int(rng.random() * len(critical))]
        order = best[rank]
        step = STEPS[int(rng.random() * len(STEPS))]
        target = place - step if rng.random() < 0.5 else place + step
        target = min(max(target, 0), len(order) - 1)
        changed = order[:place] + order[place + 1 :]
        changed.insert(target, order[place])
        if changed == order:
            continue
        moved = settled(work, changed, limits[rank])
        if moved is None or moved == order:
            continue
        best[rank] = moved
        starts = start_times(work, best)
        now = makespan + 1.0 if starts is None else max(starts[lane][-1] + seconds for seconds, lane in lasts)
        if starts is None or now > makespan * (1 + 1e-12) or not (fits is None or fits(best, starts)):
            best[rank] = order
            continue
        if now < makespan * (1 - 1e-12):
            idle = 0
        makespan = now
        path.change(rank, moved)
        critical = path.walk(starts, rng)
    return best, makespan


class _Path:
    """Where each action stands in its rank's order, kept up to date as ranks change.

    late[lane][position]: seconds from the end of what the lane does until its results are there; W of a fused action.
    """

    def __init__(self, work: WorkTables, orders: Sequence[Sequence[int]]) -> None:
        self.work = work
        self.rows: list[list[tuple[int, int]]] = [[] for _ in orders]
        self.place: list[list[int]] = [[0] * work.microbatches for _ in work.needs]
        self.late: list[list[float]] = [[0.0] * work.microbatches for _ in work.needs]
        self.sources: list[list[tuple[int, bool, float, list[float]]]] = [[] for _ in work.needs]
        for lane, feeds in enumerate(work.feeds[: work.size]):
            for fed, slot, latency, wire in feeds:
                self.sources[fed].append((lane, slot >= 0, latency, wire))
        for rank, order in enumerate(orders):
            self.change(rank, order)

    def change(self, rank: int, order: Sequence[int]) -> None:
        """Note the new order of a rank."""
        head = [0] * len(self.place)
        row = []
        for i, entry in enumerate(order):
            lane = self.work.lane_of[entry]
            k = head[lane]
            head[lane] = k + 1
            self.place[lane][k] = i
            self.late[lane][k] = 0.0
            if entry != lane:  # the row has what ends last
                self.late[lane][k] = self.work.seconds[lane + 1][k]
                lane += 1
                head[lane] = k + 1
                self.place[lane][k] = i
            row.append((lane, k))
        self.rows[rank] = row

    def walk(self, starts: Sequence[Sequence[float]], rng: random.Random) -> list[tuple[int, int]]:
        """(rank, place) of the actions of one critical path, from its end; where two lead on, one of them at random."""
        work = self.work
        seconds, home = work.seconds, work.placement
        lane = max(work.lanes, key=lambda lane: starts[lane][-1] + seconds[lane][-1])
        k = work.microbatches - 1
        near = 1e-9 * (starts[lane][k] + seconds[lane][k])
        found = []
        while True:
            rank = home[lane // 3]
            place = self.place[lane][k]
            if lane % 3 == 2 and self.late[lane - 1][k]:
                lane -= 1  # W of a fused action starts with its B
            found.append((rank, place))
            start = starts[lane][k]
            if start <= near:
                return found
            ways = []
            if place:
                before, j = self.rows[rank][place - 1]
                if starts[before][j] + seconds[before][j] >= start - near:
                    ways.append((before, j))
            latest, source = -1.0, -1
            for other, travels, latency, wire in self.sources[lane]:
                at = starts[other][k] + seconds[other][k] + self.late[other][k]
                at += latency + wire[k] if travels else 0.0
                if at > latest:
                    latest, source = at, other
            # A message that waited for its link arrives later than this; it is then the only explanation.
            if source >= 0 and (latest >= start - near or not ways):
                ways.append((source, k))
            if not ways:
                return found
            lane, k = ways[0] if len(ways) == 1 else ways[rng.random() < 0.5]
