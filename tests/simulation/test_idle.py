"""Causes of idle seconds and the longest path: by hand, and against a slow reference on random schedules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.ir.schedule import Action, Schedule, parse
from csc.simulation.idle import CAUSES, idle, longest_path
from csc.simulation.pipeline import Link, Network, Pipeline, StageWork, changes, peak_memory, states
from csc.simulation.simulate import simulate
from csc.simulation.timeline import Timeline

from .orders import chain, gpipe, needs, one_f_one_b, runs

Run = tuple[Pipeline, Schedule, int]


def nonzero(causes: dict[str, float]) -> dict[str, float]:
    return {cause: seconds for cause, seconds in causes.items() if seconds}


def test_every_cause_by_hand() -> None:
    """1F1B on 2 ranks, F 1, B 2, a latency of 0.5: rank 0 waits from 2 to 5 for B 0 of rank 1, with F 2 at hand."""
    stage = StageWork(1.0, 2.0, has_w=False, saved=1.0)
    pipeline = Pipeline((stage, stage), chain(2), Network(Link(0.5)))
    schedule = one_f_one_b(pipeline, 3)
    timeline = simulate(pipeline, schedule)
    free, tight = (idle(pipeline, schedule, timeline, limits) for limits in (None, (2.0, 2.0)))
    assert [str(e.action) for e in timeline.ranks[0]] == ["F 0 0", "F 0 1", "B 0 0", "F 0 2", "B 0 1", "B 0 2"]
    waits = [(a.end, b.start) for a, b in itertools.pairwise(timeline.ranks[0]) if b.start > a.end]
    assert waits == [(2.0, 5.0), (10.0, 12.0)]
    # 2 to 4.5: rank 1 runs F 0 and B 0; 10 to 11.5: B 2. Then half a second each time for the message.
    assert nonzero(free[0]) == {"order": 2.5, "way": 1.5, "message": 1.0}
    assert nonzero(tight[0]) == {"memory": 2.5, "way": 1.5, "message": 1.0}
    assert nonzero(free[1]) == {"ramp": 1.5 + 2.5, "way": 0.5, "message": 0.5}


def test_a_slower_rank_is_an_imbalance() -> None:
    """8 seconds of work beside 16, in a step of 18: of the 10 that it waits, F's at hand, no order could fill 8."""
    slow = Pipeline((StageWork(1.0, 1.0, has_w=False), StageWork(2.0, 2.0, has_w=False)), chain(2))
    schedule = one_f_one_b(slow, 4)
    timeline = simulate(slow, schedule)
    assert timeline.makespan == 18.0
    first, second = idle(slow, schedule, timeline)
    assert nonzero(second) == {"ramp": 2.0}
    assert first["imbalance"] == 8.0 and first["order"] + first["way"] == 2.0


def test_waiting_for_who_waits() -> None:
    """Messages of 3 seconds. Rank 2 waits from 14 to 19: till 15 for the message to rank 1, which computes till 16."""
    slow, stage = StageWork(6.0, has_b=False, has_w=False), StageWork(1.0, has_b=False, has_w=False)
    pipeline = Pipeline((slow, stage, stage), chain(3, has_b=(False,) * 3), Network(Link(3.0)))
    schedule = one_f_one_b(pipeline, 2)
    timeline = simulate(pipeline, schedule)
    assert [event.start for event in timeline.ranks[1]] == [9.0, 15.0]
    assert [event.start for event in timeline.ranks[2]] == [13.0, 19.0]
    found = idle(pipeline, schedule, timeline)
    assert nonzero(found[2]) == {"ramp": 13.0, "message": 4.0, "imbalance": 1.0}


def test_a_rank_without_work_is_idle_throughout() -> None:
    """All of it is what the other has more to do."""
    schedule = parse("rank 0: F 0 0\nrank 1: REDUCE")
    pipeline = Pipeline((StageWork(3.0, has_b=False, has_w=False),))
    found = idle(pipeline, schedule, simulate(pipeline, schedule))
    assert nonzero(found[0]) == {} and nonzero(found[1]) == {"imbalance": 3.0}


@given(st.integers(1, 5), st.integers(1, 8))
def test_even_ranks_have_no_imbalance(p: int, m: int) -> None:
    pipeline = Pipeline((StageWork(1.0, 2.0, has_w=False),) * p, chain(p))
    for schedule in (one_f_one_b(pipeline, m), gpipe(pipeline, m)):
        assert all(one["imbalance"] == 0 for one in idle(pipeline, schedule, simulate(pipeline, schedule)))


class Reference:
    """The definitions of csc.simulation.idle, looked up at one moment at a time."""

    def __init__(self, pipeline: Pipeline, schedule: Schedule, timeline: Timeline, limits: Sequence[float] | None):
        self.pipeline, self.schedule, self.timeline, self.limits = pipeline, schedule, timeline, limits
        self.arrived = {((t.kind, t.source, t.destination), t.microbatch): t.end for t in timeline.transfers}
        self.event = {event.action: event for events in timeline.ranks for event in events}
        self.part = {part: event for event in self.event.values() for part in event.action.parts}

    def times(self) -> list[float]:
        """All moments at which something can change."""
        found = {0.0, self.timeline.end, *self.arrived.values()}
        for event in self.event.values():
            found |= {event.start, event.end}
        return sorted(time for time in found if time <= self.timeline.end)

    def token(self, rank: int, time: float) -> Action | None:
        """The RECV that the rank waits in; None: it computes."""
        for action in self.schedule.ranks[rank]:
            if action.kind == "RECV" and self.arrived[action.channel, action.microbatch] > time:
                return action
            if action.computes and self.event[action].end > time:
                return None
        raise AssertionError("the rank has done all it has to do")

    def given(self, recv: Action) -> float:
        """When the sender reaches its SEND: after everything before it in its list."""
        actions = self.schedule.ranks[self.schedule.placement[recv.source]]
        before = actions[: actions.index(Action.send(recv.channel, recv.microbatch))]
        ends = [self.event[a].end for a in before if a.computes]
        return max([0.0, *ends, *(self.arrived[a.channel, a.microbatch] for a in before if a.kind == "RECV")])

    def cause(self, rank: int, time: float) -> str | None:
        """The cause of the moment, but for imbalances; None: the rank computes."""
        events = self.timeline.ranks[rank]
        if not events or time > events[-1].end:
            return "after"
        if time < events[0].start:
            return "before"
        recv = self.token(rank, time)
        if recv is None:
            return None
        waiting: Action | None = recv
        while waiting is not None:
            if time > self.given(waiting):
                return "message"
            waiting = self.token(self.schedule.placement[waiting.source], time)
        at_hand = self.at_hand(rank, recv, time)
        if not at_hand:
            return "way"
        return "order" if any(self.fits(rank, recv, action) for action in at_hand) else "memory"

    def at_hand(self, rank: int, recv: Action, time: float) -> list[Action]:
        actions = self.schedule.ranks[rank]
        later = [a for a in actions[actions.index(recv) :] if a.computes]
        nexts = {(action.kind, action.stage): action for action in reversed(later)}.values()
        return [action for action in nexts if all(self.there(rank, a, action, time) for a in action.parts)]

    def there(self, rank: int, part: Action, action: Action, time: float) -> bool:
        for needed in needs(part, self.pipeline):
            if needed in action.parts:
                continue
            if self.schedule.placement[needed.stage] != rank:
                if self.arrived[(needed.kind, needed.stage, part.stage), part.microbatch] > time:
                    return False
            elif self.part[needed].end > time:
                return False
        return True

    def fits(self, rank: int, recv: Action, action: Action) -> bool:
        if self.limits is None:
            return True
        actions = self.schedule.ranks[rank]
        place, stood = actions.index(recv), actions.index(action)
        moved = [*actions[:place], action, *actions[place:stood]]
        now, most = states(self.pipeline, self.schedule)[rank], 0.0
        for i, one in enumerate(moved):
            if one.computes:
                change = changes(self.pipeline.stages_of(one.microbatch))[one.kind][one.stage]
                for size in change:
                    now += size
                    most = max(most, now) if i >= place else most
        return most <= self.limits[rank]


@settings(max_examples=60)
@given(runs(), st.none() | st.sampled_from([0.0, 0.5, 1.0, 1.5]))
def test_causes_against_a_slow_reference(run: Run, room: float | None) -> None:
    """Every moment has the cause that the definitions give it, and all of them together are the idle seconds."""
    pipeline, schedule, _ = run
    timeline = simulate(pipeline, schedule)
    limits = None if room is None else tuple(room * peak for peak in peak_memory(pipeline, schedule))
    found = idle(pipeline, schedule, timeline, limits)
    reference = Reference(pipeline, schedule, timeline, limits)
    for rank, one in enumerate(found):
        seen = dict.fromkeys(("before", "after", "message", "memory", "order", "way"), 0.0)
        for start, end in itertools.pairwise(reference.times()):
            cause = reference.cause(rank, (start + end) / 2)
            if cause is not None:
                seen[cause] += end - start
        less = max(timeline.busy) - timeline.busy[rank]
        pool = [cause for cause in ("way", "order", "memory", "after") for _ in range(round(64 * seen[cause]))]
        left = pool[round(64 * less) :]  # in 64ths of a second, of which all times here are multiples
        assert one["message"] == seen["message"]
        assert one["imbalance"] == min(less, len(pool) / 64)
        assert one["ramp"] == seen["before"] + left.count("after") / 64
        assert all(one[cause] == left.count(cause) / 64 for cause in ("way", "order", "memory"))
        assert sum(one[cause] for cause in CAUSES) == sum(one.values()) == timeline.bubble[rank]


@given(runs())
def test_the_longest_path_is_the_makespan(run: Run) -> None:
    pipeline, schedule, _ = run
    timeline = simulate(pipeline, schedule)
    path = longest_path(schedule, timeline)
    assert sum(path.work.values()) + path.messages == timeline.makespan
    assert all(seconds <= timeline.busy[rank] for rank, seconds in path.work.items())


@given(runs(), st.data())
def test_what_is_on_the_longest_path_lengthens_the_step(run: Run, data: st.DataObject) -> None:
    """A rank made twice as slow: the step gets longer by no less than the path has of it. (With links that messages
    share, some would no longer queue.)
    """
    pipeline, schedule, _ = run
    pipeline = replace(pipeline, loads=None, network=Network(Link(3.0)))
    timeline = simulate(pipeline, schedule)
    path = longest_path(schedule, timeline)
    rank = data.draw(st.sampled_from(sorted(path.work) or [0]))
    stages = tuple(
        replace(s, forward=2 * s.forward, backward_input=2 * s.backward_input, backward_weight=2 * s.backward_weight)
        if schedule.placement[i] == rank else s
        for i, s in enumerate(pipeline.stages)
    )  # fmt: skip
    slower = simulate(replace(pipeline, stages=stages), schedule)
    assert slower.makespan >= timeline.makespan + path.work.get(rank, 0.0)


def test_a_path_through_messages_by_hand() -> None:
    """F on rank 0, 3 seconds of message, F and B on rank 1, 3 seconds back, B on rank 0."""
    pipeline = Pipeline((StageWork(1.0, 2.0, has_w=False),) * 2, chain(2), Network(Link(3.0)))
    schedule = one_f_one_b(pipeline, 1)
    path = longest_path(schedule, simulate(pipeline, schedule))
    assert path.work == {0: 3.0, 1: 3.0} and path.messages == pytest.approx(6.0)
