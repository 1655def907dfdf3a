"""Which dimension a shard has in other sizes, where that is one for sure."""

from __future__ import annotations

import pytest

from csc.analysis.placements import UNKNOWN, Placement, _reshaped


@pytest.mark.parametrize(
    ("before", "after", "held", "found"),
    [
        ((6, 32), (2, 3, 32), 0, 0),
        ((2, 3, 32), (6, 32), 0, 0),
        ((2, 3, 32), (2, 3, 4, 8), 2, 2),
        ((10, 32), (1, 10, 32), 0, UNKNOWN),  # of one image or of ten tokens: sizes do not tell
        ((1, 10, 32), (10, 32), 0, 0),
    ],
)
def test_where_a_shard_is(before: tuple[int, ...], after: tuple[int, ...], held: int, found: Placement) -> None:
    assert _reshaped(before, after, held) == found
