"""What one tensor-parallel rank has of each value of a template's graph.

Terms
  axis     a leaf of the trees of dimensions (csc.analysis.tensor_axes) that is divided: heads, hidden features
  cut      of a value: one of its dimensions has an axis, so that a rank holds a shard of it; other values are equal
  pieces   of key heads that several ranks have (csc.analysis.tensor_axes): each has its own columns of one. Of a value
           with key heads that is not in pieces each of these ranks has the whole head: it is *loose*
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from csc.analysis.tensor_axes import Dim, Division, Trees, contains, divides_all
from csc.ir import graph as g


class Undivided(Exception):
    """A call, or a parameter, that cannot be divided: the reason is a phrase with it as its subject."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        called = node.meta["role"][1] if is_parameter(node) else f"{g.op_name(node)} at {g.place(node)}"
        super().__init__(f"{called} {reason}")


class LocalValues:
    """in_pieces: the values that are; to be added to as their calls are made."""

    def __init__(self, trees: Trees, divisions: Sequence[Division]) -> None:
        self._trees, self._divisions = trees, divisions
        self.in_pieces: set[fx.Node] = set()

    def dims(self, node: fx.Node) -> list[list[Dim]]:
        return self._trees.of.get(node, [[]])

    def division(self, dim: Dim) -> Division | None:
        return next((one for one in self._divisions if one.takes(dim)), None)

    def is_cut(self, node: fx.Node) -> bool:
        return any(self.division(dim) is not None for dims in self.dims(node) for dim in dims)

    def cut_dims(self, node: fx.Node) -> list[int]:
        return [place for place, dim in enumerate(self.dims(node)[0]) if self.division(dim) is not None]

    def _size(self, dim: Dim, pieces: bool) -> int:
        division = self.division(dim)
        return dim.size if division is None else division.size(dim, pieces)

    def sizes(self, node: fx.Node, result: int = 0) -> list[int]:
        return [self._size(dim, node in self.in_pieces) for dim in self.dims(node)[result]]

    def check_one_axis(self, node: fx.Node) -> None:
        """Undivided unless a rank's shard is its own in full: one axis, in one dimension, in every stretch of it; its
        groups may be a dimension of their own.
        """
        for dims in self.dims(node):
            having = [(dim, one) for dim in dims for one in self._divisions if one.takes(dim)]
            with_axis = [(dim, one) for dim, one in having if contains(dim, one.axis)]
            rest = [dim for dim, one in having if not contains(dim, one.axis)]
            twice = any(one.groups is not None and contains(dim, one.groups) for dim, one in with_axis) and rest
            if having and (len(with_axis) != 1 or len(rest) > 1 or twice):
                raise Undivided(node, "would be divided in two ways")
            if any(not divides_all(dim, one.axis) for dim, one in with_axis):
                raise Undivided(node, "joins what is divided to what is not")

    def check_pieces(self, parameter: fx.Node) -> None:
        """Of a parameter every rank has a piece of its own."""
        for dim in self.dims(parameter)[0]:
            division = self.division(dim)
            misfit = division.misfit(dim) if division is not None else ""
            if misfit:
                raise Undivided(parameter, misfit)
        if self.knows_no_groups(parameter) is not None:
            self.in_pieces.add(parameter)

    def knows_no_groups(self, node: fx.Node, result: int = 0) -> int | None:
        """The dimension in which a value has key heads of several ranks."""
        for place, dim in enumerate(self.dims(node)[result]):
            division = self.division(dim)
            if division is not None and division.in_pieces(dim):
                return place
        return None

    def is_loose(self, node: fx.Node) -> bool:
        """Whether several ranks have the same of a value: nothing can be summed over its heads."""
        return self.knows_no_groups(node) is not None and node not in self.in_pieces


def is_parameter(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.meta["role"][0] == "parameter"
