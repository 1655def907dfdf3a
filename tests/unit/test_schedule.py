"""Schedule text, messages around an order, and the verifier: each rule broken on purpose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csc.errors import ScheduleError
from csc.ir.schedule import Action, Kind, Message, fused, parse, part, verify, with_messages
from tests.planning.in_flight import peak_in_flight

TEXT = """# by hand, 2 ranks
rank 0: F 0 0 | SEND F 0>1 0 | F 0 1 | SEND F 0>1 1 |
    RECV B 1>0 0 | B 0 0 | W 0 0 | RECV B 1>0 1 | B 0 1 | W 0 1 | REDUCE   # the end
rank 1: RECV F 0>1 0 | F 1 0 | B 1 0 | SEND B 1>0 0 | W 1 0
         | RECV F 0>1 1 | F 1 1 | B 1 1 | SEND B 1>0 1 | W 1 1 | REDUCE
"""
MESSAGES: list[Message] = [("F", 0, 1), ("B", 1, 0)]

# Stages 0 and 2 on rank 0, stage 1 on rank 1; stage 0 feeds both others.
FOLDED = """# folded
rank 0: F 0 0 | SEND F 0>1 0 | RECV F 1>2 0 | F 2 0 | B 2 0 | SEND B 2>1 0 | W 2 0 |
    RECV B 1>0 0 | B 0 0 | W 0 0 | REDUCE
rank 1: RECV F 0>1 0 | F 1 0 | SEND F 1>2 0 | RECV B 2>1 0 | B 1 0 | SEND B 1>0 0 | W 1 0 | REDUCE
"""
FOLDED_MESSAGES: list[Message] = [("F", 0, 1), ("F", 1, 2), ("F", 0, 2), ("B", 2, 1), ("B", 1, 0), ("B", 2, 0)]


def check(text: str, has_w: tuple[bool, bool] = (True, True)) -> None:
    verify(parse(text), MESSAGES, (True, True), has_w, 2)


def check_folded(text: str) -> None:
    verify(parse(text), FOLDED_MESSAGES, (True,) * 3, (True,) * 3, 1)


def test_text_round_trip() -> None:
    schedule = parse(TEXT)
    check(TEXT)
    assert schedule.name == "by hand" and schedule.microbatches == 2
    assert schedule.placement == {0: 0, 1: 1}
    assert parse(str(schedule)) == schedule
    assert peak_in_flight(schedule) == [2, 1]


def test_several_stages_on_a_rank() -> None:
    schedule = parse(FOLDED)
    check_folded(FOLDED)
    assert schedule.placement == {0: 0, 1: 1, 2: 0}
    assert parse(str(schedule)) == schedule
    assert peak_in_flight(schedule) == [1, 1, 1]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "no rank"),
        ("  F 0 0", "line 1: the line continues"),
        ("rank 0: F 0 0\nrank 2: F 2 0", "line 2: rank 2 stands where rank 1"),
        ("rank 0: G 0 0", "'G 0 0' is not an action"),
        ("rank 0: SEND F 0-1 0", "'SEND F 0-1 0' is not an action"),
        ("stage 0: F 0 0", "'stage 0: F 0 0' does not start with"),
        ("hello", "'hello' does not start with"),
    ],
)
def test_parse_refuses(text: str, part: str) -> None:
    with pytest.raises(ScheduleError, match=part):
        parse(text)


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("F 0 1 | SEND F 0>1 1 |", "SEND F 0>1 1 |", "rank 0: 'F 0 1' is missing"),
        ("F 0 1 | SEND", "F 0 1 | F 0 1 | SEND", "'F 0 1' stands there twice"),
        ("| W 0 1 ", "", "'W 0 1' is missing"),
        ("| W 1 1 | REDUCE", "| REDUCE", "rank 1: 'W 1 1' is missing"),
        ("W 0 0", "W 0 7", r"outside 0\.\.1"),
        ("| W 1 1", "| W 1 1 | W 0 1", "rank 1: 'W 0 1' belongs to stage 0, which rank 0 runs"),
        ("| W 1 1 | REDUCE", "| W 1 1 | F 2 0 | REDUCE", "'F 2 0' belongs to stage 2, the program has 2 stages"),
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
            "'SEND F 0>1 1' of rank 0 meets 'RECV F 0>1 0' of rank 1.*matched by order",
        ),
        (
            "F 0 1 | SEND F 0>1 1 |\n    RECV B 1>0 0 | B 0 0 | W 0 0 | RECV B 1>0 1",
            "F 0 1 |\n RECV B 1>0 0 | B 0 0 | W 0 0 | RECV B 1>0 1 | SEND F 0>1 1",
            "deadlock: rank 0 waits at 'RECV B 1>0 1', rank 1 waits at 'RECV F 0>1 1', in a circle",
        ),
    ],
)
def test_verify_names_what_is_wrong(old: str, new: str, part: str) -> None:
    assert old in TEXT
    with pytest.raises(ScheduleError, match=part):
        check(TEXT.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        # A rank keeps what its own stages exchange, and must run them in order.
        ("F 0 0 |", "F 0 0 | SEND F 0>2 0 |", "'SEND F 0>2 0' has nothing to move: rank 0 runs both stages"),
        ("RECV F 1>2 0 | F 2 0", "RECV F 1>2 0 | RECV F 0>2 0 | F 2 0", "'RECV F 0>2 0' has nothing to move"),
        (
            "F 0 0 | SEND F 0>1 0 | RECV F 1>2 0 | F 2 0",
            "RECV F 1>2 0 | F 2 0 | F 0 0 | SEND F 0>1 0",
            "'F 2 0' comes before 'F 0 0', which produces what it needs",
        ),
        ("| W 1 0 ", "| W 1 0 | W 0 0 ", "rank 1: 'W 0 0' belongs to stage 0, which rank 0 runs"),
        ("SEND F 1>2 0 | RECV B 2>1 0", "RECV B 2>1 0 | SEND F 1>2 0", "deadlock: rank 0 waits at 'RECV F 1>2 0'"),
    ],
)
def test_verify_names_what_is_wrong_between_stages_of_a_rank(old: str, new: str, part: str) -> None:
    assert old in FOLDED
    with pytest.raises(ScheduleError, match=part):
        check_folded(FOLDED.replace(old, new))


def test_verify_wants_no_work_for_frozen_stages() -> None:
    with pytest.raises(ScheduleError, match="stage 0 has no W"):
        check(TEXT, has_w=(False, True))
    with pytest.raises(ScheduleError, match="belongs to stage 1, the program has 1 stages"):
        verify(parse(TEXT), MESSAGES, [True], [True], 2)
    with pytest.raises(ScheduleError, match="no rank runs stage 2, the program has 3 stages"):
        verify(parse(TEXT), MESSAGES, [True] * 3, [True] * 3, 2)


def compute(*items: str) -> list[Action]:
    """Actions from "F 0 1"."""
    kinds: list[tuple[Kind, int, int]] = [(i.split()[0], *map(int, i.split()[1:])) for i in items]  # type: ignore[misc]
    return [Action(*kind) for kind in kinds]


def test_messages_stand_around_what_makes_and_needs_them() -> None:
    orders = [compute("F 0 0", "F 2 0", "B 2 0", "W 2 0", "B 0 0", "W 0 0"), compute("F 1 0", "B 1 0", "W 1 0")]
    assert with_messages("folded", orders, FOLDED_MESSAGES) == parse(FOLDED)


def test_both_ends_of_a_channel_list_its_messages_in_the_senders_order() -> None:
    """The receiver takes microbatch 0 first, though the sender sends it last: it receives both before."""
    orders = [compute("F 0 1", "F 0 0"), compute("F 1 0", "F 1 1")]
    schedule = with_messages("crossed", orders, [("F", 0, 1)])
    verify(schedule, [("F", 0, 1)], [False] * 2, [False] * 2, 2)
    assert [str(a) for a in schedule.ranks[1]] == ["RECV F 0>1 1", "RECV F 0>1 0", "F 1 0", "F 1 1", "REDUCE"]


@given(st.permutations(range(4)), st.permutations(range(4)), st.booleans())
def test_any_two_orders_of_a_channel_meet(sender: list[int], receiver: list[int], same_rank: bool) -> None:
    """Sent in one order and used in another, the messages never cross; on one rank there are none."""
    first, second = ([Action("F", stage, mb) for mb in order] for stage, order in ((0, sender), (1, receiver)))
    orders = [first + second] if same_rank else [first, second]
    schedule = with_messages("any", orders, [("F", 0, 1)])
    verify(schedule, [("F", 0, 1)], [False] * 2, [False] * 2, 4)
    assert parse(str(schedule)) == schedule
    assert sum(a.kind == "SEND" for a in schedule.ranks[0]) == (0 if same_rank else 4)


FUSED = """# fused
rank 0: F 0 0 | SEND F 0>1 0 | F 0 1 | SEND F 0>1 1 | RECV B 1>0 0 | BW 0 0 | RECV B 1>0 1 | B 0 1 | W 0 1 | REDUCE
rank 1: RECV F 0>1 0 | F 1 0 | BW 1 0 | SEND B 1>0 0 | RECV F 0>1 1 | F 1 1 | BW 1 1 | SEND B 1>0 1 | REDUCE
"""


def test_a_fused_backward_is_a_b_and_a_w() -> None:
    schedule = parse(FUSED)
    check(FUSED)
    assert parse(str(schedule)) == schedule
    assert peak_in_flight(schedule) == [2, 1]
    assert [str(part) for part in schedule.ranks[1][2].parts] == ["B 1 0", "W 1 0"]
    orders = [[action for action in actions if action.computes] for actions in schedule.ranks]
    assert with_messages("fused", orders, MESSAGES) == schedule


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("BW 0 0 | ", "", "rank 0: 'B 0 0' is missing"),
        ("BW 0 0", "BW 0 0 | BW 0 0", "'BW 0 0' stands there twice"),
        ("BW 0 0", "BW 0 0 | W 0 0", "'W 0 0' does what 'BW 0 0' does"),
        ("BW 0 0", "B 0 0 | BW 0 0", "'BW 0 0' does what 'B 0 0' does"),
        ("BW 0 0", "B 0 0", "'W 0 0' is missing"),
        ("W 0 1 | REDUCE", "REDUCE", "'W 0 1' is missing"),
        ("F 1 0 | BW 1 0", "BW 1 0 | F 1 0", "'BW 1 0' comes before 'F 1 0', whose saved activations it uses"),
        ("BW 1 0 | SEND B 1>0 0", "SEND B 1>0 0 | BW 1 0", "'SEND B 1>0 0' comes before 'BW 1 0'"),
        ("RECV B 1>0 0 | BW 0 0", "BW 0 0 | RECV B 1>0 0", "'BW 0 0' comes before 'RECV B 1>0 0'"),
        ("BW 1 1", "BW 1 7", r"outside 0\.\.1"),
    ],
)
def test_verify_counts_a_fused_backward_once(old: str, new: str, part: str) -> None:
    assert old in FUSED
    with pytest.raises(ScheduleError, match=part):
        check(FUSED.replace(old, new))


def test_stages_without_b_or_w_have_nothing_to_fuse() -> None:
    with pytest.raises(ScheduleError, match="'BW 0 0' has nothing to do: stage 0 has no W"):
        verify(parse("rank 0: F 0 0 | BW 0 0 | REDUCE"), [], [True], [False], 1)
    with pytest.raises(ScheduleError, match="'BW 0 0' has nothing to do: stage 0 has no B"):
        verify(parse("rank 0: F 0 0 | BW 0 0 | REDUCE"), [], [False], [True], 1)
    verify(parse("rank 0: F 0 0 | B 0 0 | REDUCE"), [], [True], [False], 1)
    verify(parse("rank 0: F 0 0 | W 0 0 | REDUCE"), [], [False], [True], 1)


def test_neighbours_are_fused() -> None:
    order = compute("F 0 0", "B 0 0", "W 0 0", "B 1 0", "B 0 1", "W 1 0", "W 0 1", "W 2 0", "BW 2 1")
    assert [str(a) for a in fused(order)] == [
        "F 0 0", "BW 0 0", "B 1 0", "B 0 1", "W 1 0", "W 0 1", "W 2 0", "BW 2 1",
    ]  # fmt: skip


def test_in_flight_counts_from_f_to_the_last_of_b_and_w() -> None:
    orders = [compute("F 0 0", "F 0 1", "B 0 0", "F 0 2", "W 0 0", "B 0 1", "W 0 1", "B 0 2", "W 0 2", "F 1 0")]
    assert peak_in_flight(with_messages("one", orders, [])) == [3, 0]


def test_a_part_keeps_the_order_of_what_it_has() -> None:
    text = """# given, 2 ranks, 2 microbatches
rank 0: F 0 0 | SEND F 0>1 0 | F 0 1 | SEND F 0>1 1 | RECV B 1>0 0 | BW 0 0 | RECV B 1>0 1 | B 0 1 | W 0 1 | REDUCE
rank 1: RECV F 0>1 0 | F 1 0 | BW 1 0 | SEND B 1>0 0 | RECV F 0>1 1 | F 1 1 | B 1 1 | SEND B 1>0 1 | W 1 1 | REDUCE
"""
    whole, channels = parse(text), [("F", 0, 1), ("B", 1, 0)]
    assert part(whole, channels, [True, True], [True, True]) == whole
    left = str(part(whole, [], [False, True], [False, True])).splitlines()
    assert left[1:] == ["rank 0: F 0 0 | F 0 1 | REDUCE", "rank 1: F 1 0 | BW 1 0 | F 1 1 | B 1 1 | W 1 1 | REDUCE"]
    frozen = str(part(whole, channels, [False, True], [False, False])).splitlines()
    assert "BW" not in frozen[2] and "B 1 0" in frozen[2] and "W 1 1" not in frozen[2]
