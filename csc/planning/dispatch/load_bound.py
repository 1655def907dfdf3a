"""What no dispatch with equal counts can beat.

Terms: w_1 >= w_2 >= ... are the sorted loads of blocks, P ranks, each with at least `low` and at most `high` blocks.

    load_bound(loads, ranks) -> float: of the heaviest rank; proof in docs/dispatch.md
    volume_bound(prepared, mask) -> float: of the busiest link
    lower_bound(prepared) -> float, seconds
"""

from __future__ import annotations

import numpy as np

from csc.planning.dispatch import bits
from csc.planning.dispatch.evaluate import MaskLoads, Prepared


def load_bound(loads: np.ndarray, ranks: int) -> float:
    """The larger of the mean (rounded up where loads are whole) and of (j + 1) w_{jP+1} + the low - j - 1 smallest."""
    w = np.sort(loads)[::-1]
    low = len(w) // ranks
    largest = w[::ranks]  # w_{jP+1}
    many = np.arange(1, len(largest) + 1)
    smallest = np.concatenate([[0.0], np.cumsum(w[::-1])])
    mean = w.sum() / ranks
    if (w == np.floor(w)).all():
        mean = np.ceil(mean)
    return float(max(mean, np.max(many * largest + smallest[np.maximum(low - many, 0)])))


def volume_bound(prepared: Prepared, mask: MaskLoads) -> float:
    """A rank receives what one of its blocks needs and it cannot own: the largest over all blocks."""
    keys = len(mask.shares)
    if mask.owners is None:
        short = (mask.closed[(keys - 1) // 64] >> np.uint64((keys - 1) % 64)) & np.uint64(1)
        wanted = bits.size(mask.closed) - (1 - mask.shares[-1]) * short
        return float(max(0.0, wanted.max() - prepared.workload.quotas.max()))
    reach = bits.unpack(mask.closed, keys)
    held = np.zeros((keys, prepared.workload.ranks))
    held[np.arange(keys), mask.owners] = mask.shares
    return float((reach @ mask.shares - (reach @ held).max(axis=1)).max())


def lower_bound(prepared: Prepared) -> float:
    """Seconds of all layers, forward and backward, that every dispatch with equal counts takes."""
    rates, ranks = prepared.workload.rates, prepared.workload.ranks
    bounds = [(mask.layers, load_bound(mask.loads, ranks), volume_bound(prepared, mask)) for mask in prepared.masks]
    return sum(layers * rates.seconds(load, volume) for layers, load, volume in bounds)
