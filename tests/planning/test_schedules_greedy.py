"""The list scheduler: it finishes under any memory that holds one microbatch, and keeps to its limits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.errors import InputError
from csc.ir.schedule import verify, with_messages
from csc.planning.schedules.auto import lower_bound
from csc.planning.schedules.greedy import Rule, order, run
from csc.planning.schedules.work import WorkTables, actions, least, makespan, peaks, room, start_times
from csc.simulation.pipeline import Pipeline, StageWork, peak_memory
from csc.simulation.simulate import makespan as simulated
from csc.simulation.simulate import simulate
from tests.planning.schedule_cases import Case, cases, chain


def by_kind(work: WorkTables, kinds: str) -> list[list[float]]:
    """Priorities that look at the kind alone: "BFW" runs B before F before W."""
    return [[float(kinds.index("FBW"[lane % 3]))] * work.microbatches for lane in range(3 * len(work.placement))]


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(
    cases(),
    st.permutations("FBW"),
    st.sampled_from([1.0, 1.2, 2.0, 10.0, math.inf]),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_it_always_finishes_within_its_limits(
    case: Case,
    kinds: list[str],
    spare: float,
    flight: int | None,
    held: int | None,
    patience: float,
    fused: bool,
    chance: object,
) -> None:
    """Even if the memory holds one microbatch at a time and no more. What it says it takes, the simulator says too."""
    work = WorkTables.of(case.pipeline, case.placement, case.microbatches)
    memory = [limit * spare for limit in least(work)]
    allowed = room(work, memory) if math.isfinite(spare) else None
    stages = len(case.placement)
    priority = [[p + chance.random() for p in row] for row in by_kind(work, "".join(kinds))]  # type: ignore[attr-defined]
    rule = Rule(priority, flight and [flight] * stages, held and [held] * stages, allowed, patience, fused)
    orders, seconds = run(work, rule)
    schedule = with_messages("greedy", actions(work, orders), case.pipeline.messages)
    verify(schedule, case.pipeline.messages, case.pipeline.has_b, case.pipeline.has_w, case.microbatches)
    assert simulated(case.pipeline, schedule) == pytest.approx(seconds)
    assert makespan(work, orders) == pytest.approx(seconds)
    taken = peak_memory(case.pipeline, schedule)
    state = [
        sum(s.state for s, r in zip(case.pipeline.stages, case.placement) if r == rank) for rank in range(work.ranks)
    ]
    assert [peak + fixed for peak, fixed in zip(peaks(work, orders), state)] == pytest.approx(taken)
    if allowed is not None:
        assert all(peak <= limit * (1 + 1e-6) + 1e-6 for peak, limit in zip(taken, memory))
    for stage in range(stages):
        count = {"F": 0, "B": 0, "W": 0}
        for action in schedule.ranks[case.placement[stage]]:
            if action.stage == stage and action.computes:
                for part in action.parts:
                    count[part.kind] += 1
                back = "B" if case.pipeline.has_b[stage] else "W"
                last = "W" if case.pipeline.has_w[stage] else "B"
                if case.pipeline.has_b[stage] or case.pipeline.has_w[stage]:
                    assert flight is None or count["F"] - count[back] <= flight
                    assert held is None or count["F"] - count[last] <= held
    assert seconds >= lower_bound(work) * (1 - 1e-9)
    assert seconds >= lower_bound(work, allowed) * (1 - 1e-9)


@settings(deadline=None, max_examples=100)
@given(cases(), st.permutations("FBW"), st.booleans(), st.floats(0.5, 1.5))
def test_it_gives_up_only_what_takes_longer(case: Case, kinds: str, fused: bool, share: float) -> None:
    work = WorkTables.of(case.pipeline, case.placement, case.microbatches)
    rule = Rule(by_kind(work, "".join(kinds)), fused=fused)
    orders, seconds = run(work, rule)
    limit = seconds * share
    found, took = run(work, rule, limit)
    if limit >= seconds * (1 + 1e-9):
        assert (found, took) == (orders, seconds)
    else:
        assert took == math.inf or (found, took) == (orders, seconds)
    busiest = max(
        sum(
            work.seconds[3 * s + k][mb]
            for s, r in enumerate(case.placement)
            if r == rank
            for k in range(3)
            for mb in range(case.microbatches)
            if 3 * s + k in work.lanes
        )
        for rank in range(work.ranks)
    )
    if limit < busiest * (1 - 1e-9):
        assert took == math.inf


@settings(deadline=None)
@given(cases(), st.booleans())
def test_replay_has_the_simulators_times(case: Case, fused: bool) -> None:
    work = WorkTables.of(case.pipeline, case.placement, case.microbatches)
    orders, _ = run(work, Rule(by_kind(work, "BFW"), fused=fused))
    starts = start_times(work, orders)
    assert starts is not None
    timeline = simulate(case.pipeline, with_messages("x", actions(work, orders), case.pipeline.messages))
    for events in timeline.ranks:
        for event in events:
            at = event.start
            for part in event.action.parts:
                lane = 3 * part.stage + "FBW".index(part.kind)
                assert starts[lane][part.microbatch] == pytest.approx(at)
                at += work.seconds[lane][part.microbatch]


def test_the_order_follows_the_rule() -> None:
    pipeline = chain(1, StageWork(1.0, 1.0, 1.0))
    work = WorkTables.of(pipeline, [0], 2)

    def compute(kinds: str) -> str:
        return " ".join(f"{a.kind}{a.microbatch}" for a in order(pipeline, [0], 2, Rule(by_kind(work, kinds)))[0])

    assert compute("FBW") == "F0 F1 B0 B1 W0 W1"
    assert compute("BWF") == "F0 B0 W0 F1 B1 W1"
    assert compute("BFW") == "F0 B0 F1 B1 W0 W1"


def test_b_and_w_are_one_where_the_memory_asks_for_it() -> None:
    """With 3 bytes: two microbatches saved, and for one of them what a region keeps; not what all regions do."""
    pipeline = chain(1, StageWork(1.0, 1.0, 1.0, saved=1.0, stashed=4.0, fused=1.0))
    work = WorkTables.of(pipeline, [0], 2)

    def compute(memory: float, fused: bool) -> str:
        found = order(pipeline, [0], 2, Rule(by_kind(work, "FBW"), memory=[memory], fused=fused))
        return " ".join(f"{a.kind}{a.microbatch}" for a in found[0])

    assert compute(2.0, False) == compute(2.0, True) == "F0 BW0 F1 BW1"
    assert compute(3.0, False) == compute(3.0, True) == "F0 F1 BW0 BW1"
    assert compute(5.0, False) == "F0 F1 B0 W0 B1 W1"
    assert compute(8.0, False) == "F0 F1 B0 B1 W0 W1"
    assert compute(8.0, True) == "F0 F1 BW0 BW1"


def test_patience_waits_for_a_better_action() -> None:
    """Rank 0 has a long W when B is about to arrive. Waiting for it brings the last B forward."""
    stages = (StageWork(1.0, 1.0, 4.0), StageWork(1.0, 1.5, 0.5), StageWork(0.1, 0.1, 0.1))
    messages = {("F", 0, 1): 0.0, ("F", 1, 2): 0.0, ("B", 1, 0): 0.0, ("B", 2, 1): 0.0}
    work = WorkTables.of(Pipeline(stages, messages), range(3), 2)
    hasty, patient = (
        start_times(work, run(work, Rule(by_kind(work, "BFW"), patience=patience))[0]) for patience in (0.0, 1.0)
    )
    assert hasty is not None and patient is not None
    assert patient[1][1] < hasty[1][1]


def test_limits_that_hold_nothing_are_an_error() -> None:
    pipeline = chain(2, StageWork(1.0, 1.0, 1.0, saved=2.0))
    work = WorkTables.of(pipeline, range(2), 2)
    with pytest.raises(InputError, match="limits leave ranks without anything"):
        order(pipeline, range(2), 2, Rule(by_kind(work, "BFW"), memory=[1.0, 1.0]))


def test_replay_knows_a_deadlock() -> None:
    work = WorkTables.of(chain(2, StageWork(1.0, 1.0, 1.0)), range(2), 1)
    assert start_times(work, [[0, 1, 2], [4, 3, 5]]) is None
    assert makespan(work, [[1, 0, 2], [3, 4, 5]]) == math.inf
    assert makespan(work, [[0, 1, 2], [3, 4, 5]]) == 5.0
    assert makespan(work, [[0, work.fused(0)], [3, work.fused(1)]]) == 6.0
    assert makespan(work, [[work.fused(0), 0], [3, work.fused(1)]]) == math.inf


def test_replay_refuses_a_fused_action_before_an_earlier_w() -> None:
    work = WorkTables.of(chain(1, StageWork(1.0, 1.0, 1.0)), range(1), 2)
    assert start_times(work, [[0, 0, 1, work.fused(0), 2]]) is None
    assert makespan(work, [[0, 0, 1, 2, work.fused(0)]]) == 6.0
