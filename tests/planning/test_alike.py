"""From which batch size on random batches choose alike."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from csc.planning.assign.step import BATCHES, large_enough


@given(st.dictionaries(st.integers(1, 500), st.integers(0, BATCHES), min_size=1, max_size=6))
def test_it_is_the_smallest_from_which_on_all_do(shares: dict[int, int]) -> None:
    found = large_enough(lambda size, number: number < shares[size], [*shares, *shares])
    assert found.shares == dict(sorted(shares.items()))
    able = [size for size in shares if all(shares[other] == BATCHES for other in shares if other >= size)]
    assert found.least == min(able, default=None)


def test_means_of_larger_batches_choose_alike() -> None:
    """Two plans that break even .3 above the mean: batches of n choose the other one where their mean is there."""
    samples = np.random.default_rng(0).lognormal(0.0, 1.0, 20_000)

    def alike(size: int, number: int) -> bool:
        own = np.random.default_rng(number).choice(samples, size, replace=False)
        return bool(own.mean() < samples.mean() + 0.3)

    found = large_enough(alike, [4 << n for n in range(10)])
    assert found.shares[4] < BATCHES and found.least is not None
    assert 64 <= found.least <= 1024, "a deviation of 2.2 at one sample; 2.4 of them at n samples are .3 for n = 300"
