"""An axis and the ranks that divide it, which may be more than it has entries.

Terms
  groups   of key heads: the query heads that read one of them. With more ranks than key heads those that have the same
           key head divide its groups
  each     how many ranks have one entry of the axis; they are neighbours, and a *sub-group*
  piece    what one of these has of a stretch that knows key heads and no groups (the columns of a key projection): as
           many entries as each other rank. A sub-group's pieces behind each other are one head

    Division(axis, ranks, groups)
    .size(dim, pieces)  .index(dim, index, pieces)      as a rank has them; with pieces, stretches of key heads are cut
    .ranges(dim, rank)                                  what of a parameter's dimension belongs to a rank, in pieces
    .in_pieces(dim), .misfit(dim)                       whether it has such stretches; why it cannot be cut so
    fits(entries, groups, ranks)                        whether so many ranks can divide it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from csc.analysis.dimension_trees import Dim, contains, flat, found, ranges, shard_index, shard_size


def fits(entries: int, groups: int, ranks: int) -> bool:
    """groups: of query heads for each key head; 1 of any other axis."""
    return entries % ranks == 0 or (ranks % entries == 0 and groups > 1 and groups % (ranks // entries) == 0)


@dataclass(frozen=True)
class Division:
    """groups: the leaf, where there are more ranks than entries; None else."""

    axis: Dim
    ranks: int
    groups: Dim | None = None

    @property
    def each(self) -> int:
        """How many ranks have one entry together."""
        return 1 if self.groups is None else self.ranks // self.axis.size

    @property
    def parts(self) -> Mapping[Dim, int]:
        """Into how many each leaf is cut."""
        return {self.axis: self.ranks // self.each} | ({} if self.groups is None else {self.groups: self.each})

    def takes(self, dim: Dim) -> bool:
        """Whether it divides a dimension."""
        return any(contains(dim, leaf) for leaf in self.parts)

    def in_pieces(self, dim: Dim) -> bool:
        return self.groups is not None and any(self._is_piece(stretch) for stretch in flat(dim, "sum"))

    def _is_piece(self, stretch: Dim) -> bool:
        return self.groups is not None and contains(stretch, self.axis) and not contains(stretch, self.groups)

    def misfit(self, dim: Dim) -> str:
        """Why ranks cannot each have a stretch of a parameter's dimension, as a phrase behind its name; "" if not."""
        for stretch in flat(dim, "sum") if self.groups is not None and self.takes(dim) else []:
            outer = flat(stretch, "product")[: 1 if self._is_piece(stretch) else 2]
            if [id(one) for one in outer] != [id(found(leaf)) for leaf in self.parts][: len(outer)]:
                return "does not have key heads, and in these its query heads, as outermost entries"
            if stretch.size % self.ranks:
                return f"has {stretch.size} entries of key heads for {self.ranks} ranks"
        return ""

    def size(self, dim: Dim, pieces: bool = False) -> int:
        if not pieces:
            return shard_size(dim, self.parts)
        return sum(self._stretch(one, pieces) for one in flat(dim, "sum"))

    def _stretch(self, stretch: Dim, pieces: bool) -> int:
        return stretch.size // self.ranks if pieces and self._is_piece(stretch) else shard_size(stretch, self.parts)

    def index(self, dim: Dim, index: int, pieces: bool = False) -> int:
        """Where a place between two stretches is on a rank. ValueError for a place that a shard does not have."""
        if not pieces:
            return shard_index(dim, index, self.parts)
        before, local = 0, 0
        for stretch in flat(dim, "sum"):
            if before < index < before + stretch.size and self._is_piece(stretch):
                raise ValueError(f"index {index} of {dim.size} lies within what is divided")
            if index < before + stretch.size:
                return local + shard_index(stretch, index - before, self.parts)
            before, local = before + stretch.size, local + self._stretch(stretch, pieces)
        return local

    def ranges(self, dim: Dim, rank: int) -> list[tuple[int, int]]:
        """From start to stop. Of a dimension that it divides and that has no `misfit`."""
        if self.groups is None or not self.takes(dim):
            return ranges(dim, self.axis, rank, self.ranks)
        stretches = flat(dim, "sum")
        starts = accumulate((one.size for one in stretches), initial=0)
        owned = [(start, one.size // self.ranks) for one, start in zip(stretches, starts)]
        return [(start + rank * size, start + (rank + 1) * size) for start, size in owned]
