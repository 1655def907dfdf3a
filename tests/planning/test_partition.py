"""Partitions: the best over all acyclic assignments, with and without a memory limit; layouts, candidates, words."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.errors import InputError
from csc.planning.partition import candidates, depths, describe, homes_of, message_bytes, moved, moves, partition
from csc.planning.partition_bound import NEARLY, lower_bound, stage_bound
from csc.planning.problem import Problem, branches, numbered, pipeline
from tests.planning.graphs import (
    assignments,
    bound_of,
    chain,
    depths_of,
    members,
    mllm,
    needs_of,
    orders,
    paths,
    problem_of,
    problems,
    with_memory,
)


def value(problem: Problem, stages: tuple[tuple[int, ...], ...]) -> float:
    trip = max(paths(problem)[1].values()) * max(problem.scale or (1.0,))
    return max(trip, *(bound_of(problem, units) for units in stages))


def check_valid(problem: Problem, stages: tuple[tuple[int, ...], ...]) -> list[int]:
    """Every unit once, no stage empty, values to higher stages: what the simulator and the runtime take."""
    assert sorted(u for units in stages for u in units) == list(range(len(problem.units)))
    assert len(stages) == problem.ranks and all(stages)
    home = homes_of(stages)
    assert all(home[a] <= home[b] for a, b in orders(problem))
    for kind, source, destination in pipeline(problem, stages).messages:
        assert (source < destination) == (kind == "F")
    return home


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(problems())
def test_without_memory_it_is_the_best_of_all(problem: Problem) -> None:
    stages = partition(problem)
    check_valid(problem, stages)
    brute = min(value(problem, members(home)) for home in assignments(problem))
    assert value(problem, stages) == pytest.approx(brute, rel=1e-8)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(problems(), st.integers(1, 50))
def test_with_memory_it_is_the_best_that_fits(problem: Problem, limit: int) -> None:
    problem = with_memory(problem, float(limit))
    fitting = [home for home in assignments(problem) if max(needs_of(problem, home)) <= limit]
    if not fitting:
        least = min(max(needs_of(problem, home)) for home in assignments(problem))
        with pytest.raises(InputError) as error:
            partition(problem)
        stated = re.search(r"\((\d+) bytes\)", str(error.value))
        assert stated is not None and int(stated[1]) - 1 < least <= int(stated[1])
        partition(with_memory(problem, least))
        return
    stages = partition(problem)
    home = check_valid(problem, stages)
    assert max(needs_of(problem, home)) <= limit * (1 + 1e-9)
    brute = min(value(problem, members(other)) for other in fitting)
    assert value(problem, stages) == pytest.approx(brute, rel=1e-8)


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from(["apart", "colocated"]))
def test_layouts_are_the_best_of_their_kind(problem: Problem, layout: str) -> None:
    outside = {u for u, unit in enumerate(problem.units) if unit.component != "c"}

    def group(u: int) -> frozenset[int]:
        if u not in outside:
            return frozenset()
        if layout == "colocated":
            return frozenset(outside)
        reached, waiting = {u}, [u]
        while waiting:
            now = waiting.pop()
            near = {b if a == now else a for a, b in orders(problem) if now in (a, b)}
            waiting += [v for v in near & outside if v not in reached]
            reached |= near & outside
        return frozenset(reached)

    fitting = [
        home for home in assignments(problem) if all(len({group(u) for u in units}) == 1 for units in members(home))
    ]
    if not fitting:
        with pytest.raises(InputError, match="keeps the components apart"):
            partition(problem, layout=layout)  # type: ignore[arg-type]
        return
    stages = partition(problem, layout=layout)  # type: ignore[arg-type]
    assert all(len({group(u) for u in units}) == 1 for units in stages)
    brute = min(value(problem, members(home)) for home in fitting)
    assert value(problem, stages) == pytest.approx(brute, rel=1e-8)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(problems(), st.none() | st.integers(20, 60).map(float))
def test_candidates_are_valid_distinct_and_near_the_best(problem: Problem, limit: float | None) -> None:
    problem = replace(problem, memory=limit)
    try:
        found = candidates(problem)
    except InputError:
        assert limit is not None
        return
    assert len(set(found)) == len(found)
    for stages in found:
        home = check_valid(problem, stages)
        assert limit is None or max(needs_of(problem, home)) <= limit * (1 + 1e-9)
    if limit is None:
        best = min(value(problem, stages) for stages in found)
        assert best <= lower_bound(problem).seconds * 1.002 * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(problems(most=7), st.data())
def test_moves_and_bytes(problem: Problem, data: st.DataObject) -> None:
    """Moves keep a partition valid, and the bytes of single values add up to those of the messages."""
    home = data.draw(st.sampled_from(sorted(assignments(problem))[:300]))
    found = branches(problem)
    stages = numbered(found, home)
    home = tuple(check_valid(problem, stages))
    total = sum(message_bytes(each, home) for each in problem.values)
    assert total == pytest.approx(sum(pipeline(problem, stages).messages.values()))
    for unit, source, target in moves(found, stages):
        assert home[unit] == source != target
        after = moved(found, stages, unit, target)
        if after is not None:
            check_valid(problem, after)


def test_other_in_flight_counts() -> None:
    """Four units that save 1 each, on two ranks: with twice the microbatches in flight the split has to move."""
    problem = problem_of(chain(range(4)), [(1.0, True)] * 4, 2, 8, [(1.0, 0.0)] * 4)
    assert partition(with_memory(problem, 4.0)) == ((0, 1), (2, 3))
    assert partition(with_memory(problem, 6.0), lambda depth: 2 * depth) == ((0,), (1, 2, 3))
    with pytest.raises(InputError, match=r"Allow 6 B \(6 bytes\) or more"):
        partition(with_memory(problem, 5.0), lambda depth: 2 * depth)


def test_a_limit_that_nothing_fits_says_what_takes_the_space() -> None:
    problem = mllm([(6, 1.0)], (6, 2.0), 4, ("encoder",), memory=20.0)
    with pytest.raises(InputError) as error:
        partition(problem)
    text = str(error.value)
    assert "nothing fits in 20 B on each of 4 ranks" in text
    assert "for state of llm" in text and "for activations of llm" in text
    least = float(re.search(r"\((\d+) bytes\)", text)[1])  # type: ignore[index]
    partition(with_memory(problem, least))
    with pytest.raises(InputError):
        partition(with_memory(problem, least - 1))


def test_more_stages_than_units() -> None:
    with pytest.raises(InputError, match="3 regions cannot fill 4 stages"):
        partition(problem_of(chain(range(3)), [(1.0, True)] * 3, 4, 2))


def test_frozen_encoders_get_fewer_ranks() -> None:
    """The worked case of four ranks: F = 20 in the encoder, 20 in the LLM, 16 microbatches, in 40 units of 1."""
    times = [(1.0, u >= 20) for u in range(40)]
    frozen = problem_of(chain(range(40)), times, 4, 16, components=["vision"] * 20 + ["llm"] * 20)
    stages = partition(frozen)
    assert set(range(20)) <= set(stages[0]) | set(stages[1])
    assert len(stages[0]) >= 17
    trained = problem_of(chain(range(40)), [(1.0, True)] * 40, 4, 16)
    assert len(partition(trained)[0]) < 14


def test_words_for_layouts() -> None:
    links = chain([0, 1], [2, 3])
    links[1], links[3] = [4], [4]
    links[4] = [5]
    problem = problem_of(links, [(2.0, True)] * 6, 4, 4, components=["vision"] * 2 + ["audio"] * 2 + ["llm"] * 2)
    assert describe(problem, [(0, 1), (2, 3), (4,), (5,)]) == (
        "vision on 1 stage; audio on 1 stage; llm on 2 stages; vision and audio side by side"
    )
    assert describe(problem, [(0, 2), (1, 3), (4,), (5,)]) == (
        "llm on 2 stages; vision, audio together on 2 stages; vision and audio colocated, one after the other"
    )
    assert describe(problem, [(0,), (1, 2), (3, 4), (5,)]) == (
        "vision on 1 stage; llm on 1 stage; vision, audio together on 1 stage; audio, llm together on 1 stage; "
        "vision and audio colocated, one after the other"
    )


@pytest.mark.slow
def test_three_encoders_on_many_ranks() -> None:
    """Large: exact, valid, the same again."""
    problem = mllm([(12, 1.0), (6, 0.7), (15, 0.3)], (80, 2.0), 40, ("encoder",))
    stages = partition(problem)
    check_valid(problem, stages)
    bound = lower_bound(problem)
    assert max(stage_bound(problem, units) for units in stages) <= bound.seconds * (1 + NEARLY)
    assert stages == partition(problem)


def test_depth_counts_the_longest_path() -> None:
    links = chain([0, 1], [3, 4])
    links[1], links[2] = [3], [3]
    problem = problem_of(links, [(1.0, True)] * 5, 5, 4)
    assert depths(branches(problem), [(0,), (1,), (2,), (3,), (4,)]) == [4, 3, 3, 2, 1]
    assert depths_of(problem, (0, 1, 2, 3, 4)) == [4, 3, 3, 2, 1]
