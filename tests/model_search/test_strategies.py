"""Strategies on learning curves that are known: budgets are kept, nothing is trained twice, the best pair is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.errors import InputError
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
    two_sided,
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


@given(st.integers(0, 999), st.integers(2, 5), st.integers(2, 5))
@settings(max_examples=40, deadline=None)
def test_sides_tell_of_their_pairs(seed: int, encoders: int, llms: int) -> None:
    chance = np.random.default_rng(seed)
    pairs = [(f"e{i}", f"m{j}") for i in range(encoders) for j in range(llms)]
    parts = {name: chance.normal() for pair in pairs for name in pair}
    own = {pair: parts[pair[0]] + parts[pair[1]] for pair in pairs}
    without = two_sided({pair: 1 - float(np.exp(-figure)) / 100 for pair, figure in own.items()}, 1.0)
    assert sorted(pairs, key=without.__getitem__) == sorted(
        pairs, key=own.__getitem__
    )  # sums of sides stay as they are
    with_noise = {pair: figure + chance.normal(scale=0.5) for pair, figure in own.items()}
    mended = two_sided({pair: 1 - float(np.exp(-figure)) / 100 for pair, figure in with_noise.items()}, 1.0)
    centred = {pair: mended[pair] - np.log(100) for pair in pairs}
    error = sum((centred[pair] - own[pair]) ** 2 for pair in pairs)
    assert error <= sum((with_noise[pair] - own[pair]) ** 2 for pair in pairs) + 1e-9  # a projection of noise is less
    assert two_sided({}, 1.0) == {}
    percent = two_sided({pair: 50 + figure for pair, figure in own.items()}, 1.0)  # `perfect` was forgotten
    assert sorted(pairs, key=percent.__getitem__) == sorted(pairs, key=own.__getitem__)
    with pytest.raises(InputError, match="e0 x m0 has a score of 50, and perfect is 1"):
        extrapolated({("e0", "m0"): ((8, 40.0), (16, 50.0))}, 64, 1.0, 2.0)
