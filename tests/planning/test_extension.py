"""The search for the end of a stage: several ends at a time find what trying one after the other does."""

from __future__ import annotations

import numpy as np
import pytest

from csc.planning import segment_bounds
from csc.planning.problem import Ints
from csc.planning.segment_bounds import Bools


@pytest.mark.parametrize("probes", [1, 7, 512])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_the_first_end_that_fits(monkeypatch: pytest.MonkeyPatch, probes: int, rows: int) -> None:
    """Few probes: bisection; as many as there are ends: all at once. The end behind the largest: none fits."""
    monkeypatch.setattr(segment_bounds, "PROBES", probes)
    random = np.random.default_rng(rows)
    least = random.integers(0, 20, rows)
    largest = least + random.integers(0, 40, rows)
    first = random.integers(0, 70, rows)
    asked = 0

    def fits(which: Ints, end: Ints) -> Bools:
        nonlocal asked
        asked += 1
        assert ((end >= least[which]) & (end <= largest[which])).all()
        return end >= first[which]

    found = segment_bounds._least_that_fits(fits, least, largest)
    assert found.tolist() == [
        next((end for end in range(a, b + 1) if end >= wanted), b + 1) for a, b, wanted in zip(least, largest, first)
    ]
    assert asked <= (1 if probes == 512 and rows == 1 else 7)
