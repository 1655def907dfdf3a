"""Samples into bins so that no resource of any bin is overfull: longest processing time first, over several loads.

    filled(loads, targets) -> the bin of each item
    fillings(loads, ways) -> the same for several ways to set the targets, in one go

Graham 1969 with one load and equal bins. Here an item loads several resources (the ranks of a pipeline), and bins have
*targets*: a bin with half the target is to have half the load.
"""

from __future__ import annotations

import numpy as np

from csc.planning.assign.layout import Floats


def filled(loads: Floats, targets: Floats) -> list[int]:
    """loads: [item][resource], each resource's shares summing to 1. An item goes, the largest first, where the fullest
    resource is the least full after it. No bin stays empty if there are as many items.
    """
    return fillings(loads, targets[None])[0]


def fillings(loads: Floats, ways: Floats) -> list[list[int]]:
    """ways: [way][bin], targets."""
    order = np.argsort(-loads.max(axis=1), kind="stable")
    wanted = ways / ways.sum(axis=1, keepdims=True)
    every = np.arange(len(ways))
    full = np.zeros((*ways.shape, loads.shape[1]))
    counts = np.zeros(ways.shape, dtype=np.int64)
    bins = np.zeros((len(ways), len(loads)), dtype=np.int64)
    for left, item in zip(range(len(order), 0, -1), order):
        after = full + loads[item]
        level = after.max(axis=2) / wanted
        if left <= ways.shape[1]:
            crowded = left <= (counts == 0).sum(axis=1)
            level[crowded[:, None] & (counts > 0)] = np.inf
        chosen = level.argmin(axis=1)
        bins[:, item] = chosen
        full[every, chosen] = after[every, chosen]
        counts[every, chosen] += 1
    return bins.tolist()
