"""The simulator against closed formulas, cases worked by hand, and a slow reference."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from graphlib import TopologicalSorter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.errors import InputError, ScheduleError
from csc.ir.schedule import Action, Schedule, parse, verify
from csc.simulation.pipeline import Link, Loads, Network, Pipeline, StageWork
from csc.simulation.simulate import makespan, simulate
from tests.simulation.random_loads import sent, taken_for

from .orders import chain, gpipe, interleaved, one_f_one_b, runs


def uniform(stages: int, f: float, b: float, w: float = 0.0) -> Pipeline:
    """Without w, b stands for a backward that is not split."""
    return Pipeline((StageWork(f, b, w, has_w=w > 0),) * stages, chain(stages))


TIMES = st.integers(1, 20).map(float)


@given(st.integers(1, 6), st.integers(0, 10), TIMES, TIMES)
def test_bubble_of_1f1b_and_gpipe(p: int, more: int, f: float, b: float) -> None:
    """(p - 1)(F + B) on every rank when the backward is not split: pipelines.md's table."""
    m = p + more
    pipeline = uniform(p, f, b)
    for schedule in (one_f_one_b(pipeline, m), gpipe(pipeline, m)):
        timeline = simulate(pipeline, schedule)
        assert timeline.makespan == (m + p - 1) * (f + b)
        assert timeline.bubble == ((p - 1) * (f + b),) * p
        assert timeline.busy == (m * (f + b),) * p


@given(st.integers(1, 6), st.integers(0, 10), TIMES, TIMES, TIMES)
def test_gradients_that_leave_before_w_shorten_the_drain(p: int, more: int, f: float, b: float, w: float) -> None:
    """GPipe with the gradient sent right after B: on the way back only the last stage's B is waited for, not W."""
    pipeline = uniform(p, f, b, w)
    m = p + more
    assert makespan(pipeline, gpipe(pipeline, m)) == (m + p - 1) * (f + b) + m * w


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), TIMES, TIMES)
def test_bubble_of_interleaved_1f1b(p: int, chunks: int, groups: int, f: float, b: float) -> None:
    """(p - 1)(F + B) / v, where the chunks' F and B are the v-th part of a rank's."""
    pipeline = uniform(p * chunks, f, b)
    timeline = simulate(pipeline, interleaved(pipeline, groups * p, p))
    assert len(timeline.ranks) == p
    assert timeline.bubble == ((p - 1) * (f + b),) * p


ENCODER, LLM = 20.0, 20.0


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ([StageWork(10.0, has_b=False, has_w=False)] * 2 + [StageWork(10.0, 20.0, has_w=False)] * 2, 530.0),
        ([StageWork(20.0, has_b=False, has_w=False)] + [StageWork(20 / 3, 40 / 3, has_w=False)] * 3, 380.0),
        ([StageWork(10.0, has_b=False, has_w=False)] * 2 + [StageWork(10.0, 10.0, has_w=False)] * 2, 360.0),
        (
            [
                StageWork(15.0, has_b=False, has_w=False),
                StageWork(10.0, 5.0, has_w=False),
                StageWork(7.5, 7.5, has_w=False),
                StageWork(7.5, 7.5, has_w=False),
            ],
            285.0,
        ),
    ],
)
def test_worked_cases_of_frozen_encoders(stages: list[StageWork], expected: float) -> None:
    """Encoder and LLM of F = 20 each, 4 stages, 16 microbatches: the table of pipelines.md."""
    has_b = tuple(stage.has_b for stage in stages)
    pipeline = Pipeline(tuple(stages), chain(4, has_b=has_b))
    assert makespan(pipeline, one_f_one_b(pipeline, 16)) == pytest.approx(expected)


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=5), st.integers(1, 8), st.integers(0, 4))
def test_1f1b_is_never_below_its_bound(times: list[tuple[float, float]], m: int, frozen: int) -> None:
    """The bound of heterogeneous 1F1B in pipelines.md; stages before `frozen` have no backward and no limit."""
    p = len(times)
    stages = tuple(
        StageWork(f, 0.0 if s < frozen else b, has_b=s >= frozen, has_w=False) for s, (f, b) in enumerate(times)
    )
    pipeline = Pipeline(stages, chain(p, has_b=tuple(stage.has_b for stage in stages)))
    f, back = [s.forward for s in stages], [s.backward_input for s in stages]
    bound = 0.0
    for s in range(p):
        n = min(p - s, m)
        before = sum(f[:s])
        turn = max(n * f[s], sum(f[s:]) + sum(back[s + 1 :])) if stages[s].has_b else n * f[s]
        bound = max(bound, before + turn + m * (f[s] + back[s]) - n * f[s] + sum(back[:s]))
    assert makespan(pipeline, one_f_one_b(pipeline, m)) >= bound - 1e-9


def test_latency_and_bandwidth_by_hand() -> None:
    """Messages of 10 bytes at 5 bytes a second and 3 seconds of latency, sent at 1 and 2: the second one queues."""
    schedule = parse(
        """rank 0: F 0 0 | SEND F 0>1 0 | F 0 1 | SEND F 0>1 1 | F 0 2 | SEND F 0>1 2 | REDUCE
        \nrank 1: RECV F 0>1 0 | F 1 0 | RECV F 0>1 1 | F 1 1 | RECV F 0>1 2 | F 1 2 | REDUCE"""
    )
    frozen = StageWork(1.0, has_b=False, has_w=False)
    pipeline = Pipeline((frozen, frozen), {("F", 0, 1): 10.0}, Network(Link(3.0, 5.0)))
    timeline = simulate(pipeline, schedule, name="by hand")
    assert timeline.name == "by hand"
    assert [(t.start, t.end) for t in timeline.transfers] == [(1.0, 6.0), (3.0, 8.0), (5.0, 10.0)]
    assert {(t.source_rank, t.destination_rank, t.size) for t in timeline.transfers} == {(0, 1, 10.0)}
    assert [(e.start, e.end) for e in timeline.ranks[1]] == [(6.0, 7.0), (8.0, 9.0), (10.0, 11.0)]
    assert [(e.start, e.end) for e in timeline.ranks[0]] == [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]
    assert timeline.makespan == makespan(pipeline, schedule) == 11.0
    assert timeline.bubble == (8.0, 8.0) and timeline.bubble_share == (8 / 11, 8 / 11)


def test_loads_multiply_times_and_bytes() -> None:
    schedule = parse(
        "rank 0: F 0 0 | SEND F 0>1 0 | F 0 1 | SEND F 0>1 1\nrank 1: RECV F 0>1 0 | F 1 0 | RECV F 0>1 1 | F 1 1"
    )
    frozen = StageWork(1.0, has_b=False, has_w=False)
    messages = {("F", 0, 1): 2.0}
    loads = Loads.scaled((frozen, frozen), messages, (3.0, 0.5))
    pipeline = Pipeline((frozen, frozen), messages, Network(Link(0.0, 1.0)), loads)
    timeline = simulate(pipeline, schedule)
    assert [(t.start, t.end, t.size) for t in timeline.transfers] == [(3.0, 9.0, 6.0), (9.0, 10.0, 1.0)]
    assert [(e.start, e.end) for e in timeline.ranks[1]] == [(9.0, 12.0), (12.0, 12.5)]


def test_stages_take_other_features() -> None:
    """An encoder by tiles, a decoder by tokens: the microbatch without images costs the first stage nothing."""
    schedule = parse(
        "rank 0: F 0 0 | SEND F 0>1 0 | F 0 1 | SEND F 0>1 1\nrank 1: RECV F 0>1 0 | F 1 0 | RECV F 0>1 1 | F 1 1"
    )
    frozen = StageWork(1.0, has_b=False, has_w=False)
    rates = ((replace(frozen, forward=2.0), replace(frozen, forward=0.0)), (replace(frozen, forward=0.0), frozen))
    loads = Loads(((1.0, 3.0), (0.0, 5.0)), rates, {("F", 0, 1): (4.0, 0.0)})
    pipeline = Pipeline((frozen, frozen), {("F", 0, 1): 2.0}, Network(Link(0.0, 1.0)), loads)
    timeline = simulate(pipeline, schedule)
    assert [(e.start, e.end) for e in timeline.ranks[0]] == [(0.0, 2.0), (2.0, 2.0)]
    assert [(e.start, e.end) for e in timeline.ranks[1]] == [(6.0, 9.0), (9.0, 14.0)]
    assert [t.size for t in timeline.transfers] == [4.0, 0.0]


def test_links_within_and_between_nodes() -> None:
    """Ranks 0 and 1 share a node, rank 2 is on the next: only 1>2 takes the slow link."""
    frozen = StageWork(1.0, has_b=False, has_w=False)
    network = Network(within=Link(0.5), between=Link(10.0), ranks_per_node=2)
    pipeline = Pipeline((frozen,) * 3, chain(3, has_b=(False,) * 3), network)
    timeline = simulate(pipeline, one_f_one_b(pipeline, 1))
    assert [events[0].start for events in timeline.ranks] == [0.0, 1.5, 12.5]


def test_opposite_directions_do_not_queue_and_one_pair_does() -> None:
    """Two channels from rank 0 to rank 1 share the link; the gradient that comes back has its own."""
    schedule = parse(
        """rank 0: F 0 0 | SEND F 0>2 0 | F 1 0 | SEND F 1>3 0 | RECV B 2>0 0 | B 0 0
        \nrank 1: RECV F 0>2 0 | F 2 0 | B 2 0 | SEND B 2>0 0 | RECV F 1>3 0 | F 3 0"""
    )
    trained, frozen = StageWork(1.0, 1.0, has_w=False), StageWork(1.0, has_b=False, has_w=False)
    pipeline = Pipeline(
        (trained, frozen, trained, frozen),
        {("F", 0, 2): 4.0, ("F", 1, 3): 4.0, ("B", 2, 0): 4.0},
        Network(Link(0.0, 1.0)),
    )
    moves = {(t.source, t.destination): (t.start, t.end) for t in simulate(pipeline, schedule).transfers}
    assert moves == {(0, 2): (1.0, 5.0), (1, 3): (5.0, 9.0), (2, 0): (7.0, 11.0)}


def test_stages_of_one_rank_take_turns_and_send_nothing() -> None:
    schedule = parse("rank 0: F 0 0 | F 1 0 | B 1 0 | W 1 0 | B 0 0 | W 0 0 | REDUCE")
    pipeline = Pipeline((StageWork(1.0, 2.0, 3.0), StageWork(4.0, 5.0, 6.0)), chain(2, 100.0), Network(Link(7.0, 1.0)))
    timeline = simulate(pipeline, schedule)
    assert timeline.transfers == ()
    assert timeline.makespan == 21.0 and timeline.bubble == (0.0,)
    assert [str(event.action) for event in timeline.ranks[0]] == ["F 0 0", "F 1 0", "B 1 0", "W 1 0", "B 0 0", "W 0 0"]


def reference(pipeline: Pipeline, schedule: Schedule) -> tuple[float, dict[Action, float]]:
    """Makespan and start of every compute: longest paths through the DAG of actions and departures.

    A node is an action, or ("leave", SEND): the moment at which the message takes its link.
    """
    edges: dict[object, list[tuple[object, float]]] = {}  # node -> (earlier node, seconds after it)
    home = {a.stage: rank for rank, actions in enumerate(schedule.ranks) for a in actions if a.kind != "REDUCE"}

    def length(action: Action) -> float:
        return taken_for(pipeline, action.kind, action.stage, action.microbatch)

    for rank, actions in enumerate(schedule.ranks):
        before: Action | None = None
        last_sent: dict[int, tuple[Action, float]] = {}
        for action in actions[:-1]:
            edges[action] = [] if before is None else [(before, length(before) if before.computes else 0.0)]
            if action.kind == "SEND":
                target = home[action.destination]
                link = pipeline.network.link(rank, target)
                size = sent(pipeline, action.channel, action.microbatch)
                edges["leave", action] = [(action, 0.0)]
                if target in last_sent:
                    earlier, busy = last_sent[target]
                    edges["leave", action].append((("leave", earlier), busy))
                last_sent[target] = (action, size / link.bandwidth)
                receive = Action.recv(action.channel, action.microbatch)
                edges.setdefault(("arrive", receive), []).append((("leave", action), link.seconds(size)))
            if action.kind == "RECV":
                edges[action].append((("arrive", action), 0.0))
            before = action
    when: dict[object, float] = {}
    for node in TopologicalSorter({node: [a for a, _ in earlier] for node, earlier in edges.items()}).static_order():
        when[node] = max((when[a] + after for a, after in edges[node]), default=0.0)
    # A RECV's own time is when it is done.
    starts = {node: time for node, time in when.items() if isinstance(node, Action) and node.computes}
    return max(start + length(action) for action, start in starts.items()), starts


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(runs())
def test_every_start_is_that_of_the_longest_path(run: tuple[Pipeline, Schedule, int]) -> None:
    pipeline, schedule, microbatches = run
    verify(schedule, pipeline.messages, pipeline.has_b, pipeline.has_w, microbatches)
    expected, starts = reference(pipeline, schedule)
    timeline = simulate(pipeline, schedule)
    assert {event.action: event.start for events in timeline.ranks for event in events} == pytest.approx(starts)
    assert makespan(pipeline, schedule) == timeline.makespan == pytest.approx(expected)


@settings(max_examples=50, deadline=None)
@given(runs())
def test_ranks_do_one_thing_at_a_time_in_their_order(run: tuple[Pipeline, Schedule, int]) -> None:
    pipeline, schedule, _ = run
    timeline = simulate(pipeline, schedule)
    for rank, events in enumerate(timeline.ranks):
        assert [e.action for e in events] == [a for a in schedule.ranks[rank] if a.computes]
        assert all(e.rank == rank for e in events)
        assert all(earlier.end <= later.start for earlier, later in itertools.pairwise(events))
    sends = sum(a.kind == "SEND" for actions in schedule.ranks for a in actions)
    assert len(timeline.transfers) == sends
    assert [t.start for t in timeline.transfers] == sorted(t.start for t in timeline.transfers)


def refuse(text: str, pipeline: Pipeline, part: str) -> None:
    for run in (simulate, makespan):
        with pytest.raises(ScheduleError, match=part):
            run(pipeline, parse(text))


def test_a_deadlock_names_the_circle() -> None:
    refuse(
        "rank 0: RECV B 1>0 0 | F 0 0 | SEND F 0>1 0 | B 0 0\nrank 1: RECV F 0>1 0 | F 1 0 | B 1 0 | SEND B 1>0 0",
        uniform(2, 1.0, 1.0),
        r"deadlock: rank 0 waits at 'RECV B 1>0 0', rank 1 waits at 'RECV F 0>1 0'",
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("rank 0: F 0 0\nrank 1: RECV F 0>1 0 | F 1 0", "rank 1: 'RECV F 0>1 0' waits for a message that nobody sends"),
        ("rank 0: RECV F 9>0 0", "'RECV F 9>0 0' waits for a message that nobody sends"),
        ("rank 0: F 0 0 | SEND F 0>1 0\nrank 1: F 1 0 | RECV F 0>1 0 | RECV F 0>1 1", "'RECV F 0>1 1' waits"),
        ("rank 0: F 0 0 | SEND B 0>1 0\nrank 1: F 1 0", "rank 0: 'SEND B 0>1 0' sends what the pipeline has no"),
        ("rank 0: F 0 0 | F 1 0 | SEND F 0>1 0", "'SEND F 0>1 0' sends what"),
        ("rank 0: F 0 0\nrank 1: F 1 0\nrank 2: F 2 0", "it has 3 stages, the pipeline has 2"),
    ],
)
def test_refuses(text: str, part: str) -> None:
    refuse(text, uniform(2, 1.0, 1.0), part)


def test_refuses_more_microbatches_than_the_pipeline_has() -> None:
    alike = uniform(1, 1.0, 1.0)
    pipeline = replace(alike, loads=Loads.scaled(alike.stages, alike.messages, (1.0, 2.0)))
    assert makespan(pipeline, parse("rank 0: F 0 0 | F 0 1")) == 3.0
    refuse("rank 0: F 0 0 | F 0 2", pipeline, "it has 3 microbatches, the pipeline has 2")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"stages": (StageWork(math.nan, 1.0),) * 2}, "the forward of stage 0 is nan"),
        ({"stages": (StageWork(1.0, 1.0), StageWork(1.0, -1.0))}, "the backward input of stage 1 is -1.0"),
        ({"messages": {("F", 0, 1): math.inf}}, "the size of message F 0>1 is inf"),
        ({"network": Network(Link(0.0, 0.0))}, "the seconds for a byte within nodes is inf"),
        ({"loads": Loads(((math.nan,),), ((),) * 2)}, "a feature of a microbatch is no finite number"),
    ],
)
def test_numbers_that_are_none_are_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        simulate(replace(uniform(2, 1.0, 1.0), **change), parse("rank 0: F 0 0"))


def test_nothing_to_do_takes_no_time() -> None:
    pipeline = uniform(1, 1.0, 1.0)
    schedule = parse("rank 0: REDUCE")
    assert simulate(pipeline, schedule).makespan == makespan(pipeline, schedule) == 0.0
    assert simulate(pipeline, schedule).bubble_share == (0.0,)
