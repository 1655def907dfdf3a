"""Lower bounds: equal to their definition, least over all partitions, and never above what brute force reaches."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from csc.errors import InputError
from csc.planning.frontiers import least
from csc.planning.partition_bound import (
    INTERVALS,
    WITHIN,
    floor_of,
    lower_bound,
    round_trip,
    shared_lower_bound,
    stage_bound,
)
from csc.planning.problem import Problem, Unit, Value, branches
from csc.planning.segment_bounds import segments
from tests.planning.graphs import (
    assignments,
    best_makespan,
    bound_of,
    chain,
    main_chain,
    members,
    mllm,
    paced_bound_of,
    paths,
    problem_of,
    problems,
)


def convex(problem: Problem, units: list[int]) -> bool:
    try:
        stage_bound(problem, units)
    except InputError:
        return False
    return True


@settings(max_examples=150, deadline=None)
@given(problems(most=7), st.data())
def test_the_bound_of_a_stage_is_its_definition(problem: Problem, data: st.DataObject) -> None:
    count = len(problem.units)
    units = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    assume(convex(problem, units))
    assert stage_bound(problem, units) == pytest.approx(bound_of(problem, units), rel=1e-9)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(problems(most=7), st.data())
def test_a_part_of_a_stage_has_no_larger_bound(problem: Problem, data: st.DataObject) -> None:
    """What lets the search forget all but the longest segments."""
    home = data.draw(st.sampled_from(sorted(itertools.islice(assignments(problem), 200))))
    whole = data.draw(st.sampled_from(members(home)))
    part = sorted(data.draw(st.sets(st.sampled_from(whole), min_size=1)))
    assume(convex(problem, part))
    assert stage_bound(problem, part) <= stage_bound(problem, whole) * (1 + 1e-12)


def grid(problem: Problem) -> list[float]:
    """The paces that csc.planning.partition_bound tells apart, read off the bound without it."""
    tables = segments(problem, branches(problem))
    plain = least(tables, problem.ranks, floor_of(problem, tables))
    assert plain is not None
    forward = [problem.units[u].forward for u in tables.branches.chains[-1]]
    low = max(max(forward), sum(forward) / problem.ranks) * (1 - 1e-9)
    ratio = max(2.0, plain[0] / problem.microbatches / low) ** (1 / (INTERVALS - 1))
    return [low * ratio**i for i in range(INTERVALS)]


def test_unequal_microbatches_have_no_pace() -> None:
    """Sizes whose sum is a multiple of the least are not equal for that."""
    seconds = [(1.0, 0.0, 0.0), (1.0, 0.0, 1.0), (3.0, 3.0, 0.0), (2.0, 4.0, 0.0), (1.0, 1.0, 0.0)]
    units = tuple(Unit(f"u{i}", "a", f, b, w, has_b=b + w > 0, has_w=w > 0) for i, (f, b, w) in enumerate(seconds))
    values = tuple(Value(i, (i + 1,), (i > 0,), 1.0, 1.0) for i in range(4))
    problem = Problem(units, values, 4, 4, scale=(0.5, 0.5, 0.5, 1.0))
    plain = (max(bound_of(problem, part) for part in stages) for stages in map(members, assignments(problem)))
    assert lower_bound(problem).seconds == pytest.approx(min(plain))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(problems())
def test_the_bound_is_the_least_over_all_partitions(problem: Problem) -> None:
    trip = max(paths(problem)[1].values()) * max(problem.scale or (1.0,))
    partitions = {members(home) for home in assignments(problem)}
    plain = {stages: max(trip, *(bound_of(problem, units) for units in stages)) for stages in partitions}
    found = lower_bound(problem)
    assert round_trip(problem) == pytest.approx(trip)
    assert sorted(u for units in found.stages for u in units) == list(range(len(problem.units)))
    assert plain[found.stages] == pytest.approx(min(plain.values()), rel=1e-8)
    main = list(branches(problem).chains[-1])
    assert main == main_chain(problem)
    forward = {(value.maker, reader) for value in problem.values for reader in value.readers}
    if len(set(problem.scale or ())) == 1:
        return
    if problem.scale is not None or not set(itertools.pairwise(main)) <= forward:
        assert found.seconds == pytest.approx(min(plain.values()), rel=1e-8)
        return
    steps = grid(problem)
    whole = min(max(plain[stages], paced_bound_of(problem, stages, steps)) for stages in partitions)
    assert max(min(plain.values()), whole / (1 + 2 * WITHIN)) <= found.seconds * (1 + 1e-8)
    assert found.seconds <= whole * (1 + 1e-8)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_no_order_beats_the_bound_behind_a_slow_encoder(slow: int, first: int, second: int, trains: bool) -> None:
    """What the pace is about: frozen units of a long F, then trained ones that wait for them."""
    problem = problem_of(chain(range(3)), [(float(slow), False), (float(first), True), (float(second), trains)], 3, 4)
    best = best_makespan(problem, [[0], [1], [2]], [0, 1, 2])
    assert lower_bound(problem).seconds <= best * (1 + 1e-9)


def test_the_pace_raises_the_bound() -> None:
    """Frozen encoders in large models: a figure that is not reached without it."""
    problem = mllm([(45, 1.0)], (46, 1.2), 12, ("encoder",))
    tables = segments(problem, branches(problem))
    plain = least(tables, 12, floor_of(problem, tables))
    assert plain is not None
    found = lower_bound(problem)
    assert found.seconds > 1.02 * plain[0]
    assert "pace" in found.term


@settings(max_examples=40, deadline=None)
@given(problems(most=3, ranks=3, microbatches=(1, 2)))
def test_no_order_beats_the_bound(problem: Problem) -> None:
    best = min(best_makespan(problem, members(home), range(problem.ranks)) for home in assignments(problem))
    assert lower_bound(problem).seconds <= best * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(problems(most=4, ranks=3, microbatches=(1, 2)), st.sampled_from([0.0, 0.7, 5.0]), st.sampled_from([0.0, 1.3]))
def test_no_order_beats_the_bounds_that_count_the_runtime(problem: Problem, action: float, handling: float) -> None:
    told = replace(problem, action=action, handling=handling)
    best = min(best_makespan(told, members(home), range(told.ranks)) for home in assignments(told))
    for bound in (lower_bound, shared_lower_bound):
        assert bound(problem).seconds <= bound(told).seconds <= best * (1 + 1e-9)


def test_the_bounds_count_what_the_runtime_takes() -> None:
    """Eight equal units on two ranks, 40 microbatches: of each rank at least the time of its F's is the runtime's."""
    problem = problem_of(chain(range(8)), [(1.0, True)] * 8, 2, 40)
    told = replace(problem, action=0.5, handling=0.25)
    assert lower_bound(told).seconds == pytest.approx(lower_bound(problem).seconds + 40 * 0.5)
    assert shared_lower_bound(told).seconds == pytest.approx(shared_lower_bound(problem).seconds + 40 * 0.75)
    alone = replace(told, ranks=1)
    assert shared_lower_bound(alone).seconds == pytest.approx(
        shared_lower_bound(replace(problem, ranks=1)).seconds + 20
    )


@settings(max_examples=40, deadline=None)
@given(problems(most=3, ranks=2, microbatches=(1, 2)))
def test_no_plan_at_all_beats_the_shared_bound(problem: Problem) -> None:
    """Units as stages of their own, on any rank: nothing is freer."""
    count = len(problem.units)
    best = min(
        best_makespan(problem, [[u] for u in range(count)], placement)
        for placement in itertools.product(range(problem.ranks), repeat=count)
        if len(set(placement)) == problem.ranks
    )
    shared = shared_lower_bound(problem).seconds
    assert shared <= best * (1 + 1e-9)
    assert shared <= lower_bound(problem).seconds * (1 + 1e-9)


def test_the_bound_is_reached_by_a_uniform_chain_of_two() -> None:
    """Two equal stages, F = B = W = 1, four microbatches: a ramp of 1, then 12 without a pause on the second rank."""
    units = tuple(Unit(f"u{u}", "trunk", 1.0, 1.0, 1.0) for u in range(2))
    problem = Problem(units, (Value(0, (1,), (True,), 1.0, 1.0),), 2, 4)
    assert lower_bound(problem).seconds == 13.0
    short = replace(problem, microbatches=2)
    assert best_makespan(short, [[0], [1]], [0, 1]) == lower_bound(short).seconds == 7.0


def test_a_frozen_stage_counts_the_whole_round_trip() -> None:
    """Frozen encoder of F = 5, then a trained trunk of 1, 1, 1: 5 m, then what the last microbatch has left to do."""
    problem = problem_of(chain([0, 1]), [(5.0, False), (1.0, True)], 2, 8)
    trunk = problem.units[1]
    assert stage_bound(problem, [0]) == 8 * 5 + trunk.work
    assert stage_bound(problem, [1]) == 5 + 8 * trunk.work


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [("encoder", "llm"), ("encoder",), ()])
def test_the_reference_case(frozen: tuple[str, ...]) -> None:
    """A large case: the stages that come with the bound have it, and no unit is lost."""
    problem = mllm([(24, 0.5), (12, 0.3)], (40, 1.5), 12, frozen)
    found = lower_bound(problem)
    assert len(found.stages) == 12
    worst = max(stage_bound(problem, units) for units in found.stages)
    assert worst <= found.seconds * (1 + 1e-9)
    assert worst == pytest.approx(found.seconds) or "pace" in found.term
    assert found.seconds > shared_lower_bound(problem).seconds
    assert found.seconds > sum(unit.work for unit in problem.units) * 24 / 12


def test_more_ranks_than_units() -> None:
    problem = problem_of(chain([0, 1]), [(1.0, True)] * 2, 3, 2)
    for bound in (lower_bound, shared_lower_bound):
        with pytest.raises(InputError, match="2 regions cannot fill 3 stages"):
            bound(problem)


def test_units_with_others_between_are_no_stage() -> None:
    problem = problem_of(chain(range(3)), [(1.0, True)] * 3, 2, 2)
    with pytest.raises(InputError, match="wait for each other in a circle"):
        stage_bound(problem, [0, 2])
