"""Templates: coverage of every number of ranks, the guarantee, and arrangements against brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.errors import InputError
from csc.planning.problem import Problem, Unit, Value
from csc.planning.survive.templates import (
    PipelineTemplate,
    arrangements,
    covered,
    depths,
    survival,
    templates,
)  # fmt: skip
from csc.simulation.pipeline import Link, Network
from tests.planning.graphs import problems

CASES = [
    (ranks, least, failures, left)
    for ranks in range(1, 41)
    for least in range(1, 7)
    for failures in range(4)
    for left in range((failures + 1) * least, ranks + 1)
]  # ranks of the job, of the smallest replica, failures at once, ranks left


def chain(units: int, memory: float | None = None, state: float = 16.0) -> Problem:
    layers = tuple(Unit(f"layer {i}", "llm", 1.0, 1.0, 1.0, saved=1.0, stashed=0.5, state=state) for i in range(units))
    values = tuple(Value(i, (i + 1,), (True,), 1.0, 1.0) for i in range(units - 1))
    return Problem(layers, values, 1, 1, memory, Network(Link(0.01, 1e3)))


def test_every_number_of_ranks_is_covered() -> None:
    """All 13,314: as long as (f + 1) n0 ranks are left they are a sum of f + 1 or more of the depths."""
    assert len(CASES) == 13_314
    for ranks, least, failures, left in CASES:
        allowed = depths(ranks, least, failures)
        found = covered(left, allowed, failures + 1)
        assert sum(found) == left and len(found) >= failures + 1 and set(found) <= set(allowed)


def test_any_failures_at_once_leave_a_copy_of_each_layer() -> None:
    """Each set of failed ranks tried, for small jobs: some replica lost none of its ranks."""
    tried = 0
    for ranks, least, failures, left in CASES:
        if left > 12 or ranks > 14:
            continue
        found = covered(left, depths(ranks, least, failures), failures + 1)
        replica_of = [replica for replica, depth in enumerate(found) for _ in range(depth)]
        for lost in itertools.combinations(range(left), failures):
            hit = {replica_of[rank] for rank in lost}
            assert len(hit) < len(found)
            tried += 1
    assert tried > 5_000


def test_what_is_no_sum_is_refused_with_what_would_be() -> None:
    with pytest.raises(InputError, match=r"7 ranks are no sum of 2 depths or more out of 5 to 6. Take 10 ranks or mo"):
        covered(7, range(5, 7), 2)
    with pytest.raises(InputError, match=r"9 ranks are no sum of 1 depth or more out of 4. Leave 1 to spare"):
        covered(9, [4], 1)
    with pytest.raises(InputError, match=r"7 ranks hold 1 replica of 4 ranks or more, of which 2 are needed so that 1 "
                                         r"failure at once leave one. Start with 8 ranks or more."):  # fmt: skip
        depths(7, 4, 1)


def _every_arrangement(
    made: dict[int, PipelineTemplate], ranks: int, microbatches: int, replicas: int
) -> Iterator[float]:  # fmt: skip
    for count in range(replicas, min(ranks, microbatches) + 1):
        for depths_of in itertools.combinations_with_replacement(sorted(made), count):
            if sum(depths_of) > ranks:
                continue
            for cuts in itertools.combinations(range(1, microbatches), count - 1):
                bounds = [0, *cuts, microbatches]
                yield max(made[d].seconds(b - a) for d, a, b in zip(depths_of, bounds, bounds[1:]))


@pytest.mark.parametrize("replicas", [1, 2])
@settings(max_examples=25, deadline=None)
@given(problem=problems(most=5), microbatches=st.integers(2, 5), ranks=st.integers(2, 5))
def test_arrangements_are_the_fastest(replicas: int, problem: Problem, microbatches: int, ranks: int) -> None:
    made = templates(problem, range(1, min(ranks, len(problem.units)) + 1), microbatches)
    found = arrangements(made, [ranks], microbatches, replicas)[ranks]
    best = min(_every_arrangement(made, ranks, microbatches, replicas))
    assert best * (1 - 1e-9) <= found.seconds <= best * (1 + 2e-4)
    assert found.microbatches == microbatches and len(found.replicas) >= replicas and found.spare >= 0
    assert math.isclose(found.seconds, max(made[r.depth].seconds(r.microbatches) for r in found.replicas))


@settings(max_examples=25, deadline=None)
@given(problem=problems(most=5), microbatches=st.sampled_from([2, 4, 6]), ranks=st.integers(2, 8))
def test_equal_replicas_are_what_a_mesh_has(problem: Problem, microbatches: int, ranks: int) -> None:
    made = templates(problem, range(1, len(problem.units) + 1), microbatches)
    found = arrangements(made, range(2, ranks + 1), microbatches, 2, equal=True)
    assert sorted(found) == list(range(2, ranks + 1))
    for n, each in found.items():
        assert len(set(each.replicas)) == 1 and each.microbatches == microbatches and each.spare >= 0
        best = min(
            made[depth].seconds(microbatches // count)
            for depth in made for count in range(2, microbatches + 1)
            if not microbatches % count and depth * count <= n
        )  # fmt: skip
        assert each.seconds <= best * (1 + 1e-6)
    assert [found[n].seconds for n in sorted(found)] == sorted((e.seconds for e in found.values()), reverse=True)


def test_equal_replicas_need_microbatches_that_they_can_share() -> None:
    with pytest.raises(InputError, match="no 2 equal replicas or more that share 9 microbatches out evenly"):
        survival(chain(4), 2, 9, 1, equal=True)
    assert survival(chain(4), 4, 8, 1, equal=True).arrangements[4].survives >= 1


@settings(max_examples=30, deadline=None)
@given(problem=problems(most=6), microbatches=st.integers(3, 12), replicas=st.integers(1, 3))
def test_one_rank_more_is_never_slower(problem: Problem, microbatches: int, replicas: int) -> None:
    made = templates(problem, range(1, len(problem.units) + 1), microbatches)
    found = arrangements(made, range(1, 13), microbatches, replicas)
    assert sorted(found) == list(range(replicas, 13))
    seconds = [found[n].seconds for n in sorted(found)]
    assert seconds == sorted(seconds, reverse=True)


def test_a_job_is_planned_down_to_what_failures_leave() -> None:
    problem = chain(12, memory=75.0)  # 4 layers' state and activations: 3 ranks hold a replica
    plan = survival(problem, 10, 16, 2)
    assert plan.least == 3 and sorted(plan.arrangements) == [8, 9, 10]
    assert {n: each.survives >= min(2, n // 3 - 1) for n, each in plan.arrangements.items()} == dict.fromkeys(
        (8, 9, 10), True
    )
    assert all(each.microbatches == 16 for each in plan.arrangements.values())
    used = {replica.depth for each in plan.arrangements.values() for replica in each.replicas}
    assert used <= set(plan.templates) == set(range(3, 5))


def test_too_few_ranks_are_refused_with_what_would_do() -> None:
    problem = chain(12, memory=75.0)
    with pytest.raises(InputError) as error:
        survival(problem, 5, 16, 1)
    text = str(error.value)
    assert "5 ranks (75 B each) hold 1 replica, as one takes 3 ranks" in text
    assert "Start with 6 ranks; or allow " in text and "so that 2 ranks hold a replica" in text
    with pytest.raises(InputError, match="ask for 1"):
        survival(problem, 8, 16, 2)
    with pytest.raises(InputError, match="a step of 2 microbatches has nothing to do"):
        survival(problem, 9, 2, 2)
    with pytest.raises(InputError, match="cannot survive 0 failures"):
        survival(problem, 9, 2, 0)


@pytest.mark.long
def test_64_ranks_and_48_layers_are_planned_for_every_number_of_ranks() -> None:
    plan = survival(chain(48), 64, 64, 31)
    assert sorted(plan.arrangements) == list(range(33, 65))
    assert all(each.survives >= 31 for each in plan.arrangements.values())
