"""Samples into bins of neighbours in length: what is padded to the longest of a bin then loses little.

    Runs(step, own).bins(targets) -> the bin of each of these samples

The largest load that any bin has, in times its target, is found by bisection: from the longest sample on, each bin
takes samples while it stays below. Bins with larger targets have the longer samples.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from csc.planning.assign.layout import Floats
from csc.planning.assign.step import SampleCosts

HALVINGS = 8


class SampleRuns:
    """Of these samples of a step that has a layout."""

    def __init__(self, step: SampleCosts, own: Sequence[int]) -> None:
        layout = step.layout
        assert layout is not None
        self._order = sorted(range(len(own)), key=lambda k: (-layout.lengths[own[k]], k))
        ordered = [own[k] for k in self._order]
        self._widths = np.array([float(layout.size([i])[-1]) for i in ordered])
        units = layout.samples[ordered, :-2] @ step.rank_rates[1:-2]
        self._units = np.vstack([np.zeros((1, units.shape[1])), np.cumsum(units, axis=0)])
        self._rates = step.rank_rates
        self._whole = np.maximum((step.samples @ step.rank_rates[1:]).sum(axis=0), 1e-300)
        self._known: dict[int, list[float]] = {}

    def bins(self, targets: Floats) -> list[int]:
        """targets: of each bin, no more than there are samples."""
        bins = sorted(range(len(targets)), key=lambda b: (-targets[b], b))
        wanted = targets[bins].tolist()
        low, high = 0.0, self._loads(0)[-1] / min(wanted) + 1e-12
        best = self._ends(wanted, high)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            found = self._ends(wanted, middle)
            if found is None:
                low = middle
            else:
                best, high = found, middle
        assert best is not None
        placed = [0] * len(self._order)
        start = 0
        for place, end in zip(bins, best):
            for k in self._order[start:end]:
                placed[k] = place
            start = end
        return placed

    def _ends(self, wanted: Sequence[float], most: float) -> list[int] | None:
        """Where each bin ends if none has more than `most` times its target; None if samples are left over."""
        ends, start, count = [], 0, len(self._order)
        for place, target in enumerate(wanted):
            rest = len(wanted) - place - 1
            fits = bisect_right(self._loads(start), most * target)
            start += max(1, min(fits, count - start - rest))
            ends.append(start)
        return ends if start == count else None

    def _loads(self, start: int) -> list[float]:
        """The load of a bin of samples start, ..., start + k for each k, as a share of the fullest rank's work."""
        if start not in self._known:
            width = self._widths[start] if start < len(self._widths) else 0.0
            rows = np.arange(1, len(self._widths) - start + 1)[:, None]
            seconds = self._units[start + 1 :] - self._units[start]
            seconds = seconds + rows * (width * self._rates[-2] + width**2 * self._rates[-1])
            self._known[start] = (seconds / self._whole).max(axis=1).tolist()
        return self._known[start]
