"""Cuts under little memory: against all cuts, and against what an order of work can reach."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.planning.partition import _needs, contiguous
from csc.planning.problem import Problem, Unit, Value, branches, pipeline
from csc.planning.schedules.greedy import Rule, run
from csc.planning.schedules.work import WorkTables, room
from csc.planning.segment_bounds import segments
from tests.planning.graphs import problems


def all_cuts(problem: Problem) -> list[list[tuple[int, int]]]:
    """For every way to cut the units in their order, the first unit and the end of each stage."""
    count = len(problem.units)
    found = itertools.combinations(range(1, count), problem.ranks - 1)
    return [list(itertools.pairwise([0, *inner, count])) for inner in found]


@settings(deadline=None, max_examples=60)
@given(problems(), st.sampled_from([3.0, 8.0, 15.0, 40.0]))
def test_no_other_cut_needs_less(problem: Problem, memory: float) -> None:
    problem = replace(problem, memory=memory)
    needs = _needs(problem, segments(problem, branches(problem)))
    best = min(max(needs[a, b] for a, b in cuts) for cuts in all_cuts(problem))
    found = contiguous(problem)
    if found is None:
        assert best == float("inf")
        return
    assert sorted(u for stage in found for u in stage) == list(range(len(problem.units)))
    listed = sorted((min(stage), max(stage) + 1) for stage in found)
    assert max(needs[a, b] for a, b in listed) == pytest.approx(best) and best < float("inf")


def line(count: int, ranks: int, memory: float) -> Problem:
    """Equal units with recomputation, a head that has no layer's W, much kept for W and little saved."""
    units = tuple(Unit(f"u{u}", "llm", 1.0, 2.0, 1.0, saved=1.0, stashed=15.0) for u in range(count))
    values = tuple(Value(u, (u + 1,), (True,), 0.0, 0.0) for u in range(count - 1))
    return Problem(units, values, ranks, 24, memory)


@pytest.mark.parametrize("memory", [60.0, 150.0, 1e4])
def test_an_order_takes_no_less_on_a_chain(memory: float) -> None:
    """Equal stages, messages without length: on the last rank nothing is early, and no order beats what is left."""
    problem = line(12, 4, memory)
    stages = tuple(tuple(range(3 * s, 3 * s + 3)) for s in range(4))
    needs = _needs(problem, segments(problem, branches(problem)))
    need = max(needs[3 * s, 3 * s + 3] for s in range(4))
    work = WorkTables.of(pipeline(problem, stages), range(4), 24)
    for urgency in itertools.permutations(range(3)):
        priority = [[24.0 * 2 * urgency[lane % 3] + k for k in range(24)] for lane in range(work.size)]
        for fused in (False, True):
            _, seconds = run(work, Rule(priority, memory=room(work, memory), fused=fused))
            assert seconds >= need * (1 - 1e-9)


def test_with_less_memory_the_last_stages_get_less_to_do() -> None:
    plenty, little = contiguous(line(160, 4, 1e6)), contiguous(line(160, 4, 1300.0))
    assert plenty is not None and little is not None
    assert len(little[-1]) < len(little[0])
    assert len(little[-1]) <= len(plenty[-1])
