"""Samples into bins so that no resource of any bin is overfull: longest processing time first, over several loads.

    filled(loads, targets, by_sum) -> the bin of each item

Graham 1969 with one load and equal bins. Here an item loads several resources (the ranks of a pipeline), and bins have
*targets*: a bin with half the target is to have half the load.
"""

from __future__ import annotations

import numpy as np

from csc.planning.assign.step import Floats


def filled(loads: Floats, targets: Floats, by_sum: bool = False) -> list[int]:
    """loads: [item][resource], each resource's shares summing to 1. An item goes, the largest first, where the fullest
    resource (by_sum: all resources together) is the least full after it. No bin stays empty if there are as many items.
    """
    sizes = loads.sum(axis=1) if by_sum else loads.max(axis=1)
    order = np.argsort(-sizes, kind="stable")
    wanted = targets / targets.sum()
    full = np.zeros((len(targets), loads.shape[1]))
    counts = np.zeros(len(targets), dtype=np.int64)
    bins = [0] * len(loads)
    for left, item in zip(range(len(order), 0, -1), order):
        after = full + loads[item]
        level = (after.sum(axis=1) if by_sum else after.max(axis=1)) / wanted
        if left <= int((counts == 0).sum()):
            level = np.where(counts == 0, level, np.inf)
        chosen = int(level.argmin())
        bins[int(item)] = chosen
        full[chosen] = after[chosen]
        counts[chosen] += 1
    return bins
