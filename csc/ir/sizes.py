"""What a captured graph assumes of the sizes of a batch.

Terms
  entry      a batch entry: its dtype, and its sizes: whole numbers, or expressions in symbols
  symbol     a size that may vary; one name stands for one number, wherever it stands
  relation   a sympy expression in symbols that holds for every batch that the graph is for

    sizes.allow({name: tensor}) -> bool
    sizes.values({name: tensor}) -> {symbol: number}, or None for a batch that they do not allow
    to_tree(sizes) -> JSON          Unknown for a relation of other functions than FUNCTIONS
    from_tree(JSON) -> Sizes        the inverse; ValueError, KeyError or TypeError for a tree that is none
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from csc.torch_private import SIZE_FUNCTIONS

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


class Unknown(ValueError):
    """An expression of a function that is not in FUNCTIONS."""


@dataclass(frozen=True)
class SizeGuards:
    """entries: (dtype, sizes) by name. ranges: least and largest value of a symbol, None: any. relations: see above."""

    entries: Mapping[str, tuple[str, tuple[Any, ...]]]
    ranges: Mapping[str, tuple[int, int | None]]
    relations: tuple[Any, ...]

    def allow(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the graph holds for these batch entries, as far as their names, dtypes and sizes say."""
        return self.values(tensors) is not None

    def values(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int] | None:
        """What the symbols are for these batch entries; None if the graph does not hold for them."""
        if self.entries.keys() != tensors.keys():
            return None
        values: dict[str, int] = {}
        made: list[tuple[Any, int]] = []  # sizes that are expressions
        for name, (dtype, expected) in self.entries.items():
            tensor = tensors[name]
            if str(tensor.dtype) != dtype or tensor.dim() != len(expected):
                return None
            for size, found in zip(expected, tensor.shape):
                if isinstance(size, int):
                    fits = size == found
                elif size.is_Symbol:
                    fits = found > 0 and values.setdefault(str(size), found) == found
                else:
                    made.append((size, found))
                    fits = found > 0
                if not fits:
                    return None
        hold = all(_solved(size, found, values) for size, found in made) and self.holds(values)
        return values if hold else None

    def holds(self, values: Mapping[str, int]) -> bool:
        """Whether the graph is for symbols of these values."""
        for name, value in values.items():
            low, high = self.ranges.get(name, (0, None))
            if value < low or (high is not None and value > high):
                return False
        return all(evaluated(relation, values) is not sympy.false for relation in self.relations)


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
    """An expression as plain JSON. Unknown for one of other functions than FUNCTIONS."""
    if expression in (sympy.true, sympy.false):
        return bool(expression)
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return str(expression)
    name = type(expression).__name__
    if name not in FUNCTIONS:
        raise Unknown(f"a size made by {name}")
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
