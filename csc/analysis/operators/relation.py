"""How the dimensions of one call's operands relate to those of its result: the terms of the table of operators.

Terms
  link      for each dimension of the result, the operand's dimension that it walks along with, index by index; None
            where there is none
  end       what becomes of an operand's dimension that no dimension of the result walks along with
  walk      dimensions of operands that are walked together and are not in the result have one number
  axis      (dim, inner): index i of dimension `dim` belongs to item i // inner % count of what is counted (tokens,
            samples). inner is 1 unless a reshape has joined the items with what stood behind them

    Relation(uses, sizes)                                         of a call: one Use for each operand that it reads
    reshaped(shape before, after, axis, count) -> Axis | None     where a reshape has brought an axis

Sizes may be symbols: they are compared as expressions, so that nothing is assumed of a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from torch import fx

Axis = tuple[int, int]
Link = tuple[int | None, ...]

How = Literal[
    "broadcast",  # one entry for all indices of the result's dimension
    "contracted",  # multiplied with another operand's dimension of the same walk, and summed
    "summed",  # a sum, mean or other reduction over it, alone or together with another operand's of the same walk
    "normalised",  # a reduction over it is put back into every entry, in the result's dimension `dim`
    "blocked",  # worked along: in order, by windows, by places; its entries cannot be had apart. `dim`: as above
    "cut",  # a part of it, from index `start`, is the result's dimension `dim`: a term of a sum
    "joined",  # is the part of the result's dimension `dim` from index `start`: a term of a sum
    "repeated",  # walked several times by the result's dimension `dim`
    "padded",  # the result's dimension `dim`, with something in front of it or behind
    "picked",  # indices that another operand holds are looked up in it
    "grouped",  # the outer factor of the result's dimension `dim`: a key head for several query heads
    "regrouped",  # a factor or a product of the result's dimensions, by the order of elements
    "unread",  # the operand's type counts, not its values
]


@dataclass(frozen=True)
class End:
    how: How
    dim: int | None = None
    start: int = 0
    walk: int | None = None


@dataclass(frozen=True)
class Use:
    """One operand of a call. rest: the end of its dimensions that are neither in the link nor among `ends`."""

    node: fx.Node
    link: Link
    rest: End = End("broadcast")
    ends: Mapping[int, End] = field(default_factory=dict)

    def end(self, dim: int) -> End | None:
        """None for a dimension that one of the result walks along with."""
        return None if dim in self.link else self.ends.get(dim, self.rest)


@dataclass(frozen=True)
class Relation:
    """sizes: the argument that lists sizes of the result, which a shard of it would need anew; "" if there is none."""

    uses: tuple[Use, ...]
    sizes: str = ""


@dataclass(frozen=True)
class Call:
    """What a rule looks at. out: the shape of the result, or of the first of several."""

    node: fx.Node
    name: str
    bound: Mapping[str, Any]
    out: tuple[int, ...]

    def tensors(self) -> list[fx.Node]:
        return self.node.all_input_nodes

    def given(self, *names: str) -> list[fx.Node]:
        """The tensors among these arguments."""
        return [self.bound[name] for name in names if isinstance(self.bound.get(name), fx.Node)]

    def first(self) -> fx.Node:
        return self.node.args[0]  # type: ignore[return-value]


Rule = Callable[[Call], list[Use]]


def shape_of(node: Any) -> tuple[int, ...]:
    """Of a value, or of the first of several; () for a number."""
    val: Any = node.meta["val"]
    return tuple(getattr(val[0] if isinstance(val, (tuple, list)) else val, "shape", ()))


def alike(one: Any, other: Any) -> bool:
    """Whether two sizes are one number, or one expression in symbols: without a guard on a trace."""
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    return str(one) == str(other)


def several(size: Any) -> bool:
    """Whether a size is known to be, or may be, more than 1."""
    return not isinstance(size, int) or size > 1


def same(operand: Sequence[Any], out: Sequence[Any], from_right: bool = False, without: Iterable[int] = ()) -> Link:
    """Dimension by dimension, counted from the left or as broadcasting does; None where sizes differ."""
    shift, left_out = len(out) - len(operand) if from_right else 0, set(without)
    return tuple(
        d - shift if d not in left_out and 0 <= d - shift < len(operand) and alike(operand[d - shift], size) else None
        for d, size in enumerate(out)
    )


def dims_of(value: Any, rank: int) -> list[int]:
    """What an argument `dim` names, counted from the left; None and []: all."""
    named = range(rank) if value is None or value == [] else [value] if isinstance(value, int) else value
    return [dim % max(rank, 1) for dim in named]


def reshaped(one: Sequence[int], other: Sequence[int], axis: Axis, count: int) -> Axis | None:
    """The axis after a reshape: where the same stretch of the flat memory counts count, if one dimension holds it."""
    step = prod(one[axis[0] + 1 :]) * axis[1]  # elements from one token to the next
    if not step * count:  # no elements, which lie in any order
        return None
    for dim, size in enumerate(other):
        behind = prod(other[dim + 1 :])
        if behind and step % behind == 0 and (behind * size) % (step * count) == 0:
            return dim, step // behind
    return None
