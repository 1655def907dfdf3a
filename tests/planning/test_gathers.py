"""Where schedules make parameters whole: every use is between, little is whole at once, and room is used."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.errors import InputError, ScheduleError
from csc.ir.schedule import WHOLE, Schedule, parse, part, verify
from csc.planning.gathers import held_whole, seconds_waited_for, with_gathers
from csc.planning.plan import plan
from csc.planning.problem import Problem, Unit, Value, pipeline
from csc.planning.schedules import SCHEDULES
from csc.simulation.idle import Path, idle, longest_path
from csc.simulation.pipeline import Link, Pipeline, StageWork, peak_memory
from csc.simulation.simulate import makespan, simulate
from csc.simulation.timeline import from_json, to_json
from tests.planning.schedule_cases import Case, cases, chain

STAGE = StageWork(1.0, 1.0, 1.0, saved=1.0, gathered=10.0, gather=0.5)
ONE = chain(3, STAGE)
PLAIN = "rank 0: F 0 0 | F 1 0 | F 2 0 | BW 2 0 | BW 1 0 | BW 0 0 | REDUCE"
GATHERING = """# schedule, 1 ranks, 1 microbatches
rank 0: GATHER 0 | GATHER 1 | F 0 0 | FREE 0 | GATHER 2 | F 1 0 | F 2 0 | BW 2 0 | FREE 2 | GATHER 0 |
        BW 1 0 | FREE 1 | BW 0 0 | FREE 0 | REDUCE
"""


def check(schedule: Schedule, pipeline: Pipeline, microbatches: int) -> None:
    verify(schedule, pipeline.messages, pipeline.has_b, pipeline.has_w, microbatches, pipeline.divided)


def test_the_next_stage_comes_while_one_is_at_work() -> None:
    """Stage 1 stays whole while stage 2 alone computes: beside one, another can."""
    assert with_gathers(ONE, parse(PLAIN)) == parse(GATHERING)
    assert str(parse(GATHERING)) == GATHERING
    check(parse(GATHERING), ONE, 1)


def test_gathers_take_seconds_and_bytes() -> None:
    """The first one is waited for; the others are there in time, or late by what they take longer than the work."""
    timeline = simulate(ONE, parse(GATHERING))
    assert [event.start for event in timeline.ranks[0]] == [0.5, 1.5, 2.5, 3.5, 5.5, 7.5]
    assert timeline.peak_memory == (23.0,) and peak_memory(ONE, parse(GATHERING)) == [23.0]
    slow = Pipeline(tuple(replace(stage, gather=1.75) for stage in ONE.stages), ONE.messages)
    starts = [event.start for event in simulate(slow, parse(GATHERING)).ranks[0]]
    assert starts == [1.75, 3.5, 5.25, 6.25, 8.25, 10.25]


def test_what_waits_for_parameters_is_idle_for_them() -> None:
    """Each comes .75 seconds after the stage before has computed; the first one is in the ramp."""
    slow = Pipeline(tuple(replace(stage, gather=1.75) for stage in ONE.stages), ONE.messages)
    timeline = simulate(slow, parse(GATHERING))
    assert timeline.makespan == makespan(slow, parse(GATHERING)) == 12.25
    (causes,) = idle(slow, parse(GATHERING), timeline)
    assert {cause: seconds for cause, seconds in causes.items() if seconds} == {"ramp": 1.75, "gather": 1.5}
    assert longest_path(parse(GATHERING), timeline) == Path({0: 9.0}, 0.0, 3.25)
    assert from_json(to_json(timeline), "a file").makespan == 12.25


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("GATHER 0 | GATHER 1", "GATHER 1", "'F 0 0' comes where the parameters of stage 0 are not whole"),
        ("| FREE 0 | GATHER 2", "| FREE 0 | FREE 0 | GATHER 2", "'FREE 0' ends no use"),
        ("F 0 0 | FREE 0", "F 0 0", "'GATHER 0' stands there again before 'FREE 0'"),
        ("BW 0 0 | FREE 0", "BW 0 0", "'GATHER 0' has no FREE"),
        ("| F 0 0 | FREE 0", "| FREE 0 | F 0 0", "'FREE 0' ends no use"),
        ("BW 2 0 | FREE 2", "FREE 2 | BW 2 0", "'BW 2 0' comes where the parameters of stage 2 are not whole"),
        ("GATHER 2", "GATHER 3", "'GATHER 3' belongs to stage 3, the program has 3 stages"),
        ("GATHER 2", "GATHER 2 0", "'GATHER 2 0' is not an action"),
    ],
)
def test_what_is_used_is_whole(old: str, new: str, what: str) -> None:
    assert old in GATHERING
    with pytest.raises(ScheduleError, match=what):
        check(parse(GATHERING.replace(old, new, 1)), ONE, 1)


def test_nothing_is_gathered_that_is_not_divided() -> None:
    whole = chain(3, replace(STAGE, gathered=0.0))
    assert with_gathers(whole, parse(PLAIN)) == parse(PLAIN)
    with pytest.raises(ScheduleError, match="'GATHER 0' has nothing to do: no parameters of stage 0 are divided"):
        check(parse(GATHERING), whole, 1)


def test_a_part_gathers_for_what_it_has() -> None:
    """Without a backward in stages 0 and 1, their second gathers go; a stage without parameters has none."""
    left = part(parse(GATHERING), ONE.messages, [False, False, True], [False, False, True], [True, True, False])
    assert " | ".join(map(str, left.ranks[0])) == (
        "GATHER 0 | GATHER 1 | F 0 0 | FREE 0 | F 1 0 | F 2 0 | BW 2 0 | FREE 1 | REDUCE"
    )
    verify(left, ONE.messages, [False, False, True], [False, False, True], 1, [True, True, False])


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from(["gpipe", "1f1b"]), st.lists(st.sampled_from([0.0, 2.0, 8.0]), min_size=6, max_size=6))
def test_any_schedule(case: Case, name: str, sizes: list[float]) -> None:
    """The same work in the same order; two stages of a rank at most are whole at once, unless there is room."""
    bare = case.pipeline
    stages = tuple(replace(s, gathered=size, gather=size / 8) for s, size in zip(bare.stages, sizes))
    work = replace(bare, stages=stages)
    schedule = SCHEDULES[name](work, case.placement, case.microbatches, None)
    found = with_gathers(work, schedule)
    check(found, work, case.microbatches)
    for actions, plain in zip(found.ranks, schedule.ranks, strict=True):
        assert [action for action in actions if action.kind not in WHOLE] == list(plain)
        whole: set[int] = set()
        for action in actions:
            whole = whole | {action.stage} if action.kind == "GATHER" else whole
            assert len(whole) <= 2
            whole = whole - {action.stage} if action.kind == "FREE" else whole
    timeline = simulate(work, found)
    assert timeline.makespan == pytest.approx(makespan(work, found))
    for busy, causes in zip(timeline.busy, idle(work, found, timeline)):
        assert min(causes.values()) >= -1e-9
        assert sum(causes.values()) == pytest.approx(timeline.makespan - busy, abs=1e-9)
    path = longest_path(found, timeline)
    assert sum(path.work.values()) + path.messages + path.gathers == pytest.approx(timeline.makespan)
    assert timeline.end >= makespan(bare, schedule) - 1e-9
    peaks = peak_memory(work, found)
    for limit in (max(peaks), max(peaks) + 4.0, 1e9):
        kept = with_gathers(work, schedule, limit)
        check(kept, work, case.microbatches)
        assert max(peak_memory(work, kept)) <= limit
        assert makespan(work, kept) <= makespan(work, found) + 1e-9


def problem(memory: float | None, count: int = 4, microbatches: int = 3) -> Problem:
    units = tuple(
        Unit(f"u{u}", "trunk", 1.0, 1.0, 1.0, saved=2.0, stashed=2.0, state=3.0, gathered=8.0) for u in range(count)
    )
    return Problem(units, (), 1, microbatches, memory, gathering=Link(0.5, 8.0))


def gathers(schedule: Schedule) -> int:
    return sum(action.kind == "GATHER" for action in schedule.ranks[0])


def test_one_rank_gathers_less_where_there_is_room() -> None:
    """Without a limit what holds least: for each microbatch all stages forward and back. With room a stage stays
    where its gather would be waited for, and there is a stage after the other.
    """
    least, roomy = plan(problem(None)), plan(problem(1e6))
    assert gathers(least.schedule) == 4 + 2 + 4 + 4 and gathers(roomy.schedule) == 5
    assert roomy.makespan < least.makespan and max(roomy.peak_memory) > max(least.peak_memory)
    tight = plan(problem(max(least.peak_memory)))
    assert max(tight.peak_memory) <= max(least.peak_memory) and tight.makespan == least.makespan
    with pytest.raises(InputError, match="with the stages that are whole at once, the limit is 20"):
        plan(problem(20.0))


def test_stages_of_one_rank_are_even_in_what_they_gather() -> None:
    assert [len(stage) for stage in plan(problem(None, count=24)).stages] == [3] * 8
    assert [len(stage) for stage in plan(problem(None), chunks=2).stages] == [2, 2]
    first, merge, *rest = problem(None).units  # what is put together without parameters is so where the first part is
    flow = (Value(0, (1,), (True,), 1.0, 1.0), Value(1, (2,), (True,), 1.0, 1.0))
    merging = replace(problem(None), units=(first, replace(merge, gathered=0.0), *rest), values=flow)
    assert plan(merging).stages == ((0, 1), (2,), (3,))
    assert len(plan(problem(None), stages=[[0], [1, 2, 3]]).stages) == 2
    with pytest.raises(InputError, match="4 regions cannot fill 5 stages"):
        plan(problem(None), chunks=5)
    given = plan(
        problem(None, microbatches=1), schedule=parse("rank 0: F 0 0 | BW 0 0 | REDUCE"), stages=[[0, 1, 2, 3]]
    )
    assert "GATHER 0" in str(given.schedule)


@pytest.mark.parametrize("memory", [14.0, 16.0, 18.0])
@pytest.mark.parametrize("waiting", [False, True])
def test_a_plan_leaves_room_for_what_is_whole(memory: float, waiting: bool) -> None:
    """Activations may take what is left beside two whole stages, not all that is left beside the state."""
    units = tuple(
        Unit(f"u{i}", "llm", 1.0, 1.0, 1.0, saved=1.0, stashed=0.5, state=1.0, gathered=1.0) for i in range(16)
    )
    values = tuple(Value(i, (i + 1,), (True,), 0.1, 0.1) for i in range(15))
    found = plan(Problem(units, values, 4, 8, memory, gathering=Link(0.0, 10.0), waiting=waiting), effort=0.1)
    assert max(found.peak_memory) <= memory


def test_a_stage_that_is_alone_on_its_rank_stays_whole_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is simulated to keep it."""
    tried: list[Schedule] = []

    def counted(work: Pipeline, schedule: Schedule) -> float:
        tried.append(schedule)
        return makespan(work, schedule)

    monkeypatch.setattr("csc.planning.gathers.makespan", counted)
    units = tuple(Unit(f"u{i}", "llm", 1.0, 1.0, 1.0, saved=1.0, gathered=1.0) for i in range(4))
    values = tuple(Value(i, (i + 1,), (True,), 0.1, 0.1) for i in range(3))
    numbers = pipeline(Problem(units, values, 4, 8, gathering=Link(0.0, 1.0)), tuple((u,) for u in range(4)))
    made = with_gathers(numbers, SCHEDULES["1f1b"](numbers, range(4), 8), 100.0)
    assert len(tried) == 2 and gathers(made) == 1


def test_stages_of_ranks_that_wait_for_each_other_are_kept_together() -> None:
    """One of them alone makes no step shorter: other gathers are waited for. All are gathered at the start."""
    work = replace(chain(6, STAGE), stages=tuple(replace(STAGE, gather=8.0) for _ in range(6)))
    schedule = SCHEDULES["interleaved-1f1b"](work, (0, 1, 0, 1, 0, 1), 8, None)
    least, kept = with_gathers(work, schedule), with_gathers(work, schedule, 1e3)
    assert gathers(least) > 10 and [action.kind for action in kept.ranks[0][:3]] == ["GATHER"] * 3
    assert gathers(kept) == 3 and makespan(work, kept) < 0.7 * makespan(work, least)
    assert seconds_waited_for(work, kept) <= 24.0 < seconds_waited_for(work, least)


def test_a_plan_that_would_wait_for_gathers_leaves_room_to_keep_stages() -> None:
    """What is searched first fills the memory with activations; each stage is then gathered for each microbatch."""
    units = tuple(
        Unit(f"u{i}", "llm", 1.0, 1.0, 1.0, saved=1.0, stashed=0.5, state=1.0, gathered=1.0) for i in range(16)
    )
    values = tuple(Value(i, (i + 1,), (True,), 0.1, 0.1) for i in range(15))
    asked = Problem(units, values, 4, 8, 18.0, gathering=Link(0.0, 0.2))
    found = plan(asked, effort=0.1)
    assert max(found.peak_memory) <= 18.0
    assert found.makespan <= plan(held_whole(asked), effort=0.1).makespan + 4 * 5.0
