"""Strategies on learning curves that are known: budgets are kept, nothing is trained twice, the best pair is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.errors import InputError
from csc.model_search.forecast import GROWTH, LENGTH, NOISE, OWN, forecast
from csc.model_search.strategies import (
    STRATEGIES,
    Choice,
    Grid,
    Halving,
    Mordal,
    Pair,
    Rung,
    Seen,
    Space,
    drive,
    extrapolated,
    named,
)


class Curves:
    """Made-up candidates: error = scale * samples^slope by qualities of both sides, with or without noise."""

    def __init__(self, encoders: int, llms: int, seed: int, noise: float = 0.0, full: int = 4096) -> None:
        chance = np.random.default_rng(seed)
        self.names = tuple(f"e{i}" for i in range(encoders)), tuple(f"m{i}" for i in range(llms))
        self.quality = chance.uniform(size=encoders), chance.uniform(size=llms)
        self.noise, self.seed, self.full = noise, seed, full
        self.asked: list[tuple[Pair, int, int]] = []

    def score(self, pair: Pair, samples: int) -> float:
        e, m = (self.quality[side][int(pair[side][1:])] for side in (0, 1))
        error = 0.9 * (samples / 16) ** -(0.1 + 0.2 * e + 0.1 * m)
        jitter = np.random.default_rng([self.seed, samples, int(pair[0][1:]), int(pair[1][1:])]).normal()
        return 1 - error * float(np.exp(self.noise * jitter))

    def train(self, rung: Rung, seen: Seen) -> dict[Pair, float | None]:
        assert len(set(rung.pairs)) == len(rung.pairs)
        for pair in rung.pairs:
            self.asked.append((pair, seen.reached(pair), rung.samples))
        return {pair: self.score(pair, rung.samples) for pair in rung.pairs}

    def space(self, budget: float, least: int = 8) -> Space:
        e = self.quality[0]
        total = len(self.names[0]) * len(self.names[1]) * self.full
        apart = np.abs(e[:, None] - e[None, :])
        return Space(*self.names, self.full, round(budget * total), least, encoder_distances=apart)

    def apart(self, encoder: str) -> np.ndarray:
        m = self.quality[1]
        return np.abs(m[:, None] - m[None, :])

    def search(self, strategy: object, budget: float) -> tuple[Choice, Seen]:
        return drive(strategy, self.space(budget), self.seed, self.train, self.apart)  # type: ignore[arg-type]

    @property
    def best(self) -> Pair:
        pairs = [(e, m) for e in self.names[0] for m in self.names[1]]
        return max(pairs, key=lambda pair: self.score(pair, self.full))


@given(
    st.sampled_from(["halving", "mordal", "random"]), st.integers(1, 7), st.integers(1, 6), st.integers(0, 999),
    st.floats(0.0, 0.2), st.floats(0.05, 1.0),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_budgets_are_kept_and_nothing_is_trained_twice(
    name: str, encoders: int, llms: int, seed: int, noise: float, budget: float
) -> None:
    curves = Curves(encoders, llms, seed, noise)
    try:
        choice, seen = curves.search(STRATEGIES[name], budget)
    except InputError as error:
        assert "budget is" in str(error) and not curves.asked
        return
    space = curves.space(budget)
    assert seen.spent <= space.budget
    trained = [(pair, after) for pair, before, after in curves.asked if before < after]
    assert len(trained) == len(set(trained))
    reached: dict[Pair, int] = {}
    for pair, before, after in curves.asked:
        assert before == reached.get(pair, 0)
        reached[pair] = max(before, after)
    assert sorted(choice.ranking) == sorted(space.pairs)
    assert set(choice.dropped) == set(choice.ranking[1:]) and all(choice.dropped.values())
    assert seen.reached(choice.ranking[0]) == space.full  # the winner was trained to the end


@given(st.integers(2, 7), st.integers(2, 6), st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_without_noise_the_best_is_found(encoders: int, llms: int, seed: int) -> None:
    """Curves that do not cross: every rung is right, and so is the whole order of the grid."""
    curves = Curves(encoders, llms, seed)
    assert curves.search(Halving(), 0.5)[0].ranking[0] == curves.best
    ranking = curves.search(Grid(), 1.0)[0].ranking
    pairs = [(e, m) for e in curves.names[0] for m in curves.names[1]]
    assert ranking == tuple(sorted(pairs, key=lambda pair: -curves.score(pair, curves.full)))


def test_mordal_finds_the_best_of_clear_clusters() -> None:
    """Candidates in tight groups: the medoid stands for its group, and the members are told apart in the end."""
    for seed in range(5):
        curves = Curves(6, 4, seed)
        e, m = np.array([0.1, 0.12, 0.5, 0.52, 0.9, 0.93]), np.array([0.2, 0.22, 0.8, 0.84])
        curves.quality = np.random.default_rng(seed).permutation(e), np.random.default_rng(seed).permutation(m)
        choice, seen = curves.search(Mordal(), 0.2)
        assert choice.ranking[0] == curves.best
        assert any("stands for its cluster" in why for why in choice.dropped.values())
        assert seen.spent < 0.2 * 24 * curves.full


@pytest.mark.parametrize("name", ["halving", "mordal", "grid"])
def test_a_pair_that_fails_is_passed_over(name: str) -> None:
    curves = Curves(4, 3, seed=1)
    broken = curves.best

    def train(rung: Rung, seen: Seen) -> dict[Pair, float | None]:
        assert broken not in rung.pairs or broken not in seen.failed
        scores = curves.train(rung, seen)
        return {pair: None if pair == broken else score for pair, score in scores.items()}

    choice, seen = drive(STRATEGIES[name], curves.space(1.0), 0, train, curves.apart)
    assert seen.failed == {broken}
    assert broken not in choice.ranking and len(choice.ranking) == 11


def test_pairs_that_cannot_be_composed_are_in_no_rung() -> None:
    for name in STRATEGIES:
        curves = Curves(3, 3, seed=2)
        space = curves.space(1.0)
        space = Space(
            space.encoders, space.llms, space.full, space.budget, encoder_distances=space.encoder_distances,
            impossible=frozenset({("e0", "m0"), ("e0", "m1"), ("e0", "m2"), ("e1", "m0")}),
        )  # fmt: skip
        choice, _ = drive(STRATEGIES[name], space, 0, curves.train, curves.apart)
        assert len(choice.ranking) == 5 and not {pair for pair, _, _ in curves.asked} & space.impossible


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_budget_below_the_first_rung_is_a_sentence(name: str) -> None:
    curves = Curves(6, 4, seed=0)
    with pytest.raises(InputError, match=r"the budget is .* samples, and .* takes .* with the strategy"):
        curves.search(STRATEGIES[name], 0.001)
    assert curves.asked == []


def test_names_and_shares_are_checked() -> None:
    with pytest.raises(InputError, match="there is no strategy 'best'"):
        named("best")
    with pytest.raises(InputError, match="keep is 1"):
        Curves(2, 2, 0).search(Halving(keep=1), 0.5)


@given(st.integers(0, 999), st.integers(2, 5))
@settings(max_examples=60, deadline=None)
def test_power_laws_are_extrapolated(seed: int, points: int) -> None:
    """Of curves without noise the interval holds the true error; least squares is numpy's."""
    chance = np.random.default_rng(seed)
    scale, slope = chance.uniform(0.1, 0.9, 3), -chance.uniform(0.05, 0.8, 3)
    samples = 16 * 2 ** np.arange(points)
    curves = {(str(n), "m"): tuple((int(s), 1 - float(scale[n] * s ** slope[n])) for s in samples) for n in range(3)}
    bounds = extrapolated(curves, 4096, 1.0, 2.0)
    for n in range(3):
        low, high = bounds[str(n), "m"]
        line = np.polyfit(np.log(samples), np.log(scale[n] * samples ** slope[n]), 1)
        expected = np.exp(np.polyval(line, np.log(4096)))
        assert low <= expected * 1.0001 and expected <= high * 1.0001 and low < high


def test_what_a_budget_leaves_delays_the_last_decision() -> None:
    curves = Curves(6, 4, seed=3)
    choice, seen = curves.search(Halving(), 1 / 6)
    ends = [pair for pair in seen.curves if seen.reached(pair) == curves.full]
    assert len(ends) == 2 and choice.ranking[0] in ends
    assert seen.spent <= 1 / 6 * 24 * curves.full
    twelfth = curves.search(Halving(), 1 / 12)[1]
    assert sum(twelfth.reached(pair) == curves.full for pair in twelfth.curves) == 1


def test_scores_above_the_perfect_one_are_a_sentence_where_errors_count() -> None:
    with pytest.raises(InputError, match="e0 x m0 has a score of 50, and perfect is 1"):
        extrapolated({("e0", "m0"): ((8, 40.0), (16, 50.0))}, 64, 1.0, 2.0)


@given(st.integers(0, 999), st.integers(2, 5), st.integers(2, 4))
@settings(max_examples=30, deadline=None)
def test_sides_tell_of_pairs_that_were_not_trained(seed: int, encoders: int, llms: int) -> None:
    """Figures that are sums of their sides' on a line: the forecast of a pair left out has its place among the others;
    in percent, with `perfect` forgotten, as well.
    """
    chance = np.random.default_rng(seed)
    parts = {
        f"{side}{n}": n + chance.uniform(0, 0.3) for side, count in (("e", encoders), ("m", llms)) for n in range(count)
    }
    pairs = [(f"e{i}", f"m{j}") for i in range(encoders) for j in range(llms)]

    def value(pair: Pair, samples: int) -> float:
        return 0.3 * np.log2(samples) + 2 ** (0.2 * np.log2(samples / 1024)) * (parts[pair[0]] + 1.7 * parts[pair[1]])

    left_out = pairs[int(chance.integers(len(pairs)))]
    for score in (lambda value: 1 - float(np.exp(-value)), lambda value: 50 + value):
        curves = {pair: tuple((s, score(value(pair, s))) for s in (64, 128, 256)) for pair in pairs if pair != left_out}
        expected = forecast(curves, pairs, 1024, 1.0)
        apart = [(one, other) for one in pairs for other in pairs if value(one, 1024) > value(other, 1024) + 0.5]
        assert apart and all(expected[one] > expected[other] for one, other in apart)


def test_forecasts_are_those_of_the_formula() -> None:
    """By the textbook's formula with numbers of its own, a and b by generalised least squares."""
    chance = np.random.default_rng(3)
    curves = {
        (f"e{i}", f"m{j}"): tuple((s, float(chance.uniform(0, 0.9))) for s in (8, 32))
        for i in range(3)
        for j in range(2)
    }
    points = [(pair, np.log2(s / 256), score) for pair, curve in curves.items() for s, score in curve]

    def kernel(p: Pair, d: float, q: Pair, f: float) -> float:
        alike = (p[0] == q[0]) + (p[1] == q[1]) + OWN * (p == q)
        return float(2 ** (GROWTH * (d + f)) * np.exp(-0.5 * ((d - f) / LENGTH) ** 2) * alike)

    y = -np.log(1 - np.array([score for *_, score in points]))
    mean, deviation = y.mean(), y.std()
    y = (y - mean) / deviation
    k = np.array([[kernel(p, d, q, f) for q, f, _ in points] for p, d, _ in points])
    k += np.diag([NOISE * 4 ** (GROWTH * d) for _, d, _ in points])
    h = np.array([[1, d] for _, d, _ in points])
    inverse = np.linalg.inv(k)
    line = np.linalg.solve(h.T @ inverse @ h, h.T @ inverse @ y)
    found = forecast(curves, [*curves, ("e9", "m0")], 256, 1.0)
    for pair, figure in found.items():
        near = np.array([kernel(pair, 0.0, q, f) for q, f, _ in points])
        assert figure == pytest.approx(
            mean + deviation * (line[0] + near @ inverse @ (y - h @ line)), rel=1e-2, abs=1e-2
        )


def test_forecasts_of_little_are_numbers() -> None:
    one = {("e0", "m0"): ((64, 0.5),)}
    assert np.isfinite([*forecast(one, [("e0", "m0"), ("e1", "m1")], 64, 1.0).values()]).all()
    same = {(f"e{i}", "m0"): ((8, 0.3), (16, 0.3)) for i in range(4)}
    assert np.ptp([*forecast(same, [*same], 64, 1.0).values()]) == pytest.approx(0, abs=1e-9)
    perfect = {(f"e{i}", "m0"): ((8, 1.0 - i / 4),) for i in range(3)}  # an error of 0
    expected = forecast(perfect, [*perfect], 64, 1.0)
    assert sorted(perfect, key=lambda pair: -expected[pair]) == [*perfect]
