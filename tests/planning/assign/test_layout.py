"""How samples lie in microbatches: features, sizes, neighbours in length, and sizes that are kept to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.planning.assign.portfolio import CHEAP, assign, settled
from csc.planning.assign.step import BatchLayout, SampleCosts, Size, widths_of
from tests.balance.costs import costs

GROUPS = [[0, 3], [1], [2, 4, 5]]
LENGTHS = np.array([10.0, 33.0, 7.0, 12.0, 20.0, 9.0])
UNITS = np.array([[1.0], [2.0], [0.0], [1.0], [3.0], [2.0]])


def step(layout: BatchLayout, replicas: int, microbatches: int) -> SampleCosts:
    own = costs(3, microbatches)
    return SampleCosts(
        layout.samples, own.pipeline, own.placement, own.orders, replicas, microbatches, (1.0,) * 4, layout
    )


@pytest.mark.parametrize("packed", [True, False])
def test_features_are_those_of_the_rows(packed: bool) -> None:
    layout = BatchLayout(LENGTHS, UNITS, packed, multiple=8)
    for group, row in zip(GROUPS, layout.features(GROUPS).tolist()):
        own, units = LENGTHS[group], UNITS[group, 0]
        width = 8 * np.ceil((own.sum() if packed else own.max()) / 8)
        pairs = (own**2).sum() if packed else len(group) * width**2
        positions = width if packed else len(group) * width
        assert row == [1.0, units.sum(), (units**2).sum(), positions, pairs]
        assert layout.size(group) == (int(units.sum()), 1 if packed else len(group), int(width))


def test_a_known_width_is_taken_if_it_adds_little() -> None:
    layout = BatchLayout(LENGTHS, UNITS, True, 8, known=widths_of([(2, 1, 28)]), slack=0.25)
    assert layout.size([0, 3]) == (2, 1, 28)  # 24 would do
    assert layout.features([[0, 3]])[0, -2] == 28
    assert replace(layout, slack=0.0).size([0, 3]) == (2, 1, 24)
    assert layout.size([0, 5]) == (3, 1, 24)  # of another kind nothing is known


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), min_size=8, max_size=24), st.booleans(),
    st.integers(1, 2), st.booleans(),
)  # fmt: skip
def test_each_sample_once_however_they_lie(
    samples: list[tuple[int, int]], packed: bool, replicas: int, knows: bool
) -> None:
    lengths, units = (np.array(one, dtype=np.float64) for one in zip(*samples))
    layout = BatchLayout(lengths, units[:, None], packed, 8)
    if knows:
        first = assign(step(layout, replicas, 4), rounds=0)
        layout = replace(layout, known=widths_of(size for own in first.groups for size in layout.sizes(own)))
    found = assign(step(layout, replicas, 4), rounds=4)
    assert sorted(i for own in found.groups for group in own for i in group) == list(range(len(samples)))
    assert all(len(own) == 4 and all(own) for own in found.groups)
    assert found == assign(step(layout, replicas, 4), rounds=4)


def test_neighbours_in_length_share_padded_rows() -> None:
    """Long and short samples, half of each: padding a short one to a long one doubles it."""
    lengths = np.array([400.0, 50.0] * 16)
    found = assign(step(BatchLayout(lengths, np.ones((32, 1)), False, 8), 1, 8), rounds=0)
    mixed = [group for group in found.groups[0] if len({lengths[i] for i in group}) > 1]
    assert len(mixed) <= 1


def test_samples_change_places_until_sizes_are_known() -> None:
    lengths = np.array([10.0, 20.0, 30.0, 40.0])
    layout = BatchLayout(lengths, np.zeros((4, 1)), True, 10, known={(0, 1): (50,)}, slack=0.0)
    found = settled(step(layout, 1, 2), [[0, 1], [2, 3]], lambda groups: True)
    assert sorted(map(sorted, found)) == [[0, 3], [1, 2]] or sorted(map(len, found)) == [1, 3]
    assert {layout.size(group) for group in found} == {(0, 1, 50)}
    assert settled(step(layout, 1, 2), [[0, 1], [2, 3]], lambda groups: False) == [[0, 1], [2, 3]]


def test_what_single_samples_do_not_settle_two_do() -> None:
    """A short row and two longer ones change places; one for one leads nowhere."""
    lengths = np.array([100.0, 90.0, 90.0, 30.0, 30.0, 30.0])
    layout = BatchLayout(lengths, np.ones((6, 1)), True, 10, known={(3, 1): (160, 210)}, slack=0.0)
    asked, groups = step(layout, 1, 2), [[0, 1, 2], [3, 4, 5]]
    assert settled(asked, groups, lambda groups: True, CHEAP) == groups
    found = settled(asked, groups, lambda groups: True)
    assert {layout.size(group) for group in found} == {(3, 1, 160), (3, 1, 210)}


def test_a_known_size_is_not_bought_with_a_longer_step() -> None:
    lengths = np.array([1000.0, 2000.0, 3000.0, 4000.0])
    layout = BatchLayout(lengths, np.zeros((4, 1)), True, 1000, known={(0, 1): (2000, 3000, 7000, 8000)}, slack=0.0)
    equal = [[0, 3], [1, 2]]
    asked = step(layout, 1, 2)
    longer = asked.seconds_of_ways([[[0, 1], [2, 3]]])[0] / asked.seconds_of_ways([equal])[0]
    assert longer > 1.05 and settled(asked, equal, lambda groups: True) == equal


def test_large_microbatches_are_not_searched_through() -> None:
    """Two of fifty samples for two of fifty are a million and a half changes; what is looked at is bounded."""
    random = np.random.default_rng(0)
    lengths, units = random.integers(10, 2000, 400).astype(float), random.integers(0, 9, (400, 1)).astype(float)
    groups = [list(range(first, first + 50)) for first in range(0, 400, 50)]
    plain = BatchLayout(lengths, units, True, 64)
    known = widths_of([plain.size(group) for group in groups[1:]])
    looked = [0]

    class Counted(BatchLayout):
        def size(self, group: Sequence[int]) -> Size:
            looked[0] += 1
            return super().size(group)

    settled(step(Counted(lengths, units, True, 64, known=known), 1, 8), groups, lambda groups: False)
    assert 0 < looked[0] <= 3 * (2 * 2**14 + 100)
