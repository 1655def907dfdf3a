"""The named schedules: the published bubbles and memory on uniform chains, and validity on everything else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.errors import InputError, ScheduleError
from csc.ir.schedule import Schedule, parse, verify, with_messages
from csc.planning.schedules import SCHEDULES, placement, stages_per_rank, timed
from csc.simulation.pipeline import Loads, Pipeline, StageWork, peak_memory
from csc.simulation.simulate import makespan, simulate
from tests.planning.in_flight import peak_in_flight
from tests.planning.schedule_cases import Case, cases, chain

NAMED = [name for name in SCHEDULES if name != "auto"]


def bubbles(pipeline: Pipeline, schedule: Schedule) -> tuple[float, float]:
    """Idle time by the zero-bubble papers' measure (the longest span of a rank from its first action to its last, less
    its work) and by the makespan (less the work of a rank).
    """
    timeline = simulate(pipeline, schedule)
    work = sum(event.end - event.start for event in timeline.ranks[0])
    return max(events[-1].end - events[0].start for events in timeline.ranks) - work, timeline.makespan - work


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [2, 3, 5])
def test_published_bubbles_of_equal_stages(ranks: int, rounds: int) -> None:
    """F = B = W = 1 per rank, microbatches enough to fill the pipeline; activations in microbatches of a rank."""
    p, m = ranks, rounds * ranks

    def measured(name: str) -> tuple[float, float, float]:
        v = stages_per_rank(name)
        pipeline = chain(p * v, StageWork(1 / v, 1 / v, 1 / v, saved=1 / v, stashed=1 / v))
        schedule = SCHEDULES[name](pipeline, placement(name, p), m)
        span, whole = bubbles(pipeline, schedule)
        return pytest.approx(span), pytest.approx(whole), pytest.approx(max(peak_memory(pipeline, schedule)))

    ramp = p - 1
    assert measured("gpipe") == (3 * ramp, 3 * ramp, m)
    assert measured("1f1b") == (3 * ramp, 3 * ramp, p)
    assert measured("interleaved-1f1b") == (3 * ramp / 2, 3 * ramp / 2, p + ramp / 2)
    assert measured("interleaved-zb") == (ramp / 2, ramp / 2, p)
    assert measured("zb-h1") == (ramp, ramp, p)
    assert measured("zb-h2") == (0, ramp, 2 * p - 1)
    assert measured("zb-v") == (0, ramp / 2, p)


@pytest.mark.parametrize("ranks", [2, 4, 6])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 2.0, 0.5), (1.0, 1.5, 1.25), (2.0, 1.0, 1.0)])
def test_published_formulas_of_unequal_f_b_w(ranks: int, times: tuple[float, float, float]) -> None:
    f, b, w = times
    pipeline = chain(ranks, StageWork(f, b, w, saved=1.0, stashed=1.0))
    span = {
        name: bubbles(pipeline, SCHEDULES[name](pipeline, range(ranks), 4 * ranks))[0]
        for name in ("1f1b", "zb-h1", "zb-h2")
    }
    ramp = ranks - 1
    assert span["1f1b"] == pytest.approx(ramp * (f + b + w))
    if w <= min(f, b):  # the papers' formulas are for W that fits into the gaps
        assert span["zb-h1"] == pytest.approx(ramp * (f + b - w))
    if times == (1.0, 1.0, 1.0):
        assert span["zb-h2"] == pytest.approx(ramp * (f + b - 2 * w))


def test_1f1b_is_the_classical_order() -> None:
    pipeline = chain(3, StageWork(1.0, 1.0, 1.0))
    schedule = SCHEDULES["1f1b"](pipeline, range(3), 4)
    compute = [" ".join(f"{a.kind}{a.microbatch}" for a in rank if a.computes) for rank in schedule.ranks]
    assert compute == [
        "F0 F1 F2 BW0 F3 BW1 BW2 BW3",
        "F0 F1 BW0 F2 BW1 F3 BW2 BW3",
        "F0 BW0 F1 BW1 F2 BW2 F3 BW3",
    ]
    assert peak_in_flight(schedule) == [3, 2, 1]


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_interleaved_zero_bubble_divides_the_ramp_of_zb_h1(ranks: int, chunks: int) -> None:
    """(p - 1) (F + B - W) / v in the memory of 1F1B, whatever the number of stages on a rank."""
    pipeline = chain(ranks * chunks, StageWork(1.0, 1.0, 1.0, saved=1.0, stashed=1.0))
    schedule = SCHEDULES["interleaved-zb"](pipeline, placement("interleaved-zb", ranks, chunks), 3 * ranks)
    assert bubbles(pipeline, schedule) == (ranks - 1, ranks - 1)
    assert peak_memory(pipeline, schedule) == [ranks * chunks] * ranks
    if chunks == 1:
        assert schedule.ranks == SCHEDULES["zb-h1"](pipeline, range(ranks), 3 * ranks).ranks


def test_interleaved_zero_bubble_is_the_published_order() -> None:
    """One forward of lead from rank to rank, and one W of lag; groups of two microbatches go through both stages."""
    pipeline = chain(4, StageWork(1.0, 1.0, 1.0))
    schedule = SCHEDULES["interleaved-zb"](pipeline, placement("interleaved-zb", 2), 4)
    assert [" ".join(f"{a.kind}{a.stage}.{a.microbatch}" for a in rank if a.computes) for rank in schedule.ranks] == [
        "F0.0 F0.1 F2.0 F2.1 B2.0 W2.0 F0.2 B2.1 W2.1 F0.3 B0.0 W0.0 F2.2 B0.1 W0.1 F2.3 B2.2 W2.2 B2.3 W2.3 "
        "B0.2 W0.2 B0.3 W0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 W3.0 F1.2 B1.0 W3.1 F1.3 B1.1 W1.0 F3.2 B3.2 W1.1 F3.3 B3.3 W3.2 B1.2 W3.3 "
        "B1.3 W1.2 W1.3",
    ]


def test_a_fused_backward_holds_what_one_region_keeps() -> None:
    """Recomputed layers: W needs much more than F saved. 1F1B holds that of one region, with B and W apart of all."""
    pipeline = chain(4, StageWork(1.0, 2.0, 1.0, saved=1.0, stashed=20.0, fused=4.0))
    fused = SCHEDULES["1f1b"](pipeline, range(4), 8)
    orders = [[part for a in actions if a.computes for part in a.parts] for actions in fused.ranks]
    apart = with_messages("apart", orders, pipeline.messages)
    assert peak_memory(pipeline, fused) == [8.0, 7.0, 6.0, 5.0]
    assert peak_memory(pipeline, apart) == [23.0, 22.0, 21.0, 20.0]
    assert makespan(pipeline, fused) == 3 * 4 + 8 * 4
    assert makespan(pipeline, apart) == 3 * 3 + 8 * 4


def test_warm_up_is_the_longest_path_to_the_end() -> None:
    """Two encoders beside each other: the one that joins late runs no further ahead than it must."""
    messages = {("F", 0, 2): 0.0, ("F", 1, 4): 0.0, ("F", 2, 3): 0.0, ("F", 3, 4): 0.0}
    messages |= {("B", b, a): 0.0 for _, a, b in list(messages)}
    pipeline = Pipeline((StageWork(1.0, 1.0, 1.0),) * 5, messages)
    schedule = SCHEDULES["1f1b"](pipeline, range(5), 12)
    assert peak_in_flight(schedule) == [4, 2, 3, 2, 1]


def test_eager_takes_the_memory_that_it_is_given() -> None:
    pipeline = chain(4, StageWork(1.0, 1.0, 1.0, saved=1.0, stashed=0.5, state=10.0))
    for limit, peak in ((11.0, [1, 1, 1, 1]), (14.0, [4, 3, 2, 1]), (16.0, [6, 5, 4, 2]), (99.0, [8, 6, 4, 2])):
        schedule = SCHEDULES["eager-1f1b"](pipeline, range(4), 12, limit)
        assert peak_in_flight(schedule) == peak
        assert max(peak_memory(pipeline, schedule)) <= limit
    assert makespan(pipeline, SCHEDULES["eager-1f1b"](pipeline, range(4), 12)) <= makespan(
        pipeline, SCHEDULES["1f1b"](pipeline, range(4), 12)
    )


def check(case: Case, schedule: Schedule) -> None:
    """Valid, and still so as text; each stage runs F, B and W in one order of microbatches."""
    pipeline = case.pipeline
    verify(schedule, pipeline.messages, pipeline.has_b, pipeline.has_w, case.microbatches)
    assert parse(str(schedule)) == schedule
    assert list(schedule.placement.values()) == list(case.placement)
    for stage in range(len(pipeline.stages)):
        orders = {
            tuple(a.microbatch for actions in schedule.ranks for a in actions if kind in a.kind and a.stage == stage)
            for kind, there in (("F", True), ("B", pipeline.has_b[stage]), ("W", pipeline.has_w[stage]))
            if there
        }
        assert len(orders) == 1
        if pipeline.loads is None:
            assert orders == {tuple(range(case.microbatches))}


@settings(deadline=None)
@given(cases(), st.sampled_from([name for name in NAMED if stages_per_rank(name) == 1]))
def test_named_schedules_are_valid_for_any_stages(case: Case, name: str) -> None:
    check(case, SCHEDULES[name](case.pipeline, case.placement, case.microbatches))


@settings(deadline=None)
@given(cases(), st.sampled_from(["interleaved-1f1b", "interleaved-zb", "zb-v"]), st.data())
def test_schedules_of_several_stages_a_rank_are_valid(case: Case, name: str, data: st.DataObject) -> None:
    count = len(case.pipeline.stages)
    chunks = 2 if name == "zb-v" else data.draw(st.sampled_from([v for v in (1, 2, 3, 6) if count % v == 0]))
    if count % chunks:
        return
    placed = Case(case.pipeline, tuple(placement(name, count // chunks, chunks)), case.microbatches)
    check(placed, SCHEDULES[name](case.pipeline, placed.placement, case.microbatches))


@settings(deadline=None, max_examples=50)
@given(cases(), st.sampled_from([name for name in NAMED if stages_per_rank(name) == 1]), st.sampled_from([None, 30.0]))
def test_a_schedule_is_timed_without_being_made(case: Case, name: str, memory: float | None) -> None:
    given_to = (case.pipeline, case.placement, case.microbatches, memory)
    try:
        made = makespan(case.pipeline, SCHEDULES[name](*given_to))
    except InputError as error:
        with pytest.raises(InputError) as again:
            timed(name, *given_to)
        assert str(again.value) == str(error)
    else:
        assert timed(name, *given_to) == pytest.approx(made, rel=1e-12)


def test_frozen_stages_have_no_slot() -> None:
    frozen, trained = StageWork(1.0, has_b=False, has_w=False), StageWork(1.0, 1.0, 1.0)
    messages = {("F", s, s + 1): 0.0 for s in range(3)} | {("B", 3, 2): 0.0}
    pipeline = Pipeline((frozen, frozen, trained, trained), messages)
    for name in SCHEDULES:
        ranks = 4 // stages_per_rank(name)
        schedule = SCHEDULES[name](pipeline, placement(name, ranks), 5)
        assert not [a for actions in schedule.ranks for a in actions if a.kind in "BW" and a.stage < 2], name


def test_placements() -> None:
    assert placement("1f1b", 3) == [0, 1, 2]
    assert placement("interleaved-1f1b", 3) == [0, 1, 2, 0, 1, 2]
    assert placement("interleaved-1f1b", 2, 3) == [0, 1, 0, 1, 0, 1]
    assert placement("interleaved-zb", 2, 3) == [0, 1, 0, 1, 0, 1]
    assert placement("zb-v", 3) == [0, 1, 2, 2, 1, 0]
    assert {name: stages_per_rank(name) for name in SCHEDULES} == dict.fromkeys(SCHEDULES, 1) | {
        "interleaved-1f1b": 2,
        "interleaved-zb": 2,
        "zb-v": 2,
    }


def test_what_does_not_fit_is_said() -> None:
    pipeline = chain(4, StageWork(1.0, 1.0, 1.0, saved=2.0, stashed=1.0, state=100.0))
    with pytest.raises(InputError, match="zb-v does not run 4 stages on the ranks"):
        SCHEDULES["zb-v"](pipeline, range(4), 4)
    for name in ("interleaved-1f1b", "interleaved-zb"):
        with pytest.raises(InputError, match=f"{name} does not run 4 stages"):
            SCHEDULES[name](pipeline, [0, 0, 1, 1], 4)
    with pytest.raises(InputError, match="zb-v cannot have 3 stages on a rank"):
        placement("zb-v", 2, 3)
    with pytest.raises(InputError, match=r"there is no schedule 'zb'.*Choose one of gpipe, 1f1b"):
        stages_per_rank("zb")
    with pytest.raises(InputError, match="there is no schedule 'zb'"):
        placement("zb", 2)
    with pytest.raises(InputError, match="3 ranks for 4 stages"):
        SCHEDULES["1f1b"](pipeline, range(3), 4)
    with pytest.raises(InputError, match="leaves a rank without a stage"):
        SCHEDULES["1f1b"](pipeline, [0, 1, 3, 4], 4)
    with pytest.raises(InputError, match="cannot be 0 microbatches"):
        SCHEDULES["1f1b"](pipeline, range(4), 0)
    with pytest.raises(InputError, match="the loads of 2 microbatches, the schedule has 3"):
        SCHEDULES["1f1b"](
            Pipeline(
                pipeline.stages, pipeline.messages, loads=Loads.scaled(pipeline.stages, pipeline.messages, (1.0, 2.0))
            ),
            range(4),
            3,
        )
    with pytest.raises(ScheduleError, match="F 1>0 leads the wrong way"):
        SCHEDULES["1f1b"](Pipeline((StageWork(1.0),) * 2, {("F", 1, 0): 0.0}), range(2), 1)
    with pytest.raises(
        InputError, match="gpipe does not fit in 120 bytes: rank 0 needs 124 bytes, 100 bytes of it for"
    ):
        SCHEDULES["gpipe"](pipeline, range(4), 12, 120.0)
    for name in ("1f1b", "auto"):
        with pytest.raises(
            InputError, match=r"nothing fits in 101 bytes: rank 0 .* needs 102 bytes, 100 .* and 2 bytes"
        ):
            SCHEDULES[name](pipeline, range(4), 12, 101.0)
    with pytest.raises(InputError, match="2 memory limits for 4 ranks"):
        SCHEDULES["auto"](pipeline, range(4), 12, [1000.0, 1000.0])
