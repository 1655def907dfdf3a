"""Calls of operators as users write them: `torch.mm(a, b)` and `a.view(2, 3)`, not `aten.mm.default(a, b)`.

    as_users_write(node, target, names) -> (`torch.mm(`, its operands) or None: it is written by its own name

Only for operators that such a call is, to the bit, for whatever its arguments may be: Python's bindings of torch choose
the operator by the types of these. They take half the time of a call through `torch.ops`, which counts where a model
is narrow: a step has more than a hundred of them for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from csc.torch_private.exported import OpOverload

FUNCTIONS = frozenset({
    "aten::add.Tensor", "aten::addmm", "aten::bmm", "aten::cat", "aten::cos", "aten::div.Scalar", "aten::div.Tensor",
    "aten::exp", "aten::mean.dim", "aten::mm", "aten::mul.Scalar", "aten::mul.Tensor", "aten::ne.Scalar", "aten::neg",
    "aten::pow.Tensor_Scalar", "aten::rsqrt", "aten::sigmoid", "aten::sin", "aten::sub.Tensor", "aten::sum.dim_IntList",
    "aten::t", "aten::tanh", "aten::transpose.int", "aten::unsqueeze",
})  # fmt: skip
METHODS = frozenset({"aten::expand", "aten::permute", "aten::view"})  # whose second argument is a list of sizes


def as_users_write(node: fx.Node, target: OpOverload, names: Mapping[fx.Node, str]) -> tuple[str, list[Any]] | None:
    """See the module. names: of values, as Python text."""
    operator, called = target.name(), target._schema.name.removeprefix("aten::")
    if node.kwargs or not node.args or not isinstance(node.args[0], (fx.Node, list, tuple)):
        return None
    if operator in FUNCTIONS:
        return f"torch.{called}(", list(node.args)
    if operator in METHODS and len(node.args) == 2 and isinstance(node.args[0], fx.Node):
        sizes = node.args[1]
        return (f"{names[node.args[0]]}.{called}(", list(sizes)) if isinstance(sizes, (list, tuple)) and sizes else None
    return None
