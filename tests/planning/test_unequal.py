"""Ranks of several kinds: bounds against brute force, plans that give slower ranks less, memory of each rank."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.errors import InputError
from csc.planning.partition import orders, partitions
from csc.planning.partition_bound import lower_bound, round_trip, shared_lower_bound, spread_over_kinds
from csc.planning.plan import plan
from csc.planning.problem import Problem, RankKind, pipeline, placed, unequal
from csc.simulation.pipeline import Link, Network, RankNodes
from csc.simulation.simulate import makespan
from tests.planning.graphs import assignments, best_makespan, bound_of, chain, members, mllm, problem_of, problems


def slower(problem: Problem, ranks: tuple[int, ...], factors: tuple[float, float, float], **memory: float) -> Problem:
    """The problem with these ranks slower by a factor for F, B and W; memory: bytes of `fast` and `slow` ones."""
    fast = tuple((u.forward, u.backward_input, u.backward_weight) for u in problem.units)
    slow = tuple(tuple(t * f for t, f in zip(seconds, factors)) for seconds in fast)
    others = tuple(rank for rank in range(problem.ranks) if rank not in ranks)
    kinds = [RankKind("fast", others, fast, memory.get("fast")), RankKind("slow", ranks, slow, memory.get("slow"))]  # type: ignore[arg-type]
    return unequal(problem, [kind for kind in kinds if kind.ranks])


def stage_bound_on(problem: Problem, units: tuple[int, ...], kind: int) -> float:
    """The definition: ways of the fastest ranks, the stage's own work on its kind."""
    return bound_of(problem, units, problem.alike(kind))


def least_over_partitions(problem: Problem) -> float:
    """Over all assignments to the ranks, some of which may stay without a stage, and all places for the stages."""
    best = float("inf")
    for count in range(1, problem.ranks + 1):
        for home in assignments(replace(problem, ranks=count)):
            stages = members(home)
            for ranks in itertools.permutations(range(problem.ranks), count):
                bounds = (stage_bound_on(problem, s, problem.kind_of[r]) for s, r in zip(stages, ranks))
                best = min(best, max(bounds))
    return max(best, round_trip(problem), spread_over_kinds(problem))


@settings(max_examples=60, deadline=None)
@given(problems(most=5, ranks=3, microbatches=(1, 4)), st.sampled_from([(2.0, 2.0, 2.0), (1.0, 3.0, 1.5)]), st.data())
def test_the_bound_is_least_over_partitions_and_places(
    problem: Problem, factors: tuple[float, float, float], data: st.DataObject
) -> None:
    slow = data.draw(st.sets(st.integers(0, problem.ranks - 1), min_size=1))
    other = slower(problem, tuple(sorted(slow)), factors)
    if other.kinds:
        assert lower_bound(other).seconds == pytest.approx(least_over_partitions(other), rel=1e-5)
    else:
        assert lower_bound(other).seconds >= lower_bound(problem).seconds * (1 - 1e-9)


@settings(max_examples=20, deadline=None)
@given(problems(most=4, ranks=2, microbatches=(1, 2)), st.sampled_from([(2.0, 2.0, 2.0), (1.5, 1.0, 3.0)]))
def test_no_order_beats_the_bounds(problem: Problem, factors: tuple[float, float, float]) -> None:
    """Every partition, on every rank, in the best of all orders."""
    problem = replace(problem, scale=None)
    other = slower(problem, (problem.ranks - 1,), factors)
    bound = lower_bound(other).seconds
    for home in assignments(problem):
        stages = members(home)
        for ranks in itertools.permutations(range(problem.ranks)):
            one = placed(other, stages, ranks)
            assert best_makespan(one, stages, ranks) >= bound * (1 - 1e-9)
    units = tuple((u,) for u in range(len(problem.units)))
    for ranks in itertools.product(range(problem.ranks), repeat=len(units)):
        if set(ranks) == set(range(problem.ranks)):
            one = placed(other, units, ranks)
            assert best_makespan(one, units, ranks) >= shared_lower_bound(other).seconds * (1 - 1e-9)


def test_a_slow_rank_gets_less_and_the_plan_is_near_the_bound() -> None:
    """Half of the ranks take twice as long: the best is about 2/3 of the speed of fast ones alone, not 1/2."""
    links = chain(range(24))
    even = problem_of(links, [(1.0, True)] * 24, 4, 16)
    other = slower(even, (1, 3), (2.0, 2.0, 2.0))
    found = plan(other, effort=0.05, chunks=1)
    work = {rank: len(stage) for stage, rank in zip(found.stages, found.placement)}
    assert work[1] + work[3] < work[0] + work[2]
    assert found.makespan == makespan(pipeline(other, found.stages, found.placement), found.schedule)
    assert found.bound is not None
    assert found.bound <= found.makespan < 1.12 * found.bound
    alone = plan(slower(even, (0, 1, 2, 3), (2.0, 2.0, 2.0)), effort=0.05, chunks=1)
    assert found.makespan < 0.75 * alone.makespan


@pytest.mark.parametrize("schedule", ["auto", "1f1b", "interleaved-1f1b"])
def test_every_rank_keeps_to_its_own_memory(schedule: str) -> None:
    problem = replace(mllm([(6, 1.0)], (10, 2.0), 4, microbatches=8), memory=None)
    least = plan(problem, "1f1b", chunks=1).peak_memory
    other = slower(problem, (2, 3), (1.0, 1.0, 1.0), fast=3 * max(least), slow=1.1 * max(least))
    found = plan(other, schedule, effort=0.05)
    limits = [3 * max(least)] * 2 + [1.1 * max(least)] * 2
    assert all(peak <= limit * (1 + 1e-9) for peak, limit in zip(found.peak_memory, limits))


def test_what_fits_nowhere_names_the_rank_and_its_limit() -> None:
    problem = mllm([(6, 1.0)], (10, 2.0), 4, microbatches=8)
    with pytest.raises(InputError, match=r"nothing fits in 0\.001 bytes: rank 3"):
        plan(slower(problem, (3,), (1.0, 1.0, 1.0), fast=1e15, slow=1e-3), effort=0.01)


def test_a_link_is_as_slow_as_its_slower_end() -> None:
    near, far, slow = Link(1e-6, 100.0), Link(2e-6, 10.0), Link(5e-6, 4.0)
    network = Network(places=(RankNodes((0,), near, far), RankNodes((0,), near, far), RankNodes((1,), near, slow)))
    assert network.link(0, 1) == near
    assert network.link(1, 2) == network.link(2, 1) == Link(5e-6, 4.0)


def test_ranks_that_are_of_no_kind_are_named() -> None:
    problem = mllm([(6, 1.0)], (10, 2.0), 4, microbatches=8)
    with pytest.raises(InputError, match="name the ranks"):
        plan(replace(slower(problem, (3,), (1.0, 1.0, 1.0)), ranks=5))


def test_a_large_problem_is_looked_at_once_for_each_order() -> None:
    """64 ranks of two kinds and 130 units: no search for orders, one partition for each, and the cuts in order."""
    both = slower(problem_of(chain(range(130)), [(1.0, True)] * 130, 64, 999), tuple(range(40, 64)), (2.0, 2.0, 2.0))
    found = orders(both)
    assert [list(order) for order in found] == [list(range(64)), [*range(40, 64), *range(40)]]
    for order in found:
        listed = partitions(both, order, [None])
        assert 1 <= len(listed) <= 2
        for stages in listed:
            assert sorted(u for members in stages for u in members) == list(range(130))
            assert max(len(members) * (1 + (rank >= 40)) for members, rank in zip(stages, order)) <= 4
