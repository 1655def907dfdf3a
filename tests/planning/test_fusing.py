"""Which B's and W's are fused: against all choices there are, and what it costs and saves."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.planning.problem import pipeline
from csc.planning.schedules import stages_per_rank
from csc.planning.schedules.greedy import Rule, joined, run, settled, settled_all, spared
from csc.planning.schedules.named import ORDERS
from csc.planning.schedules.work import WorkTables, actions, least, makespan, peaks, room
from csc.simulation.pipeline import StageWork
from tests.planning.graphs import problems
from tests.planning.schedule_cases import Case, cases, chain

Orders = list[list[int]]


def apart(work: WorkTables, orders: Orders) -> Orders:
    """The orders with every fused action as its B and its W."""
    both = {work.fused(s): [3 * s + 1, 3 * s + 2] for s in range(len(work.placement))}
    return [[lane for entry in order for lane in both.get(entry, [entry])] for order in orders]


def greedy(case: Case, spare: float, urgency: str, fused: bool) -> tuple[WorkTables, Orders, list[float] | None]:
    """Some order that fits into `spare` times the least memory."""
    work = WorkTables.of(case.pipeline, case.placement, case.microbatches)
    allowed = room(work, [limit * spare for limit in least(work)]) if math.isfinite(spare) else None
    priority = [[float(urgency.index("FBW"[lane % 3]))] * work.microbatches for lane in range(work.size)]
    return work, run(work, Rule(priority, memory=allowed, fused=fused))[0], allowed


SOME = (cases(4, 3), st.sampled_from([1.0, 1.5, math.inf]), st.permutations("FBW").map("".join), st.booleans())


@settings(deadline=None, max_examples=150)
@given(*SOME)
def test_settled_orders_fit_and_no_other_choice_is_faster(case: Case, spare: float, urgency: str, fused: bool) -> None:
    work, orders, allowed = greedy(case, spare, urgency, fused)
    found = settled_all(work, orders, allowed)
    assert found is not None
    assert [sorted(order) for order in apart(work, found)] == [sorted(order) for order in apart(work, orders)]
    limits = allowed or [math.inf] * work.ranks
    assert all(peak <= limit * (1 + 1e-6) + 1e-9 for peak, limit in zip(peaks(work, found), limits))
    assert settled_all(work, found, allowed) == found
    seconds = makespan(work, found)
    assert seconds <= makespan(work, orders) * (1 + 1e-9)
    whole = [joined(work, order) for order in apart(work, found)]
    pairs = [(rank, i) for rank, order in enumerate(whole) for i, entry in enumerate(order) if entry >= work.size]
    for choice in product((False, True), repeat=len(pairs)) if len(pairs) <= 6 else ():
        tried = [list(order) for order in whole]
        for (rank, i), divide in reversed(list(zip(pairs, choice))):
            if divide:
                lane = work.lane_of[tried[rank][i]]
                tried[rank][i : i + 1] = [lane, lane + 1]
        if all(peak <= limit * (1 + 1e-9) for peak, limit in zip(peaks(work, tried), limits)):
            assert makespan(work, tried) >= seconds * (1 - 1e-9)


@settings(deadline=None, max_examples=150)
@given(*SOME)
def test_what_is_spared_costs_nothing_and_holds_no_more(case: Case, spare: float, urgency: str, fused: bool) -> None:
    work, orders, _ = greedy(case, spare, urgency, fused)
    found = spared(work, orders)
    assert makespan(work, found) <= makespan(work, orders) * (1 + 1e-9)
    assert all(a <= b + 1e-9 for a, b in zip(peaks(work, found), peaks(work, orders)))
    assert apart(work, found) == apart(work, orders)


@settings(deadline=None)
@given(cases(), st.sampled_from([name for name in ORDERS if stages_per_rank(name) == 1]))
def test_joined_orders_hold_no_more_and_do_the_same(case: Case, name: str) -> None:
    work = WorkTables.of(case.pipeline, case.placement, case.microbatches)
    orders = apart(work, ORDERS[name](work, None))
    found = [joined(work, order) for order in orders]
    assert apart(work, found) == orders
    assert all(a <= b + 1e-9 for a, b in zip(peaks(work, found), peaks(work, orders)))
    assert makespan(work, found) >= makespan(work, orders) * (1 - 1e-9)
    parts = [[part for action in row for part in action.parts] for row in actions(work, found)]
    assert parts == actions(work, orders)


def test_memory_decides_which_are_divided() -> None:
    """Two microbatches in flight on rank 0, one on rank 1: there is room to divide where fewer are alive."""
    work = WorkTables.of(chain(2, StageWork(1.0, 1.0, 1.0, saved=1.0, stashed=4.0, fused=1.0)), range(2), 3)
    fused = ORDERS["1f1b"](work, None)
    assert fused == [[0, 0, 6, 0, 6, 6], [3, 7, 3, 7, 3, 7]]
    assert settled_all(work, fused, [2.9, 2.9]) is None
    assert settled_all(work, fused, [3.0, 2.0]) == fused
    assert settled_all(work, fused, [4.0, 4.0]) == [[0, 0, 6, 0, 6, 1, 2], [3, 4, 5, 3, 4, 5, 3, 4, 5]]
    assert settled(work, [0, 1, 0, 2, 1, 2], 4.0) is None  # what stage 0 keeps does not fit beside another F
    assert settled(work, [0, 1, 0, 2, 1, 2], 5.0) == [0, 1, 0, 2, 1, 2]
    assert makespan(work, fused) == 3 + 3 * 3
    assert makespan(work, [[0, 0, 1, 2, 0, 1, 2, 1, 2], [3, 4, 5, 3, 4, 5, 3, 4, 5]]) == 2 + 3 * 3


def test_at_the_end_what_nobody_waits_for_is_fused() -> None:
    """Rank 0 sends no gradient, so it may always fuse; rank 1 not while rank 0 waits."""
    work = WorkTables.of(chain(2, StageWork(1.0, 1.0, 1.0, stashed=4.0, fused=1.0)), range(2), 2)
    orders = [[0, 0, 1, 2, 1, 2], [3, 4, 5, 3, 4, 5]]
    found = spared(work, orders)
    assert found[0] == [0, 0, 6, 6] and found[1][:3] == [3, 4, 5]
    assert makespan(work, found) == makespan(work, orders)


@pytest.mark.slow
@settings(deadline=None)
@given(problems())
def test_a_stage_keeps_what_its_units_do(problem) -> None:  # type: ignore[no-untyped-def]
    everything = [list(range(len(problem.units)))]
    stage = pipeline(problem, everything).stages[0]
    moments = [max(0.0, u.stashed - (u.saved if u.has_b else 0.0)) for u in problem.units if u.has_w]
    assert stage.fused <= max(moments, default=0.0)
    assert stage.fused == pytest.approx(min(max(moments, default=0.0), max(0.0, stage.stashed - stage.saved)))
