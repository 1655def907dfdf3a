"""Encoding for the next step: everything that fits, where it fits, and what it then takes."""

from __future__ import annotations

import pytest

from csc.ir.schedule import Action, Schedule
from csc.planning.encode_ahead import AheadPlan, fit_ahead
from csc.planning.schedules.by_name import SCHEDULES
from csc.simulation.pipeline import Pipeline, StageWork
from csc.simulation.simulate import makespan
from tests.planning.schedule_cases import chain

INF = float("inf")


def stepped(pipeline: Pipeline, schedule: Schedule, found: AheadPlan, seconds: float) -> float:
    """The step with them, simulated as stages of their own that nothing waits for."""
    first = len(pipeline.stages)
    ranks = []
    for rank, actions in enumerate(schedule.ranks):
        listed, done, due = list[Action](), 0, True
        for action in actions:
            if due and action.kind != "SEND":
                listed += [Action("F", first + rank, mb) for mb in found.orders[rank].get(done, ())]
                due = False
            listed.append(action)
            done, due = (done + 1, True) if action.computes else (done, due)
        if due:
            listed += [Action("F", first + rank, mb) for mb in found.orders[rank].get(done, ())]
        ranks.append(tuple(listed))
    more = (StageWork(seconds, has_b=False, has_w=False),) * len(ranks)
    return makespan(Pipeline((*pipeline.stages, *more), pipeline.messages), Schedule("", tuple(ranks)))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("seconds", [0.0, 0.4, 1.0, 2.5, 40.0])
def test_a_step_takes_what_is_said(name: str, seconds: float) -> None:
    pipeline = chain(4, StageWork(1.0, 1.0, 1.0))
    schedule = SCHEDULES[name](pipeline, range(4), 8)
    alone = makespan(pipeline, schedule)
    found = fit_ahead(pipeline, schedule, seconds, [0], [INF] * 4)
    assert sorted(mb for order in found.orders for own in order.values() for mb in own) == list(range(8))
    assert found.seconds == pytest.approx(stepped(pipeline, schedule, found, seconds))
    assert found.seconds <= alone + 2 * seconds, "four ranks share what is left"
    if found.waits == 8:
        assert found.seconds == pytest.approx(alone), "it takes only time in which ranks wait"
    if seconds <= 1.0 and name != "zb-h1":
        assert found.waits == 8


def test_memory_bounds_how_much() -> None:
    pipeline = chain(3, StageWork(1.0, 1.0, 1.0))
    schedule = SCHEDULES["1f1b"](pipeline, range(3), 6)

    def by_rank(room: list[float]) -> list[int]:
        orders = fit_ahead(pipeline, schedule, 0.5, [1], room).orders
        return [sum(map(len, order.values())) for order in orders]

    assert by_rank([INF, 4.9, INF])[1] == 4 and sum(by_rank([INF, 4.9, INF])) == 4, "all of them come to the reader"
    assert by_rank([1.0, 6.0, 0.0]) == [0, 6, 0], "a reader's own waits first"
    assert by_rank([INF, -3.0, INF]) == [0, 0, 0]
