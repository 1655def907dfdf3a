"""How ranks are numbered on a mesh, some positions of which may have fewer ranks than others.

numbers = RankNumbers(order, sizes)      sizes by axis, for each position on the pp axis
.count                          of all ranks
.number(dp, pp, cp, tp) -> rank           .place(rank) -> {axis: index}        unchecked
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate


class RankNumbers:
    """Ranks count through the axes in their order, the last one fastest. An axis whose sizes differ comes behind pp."""

    def __init__(self, order: Sequence[str], sizes: Sequence[Mapping[str, int]]) -> None:
        place = order.index("pp")
        self._slower, self._faster = order[:place], order[place + 1 :]  # than pp
        self._sizes = sizes
        each = (math.prod(of[axis] for axis in self._faster) for of in self._sizes)
        self._starts = (0, *accumulate(each))  # of positions, for one index of the slower axes
        self._strides = [self._apart(of) for of in self._sizes]

    def _apart(self, sizes: Mapping[str, int]) -> tuple[int, int, int]:
        """How far neighbours along dp, cp and tp are."""
        found: dict[str, int] = {}
        for axes, each in ((self._faster, 1), (self._slower, self._starts[-1])):
            for axis in reversed(axes):
                found[axis], each = each, each * sizes[axis]
        return found["dp"], found["cp"], found["tp"]

    def number(self, dp: int, pp: int, cp: int, tp: int) -> int:
        """The rank there."""
        of_dp, of_cp, of_tp = self._strides[pp]
        return self._starts[pp] + dp * of_dp + cp * of_cp + tp * of_tp

    def place(self, rank: int) -> dict[str, int]:
        """Inverse of `number`."""
        ahead, rank = divmod(rank, self._starts[-1])
        position = bisect_right(self._starts, rank) - 1
        found, sizes = {"pp": position}, self._sizes[position]
        for axes, index in ((self._slower, ahead), (self._faster, rank - self._starts[position])):
            for axis in reversed(axes):
                index, found[axis] = divmod(index, sizes[axis])
        return found
