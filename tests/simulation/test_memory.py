"""Memory curves against a count of what is alive, and peaks against the curves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from csc.ir.schedule import Schedule, parse
from csc.simulation.pipeline import Pipeline, StageWork, peak_memory
from csc.simulation.simulate import simulate
from csc.simulation.timeline import Timeline
from tests.simulation.random_loads import taken

from .orders import chain, gpipe, one_f_one_b, runs


def test_one_microbatch_by_hand() -> None:
    pipeline = Pipeline((StageWork(1.0, 2.0, 3.0, saved=10.0, stashed=4.0, state=100.0),))
    timeline = simulate(pipeline, parse("rank 0: F 0 0 | B 0 0 | W 0 0 | REDUCE"))
    assert timeline.memory == (((0.0, 100.0), (0.0, 110.0), (3.0, 104.0), (6.0, 100.0)),)
    assert timeline.peak_memory == (110.0,) and timeline.peak_activations == (10.0,)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (StageWork(1.0, 1.0, has_w=False, saved=5.0, stashed=3.0), [(0.0, 0.0), (0.0, 5.0), (2.0, 0.0)]),
        (StageWork(1.0, 0.0, 1.0, has_b=False, saved=5.0, stashed=3.0), [(0.0, 0.0), (0.0, 5.0), (2.0, 0.0)]),
        (StageWork(1.0, has_b=False, has_w=False, saved=5.0, stashed=3.0), [(0.0, 0.0)]),
    ],
)
def test_stages_without_b_or_w(stage: StageWork, expected: list[tuple[float, float]]) -> None:
    parts = ["F 0 0"] + ["B 0 0"] * stage.has_b + ["W 0 0"] * stage.has_w
    assert list(simulate(Pipeline((stage,)), parse(f"rank 0: {' | '.join(parts)}")).memory[0]) == expected


def test_a_fused_backward_by_hand() -> None:
    """B and W apart hold what all regions keep, 40 bytes, BW what one of them does, 4."""
    pipeline = Pipeline((StageWork(1.0, 2.0, 3.0, saved=10.0, stashed=40.0, fused=4.0, state=100.0),))
    timeline = simulate(pipeline, parse("rank 0: F 0 0 | BW 0 0 | REDUCE"))
    assert timeline.memory == (((0.0, 100.0), (0.0, 110.0), (1.0, 114.0), (6.0, 100.0)),)
    assert timeline.busy == (6.0,)
    assert simulate(pipeline, parse("rank 0: F 0 0 | B 0 0 | W 0 0")).peak_memory == (140.0,)


def test_1f1b_holds_p_minus_s_microbatches_and_gpipe_all() -> None:
    pipeline = Pipeline((StageWork(1.0, 2.0, has_w=False, saved=1.0, state=50.0),) * 4, chain(4))
    assert simulate(pipeline, one_f_one_b(pipeline, 9)).peak_activations == (4.0, 3.0, 2.0, 1.0)
    assert simulate(pipeline, gpipe(pipeline, 9)).peak_activations == (9.0,) * 4
    assert peak_memory(pipeline, gpipe(pipeline, 9)) == [59.0] * 4


def alive(pipeline: Pipeline, timeline: Timeline, rank: int, time: float) -> float:
    """Bytes of a rank just after `time`, one microbatch at a time."""
    total = timeline.state[rank]
    spans: dict[tuple[int, int], dict[str, tuple[float, float]]] = {}
    for event in timeline.ranks[rank]:
        span = (event.start, event.end)
        spans.setdefault((event.action.stage, event.action.microbatch), {})[event.action.kind] = span
    for (stage, mb), span in spans.items():
        until = span.get("BW", span.get("B", span.get("W")))
        if until and span["F"][0] <= time < until[1]:
            total += taken(pipeline, "saved", stage, mb)
        if "BW" in span and span["BW"][0] <= time < span["BW"][1]:
            total += taken(pipeline, "fused", stage, mb)
        if "B" in span and "W" in span and span["B"][1] <= time < span["W"][1]:
            total += taken(pipeline, "stashed", stage, mb)
    return total


@settings(max_examples=150, deadline=None)
@given(runs())
def test_curves_count_what_is_alive(run: tuple[Pipeline, Schedule, int]) -> None:
    pipeline, schedule, _ = run
    timeline = simulate(pipeline, schedule)
    for rank, curve in enumerate(timeline.memory):
        assert timeline.state[rank] == sum(pipeline.stages[s].state for s, r in schedule.placement.items() if r == rank)
        assert [time for time, _ in curve] == sorted(time for time, _ in curve)
        last = dict(curve)  # of points at one time the last one holds
        for time, size in last.items():
            assert size == alive(pipeline, timeline, rank, time)
        for earlier, later in zip(sorted(last), sorted(last)[1:]):
            assert last[earlier] == alive(pipeline, timeline, rank, (earlier + later) / 2)
        assert curve[-1][1] == timeline.state[rank]


@settings(max_examples=150, deadline=None)
@given(runs())
def test_peaks_need_no_simulation(run: tuple[Pipeline, Schedule, int]) -> None:
    pipeline, schedule, _ = run
    assert peak_memory(pipeline, schedule) == list(simulate(pipeline, schedule).peak_memory)


def test_a_compute_without_length_still_counts() -> None:
    """At the end everything is free again, but at time 0 the saved bytes were there."""
    pipeline = Pipeline((StageWork(0.0, 0.0, has_w=False, saved=7.0),))
    assert simulate(pipeline, parse("rank 0: F 0 0 | B 0 0")).peak_memory == (7.0,)
