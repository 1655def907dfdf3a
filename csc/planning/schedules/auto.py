"""Search for the order of F, B and W with the least makespan under a memory limit.

Terms: see work.py and greedy.py.

    auto(pipeline, placement, microbatches, memory=None, budget=None, seed=0, in_turn=False) -> Schedule
    searched_orders(work, memory=None, budget=None, seed=0, in_turn=False) -> BestOrders      the same as orders

In turn: the named schedules that fit; the greedy scheduler under a grid of targets; a local search on the best order.
B and W are fused where the memory asks for it, and at the end where nothing is lost.
It ends when the lower bound is reached or the budget is spent. The budget counts simulated actions, not time, so the
same arguments give the same schedule on every machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from csc.errors import InputError
from csc.ir.schedule import Schedule
from csc.planning.schedules.activations import room
from csc.planning.schedules.finish import finish
from csc.planning.schedules.fusing import hastened, settled_all, spared
from csc.planning.schedules.greedy import Rule
from csc.planning.schedules.makespan_bound import lower_bound
from csc.planning.schedules.named import ORDERS, depths
from csc.planning.schedules.search import improve
from csc.planning.schedules.timing import makespan
from csc.planning.schedules.work import WorkTables
from csc.simulation.pipeline import Pipeline

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
    found = [BestOrders(makespan(work, orders), work, orders) for orders in _named(work, allowed)]
    rules: list[tuple[float, int, Rule]] = []
    made: dict[object, tuple[list[list[int]], float]] = {}  # many rules are the same where little is trained
    for rule in _rules(work, allowed):
        if found and (left <= 0 or min(found).seconds <= enough):
            break
        kind = (rule.patience, rule.fused, *(tuple(rule.priority[lane]) for lane in work.lanes))
        if kind not in made:
            made[kind] = hastened(work, rule, _least(found))
        orders, seconds = made[kind]
        left -= GREEDY_COST * size
        found.append(BestOrders(seconds, work, orders))
        rules.append((seconds, len(rules), rule))
    best_rules = [rule for *_, rule in sorted(rules)[:8]]
    for sequence in () if in_turn else _sequences(pipeline, microbatches):
        other = WorkTables.of(pipeline, placement, microbatches, sequence)
        for rule in best_rules:
            if left <= 0 or min(found).seconds <= enough:
                break
            orders, seconds = hastened(other, rule, _least(found))
            left -= GREEDY_COST * size
            found.append(BestOrders(seconds, other, orders))
    best = min(found)
    if best.seconds > enough and left > 0:
        orders, seconds = improve(best.work, best.orders, allowed, left // size, random.Random(seed), enough)
        best = BestOrders(seconds, best.work, orders)
    return best


def _least(found: Sequence[BestOrders]) -> float:
    """Seconds of the best so far."""
    return min(found).seconds if found else math.inf


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
            at = start[lane] + work.seconds[lane][0] + (latency + wire[0] if slot >= 0 else 0.0)
            start[fed] = max(start[fed], at)
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
