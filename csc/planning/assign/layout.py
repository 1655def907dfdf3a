"""How the samples of a microbatch lie in it, and what features it has for that.

Terms
  length     positions that a sample takes in the language model
  width      of a microbatch: the length of its rows, a multiple of `multiple`, or a known one of its size
  packed     all samples in one row, each seeing itself: pairs of positions are the sum of their squared lengths
  padded     a row for each sample, all as long as the longest: pairs are rows x width squared
  units      what else a sample has, counted: tiles, images, frames; a microbatch has the sum
  size       (units of each kind, rows, width): microbatches of one size have one program

    Layout(lengths, units, packed, multiple, known)
    layout.features(groups) -> [microbatch][feature]       (1, units, their squares by sample, positions, pairs)
    layout.sizes(groups) -> [Size]                         layout.samples -> [sample][feature], without the constant one
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Kind = tuple[int, ...]  # units of each kind, then rows
Size = tuple[int, ...]  # and the width
STEPS = 2  # multiples by which a microbatch is made wider, where that is more than the slack


@dataclass(frozen=True)
class BatchLayout:
    """lengths: of each sample; units: [sample][kind]. multiple: widths are multiples of it. known: by kind the widths
    that have programs, ascending: a microbatch is made as wide as one of them if that adds at most `slack` of it, or
    STEPS multiples; none with a slack of 0.
    """

    lengths: Floats
    units: Floats
    packed: bool
    multiple: int = 1
    known: Mapping[Kind, tuple[int, ...]] = field(default_factory=dict)
    slack: float = 0.05

    @cached_property
    def samples(self) -> Floats:
        """What each has alone, unpadded."""
        own = self.lengths[:, None]
        return np.hstack([self.units, self.units**2, own, own**2])

    def features(self, groups: Sequence[Sequence[int]]) -> Floats:
        """Of each group as a microbatch."""
        members = np.fromiter(chain.from_iterable(groups), np.int64)
        rows = np.array([len(group) for group in groups])
        starts = np.concatenate([[0], np.cumsum(rows)[:-1]])
        sums = np.add.reduceat(self.samples[members], starts, axis=0)
        widths = self._widths(sums, rows, np.maximum.reduceat(self.lengths[members], starts))
        if self.packed:
            sums[:, -2] = widths
        else:
            sums[:, -2], sums[:, -1] = rows * widths, rows * widths**2
        return np.hstack([np.ones((len(groups), 1)), sums])

    def _widths(self, sums: Floats, rows: npt.NDArray[np.int64], longest: Floats) -> Floats:
        least = np.ceil((sums[:, -2] if self.packed else longest) / self.multiple) * self.multiple
        if self.known:
            units = sums[:, : self.units.shape[1]].astype(np.int64).tolist()
            kinds = [(*own, 1 if self.packed else count) for own, count in zip(units, rows.tolist())]
            least = np.array([self._width(kind, width) for kind, width in zip(kinds, least.tolist())])
        return least

    def _width(self, kind: Kind, least: float) -> float:
        """A known width of the kind that is little more, else the least."""
        for width in self.known.get(kind, ()):
            if least <= width <= least + max(self.slack * least, STEPS * self.multiple * (self.slack > 0)):
                return width
        return least

    def sizes(self, groups: Sequence[Sequence[int]]) -> list[Size]:
        """Of each group."""
        return [self.size(group) for group in groups]

    @cached_property
    def _counts(self) -> tuple[list[int], list[tuple[int, ...]]]:
        """Lengths and units as Python's numbers: single ones are faster so."""
        return [int(one) for one in self.lengths.tolist()], [tuple(map(int, row)) for row in self.units.tolist()]

    def size(self, group: Sequence[int]) -> Size:
        """Of one group."""
        lengths, units = self._counts
        own = [lengths[i] for i in group]
        kind = (*map(sum, zip(*(units[i] for i in group))), 1 if self.packed else len(own))
        least = -(-(sum(own) if self.packed else max(own)) // self.multiple) * self.multiple
        return (*kind, int(self._width(kind, least)))

    def knows(self, size: Size) -> bool:
        """Whether it is a known size."""
        return size[-1] in self.known.get(size[:-1], ())


def widths_of(sizes: Iterable[Size]) -> dict[Kind, tuple[int, ...]]:
    """By kind the widths of these sizes, the least first."""
    found: dict[Kind, list[int]] = {}
    for *kind, width in sorted(set(sizes)):
        found.setdefault(tuple(kind), []).append(width)
    return {kind: tuple(widths) for kind, widths in found.items()}
