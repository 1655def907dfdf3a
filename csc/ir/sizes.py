"""What a captured graph assumes of the sizes of a batch.

Terms
  entry      a batch entry: its dtype, and its sizes: whole numbers, or expressions in symbols
  symbol     a size that may vary; one name stands for one number, wherever it stands
  relation   a sympy expression in symbols that holds for every batch that the graph is for

    sizes.match({name: tensor}) -> {symbol: number}, or the Miss of a batch that they do not allow
    sizes.allow({name: tensor}) -> bool
    to_tree(sizes) -> JSON          Unstorable for a relation of other functions than FUNCTIONS
    from_tree(JSON) -> Sizes        the inverse; ValueError, KeyError or TypeError for a tree that is none
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from csc.ir.miss import Miss
from csc.ir.unstorable import Unstorable
from csc.torch_private.symbolic_sizes import SIZE_FUNCTIONS

LATEST = 256  # answers kept

FUNCTIONS: dict[str, Any] = {
    **{
        one.__name__: one
        for one in (
            sympy.Add, sympy.Mul, sympy.Pow, sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge, sympy.And,
            sympy.Or, sympy.Not,
        )
    },
    **SIZE_FUNCTIONS,
}  # fmt: skip

Tree = Any


@dataclass(frozen=True)
class SizeGuards:
    """entries: (dtype, sizes) by name. ranges: least and largest value of a symbol, None: any. relations: see above."""

    entries: Mapping[str, tuple[str, tuple[Any, ...]]]
    ranges: Mapping[str, tuple[int, int | None]]
    relations: tuple[Any, ...]
    _matched: dict[Any, dict[str, int] | Miss] = field(default_factory=dict, init=False, compare=False, repr=False)

    def allow(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the graph holds for these batch entries, as far as their names, dtypes and sizes say."""
        return not isinstance(self.match(tensors), Miss)

    def match(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int] | Miss:
        """What the symbols are for these batch entries, or why the graph does not hold for them. At once for sizes that
        were asked for lately.
        """
        asked = tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
        if asked not in self._matched:
            if len(self._matched) >= LATEST:
                self._matched.clear()
            self._matched[asked] = self._match(tensors)
        return self._matched[asked]

    def _match(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int] | Miss:
        if self.entries.keys() != tensors.keys():
            return Miss("the list of its entries", ", ".join(self.entries), ", ".join(tensors))
        values: dict[str, int] = {}
        made: list[tuple[str, Any, int]] = []  # sizes that are expressions, and where
        for name, (dtype, expected) in self.entries.items():
            tensor = tensors[name]
            if str(tensor.dtype) != dtype or tensor.dim() != len(expected):
                return Miss(name, _kind(dtype, len(expected)), _kind(str(tensor.dtype), tensor.dim()))
            for dimension, (size, found) in enumerate(zip(expected, tensor.shape)):
                place = f"{name}.shape[{dimension}]"
                if isinstance(size, int):
                    fits, assumed = size == found, str(size)
                elif size.is_Symbol:
                    fits = found > 0 and values.setdefault(str(size), found) == found
                    assumed = str(values.get(str(size), "at least 1"))
                else:
                    made.append((place, size, found))
                    fits, assumed = found > 0, "at least 1"
                if not fits:
                    return Miss(place, assumed, str(found))
        for place, size, found in made:
            if not _solved(size, found, values):
                return Miss(place, self._text(size), str(found))
        return self._broken(values) or values

    def holds(self, values: Mapping[str, int]) -> bool:
        """Whether the graph is for symbols of these values."""
        return self._broken(values) is None

    def _broken(self, values: Mapping[str, int]) -> Miss | None:
        """The range or the relation that does not hold."""
        for name, value in values.items():
            low, high = self.ranges.get(name, (0, None))
            if value < low or (high is not None and value > high):
                return Miss(self._places().get(name, name), f"{low} to {'any' if high is None else high}", str(value))
        for relation in self.relations:
            if evaluated(relation, values) is sympy.false:
                return Miss(self._text(relation), "true", "false")
        return None

    def _places(self) -> dict[str, str]:
        """Where each symbol stands alone."""
        found: dict[str, str] = {}
        for name, (_, sizes) in self.entries.items():
            for dimension, size in enumerate(sizes):
                if not isinstance(size, int) and size.is_Symbol:
                    found.setdefault(str(size), f"{name}.shape[{dimension}]")
        return found

    def _text(self, expression: Any) -> str:
        """In the words of entries."""
        places = self._places()
        named = {one: sympy.Symbol(places[str(one)]) for one in expression.free_symbols if str(one) in places}
        return str(expression.xreplace(named))


def exactly(tensors: Mapping[str, torch.Tensor]) -> SizeGuards:
    """For these sizes alone."""
    return SizeGuards({name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}, {}, ())


def _kind(dtype: str, dimensions: int) -> str:
    return f"{dtype} of {dimensions} dimensions"


def _solved(size: Any, found: int, values: dict[str, int]) -> bool:
    """Whether an expression is a number that was found; what that says of its symbol is added to the values."""
    known = evaluated(size, values)
    unknown = known.free_symbols
    if len(unknown) == 1:
        (symbol,) = unknown
        solutions = [one for one in sympy.solve(known - found, symbol) if one.is_Integer and one >= 1]
        if len(solutions) == 1:
            values[str(symbol)] = int(solutions[0])
        return len(solutions) == 1
    return not unknown and bool(known == found)


def evaluated(relation: Any, values: Mapping[str, int]) -> Any:
    """An expression in which symbols are these numbers."""
    return relation.subs({one: values[str(one)] for one in relation.free_symbols if str(one) in values})


def to_tree(sizes: SizeGuards) -> Tree:
    """Plain JSON."""
    entries = {
        name: [dtype, [expression_to_tree(sympy.sympify(size)) for size in shape]]
        for name, (dtype, shape) in sizes.entries.items()
    }
    ranges = {name: list(both) for name, both in sizes.ranges.items()}
    return {"entries": entries, "ranges": ranges, "relations": [expression_to_tree(one) for one in sizes.relations]}


def from_tree(tree: Tree) -> SizeGuards:
    """The inverse."""
    entries = {name: (dtype, tuple(map(_size, shape))) for name, (dtype, shape) in tree["entries"].items()}
    ranges = {name: (low, high) for name, (low, high) in tree["ranges"].items()}
    return SizeGuards(entries, ranges, tuple(map(expression_from_tree, tree["relations"])))


def _size(tree: Tree) -> Any:
    return tree if isinstance(tree, int) else expression_from_tree(tree)


def expression_to_tree(expression: Any) -> Tree:
    """An expression as plain JSON. Unstorable for one of other functions than FUNCTIONS."""
    if expression in (sympy.true, sympy.false):
        return bool(expression)
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return str(expression)
    name = type(expression).__name__
    if name not in FUNCTIONS:
        raise Unstorable(f"a size made by {name}")
    return [name, *map(expression_to_tree, expression.args)]


def expression_from_tree(tree: Tree) -> Any:
    """The inverse."""
    if isinstance(tree, bool):
        return sympy.true if tree else sympy.false
    if isinstance(tree, int):
        return sympy.Integer(tree)
    if isinstance(tree, str):
        return sympy.Symbol(tree, integer=True, positive=True)
    name, *arguments = tree
    return FUNCTIONS[name](*map(expression_from_tree, arguments))
