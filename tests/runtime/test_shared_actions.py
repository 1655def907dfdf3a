"""What a rank does that several replicas share: what runs for one replica runs for all, with receives that block."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from hypothesis import given, reject, settings
from hypothesis import strategies as st

from csc.errors import CscError
from csc.ir.schedule import Action, Schedule, parse
from csc.planning.plan import plan
from csc.runtime.rank import repeated
from tests.planning.graphs import problems

SCHEDULES = ("gpipe", "1f1b", "zb-h1")  # components with stages of their own have one on a rank


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Of chains, encoders beside each other and any small graph, with something frozen or not."""
    problem = draw(problems(ranks=3, microbatches=(1, 2, 3, 4)))
    try:
        return plan(problem, schedule=draw(st.sampled_from(SCHEDULES))).schedule
    except CscError:
        reject()


def run(lists: Sequence[Sequence[Action]], dp: int, shared: Sequence[int], meets: bool) -> dict[tuple[int, int], int]:
    """Every rank's actions with receives that block: how many each could not do. A rank of a position that so many
    replicas share numbers their microbatches in turns; mail between two ranks is one queue for each kind, whosever it
    is. meets: the ranks of a position wait for each other behind every W, as where they divide gradients, and where
    parameters are gathered.
    """
    place = {action.stage: position for position, own in enumerate(lists) for action in own if action.computes}
    todo = {
        (position, rank): deque(repeated(own, each))
        for position, (own, each) in enumerate(zip(lists, shared, strict=True)) for rank in range(dp // each)
    }  # fmt: skip
    mail: dict[Any, deque[Any]] = {}  # by kind, from which position and rank, to which
    moved = True
    while moved:
        moved = False
        for (position, rank), actions in todo.items():
            each = shared[position]
            while actions:
                action = actions[0]
                others = [len(left) for at, left in todo.items() if at[0] == position]
                if meets and max(others) > len(actions) and action.kind in ("W", "BW", "GATHER"):
                    break
                microbatch, turn = divmod(action.microbatch, each)
                replica = rank * each + turn
                what = (*action.channel, microbatch, replica)
                if action.kind == "SEND":
                    other = place[action.destination]
                    key = action.message, position, rank, other, replica // shared[other]
                    mail.setdefault(key, deque()).append(what)
                elif action.kind == "RECV":
                    other = place[action.source]
                    box = mail.get((action.message, other, replica // shared[other], position, rank))
                    if not box:
                        break
                    assert box.popleft() == what, "messages between two ranks come in the order of both"
                actions.popleft()
                moved = True
    return {at: len(left) for at, left in todo.items()}


@settings(max_examples=60, deadline=None)
@given(schedules(), st.sampled_from([2, 4]), st.data())
def test_no_rank_waits_for_ever(schedule: Schedule, dp: int, data: st.DataObject) -> None:
    shared = [data.draw(st.sampled_from([1, 2, dp])) for _ in schedule.ranks]
    assert set(run(schedule.ranks, dp, shared, data.draw(st.booleans())).values()) == {0}


@settings(max_examples=30, deadline=None)
@given(schedules(), st.integers(1, 3))
def test_each_action_is_done_for_every_replica(schedule: Schedule, replicas: int) -> None:
    for actions in schedule.ranks:
        found = repeated(actions, replicas)
        for replica in range(replicas):
            own = [one._replace(microbatch=one.microbatch // replicas) for one in found
                   if one.microbatch >= 0 and one.microbatch % replicas == replica]  # fmt: skip
            assert own == [one for one in actions if one.microbatch >= 0], "in the order of the schedule"
        assert [one for one in found if one.microbatch < 0] == [one for one in actions if one.microbatch < 0]


def test_a_turn_has_one_compute() -> None:
    """The second F of replica 0 could wait for what another rank makes of the first of replica 1."""
    actions = parse("rank 0: GATHER 0 | F 0 0 | SEND F 0>1 0 | RECV F 1>2 0 | F 2 0 | FREE 0 | REDUCE\n").ranks[0]
    assert " | ".join(map(str, repeated(actions, 2))) == (
        "GATHER 0 | F 0 0 | SEND F 0>1 0 | F 0 1 | SEND F 0>1 1 | RECV F 1>2 0 | F 2 0 | RECV F 1>2 1 | F 2 1 | "
        "FREE 0 | REDUCE"
    )
