"""Expressions from samples: exact for every polynomial of the stated degrees, an error for any other function."""

from __future__ import annotations

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.analysis.symbolic import check, exponents, fit, held_out, lattice
from csc.errors import CscError

sizes = st.integers(1, 4096)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """(start, steps, coefficients) for one to four symbols."""
    count = draw(st.integers(1, 4))
    start = draw(st.lists(sizes, min_size=count, max_size=count))
    steps = draw(st.lists(sizes, min_size=count, max_size=count))
    number = len(exponents(count))
    return start, steps, draw(st.lists(st.integers(-(10**12), 10**12), min_size=number, max_size=number))


def value(point: tuple[int, ...], coefficients: list[int]) -> int:
    total = 0
    for coefficient, powers in zip(coefficients, exponents(len(point))):
        for size, power in zip(point, powers):
            coefficient *= size**power
        total += coefficient
    return total


@given(cases())
@settings(max_examples=25, deadline=None)
def test_a_polynomial_is_found_exactly(case: tuple[list[int], list[int], list[int]]) -> None:
    start, steps, coefficients = case
    symbols = sympy.symbols(f"x:{len(start)}")
    points = lattice(start, steps)
    found = fit(symbols, points, [{"flops": value(point, coefficients)} for point in points])["flops"]
    monomials = [sympy.prod(s**p for s, p in zip(symbols, powers)) for powers in exponents(len(symbols))]
    assert sympy.expand(found - sum(c * m for c, m in zip(coefficients, monomials))) == 0
    further = held_out(start, steps)
    check({"flops": found}, symbols, further, {"flops": value(further, coefficients)})
    with pytest.raises(CscError, match="flops"):
        check({"flops": found}, symbols, further, {"flops": value(further, coefficients) + 1})


def test_counts() -> None:
    """1, and batch; three with a length; six with two; ten with three: each with and without the batch."""
    assert [len(exponents(n)) for n in (1, 2, 3, 4)] == [2, 6, 12, 20]
    points = lattice((2, 8, 5), (2, 4, 5))
    assert len(set(points)) == len(points) == 12
    assert points[0] == (2, 8, 5)
    further = held_out((2, 8, 5), (2, 4, 5))
    assert all(further[i] not in {point[i] for point in points} for i in range(3))


@pytest.mark.parametrize("function", [lambda b, t: t**3, lambda b, t: b * b, lambda b, t: b * (t // 3)])
def test_another_function_is_an_error(function: object) -> None:
    symbols = sympy.symbols("batch text")
    points, further = lattice((2, 8), (2, 4)), held_out((2, 8), (2, 4))
    expressions = fit(symbols, points, [{("head", "F flops"): function(*point)} for point in points])  # type: ignore[operator]
    with pytest.raises(CscError, match=r"head F flops: .*at batch = 6, text = 20"):
        check(expressions, symbols, further, {("head", "F flops"): function(*further)})  # type: ignore[operator]
