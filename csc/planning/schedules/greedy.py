"""An event-driven list scheduler, and which B's and W's run as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

from csc.errors import InputError
from csc.ir.schedule import Action
from csc.planning.schedules.work import Reserve, WorkTables, actions, makespan, reserves, start_times
from csc.simulation.pipeline import Pipeline

# --- An event-driven list scheduler: whenever a rank is free, it picks among the actions that are ready by a rule ----
#
# Terms: see work.py.
#
# Time runs as in csc.simulation: a message leaves when its action ends and its directed pair of ranks is idle,
# occupies the pair for size / bandwidth and arrives after the latency.
#
# Why it never deadlocks. All lanes run their microbatches in one sequence. Let i be the first microbatch that is not
# done. All before it are done, so what is left of i is at the heads of its lanes; and as the F, B and W of one
# microbatch form a DAG, some action of i has all its inputs. It is not held back for ever:
# - W: never held back.
# - B: only by bytes, if the stage keeps more after B than it saved, and fused as well as apart. W's that are ready run
#   first and give back theirs; then it can be fused.
# - F: by counts only if an earlier microbatch were in flight, and all of these are done; by bytes as B.
# That the bytes then fit is an invariant, `_safe`: the rank could finish its microbatches in turn, from the first that
# is not done to the last that it has started, once the W's that are ready have run. It holds at the start, as each fits
# alone. An F only starts if it holds afterwards. B and W give back bytes, or take what was set aside for them. So i
# gets done, and then i + 1.


@dataclass(frozen=True)
class Rule:
    """priority[lane][position]: of what is ready and allowed, the least goes first. Finite.

    in_flight[stage]: microbatches that may be between their F and their B's end. held[stage]: between F and the end of
    the last of B and W. memory[rank]: bytes of activations (without state). None: no limit.
    patience: a rank waits for a better action that is known to become ready in x seconds, rather than start one that
    would keep it busy for y seconds longer than x, if x <= patience * y.
    fused: B and W run as one wherever they can; else only where what all regions keep for W does not fit.
    """

    priority: Sequence[Sequence[float]]
    in_flight: Sequence[float] | None = None
    held: Sequence[float] | None = None
    memory: Sequence[float] | None = None
    patience: float = 0.0
    fused: bool = False


def order(pipeline: Pipeline, placement: Sequence[int], microbatches: int, rule: Rule) -> list[list[Action]]:
    """For each rank its F, B, W and BW, in the order in which the rule runs them."""
    work = WorkTables.of(pipeline, placement, microbatches)
    return actions(work, run(work, rule)[0])


def run(work: WorkTables, rule: Rule, give_up: float = math.inf) -> tuple[list[list[int]], float]:
    """The orders of the ranks and their makespan. Every limit must allow one microbatch at a time.

    give_up: seconds. Where a rank cannot finish by then, even without a further pause, the run ends: the makespan is
    inf and the orders are not whole.
    """
    inf = math.inf
    seconds = work.seconds
    state = _State.of(work, rule)
    head, busy, heap = state.head, state.busy, state.heap
    choose, start = _chooser(work, rule, state), _starter(work, rule, state)
    orders: list[list[int]] = [[] for _ in range(work.ranks)]
    spare = [give_up] * work.ranks  # how long a rank may still pause, less what it has paused
    for lane in work.lanes:
        spare[work.placement[lane // 3]] -= work.totals[lane]
    while heap:
        now, rank = heap[0]
        if now < busy[rank]:
            heappop(heap)
            continue  # a wake-up from before the rank found other work
        entry, k, earliest = choose(rank, now)
        if entry < 0:
            if earliest < inf:
                heapreplace(heap, (earliest, rank))
            else:
                heappop(heap)
            continue
        takes = seconds[entry][k]
        end = (now if now > earliest else earliest) + takes
        spare[rank] -= end - takes - busy[rank]
        if spare[rank] < 0:
            return orders, inf
        busy[rank] = end
        heapreplace(heap, (end, rank))
        orders[rank].append(entry)
        start(rank, entry, k, now, end)
    if any(head[lane] < work.microbatches for lane in work.lanes):
        raise InputError(
            "the rule's limits leave ranks without anything that they may start",
            "schedule",
            "Allow every stage one microbatch in flight, every rank the bytes of one, and finite priorities",
        )
    return orders, max(busy)


@dataclass(slots=True)
class _State:
    """Where a run stands.

    By lane: the position of its next action (head), its priority (urgency), when it can start (ready; inf for not known
    or none left). By lane and position: when the last input so far arrives (when), how many have not been sent (left).
    By rank: when it is free (busy), its bytes of activations, those that W's which are ready will give back (pending),
    the most bytes (caps). heap: the moments to look at ranks.
    """

    head: list[int]
    urgency: list[float]
    ready: list[float]
    when: list[list[float]]
    left: list[list[int]]
    busy: list[float]
    bytes: list[float]
    pending: list[float]
    caps: list[float]
    heap: list[tuple[float, int]]

    @classmethod
    def of(cls, work: WorkTables, rule: Rule) -> _State:
        """Before the first action."""
        count, ranks = work.microbatches, work.ranks
        return cls(
            head=[0] * work.size,
            urgency=[row[0] for row in rule.priority],
            ready=[math.inf if needed else 0.0 for needed in work.needs],
            when=[[0.0] * count for _ in range(work.size)],
            left=[[needed] * count for needed in work.needs],
            busy=[0.0] * ranks,
            bytes=[0.0] * ranks,
            pending=[0.0] * ranks,
            caps=[math.inf] * ranks if rule.memory is None else [most * (1 + 1e-9) for most in rule.memory],
            heap=[(0.0, rank) for rank in range(ranks)],
        )


# `_chooser` and `_starter` make functions over local names. These run once for each action of every schedule that a
# search tries, and to read attributes would be a tenth of what they take.


def _chooser(work: WorkTables, rule: Rule, state: _State) -> Callable[[int, float], tuple[int, int, float]]:
    """choose(rank, now) -> (entry, position, when its inputs are there) of what the rank is to start; or (-1, 0, when
    to look again), which is inf if no message that it waits for is on its way.
    """
    ready, urgency, head, bytes_, caps = state.ready, state.urgency, state.head, state.bytes, state.caps
    lanes_of, size, seconds, growth, moment = work.lanes_of, work.size, work.seconds, work.growth, work.moment
    patience, fusing, inf = rule.patience, rule.fused, math.inf
    kinds = [lane % 3 for lane in range(size)]
    both = [stage.has_b and stage.has_w for stage in work.pipeline.stages]
    admits = _admitter(work, rule, state)
    limited = rule.memory is not None or admits is not None
    slack = 1e-9 * work.longest

    def choose(rank: int, now: float) -> tuple[int, int, float]:
        reach = now + slack
        best, best_entry, best_priority = -1, -1, inf
        later_at, later_priority = inf, inf  # the best of what is known to become ready
        wake = inf
        room = caps[rank] - bytes_[rank]
        for lane in lanes_of[rank]:
            earliest = ready[lane]
            if earliest == inf:
                continue
            p = urgency[lane]
            if earliest > reach:
                if earliest < wake:
                    wake = earliest
                if not patience or p > best_priority or p > later_priority:
                    continue
            elif p >= best_priority:
                continue
            kind, entry = kinds[lane], lane
            if kind == 1:
                k = head[lane]
                fits = growth[lane][k] <= room
                if fusing or not fits:
                    stage = lane // 3
                    if both[stage] and head[lane + 1] == k and moment[stage][k] <= room:
                        entry, fits = size + stage, True
                if not fits:
                    continue
            elif kind == 0 and limited:
                k = head[lane]
                if growth[lane][k] > room or (admits is not None and not admits(rank, lane, k)):
                    continue
            if earliest > reach:
                later_at, later_priority = earliest, p
            else:
                best, best_entry, best_priority = lane, entry, p
        if best < 0:
            return -1, 0, wake
        earliest, k = ready[best], head[best]
        if later_priority < best_priority:
            end_time = (now if now > earliest else earliest) + seconds[best_entry][k]
            if later_at - now <= patience * (end_time - later_at):
                return -1, 0, later_at
        return best_entry, k, earliest

    return choose


def _admitter(work: WorkTables, rule: Rule, state: _State) -> Callable[[int, int, int], bool] | None:
    """admits(rank, lane, position): whether the counts, and the bytes that the rank must set aside, let this F start
    now. None: always.
    """
    head, bytes_, pending, caps = state.head, state.bytes, state.pending, state.caps
    stages = work.pipeline.stages
    reserve = reserves(work) if rule.memory is not None else [None] * work.ranks
    counted = rule.in_flight is not None or rule.held is not None
    if not counted and not any(reserve):
        return None
    in_flight = rule.in_flight or [math.inf] * len(stages)
    held = rule.held or [math.inf] * len(stages)
    # The lane that ends a stage's hold on a microbatch, and the one that ends its flight; -1: nothing is held.
    last = [3 * s + 2 if stage.has_w else 3 * s + 1 if stage.has_b else -1 for s, stage in enumerate(stages)]
    back = [3 * s + 1 if stage.has_b else end for s, (stage, end) in enumerate(zip(stages, last))]

    def admits(rank: int, lane: int, k: int) -> bool:
        stage = lane // 3
        end = last[stage]
        if end < 0:
            return True
        if k - head[back[stage]] >= in_flight[stage] or k - head[end] >= held[stage]:
            return False
        guard = reserve[rank]
        return guard is None or _safe(guard, head, lane, k, bytes_[rank] - pending[rank], caps[rank])

    return admits


def _starter(work: WorkTables, rule: Rule, state: _State) -> Callable[[int, int, int, float, float], None]:
    """start(rank, entry, position, now, end): run this from now to end, and tell the lanes that it feeds."""
    ready, urgency, head, when, left = state.ready, state.urgency, state.head, state.when, state.left
    bytes_, pending, busy, heap = state.bytes, state.pending, state.busy, state.heap
    growth, owed, count, bounded = work.growth, work.owed, work.microbatches, rule.memory is not None
    moves = [(lane,) if entry < work.size else (lane, lane + 1) for entry, lane in enumerate(work.lane_of)]
    priority = rule.priority
    table = [
        [(fed, work.placement[fed // 3], when[fed], left[fed], slot, latency, wire) for fed, slot, latency, wire in row]
        for row in work.feeds
    ]
    free = [0.0] * work.slots
    inf = math.inf

    def start(rank: int, entry: int, k: int, now: float, end: float) -> None:
        if bounded:
            bytes_[rank] += growth[entry][k]
            pending[rank] += owed[entry][k]
        ahead = k + 1
        for moved in moves[entry]:
            head[moved] = ahead
            if ahead < count:
                ready[moved] = inf if left[moved][ahead] else when[moved][ahead]
                urgency[moved] = priority[moved][ahead]
            else:
                ready[moved] = inf
        for fed, home, arrival, waits, slot, latency, wire in table[entry]:
            moment = end
            if slot >= 0:
                if free[slot] > moment:
                    moment = free[slot]
                moment += wire[k]
                free[slot] = moment
                moment += latency
            if moment > arrival[k]:
                arrival[k] = moment
            else:
                moment = arrival[k]
            if waits[k] == 1:
                if head[fed] == k:
                    ready[fed] = moment
                if busy[home] <= now:
                    heappush(heap, (moment, home))
            waits[k] -= 1

    return start


def _safe(reserve: Reserve, head: Sequence[int], lane: int, position: int, taken: float, cap: float) -> bool:
    """Whether the rank could still finish all its microbatches up to this one, in turn, if it started this F now.

    taken: bytes alive on it once the W's that are ready have run.
    """
    hold = taken + reserve.saved[lane // 3][position]
    if hold + reserve.most <= cap:
        return True
    stages = reserve.stages
    for j in range(min(head[3 * s + 1] for s in stages), position + 1):
        grows = gives = 0.0
        for s in stages:
            if j < head[3 * s] or (3 * s == lane and j == position):
                if j >= head[3 * s + 1]:
                    gives += reserve.saved[s][j]
            else:
                grows += reserve.saved[s][j]
        if hold + grows + reserve.extra[j] > cap:
            return False
        hold -= gives
    return True


# --- Which B's and W's run as one ------------------------------------------------------------------------------------
#
# BW holds what W needs of one region at a time, B alone lets its gradient go earlier.
#
# Terms: see work.py. A B whose W is the next action of its rank can be fused with it: the rank does the same in the
# same time, holds less in between, and sends the gradient when W is done, too.


HOPELESS = 1.02  # dividing BW's makes up for less than this


def joined(work: WorkTables, order: Sequence[int]) -> list[int]:
    """The order of a rank with every B fused whose W is the next action, unless BW would hold more than the two."""
    head = [0] * work.size
    entries: list[int] = []
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
        entries.append(entry)
    return entries


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
    pairs: list[int] = []
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
            pairs.append(entry)
            continue
        weight = lane + 1
        paired = head[weight] == k and (entry != lane or (i < count and order[i] == weight))
        if paired:
            i += entry == lane
            head[weight] = k + 1
            if grown <= limit:
                pairs += (lane, weight)
            elif alive + moment[lane // 3][k] <= limit:
                pairs.append(size + lane // 3)
            else:
                return None
            alive += growth[size + lane // 3][k]
        elif entry != lane or grown > limit:
            return None
        else:
            alive = grown
            pairs.append(lane)
    return pairs


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
    settled_orders = settled_all(work, orders, rule.memory)
    return (orders, seconds) if settled_orders is None else (settled_orders, makespan(work, settled_orders))


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
    entries: list[int] = []
    for entry, k, paired in _steps(work, order):
        if not paired:
            entries.append(entry)
            continue
        fused = work.fused(entry // 3)
        end = starts[entry + 1][k] + work.seconds[entry + 1][k]
        awaited = any(
            end + (latency + wire[k] if slot >= 0 else 0.0) > starts[fed][k] * (1 + 1e-12)
            for fed, slot, latency, wire in work.feeds[fused]
        )
        entries += [entry, entry + 1] if awaited else [fused]
    return entries
