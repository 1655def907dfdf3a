"""Stages of which some belong to one component alone: against all ways to cut the others' units and its own."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.errors import InputError
from csc.planning.partition import own_stages
from csc.planning.problem import Problem, Unit, Value


def problem(encoder: list[int], language: list[int], ranks: int) -> Problem:
    units = [Unit(f"e{i}", "encoder", seconds * 1e-3) for i, seconds in enumerate(encoder)]
    units += [Unit(f"l{i}", "language", seconds * 1e-3) for i, seconds in enumerate(language)]
    return Problem(units=tuple(units), values=(), ranks=ranks, microbatches=1)


def least(costs: list[int], stages: int) -> int:
    ways = combinations(range(1, len(costs)), stages - 1)
    return min(max(sum(costs[a:b]) for a, b in pairwise((0, *cuts, len(costs)))) for cuts in ways)


SECONDS = st.lists(st.integers(1, 9), min_size=3, max_size=6)


@settings(max_examples=50, deadline=None)
@given(SECONDS, SECONDS, st.integers(1, 3), st.integers(1, 3))
def test_both_are_as_even_as_they_can_be(encoder: list[int], language: list[int], own: int, others: int) -> None:
    whole = problem(encoder, language, own + others)
    found = own_stages(whole, [("encoder", own)])
    assert [unit for stage in found for unit in stage] == list(range(len(whole.units)))
    sums = [round(sum(whole.units[unit].work for unit in stage) * 1e3) for stage in found]
    assert max(sums[:own]) == least(encoder, own) and max(sums[own:]) == least(language, others)


def test_what_is_not_there_or_too_short_is_an_error() -> None:
    whole = problem([1, 2], [3, 4], 5)
    with pytest.raises(InputError, match=r"3 pipeline stages for encoder, which has 2 regions.*pp=2, or less"):
        own_stages(whole, [("encoder", 3)])
    with pytest.raises(InputError, match=r"gives vision pipeline stages of its own.*encoder, language"):
        own_stages(whole, [("vision", 1)])
    with pytest.raises(InputError, match="4 pipeline stages for all that has no stages of its own, which has 2"):
        own_stages(whole, [("encoder", 1)])


def test_the_last_component_shares_its_stages_where_all_are_named() -> None:
    whole = problem([1, 2], [3, 4], 3)
    whole = replace(whole, units=(*whole.units, Unit("head", "root", 1e-3)))
    for own in ([("encoder", 1), ("language", 2)], [("language", 2), ("encoder", 1)]):
        assert own_stages(whole, own) == [[0, 1], [2], [3, 4]] == own_stages(whole, [("encoder", 1)])


def reading(whole: Problem, *pairs: tuple[int, int]) -> Problem:
    """Each pair: a unit, and one that reads what it makes."""
    return replace(whole, values=tuple(Value(a, (b,), (True,), 1.0, 1.0) for a, b in pairs))


def test_a_component_that_reads_all_others_stands_behind_them_with_the_loss() -> None:
    whole = problem([1, 2], [3, 4], 3)
    whole = reading(replace(whole, units=(*whole.units, Unit("loss", "root", 1e-3))), (1, 2), (2, 3), (0, 4), (3, 4))
    assert own_stages(whole, [("language", 2)]) == [[0, 1], [2], [3, 4]]
    middle = problem([1], [3], 3)
    middle = replace(middle, units=(Unit("merge", "root", 1e-3), *middle.units, Unit("loss", "root", 1e-3)))
    middle = reading(middle, (0, 2), (1, 2), (2, 3))
    assert own_stages(middle, [("encoder", 1), ("language", 1)]) == [[1], [0], [2, 3]]


def test_stages_in_front_read_nothing_from_behind() -> None:
    whole = problem([1, 2], [3, 4], 2)
    whole = reading(replace(whole, units=(*whole.units, Unit("head", "root", 1e-3, state=8.0))), (1, 2), (3, 4))
    with pytest.raises(InputError, match="gives language pipeline stages in front of others, and it reads what e1 of"):
        own_stages(whole, [("language", 1)])
    with pytest.raises(InputError, match="gives language pipeline stages in front of others, and it reads what e1 of"):
        own_stages(reading(problem([1, 2], [3, 4], 2), (1, 2)), [("language", 1)], [("language", 2)])
