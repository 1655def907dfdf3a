"""What layouts take at least, beside what plans take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from csc.planning.meshes import expected_seconds, least_memory, least_seconds
from csc.planning.plan import plan
from csc.planning.problem import Problem
from tests.planning.graphs import chain, problem_of, problems


@settings(max_examples=25, deadline=None)
@given(problems(most=5, ranks=3, microbatches=(1, 2, 4)))
def test_no_plan_is_below_the_bounds(problem: Problem) -> None:
    """In just the memory that a plan takes, so that the bytes and seconds of what is saved count."""
    for schedule in ("gpipe", "1f1b", "zb-h1", "auto"):
        found = plan(problem, schedule, effort=0.05)
        held = max(found.peak_memory)
        assert held >= least_memory(problem) - 1e-9
        if held:
            assert found.makespan >= least_seconds(replace(problem, memory=held)) - 1e-9


def test_little_room_takes_long() -> None:
    """Eight stages, one microbatch at a time: the bound knows of it, and the guess is right."""
    sizes = [(8.0, 1.0)] * 8
    problem = problem_of(chain(range(8)), [(1.0, True)] * 8, 8, 16, sizes)
    tight = replace(problem, memory=18.0)
    taken = plan(tight, effort=0.05).makespan
    assert least_seconds(problem) < least_seconds(tight) <= taken
    assert expected_seconds(problem) == pytest.approx(least_seconds(problem))
    assert least_seconds(tight) <= expected_seconds(tight) == pytest.approx(taken, rel=0.5)
    assert expected_seconds(replace(problem, memory=5.0)) == float("inf")
    assert least_seconds(replace(problem, memory=1.0)) == float("inf")
