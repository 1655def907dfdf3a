"""From which batch size on batches drawn at random lead to the same choice.

The criterion is Entrain's: a size is large enough if 59 fresh batches choose alike. If more than one in twenty batches
chose otherwise, 59 alike would be seen in one case of twenty (0.95 ** 59 = 0.048).

    large_enough(alike, sizes) -> AlikeSizes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

BATCHES = 59


@dataclass(frozen=True)
class AlikeSizes:
    """shares: by size how many of BATCHES chose alike. least: the smallest from which on all of each size did; None:
    the largest size did not.
    """

    shares: dict[int, int]
    least: int | None


def large_enough(alike: Callable[[int, int], bool], sizes: Iterable[int]) -> AlikeSizes:
    """alike: whether a batch of this size, by number, chooses as the others do; sizes: those to look at."""
    shares = {size: sum(alike(size, number) for number in range(BATCHES)) for size in sorted(set(sizes))}
    least = None
    for size, share in reversed(shares.items()):
        if share < BATCHES:
            break
        least = size
    return AlikeSizes(shares, least)
