"""Calls of operators as users write them: `torch.mm(a, b)` and `a.view(2, 3)`, not `aten.mm.default(a, b)`.

    as_users_write(node, target, names) -> Written       None: it is written by its own name
    written_over(node, target, names) -> Written         of a call that writes its result over its first operand

Only for operators that such a call is, to the bit, for whatever its arguments may be: Python's bindings of torch choose
the operator by the types of these. They take half the time of a call through `torch.ops`, which counts where a model
is narrow: a step has more than a hundred of them for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import fx

from csc.ir import graph as g
from csc.torch_private.exported import OpOverload

FUNCTIONS = frozenset({
    "aten::add.Tensor", "aten::addmm", "aten::bmm", "aten::cat", "aten::cos", "aten::div.Scalar", "aten::div.Tensor",
    "aten::exp", "aten::mean.dim", "aten::mm", "aten::mul.Scalar", "aten::mul.Tensor", "aten::ne.Scalar", "aten::neg",
    "aten::pow.Tensor_Scalar", "aten::rsqrt", "aten::sigmoid", "aten::sin", "aten::sub.Tensor", "aten::sum.dim_IntList",
    "aten::t", "aten::tanh", "aten::transpose.int", "aten::unsqueeze",
})  # fmt: skip
OF_SIZES = frozenset({"aten::expand", "aten::permute", "aten::view"})  # methods whose second argument is a list


class Written(NamedTuple):
    """`torch.mm(`, its operands; named: those with their names before them."""

    opening: str
    operands: list[Any]
    named: dict[str, Any]


def as_users_write(node: fx.Node, target: OpOverload, names: Mapping[fx.Node, str]) -> Written | None:
    """See the module. names: of values, as Python text."""
    operator, called = target.name(), target._schema.name.removeprefix("aten::")
    first, *others = node.args or (None,)
    if operator in FUNCTIONS and not node.kwargs and isinstance(first, (fx.Node, list, tuple)):
        return Written(f"torch.{called}(", [first, *others], {})
    if not isinstance(first, fx.Node):
        return None
    if operator == "aten::clone" and not others:
        return Written(f"{names[first]}.clone(", [], dict(node.kwargs))
    if operator == "aten::slice.Tensor" and not node.kwargs:
        return _narrowed(node, first, names)
    if operator in OF_SIZES and len(others) == 1 and not node.kwargs:
        [sizes] = others
        if isinstance(sizes, (list, tuple)) and sizes:
            return Written(f"{names[first]}.{called}(", list(sizes), {})
    return None


def _narrowed(node: fx.Node, first: fx.Node, names: Mapping[fx.Node, str]) -> Written | None:
    """Consecutive entries of a dimension, where the sizes of both are numbers."""
    given = g.bind(node)
    dim, before, after = given["dim"], first.meta["val"].shape, node.meta["val"].shape
    if given["step"] != 1 or not all(isinstance(size, int) for size in (before[dim], after[dim])):
        return None
    start, *_ = slice(given["start"], given["end"]).indices(before[dim])
    return Written(f"{names[first]}.narrow(", [dim, start, after[dim]], {})


def written_over(node: fx.Node, target: OpOverload, names: Mapping[fx.Node, str]) -> Written:
    """See the module."""
    called, way = target._schema.name.removeprefix("aten::"), node.meta["in_place"]
    first, *others = node.args
    assert isinstance(first, fx.Node)
    if way == g.METHOD:
        return Written(f"{names[first]}.{called}_(", others, {})
    return Written(f"aten.{called}.{way}(", [first, *others], {way: first})
