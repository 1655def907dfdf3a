"""What to keep and what to make again, against every choice there is."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.planning.rematerialise import Candidate, StashChoice, least, savings


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[Candidate], list[int]]:
    """Small graphs: the first step enters F; later ones read earlier ones; some cannot be kept, some not made again."""
    steps = [Candidate((), draw(st.integers(1, 9)), None)]
    for i in range(1, draw(st.integers(2, 7))):
        inputs = tuple(sorted(draw(st.sets(st.integers(0, i - 1), min_size=1, max_size=2))))
        size, time = draw(st.integers(1, 9)), float(draw(st.integers(0, 5)))
        kind = draw(st.sampled_from(["plain", "plain", "plain", "view", "random"]))
        steps.append(Candidate(inputs, None if kind == "view" else size, None if kind == "random" else time))
    return steps, draw(st.lists(st.integers(0, len(steps) - 1), min_size=1, max_size=3))


def every(steps: list[Candidate], needed: list[int]) -> list[tuple[int, float]]:
    """(bytes, seconds) of every set of steps to keep from which the rest can be made again."""
    found = []
    for flags in product((False, True), repeat=len(steps)):
        kept = {i for i, flag in enumerate(flags) if flag}
        if any(steps[i].size is None for i in kept):
            continue
        again: set[int] = set()
        stack = [i for i in needed if i not in kept]
        while stack:
            i = stack.pop()
            if i not in again:
                again.add(i)
                stack += [used for used in steps[i].inputs if used not in kept]
        if any(steps[i].seconds is None for i in again):
            continue
        found.append((sum(steps[i].size or 0 for i in kept), sum(steps[i].seconds or 0.0 for i in again)))
    return found


def total(saving: StashChoice, price: float) -> float:
    return saving.kept + price * saving.rematerialised


@settings(max_examples=60, deadline=None)
@given(networks(), st.sampled_from([0.0, 0.3, 1.0, 2.5, 100.0]))
def test_the_cut_is_the_least_of_all_choices(network: tuple[list[Candidate], list[int]], price: float) -> None:
    steps, needed = network
    choices = every(steps, needed)
    found = least(steps, needed, price)
    assert total(found, price) == pytest.approx(min(kept + price * again for kept, again in choices), abs=0.02)
    assert (found.kept, found.rematerialised) in choices


@settings(max_examples=40, deadline=None)
@given(networks())
def test_the_corners_are_best_at_every_price(network: tuple[list[Candidate], list[int]]) -> None:
    steps, needed = network
    choices, corners = every(steps, needed), savings(steps, needed)
    assert corners[0].price == float("inf")
    assert [c.kept for c in corners] == sorted({c.kept for c in corners}, reverse=True)
    assert corners[0].rematerialised == min(again for _, again in choices)
    for price in (0.0, 0.1, 0.7, 1.3, 4.0, 50.0):
        here = [c for c in corners if c.price >= price][-1]
        assert total(here, price) == pytest.approx(min(kept + price * again for kept, again in choices), abs=0.02)


def test_a_chain_keeps_the_narrow_place() -> None:
    """in (8) -> wide (8) -> narrow (1) -> wide (8, needed): keep the narrow one and run the last call again."""
    steps = [Candidate((), 8, None), Candidate((0,), 8, 1.0), Candidate((1,), 1, 1.0), Candidate((2,), 8, 1.0)]
    assert least(steps, [3], 0.0).kept_steps == {2}
    assert least(steps, [3], 8.0).kept_steps == {3}
    assert [c.kept for c in savings(steps, [3])] == [8, 1]


def test_what_can_neither_be_kept_nor_made_again() -> None:
    with pytest.raises(ValueError, match="neither"):
        least([Candidate((), None, None)], [0], 1.0)
