"""Schedule text, its verifier (each rule broken on purpose), and the planners that produce schedules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csc.errors import ScheduleError
from csc.ir.schedule import Message, Schedule, parse, peak_in_flight, verify
from csc.planning.schedules import gpipe, one_f_one_b

TEXT = """# by hand, 2 stages
stage 0: F 0 0 | SEND F 0>1 0 | F 0 1 | SEND F 0>1 1 |
    RECV B 1>0 0 | B 0 0 | W 0 0 | RECV B 1>0 1 | B 0 1 | W 0 1 | REDUCE   # the end
stage 1: RECV F 0>1 0 | F 1 0 | B 1 0 | SEND B 1>0 0 | W 1 0
         | RECV F 0>1 1 | F 1 1 | B 1 1 | SEND B 1>0 1 | W 1 1 | REDUCE
"""
MESSAGES: list[Message] = [("F", 0, 1), ("B", 1, 0)]


def check(text: str, has_w: tuple[bool, bool] = (True, True)) -> None:
    verify(parse(text), MESSAGES, (True, True), has_w, 2)


def test_text_round_trip() -> None:
    schedule = parse(TEXT)
    check(TEXT)
    assert schedule.name == "by hand" and schedule.microbatches == 2
    assert parse(str(schedule)) == schedule
    assert peak_in_flight(schedule) == [2, 1]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "no stage"),
        ("  F 0 0", "line 1: the line continues"),
        ("stage 0: F 0 0\nstage 2: F 2 0", "line 2: stage 2 stands where stage 1"),
        ("stage 0: G 0 0", "'G 0 0' is not an action"),
        ("stage 0: F 1 0", "belongs to stage 1"),
        ("stage 0: SEND F 1>0 0", "belongs to stage 1"),
        ("hello", "'hello' does not start with"),
    ],
)
def test_parse_refuses(text: str, part: str) -> None:
    with pytest.raises(ScheduleError, match=part):
        parse(text)


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("F 0 1 | SEND F 0>1 1 |", "SEND F 0>1 1 |", "stage 0: 'F 0 1' is missing"),
        ("F 0 1 | SEND", "F 0 1 | F 0 1 | SEND", "'F 0 1' stands there twice"),
        ("| W 0 1 ", "", "'W 0 1' is missing"),
        ("| W 1 1 | REDUCE", "| REDUCE", "stage 1: 'W 1 1' is missing"),
        ("W 0 0", "W 0 7", "outside 0..1"),
        ("F 1 0 | B 1 0", "B 1 0 | F 1 0", "'B 1 0' comes before 'F 1 0'"),
        ("B 0 0 | W 0 0", "W 0 0 | B 0 0", "'W 0 0' comes before 'B 0 0'"),
        ("| SEND B 1>0 1", "", "'SEND B 1>0 1' is missing"),
        ("RECV B 1>0 1 | ", "", "'RECV B 1>0 1' is missing"),
        ("F 0 0 | SEND F 0>1 0", "SEND F 0>1 0 | F 0 0", "'SEND F 0>1 0' comes before 'F 0 0'"),
        ("RECV F 0>1 0 | F 1 0", "F 1 0 | RECV F 0>1 0", "'F 1 0' comes before 'RECV F 0>1 0'"),
        ("RECV F 0>1 0", "RECV F 0>1 0 | RECV B 0>1 0", "no such message"),
        ("W 0 1 | REDUCE", "REDUCE | W 0 1", "'W 0 1' comes after REDUCE"),
        ("W 0 1 | REDUCE", "W 0 1", "'REDUCE' is missing"),
        (
            "F 0 0 | SEND F 0>1 0 | F 0 1 | SEND F 0>1 1",
            "F 0 0 | F 0 1 | SEND F 0>1 1 | SEND F 0>1 0",
            "matched by order",
        ),
        (
            "F 0 1 | SEND F 0>1 1 |\n    RECV B 1>0 0 | B 0 0 | W 0 0 | RECV B 1>0 1",
            "F 0 1 |\n RECV B 1>0 0 | B 0 0 | W 0 0 | RECV B 1>0 1 | SEND F 0>1 1",
            "deadlock: stage 0 waits at 'RECV B 1>0 1', stage 1 waits at 'RECV F 0>1 1', in a circle",
        ),
    ],
)
def test_verify_names_what_is_wrong(old: str, new: str, part: str) -> None:
    assert old in TEXT
    with pytest.raises(ScheduleError, match=part):
        check(TEXT.replace(old, new))


def test_verify_wants_no_work_for_frozen_stages() -> None:
    with pytest.raises(ScheduleError, match="the stage has no W"):
        check(TEXT, has_w=(False, True))
    with pytest.raises(ScheduleError, match="has 2 stages, the program has 1"):
        verify(parse(TEXT), MESSAGES, [True], [True], 2)


def test_verify_is_linear() -> None:
    stages, microbatches = 16, 512
    chain: list[Message] = [("F", s, s + 1) for s in range(stages - 1)]
    chain += [("B", s + 1, s) for s in range(stages - 1)]
    schedule = one_f_one_b(stages, microbatches, chain, [True] * stages, [True] * stages)
    assert peak_in_flight(schedule) == [stages - s for s in range(stages)]


@st.composite
def stage_graphs(draw: st.DrawFn) -> tuple[int, int, list[Message], list[bool], list[bool]]:
    """A random DAG of stages, with random frozen ones, and the gradient messages that it needs."""
    stages = draw(st.integers(1, 6))
    pairs = [(a, b) for b in range(stages) for a in range(b)]
    edges = {pair for pair in pairs if draw(st.booleans())}
    for a in range(stages - 1):  # every stage but the last (the loss) is of use to a later one
        if not any(pair[0] == a for pair in edges):
            edges.add((a, draw(st.integers(a + 1, stages - 1))))
    trainable = [draw(st.booleans()) for _ in range(stages)]
    needs = list(trainable)  # a gradient flows to a stage if it or a stage before it is trainable
    for stage in range(stages):
        needs[stage] = needs[stage] or any(needs[a] for a, b in edges if b == stage)
    messages: list[Message] = [("F", a, b) for a, b in edges]
    messages += [("B", b, a) for a, b in edges if needs[a]]
    return stages, draw(st.integers(1, 9)), messages, needs, trainable


@given(stage_graphs(), st.sampled_from([gpipe, one_f_one_b]))
def test_planned_schedules_are_valid(
    graph: tuple[int, int, list[Message], list[bool], list[bool]], plan: Callable[..., Schedule]
) -> None:
    stages, microbatches, messages, has_b, has_w = graph
    schedule = plan(stages, microbatches, messages, has_b, has_w)
    verify(schedule, messages, has_b, has_w, microbatches)
    verify(parse(str(schedule)), messages, has_b, has_w, microbatches)
    for stage, peak in enumerate(peak_in_flight(schedule)):
        limit = microbatches if plan is gpipe else min(microbatches, stages - stage)
        assert peak == (limit if has_b[stage] else 0)
        assert schedule.stages[stage][-1].kind == "REDUCE"


def test_planners_want_stages_in_order() -> None:
    with pytest.raises(ScheduleError, match="F 1>0 leads the wrong way"):
        gpipe(2, 1, [("F", 1, 0)], [True, True], [True, True])
