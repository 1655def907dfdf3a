"""Search for the order of F, B and W with the least makespan under a memory limit, and its lower bound."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from csc.errors import InputError
from csc.ir.schedule import Schedule, with_messages
from csc.planning.schedules.greedy import Rule, hastened, settled, settled_all, spared
from csc.planning.schedules.named import ORDERS, depths
from csc.planning.schedules.work import WorkTables, actions, makespan, peaks, room, size, start_times, state
from csc.simulation.pipeline import Pipeline

# --- A lower bound on the makespan of a pipeline whose stages stand on given ranks -----------------------------------
#
# Terms: see work.py. The *head* of a lane is the least time before its first action can start, its *tail* the least
# time that must pass after its last action ends: the longest chain of actions and messages before and after.


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
    for lanes in work.lanes_of:
        for first in {head[lane] for lane in lanes}:
            seconds = 0.0
            for lane in sorted((lane for lane in lanes if head[lane] >= first), key=lambda lane: -tail[lane]):
                seconds += total[lane]
                best = max(best, first + seconds + tail[lane])
    if room is None:
        return best
    for lanes, bytes_ in zip(work.lanes_of, room):
        backs = [lane for lane in lanes if lane % 3 == 1]
        if not backs:
            continue
        turning = {lane // 3 for lane in backs}
        before = [lane for lane in lanes if lane % 3 == 0 and lane // 3 in turning]
        after = [lane for lane in lanes if lane % 3 == 2 and lane // 3 in turning]
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


# --- From orders to a schedule: check the memory, add the messages ---------------------------------------------------


def check(name: str, work: WorkTables, orders: Sequence[Sequence[int]], memory: Sequence[float] | float | None) -> None:
    """InputError if a rank's state and activations do not fit into its memory."""
    allowed = room(work, memory)
    if allowed is None:
        return
    for rank, (peak, limit) in enumerate(zip(peaks(work, orders), allowed)):
        if peak > limit * (1 + 1e-9):
            fixed = state(work)[rank]
            raise InputError(
                f"{name} does not fit in {size(limit + fixed)}: rank {rank} needs {size(peak + fixed)}, "
                f"{size(fixed)} of it for parameters, gradients and optimizer state",
                "schedule",
                "Allow more memory, or choose auto, which keeps to the limit",
            )


def finish(
    name: str, work: WorkTables, orders: Sequence[Sequence[int]], memory: Sequence[float] | float | None
) -> Schedule:
    """The schedule of these orders. InputError if a rank's state and activations do not fit into its memory."""
    check(name, work, orders, memory)
    return with_messages(name, actions(work, orders), work.pipeline.messages)


# --- Local search on the orders themselves: move actions that the makespan hangs on ----------------------------------
#
# Terms: see work.py. A *critical path* is a chain of actions, each starting because the one before it ended (on its
# rank, or with a message), from the start of the step to its end. Only an order that changes on every critical path
# can be better, so moves start from actions on one of them.


Fits = Callable[[Sequence[Sequence[int]], Sequence[Sequence[float]]], bool]  # of orders and their start times

# How far an action moves, in places of its rank's order; near ones more often.
STEPS = (1, 1, 1, 2, 2, 3, 4, 6, 9)
# Trials without a better makespan after which it is not worth going on: for each action of the step, and at least.
MOVES_WITHOUT_GAIN, LEAST = 10, 1000


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
    patience = max(LEAST, MOVES_WITHOUT_GAIN * len(work.lanes) * work.microbatches)
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
        path = []
        while True:
            rank = home[lane // 3]
            place = self.place[lane][k]
            if lane % 3 == 2 and self.late[lane - 1][k]:
                lane -= 1  # W of a fused action starts with its B
            path.append((rank, place))
            start = starts[lane][k]
            if start <= near:
                return path
            sources = []
            if place:
                before, j = self.rows[rank][place - 1]
                if starts[before][j] + seconds[before][j] >= start - near:
                    sources.append((before, j))
            latest, source = -1.0, -1
            for other, travels, latency, wire in self.sources[lane]:
                arrival = starts[other][k] + seconds[other][k] + self.late[other][k]
                arrival += latency + wire[k] if travels else 0.0
                if arrival > latest:
                    latest, source = arrival, other
            # A message that waited for its link arrives later than this; it is then the only explanation.
            if source >= 0 and (latest >= start - near or not sources):
                sources.append((source, k))
            if not sources:
                return path
            lane, k = sources[0] if len(sources) == 1 else sources[rng.random() < 0.5]


# --- Search for the order of F, B and W with the least makespan under a memory limit ---------------------------------
#
# Terms: see work.py and greedy.py.
#
# In turn: the named schedules that fit; the greedy scheduler under a grid of targets; a local search on the best
# order. B and W are fused where the memory asks for it, and at the end where nothing is lost. It ends when the lower
# bound is reached or the budget is spent. The budget counts simulated actions, not time, so the same arguments give
# the same schedule on every machine.


# Budget by default: simulated actions for each action of the step. About 0.4 microseconds each.
EVALUATIONS = 2000
GREEDY_COST = 3  # choosing the next action takes as long as replaying three

LEADS = (1.0, 1.5, 0.5, 2.0, 4.0, 1000.0)  # F ahead of B, in depths
LAGS = ("depth", "none", "fused", "one", "twice", "all")  # W behind B
PATIENCE = (1.0, 0.0)


@dataclass(frozen=True, order=True)
class BestOrders:
    """Orders and how long they take. The first of equals wins."""

    seconds: float
    work: WorkTables = field(compare=False)
    orders: list[list[int]] = field(compare=False)


def auto(
    pipeline: Pipeline,
    placement: Sequence[int],
    microbatches: int,
    memory: Sequence[float] | float | None = None,
    budget: int | None = None,
    seed: int = 0,
    in_turn: bool = False,
) -> Schedule:
    """The best schedule found: never slower than a named one that fits in the same memory.

    memory: bytes of each rank, or of all, for state and activations. budget: actions to simulate; by default 2,000 for
    each action of the step. Where `pipeline.loads` gives microbatches different sizes, orders of the microbatches other
    than 0, 1, ... are tried too, the same on all stages: gradients are then summed in that order. in_turn: keep to
    0, 1, ..., so that gradients have the bits that the named schedules give.
    InputError if the memory cannot hold one microbatch at a time: the least that would do, and what takes it.
    """
    work = WorkTables.of(pipeline, placement, microbatches)
    best = searched_orders(work, memory, budget, seed, in_turn)
    return finish("auto", best.work, spared(best.work, best.orders), memory)


def searched_orders(
    work: WorkTables,
    memory: Sequence[float] | float | None = None,
    budget: int | None = None,
    seed: int = 0,
    in_turn: bool = False,
) -> BestOrders:
    """What `auto` makes its schedule of; its arguments."""
    pipeline, placement, microbatches = work.pipeline, work.placement, work.microbatches
    allowed = room(work, memory)
    enough = lower_bound(work, allowed) * (1 + 1e-6)
    size = len(work.lanes) * microbatches
    left = EVALUATIONS * size if budget is None else budget
    candidates = [BestOrders(makespan(work, orders), work, orders) for orders in _named(work, allowed)]
    rules: list[tuple[float, int, Rule]] = []
    hastened_of: dict[object, tuple[list[list[int]], float]] = {}  # many rules are the same where little is trained
    for rule in _rules(work, allowed):
        if candidates and (left <= 0 or min(candidates).seconds <= enough):
            break
        kind = (rule.patience, rule.fused, *(tuple(rule.priority[lane]) for lane in work.lanes))
        if kind not in hastened_of:
            hastened_of[kind] = hastened(work, rule, _least(candidates))
        orders, seconds = hastened_of[kind]
        left -= GREEDY_COST * size
        candidates.append(BestOrders(seconds, work, orders))
        rules.append((seconds, len(rules), rule))
    best_rules = [rule for *_, rule in sorted(rules)[:8]]
    for sequence in () if in_turn else _sequences(pipeline, microbatches):
        other = WorkTables.of(pipeline, placement, microbatches, sequence)
        for rule in best_rules:
            if left <= 0 or min(candidates).seconds <= enough:
                break
            orders, seconds = hastened(other, rule, _least(candidates))
            left -= GREEDY_COST * size
            candidates.append(BestOrders(seconds, other, orders))
    best = min(candidates)
    if best.seconds > enough and left > 0:
        orders, seconds = improve(best.work, best.orders, allowed, left // size, random.Random(seed), enough)
        best = BestOrders(seconds, best.work, orders)
    return best


def _least(candidates: Sequence[BestOrders]) -> float:
    """Seconds of the best so far."""
    return min(candidates).seconds if candidates else math.inf


def _named(work: WorkTables, allowed: Sequence[float] | None) -> Iterator[list[list[int]]]:
    """The orders of the named schedules that take these stages on these ranks and fit."""
    for name in ORDERS:
        try:
            orders = settled_all(work, ORDERS[name](work, allowed), allowed)
        except InputError:
            continue  # it wants its stages elsewhere
        if orders is not None:
            yield orders


def _rules(work: WorkTables, allowed: Sequence[float] | None) -> Iterator[Rule]:
    """Rules whose priorities are target times in a steady state: one microbatch per cycle of the busiest rank.

    F of a stage is due when the first could be there, in cycles; B a lead later, W a lag after that. The lead is a
    multiple of the stage's depth, counted in stages or in cycles from F to B of one microbatch alone.
    """
    alone = _alone(work)
    stages = range(len(work.placement))
    load = [0.0] * work.ranks
    for lane in work.lanes:
        load[work.placement[lane // 3]] += sum(work.seconds[lane])
    cycle = max(load) / work.microbatches or 1.0
    unit = depths(work)
    trip = [1.0 + max(0.0, alone[3 * s + 1] - alone[3 * s]) / cycle for s in stages]
    deepest = max(unit)
    lags = {
        "none": [0.0 for _ in stages],
        "fused": [0.0 for _ in stages],
        "one": [1.0 for _ in stages],
        "depth": [float(deepest - d) for d in unit],
        "twice": [2.0 * (deepest - d) for d in unit],
        "all": [1000.0 * work.microbatches for _ in stages],
    }
    measures: tuple[list[float], list[float]] = ([float(d) for d in unit], trip)
    for lead, lag, depth, patience in product(LEADS, LAGS, measures, PATIENCE):
        priority = []
        for s in stages:
            due = alone[3 * s] / cycle
            back = due + lead * depth[s] - 0.5
            for start in (due, back, back + lags[lag][s] + 0.1):
                priority.append([start + k for k in range(work.microbatches)])
        yield Rule(priority, memory=allowed, patience=patience, fused=lag == "fused")


def _alone(work: WorkTables) -> list[float]:
    """[lane]: when its first action could start if every stage had a rank of its own."""
    start = [0.0] * len(work.needs)
    for lane in work.upstream_first:
        for fed, slot, latency, wire in work.feeds[lane]:
            arrival = start[lane] + work.seconds[lane][0] + (latency + wire[0] if slot >= 0 else 0.0)
            start[fed] = max(start[fed], arrival)
    return start


def _sequences(pipeline: Pipeline, microbatches: int) -> Iterator[list[int]]:
    """Other orders of the microbatches, if their sizes differ: small ones first and last, ascending, descending.

    A small first microbatch shortens the ramp, a small last one the way back.
    """
    loads = pipeline.loads
    if loads is None or len(set(loads.features[:microbatches])) == 1:
        return
    ascending = sorted(range(microbatches), key=lambda mb: (loads.work[mb], mb))
    yield ascending[::2] + ascending[1::2][::-1]
    yield ascending
    yield ascending[::-1]
