"""Partitions for two stages on each rank: the loads against all splits there are, and what they are good for."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.planning.plan import plan
from csc.planning.problem import Problem, pipeline
from csc.planning.schedules import SCHEDULES, auto, placement
from csc.planning.screen import FEW, screen
from csc.planning.ways import CLOSE, KEPT, filled, paired
from csc.simulation.pipeline import peak_memory
from csc.simulation.simulate import makespan
from tests.planning.graphs import mllm

TIMES = st.sampled_from([0.0, 0.5, 1.0, 1.3, 4.0])


def splits(units: int, stages: int) -> list[list[int]]:
    """The ends of all contiguous, non-empty stages."""
    return [[*inner, units] for inner in combinations(range(1, units), stages - 1)]


def largest(work: list[float], loads: list[float], ends: list[int]) -> float:
    return max(load + sum(work[a:b]) for load, (a, b) in zip(loads, pairwise([0, *ends])))


@settings(deadline=None)
@given(st.lists(TIMES, min_size=1, max_size=8), st.lists(TIMES, min_size=1, max_size=4))
def test_the_largest_load_is_the_least_there_is(work: list[float], loads: list[float]) -> None:
    loads = loads[: len(work)]
    ends = filled([work] * len(loads), loads)
    assert ends in splits(len(work), len(loads))
    least = min(largest(work, loads, ends) for ends in splits(len(work), len(loads)))
    assert largest(work, loads, ends) == pytest.approx(least)


def loads(problem: Problem, stages: tuple[tuple[int, ...], ...], home: list[int]) -> list[float]:
    found = [0.0] * problem.ranks
    for members, rank in zip(stages, home):
        found[rank] += sum(problem.units[unit].work for unit in members)
    return found


@pytest.mark.parametrize("name", ["interleaved-zb", "zb-v"])
def test_the_two_stages_of_a_rank_even_each_other_out(name: str) -> None:
    """No contiguous partition into two stages a rank has less of a largest load, but for CLOSE."""
    problem = mllm([(3, 2.0)], (5, 1.0), 3, ("encoder",))
    home = placement(name, 3)
    found = paired(problem, home)
    assert 1 <= len(found) <= KEPT
    every = [
        tuple(tuple(range(a, b)) for a, b in pairwise([0, *ends])) for ends in splits(len(problem.units), len(home))
    ]
    least = min(max(loads(problem, stages, home)) for stages in every)
    for stages in found:
        assert stages in every
        assert max(loads(problem, stages, home)) <= CLOSE * least


def test_there_are_none_for_other_placements_and_for_less_memory_than_anything_takes() -> None:
    problem = mllm([(3, 2.0)], (5, 1.0), 3, ("encoder",))
    assert paired(problem, [0, 1, 2]) == []
    assert paired(problem, [0, 0, 1, 1, 2, 2]) == []
    assert paired(problem, [0, 1, 2] * 3) == []
    assert paired(replace(problem, ranks=8), placement("zb-v", 8)) == []
    assert paired(replace(problem, memory=1e-9), placement("zb-v", 3)) == []


def equal_forwards(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """The split into two stages a rank of someone who sees forwards only."""
    count = 2 * problem.ranks
    ends = filled([[unit.forward for unit in problem.units]] * count, [0.0] * count)
    return tuple(tuple(range(a, b)) for a, b in pairwise([0, *ends]))


def test_a_plan_is_faster_than_interleaved_zero_bubble_on_equal_forwards() -> None:
    """Within the memory of that schedule. Planning that balances stages one by one makes it 1.19 times as fast."""
    problem = mllm([(12, 1.0)], (16, 1.0), 4, ("encoder",), microbatches=8)
    numbers = pipeline(problem, equal_forwards(problem))
    schedule = SCHEDULES["interleaved-zb"](numbers, placement("interleaved-zb", 4), 8)
    found = plan(replace(problem, memory=max(peak_memory(numbers, schedule))))
    assert 1.22 * found.makespan <= makespan(numbers, schedule)


def test_interleaved_zero_bubble_is_among_the_orders_that_are_tried() -> None:
    """On stages of which the other orders of a quick look make no plan that is as fast in that memory."""
    problem = mllm([(12, 1.0)], (16, 1.0), 4, ("encoder", "llm"), microbatches=12)
    stages, home = equal_forwards(problem), placement("interleaved-zb", 4)
    numbers = pipeline(problem, stages)
    schedule = SCHEDULES["interleaved-zb"](numbers, home, 12)
    memory, seconds = max(peak_memory(numbers, schedule)), makespan(numbers, schedule) * (1 + 1e-9)
    others = screen(replace(problem, memory=memory), stages, home, tuple(each for each in FEW if each != schedule.name))
    looked = screen(replace(problem, memory=memory), stages, home)
    assert others is not None and others.seconds > seconds
    assert looked is not None and looked.seconds <= seconds
    assert makespan(numbers, auto(numbers, home, 12, memory, budget=0)) <= seconds
