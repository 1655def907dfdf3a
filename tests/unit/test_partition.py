"""Partition against brute force."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csc.errors import InputError
from csc.planning.partition import at_cuts, balance


def largest(costs: list[int], firsts: list[int]) -> int:
    return max(sum(costs[a:b]) for a, b in pairwise([*firsts, len(costs)]))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 9))
def test_balance_is_optimal(costs: list[int], stages: int) -> None:
    stages = min(stages, len(costs))
    firsts = balance(costs, stages)
    assert firsts[0] == 0 and len(firsts) == stages
    assert all(a < b for a, b in pairwise([*firsts, len(costs)])), "a stage is empty"
    best = min(largest(costs, [0, *cuts]) for cuts in combinations(range(1, len(costs)), stages - 1))
    assert largest(costs, firsts) == best


def test_ties_leave_early_stages_light() -> None:
    assert balance([1, 1, 1, 1, 1], 2) == [0, 2]
    assert balance([0, 0, 0, 0], 3) == [0, 1, 2]


def test_balance_is_fast_enough_for_thousands_of_regions() -> None:
    costs = [10**12 + 7919 * i % 104729 for i in range(5000)]
    assert len(balance(costs, 64)) == 64


@pytest.mark.parametrize(
    ("costs", "stages", "part"), [([1], 2, "cannot fill"), ([1], 0, "0 stages"), ([1, -1], 1, "costs -1")]
)
def test_balance_refuses(costs: list[int], stages: int, part: str) -> None:
    with pytest.raises(InputError, match=part):
        balance(costs, stages)


def test_at_cuts() -> None:
    names = ["embed", "layers.0", "layers.1", "head"]
    assert at_cuts(names, ["head", "layers.1"]) == [0, 2, 3]
    assert at_cuts(names, []) == [0]
    for cuts, part in ((["layer.1"], "layers.1"), (["embed"], "first region"), (["head", "head"], "twice")):
        with pytest.raises(InputError, match=part):
            at_cuts(names, cuts)
