"""CKA and clusters against what their definitions say, without shortcuts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.model_search.similarity import clusters, distances, linear_cka


def by_definition(x: np.ndarray, y: np.ndarray) -> float:
    """With the products of features, entry by entry."""
    x, y = x - x.mean(0), y - y.mean(0)
    across = sum((x[:, i] @ y[:, j]) ** 2 for i in range(x.shape[1]) for j in range(y.shape[1]))
    within = [
        np.sqrt(sum((z[:, i] @ z[:, j]) ** 2 for i in range(z.shape[1]) for j in range(z.shape[1]))) for z in (x, y)
    ]
    return float(across / (within[0] * within[1]))


@given(st.integers(0, 2**32 - 1), st.integers(3, 9), st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_linear_cka_is_its_definition(seed: int, samples: int, one: int, other: int) -> None:
    chance = np.random.default_rng(seed)
    x, y = chance.normal(size=(samples, one)), chance.normal(size=(samples, other))
    assert linear_cka(x, y) == pytest.approx(by_definition(x, y), abs=1e-9)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_rotation_scale_and_shift_make_no_difference(seed: int) -> None:
    chance = np.random.default_rng(seed)
    x = chance.normal(size=(12, 5))
    rotation, _ = np.linalg.qr(chance.normal(size=(5, 5)))
    assert linear_cka(x, 3 * x @ rotation + 7) == pytest.approx(1.0)


def test_a_constant_is_like_nothing() -> None:
    assert linear_cka(np.ones((6, 3)), np.random.default_rng(0).normal(size=(6, 2))) == 0.0


def average_linkage(apart: np.ndarray, count: int) -> set[frozenset[int]]:
    """Joins the two clusters with the least mean distance until `count` are left."""
    groups = [frozenset([i]) for i in range(len(apart))]
    while len(groups) > count:
        mean = {(a, b): np.mean([apart[i, j] for i in a for j in b]) for a, b in itertools.combinations(groups, 2)}
        a, b = min(mean, key=mean.__getitem__)
        groups = [group for group in groups if group not in (a, b)] + [a | b]
    return set(groups)


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_clusters_are_those_of_average_linkage(seed: int, size: int, count: int) -> None:
    chance = np.random.default_rng(seed)
    apart = distances([chance.normal(size=(10, 4)) for _ in range(size)])
    found = clusters(apart, count)
    assert {frozenset(members) for members in found.members} == average_linkage(apart, min(count, size))
    assert sorted(itertools.chain(*found.members)) == list(range(size))
    for members, medoid in zip(found.members, found.medoids, strict=True):
        assert medoid in members
        assert apart[medoid, members].sum() == pytest.approx(min(apart[one, members].sum() for one in members))
        assert all(found.of(one) == found.members.index(members) for one in members)
