"""Rates of features: found again from a model's numbers at a few sizes, and what stages pay by them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.errors import InputError
from csc.planning.problem import Problem, SizeRates, Unit, Value, fitted, loads, mean, pipeline

RATE = st.floats(0.0, 100.0).map(lambda x: round(x, 2))
SIZES = [(1.0, float(t), float(n), float(n) ** 2) for t, n in ((1, 100), (2, 700), (5, 300), (8, 900), (3, 2000))]


@st.composite
def models(draw: st.DrawFn) -> tuple[SizeRates, Problem]:
    count = draw(st.integers(1, 4))
    features = len(SIZES[0])
    units = tuple(
        tuple(Unit(f"unit {u}", "llm", *(draw(RATE) for _ in range(3)), saved=draw(RATE)) for u in range(count))
        for _ in range(features)
    )
    values = tuple(
        tuple(Value(u, (u + 1,), (True,), draw(RATE), draw(RATE)) for u in range(count - 1)) for _ in range(features)
    )
    return SizeRates(units, values, 0.0), Problem(units[0], values[0], 1, 2)


def numbers(problem: Problem) -> list[float]:
    own = [x for u in problem.units for x in (u.forward, u.backward_input, u.backward_weight, u.saved)]
    return own + [x for v in problem.values for x in (v.size, v.gradient_size)]


@settings(max_examples=40, deadline=None)
@given(models())
def test_rates_are_found_again(case: tuple[SizeRates, Problem]) -> None:
    right, problem = case
    found = fitted([mean(right, problem, size) for size in SIZES], SIZES)
    assert found.error < 1e-6
    other = (1.0, 4.0, 1234.0, 999999.0)
    assert numbers(mean(found, problem, other)) == pytest.approx(numbers(mean(right, problem, other)), rel=1e-4)


@settings(max_examples=40, deadline=None)
@given(models(), st.sampled_from([0.0, 0.7]), st.sampled_from([0.0, 0.3]))
def test_loads_are_the_pipelines_of_each_size(case: tuple[SizeRates, Problem], action: float, handling: float) -> None:
    """What the runtime takes is there once for a microbatch, not for each of its tokens."""
    rates, problem = case
    problem = replace(problem, action=action, handling=handling)
    stages = [[u] for u in range(len(problem.units))]
    whole = pipeline(problem, stages)
    found = replace(whole, loads=loads(rates, problem, stages, SIZES))
    for number, size in enumerate(SIZES):
        right = pipeline(mean(rates, problem, size), stages)
        for stage, own in zip(right.stages, found.stages_of(number)):
            assert own.seconds("BW") == pytest.approx(stage.seconds("BW"), rel=1e-9)
            assert (own.forward, own.saved) == pytest.approx((stage.forward, stage.saved), rel=1e-9)
            assert own.fused >= stage.fused * (1 - 1e-9)
        for channel, bytes_ in right.messages.items():
            assert found.size(channel, number) == pytest.approx(bytes_, rel=1e-9)


def test_too_few_sizes_are_refused() -> None:
    unit = Unit("unit", "llm", 1.0)
    problem = Problem((unit,), (), 1, 2)
    with pytest.raises(InputError, match="2 sizes do not tell 3 features apart"):
        fitted([problem, problem], [(1.0, 1.0, 1.0), (1.0, 2.0, 4.0)])
    with pytest.raises(InputError, match="not of one model"):
        fitted([problem, Problem((replace(unit, name="other"),), (), 1, 2)], [(1.0, 1.0), (1.0, 2.0)])
