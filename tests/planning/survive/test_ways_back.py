"""Ways back: rerouted orders are whole and keep the memory; moves, the choice by simulated time."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.errors import InputError
from csc.planning.problem import Problem
from csc.planning.survive.reroute import rerouted
from csc.planning.survive.templates import arranged, templates
from csc.planning.survive.ways_back import (
    Layout,
    Placed,
    layout_of,
    moves,
    ways_back,
)
from csc.simulation.pipeline import peak_memory
from csc.simulation.simulate import makespan
from tests.planning.graphs import problems
from tests.planning.survive.test_templates import chain


@pytest.mark.parametrize("memory", [None, 70.0])
@pytest.mark.parametrize("lost", [[(0, 0)], [(0, 3)], [(1, 1)], [(0, 2), (1, 2)], [(0, 1), (2, 3)]])
def test_rerouted_work_is_whole_and_fits(lost: list[tuple[int, int]], memory: float | None) -> None:
    made = templates(chain(12, memory), [4], 5)[4]
    run = rerouted(made, [5, 4, 6], lost)
    assert run is not None and len(run.ranks) == 12 - len(lost) and not set(run.ranks) & set(lost)
    done = Counter(
        (kind, *run.stages[action.stage], action.microbatch)
        for actions in run.schedule.ranks for action in actions if action.computes for kind in action.kind
    )  # fmt: skip
    assert done == Counter(itertools.product("FBW", [0], range(4), range(5))) + Counter(
        itertools.product("FBW", [1], range(4), range(4))
    ) + Counter(itertools.product("FBW", [2], range(4), range(6)))
    for rank, actions in enumerate(run.schedule.ranks):  # nobody runs a stage whose parameters it lacks
        assert {run.stages[a.stage][1] for a in actions if a.computes} == {run.ranks[rank][1]}
    assert run.seconds == makespan(run.pipeline, run.schedule)
    assert memory is None or max(peak_memory(run.pipeline, run.schedule)) <= memory
    sent = Counter((a.channel, a.microbatch) for actions in run.schedule.ranks for a in actions if a.kind == "SEND")
    received = Counter((a.channel, a.microbatch) for actions in run.schedule.ranks for a in actions if a.kind == "RECV")
    assert sent == received


def test_a_lost_ranks_work_fits_the_bubbles_of_its_peers() -> None:
    """Four replicas of 1F1B, four stages: a step without one rank takes at most N / (N - 1) of what it took."""
    made = templates(chain(8), [4], 8, ["1f1b"])[4]
    for stage in range(4):
        run = rerouted(made, [8] * 4, [(0, stage)])
        assert run is not None and run.seconds <= made.seconds(8) * 16 / 15 * 1.03


def test_more_peers_than_microbatches() -> None:
    made = templates(chain(8), [4], 2)[4]
    run = rerouted(made, [2] * 5, [(0, 1)])
    assert run is not None and run.seconds >= made.seconds(2)
    guests = [a for actions in run.schedule.ranks for a in actions if a.computes and run.stages[a.stage] == (0, 1)]
    assert sum(len(a.kind) for a in guests) == 6


def test_a_stage_that_nobody_holds_is_not_rerouted() -> None:
    made = templates(chain(8), [4], 4)[4]
    assert rerouted(made, [4, 4], [(0, 1), (1, 1)]) is None
    assert rerouted(made, [4], [(0, 1)]) is None


def test_moves_come_from_holders_that_are_left() -> None:
    before: Layout = (Placed((0, 1), ((0, 1), (2, 3)), 4), Placed((2, 3), ((0, 1), (2, 3)), 4))
    after: Layout = (Placed((0, 2, 3), ((0,), (1,), (2, 3)), 8),)
    assert moves(before, after, [1], [1.0] * 4) == ()
    other: Layout = (Placed((3, 0, 2), ((0,), (1,), (2, 3)), 8),)
    assert [tuple(move) for move in moves(before, other, [1], [1.0] * 4)] == [
        (0, 0, 3, 1.0), (2, 3, 2, 1.0), (3, 3, 2, 1.0),
    ]  # fmt: skip
    with pytest.raises(InputError, match="no rank that is left holds 2 of 4 regions, the first is number 2"):
        moves(before, after, [1, 3], [1.0] * 4)


@settings(max_examples=30, deadline=None)
@given(problem=problems(most=6), depth=st.integers(1, 4), count=st.integers(2, 3), data=st.data())
def test_every_way_back_holds_every_unit_and_keeps_the_microbatches(
    problem: Problem, depth: int, count: int, data: st.DataObject
) -> None:
    depth = min(depth, len(problem.units))
    made = templates(problem, range(1, len(problem.units) + 1), 6)
    start = arranged(made, depth * count, [depth] * count, 6)
    assert start is not None
    before = layout_of(start, made)
    lost = data.draw(st.integers(0, depth * count - 1))
    ways = ways_back(problem, made, before, [lost])
    assert "anew" in {way.kind for way in ways}
    for way in ways:
        assert sum(replica.microbatches for replica in way.layout) == 6
        if way.kind != "rerouted":
            ranks = [rank for replica in way.layout for rank in replica.ranks]
            assert lost not in ranks and len(set(ranks)) == len(ranks)
            for replica in way.layout:
                assert sorted(u for units in replica.stages for u in units) == list(range(len(problem.units)))
    steps = [way.steps(3600.0) for way in ways]
    assert steps == sorted(steps, reverse=True)
    fastest = min(ways, key=lambda way: way.seconds)
    assert ways_back(problem, made, before, [lost], horizon=1e12)[0].seconds <= fastest.seconds * (1 + 1e-6)


def test_where_little_time_is_left_nothing_moves() -> None:
    problem = chain(8, state=1e6)
    made = templates(problem, range(1, 9), 8, ["1f1b"])
    start = arranged(made, 16, [4] * 4, 32)
    assert start is not None
    before = layout_of(start, made)
    soon = ways_back(problem, made, before, [5], horizon=100.0)[0]
    assert soon.kind == "rerouted" and soon.moved == 0
    kinds = {way.kind for way in ways_back(problem, made, before, [5])}
    assert kinds == {"smaller", "borrowed", "merged", "anew", "rerouted"}


def test_what_cannot_go_on_says_so() -> None:
    problem = chain(8)
    made = templates(problem, range(2, 9), 4)
    start = arranged(made, 2, [2], 4)
    assert start is not None
    with pytest.raises(InputError, match="no rank that is left holds 4 of 8 regions"):
        ways_back(problem, made, layout_of(start, made), [1])
