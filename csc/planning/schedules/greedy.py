"""An event-driven list scheduler: whenever a rank is free, it picks among the actions that are ready by a rule.

Terms: see work.py.

    Rule(priority, in_flight, held, memory, patience, fused)
    order(pipeline, placement, microbatches, rule) -> for each rank its F, B, W and BW
    run(work, rule, give_up) -> (orders, makespan)

Time runs as in csc.simulation: a message leaves when its action ends and its directed pair of ranks is idle, occupies
the pair for size / bandwidth and arrives after the latency.

Why it never deadlocks. All lanes run their microbatches in one sequence. Let i be the first microbatch that is not
done. All before it are done, so what is left of i is at the heads of its lanes; and as the F, B and W of one microbatch
form a DAG, some action of i has all its inputs. It is not held back for ever:
- W: never held back.
- B: only by bytes, if the stage keeps more after B than it saved, and fused as well as apart. W's that are ready run
  first and give back theirs; then it can be fused.
- F: by counts only if an earlier microbatch were in flight, and all of these are done; by bytes as B.
That the bytes then fit is an invariant, `_safe`: the rank could finish its microbatches in turn, from the first that is
not done to the last that it has started, once the W's that are ready have run. It holds at the start, as each fits
alone. An F only starts if it holds afterwards. B and W give back bytes, or take what was set aside for them. So i gets
done, and then i + 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from csc.errors import InputError
from csc.ir.schedule import Action
from csc.planning.schedules.memory import Reserve, reserves
from csc.planning.schedules.work import WorkTables, actions
from csc.simulation.pipeline import Pipeline


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
    count = work.microbatches
    seconds, growth, feeds, needs = work.seconds, work.growth, work.feeds, work.needs
    stages = work.pipeline.stages
    priority, patience, fusing = rule.priority, rule.patience, rule.fused
    lanes_of = work.lanes_of
    rank_of = [work.placement[lane // 3] for lane in range(work.size)]
    kinds = [lane % 3 for lane in range(work.size)]
    size, moment = work.size, work.moment
    both = [stage.has_b and stage.has_w for stage in stages]
    left = [[n] * count for n in needs]
    when = [[0.0] * count for _ in range(size)]
    inf = math.inf
    # Of each lane's next action: when it can start, inf for not known or none left, and its priority.
    ready = [inf if n else 0.0 for n in needs]
    urgency = [row[0] for row in priority]
    head = [0] * size
    free = [0.0] * work.slots
    bytes_ = [0.0] * work.ranks
    caps = [inf if rule.memory is None else rule.memory[r] * (1 + 1e-9) for r in range(work.ranks)]
    in_flight = [inf] * len(stages) if rule.in_flight is None else list(rule.in_flight)
    held = [inf] * len(stages) if rule.held is None else list(rule.held)
    limited = rule.memory is not None or rule.in_flight is not None or rule.held is not None
    reserve = reserves(work) if rule.memory is not None else [None] * work.ranks
    pending = [0.0] * work.ranks  # bytes that W's which are ready will give back
    # The lane that ends a stage's hold on a microbatch, and the one that ends its flight; -1: nothing is held.
    last = [3 * s + 2 if stage.has_w else 3 * s + 1 if stage.has_b else -1 for s, stage in enumerate(stages)]
    back = [3 * s + 1 if stage.has_b else end for s, (stage, end) in enumerate(zip(stages, last))]
    gate = [3 * s + (1 if stage.has_b else 0) if stage.has_w else -1 for s, stage in enumerate(stages)]  # makes W ready
    orders: list[list[int]] = [[] for _ in range(work.ranks)]
    busy = [0.0] * work.ranks
    spare = [give_up] * work.ranks  # how long a rank may still pause, less what it has paused
    for lane in work.lanes:
        spare[rank_of[lane]] -= sum(seconds[lane])
    idle = [False] * work.ranks
    done = 0
    slack = 1e-9 * max(map(max, seconds))
    heap = [(0.0, r) for r in range(work.ranks)]
    makespan = 0.0
    while heap:
        now, rank = heappop(heap)
        if now < busy[rank]:
            continue  # a wake-up from before the rank found other work
        reach = now + slack
        best, best_entry, best_priority = -1, -1, inf
        later, later_at, later_priority = -1, inf, inf  # the best of what is known to become ready
        wake = inf
        room = caps[rank] - bytes_[rank]
        for lane in lanes_of[rank]:
            at = ready[lane]
            if at == inf:
                continue
            p = urgency[lane]
            if at > reach:
                if at < wake:
                    wake = at
                if not patience or p > best_priority or p > later_priority:
                    continue
            elif p >= best_priority:
                continue
            kind = kinds[lane]
            entry = lane
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
                if growth[lane][k] > room:
                    continue
                stage = lane // 3
                end = last[stage]
                if end >= 0:
                    if k - head[back[stage]] >= in_flight[stage] or k - head[end] >= held[stage]:
                        continue
                    guard = reserve[rank]
                    if guard is not None and not _safe(guard, head, lane, k, bytes_[rank], pending[rank], caps[rank]):
                        continue
            if at > reach:
                later, later_at, later_priority = lane, at, p
            else:
                best, best_entry, best_priority = lane, entry, p
        if best < 0:
            idle[rank] = True
            if wake < inf:
                heappush(heap, (wake, rank))
            continue
        lane, entry = best, best_entry
        k = head[lane]
        at = ready[lane]
        end_time = (now if now > at else at) + seconds[entry][k]
        if (
            patience
            and later >= 0
            and later_priority < best_priority
            and later_at - now <= patience * (end_time - later_at)
        ):
            idle[rank] = True
            heappush(heap, (later_at, rank))
            continue
        spare[rank] -= end_time - seconds[entry][k] - busy[rank]
        if spare[rank] < 0:
            return orders, inf
        idle[rank] = False
        busy[rank] = end_time
        orders[rank].append(entry)
        bytes_[rank] += growth[entry][k]
        done += 1
        if entry == lane:
            if kinds[lane] == 2:
                pending[rank] += growth[lane][k]
            elif lane == gate[lane // 3]:
                pending[rank] -= growth[lane - lane % 3 + 2][k]
        else:
            done += 1
        if end_time > makespan:
            makespan = end_time
        ahead = k + 1
        for moved in (lane,) if entry == lane else (lane, lane + 1):
            head[moved] = ahead
            ready[moved] = when[moved][ahead] if ahead < count and not left[moved][ahead] else inf
            if ahead < count:
                urgency[moved] = priority[moved][ahead]
        for fed, slot, latency, wire in feeds[entry]:
            at = end_time
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
            if not waits[k]:
                if head[fed] == k:
                    ready[fed] = row[k]
                if idle[rank_of[fed]]:
                    heappush(heap, (row[k], rank_of[fed]))
        heappush(heap, (end_time, rank))
    if done < len(work.lanes) * count:
        raise InputError(
            "the rule's limits leave ranks without anything that they may start",
            "schedule",
            "Allow every stage one microbatch in flight, every rank the bytes of one, and finite priorities",
        )
    return orders, makespan


def _safe(
    reserve: Reserve, head: Sequence[int], lane: int, position: int, taken: float, pending: float, cap: float
) -> bool:
    """Whether the rank could still finish all its microbatches up to this one, in turn, if it started this F now.

    taken: bytes alive on it; pending: those of them that the W's that are ready give back.
    """
    hold = taken - pending + reserve.saved[lane // 3][position]
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
