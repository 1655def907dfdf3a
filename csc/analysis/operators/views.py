"""How the results of calls lie in memory: in that of an operand, or in one of their own.

is_view(node) -> bool        the result shares its first operand's memory
base(node) -> Node           what a view looks at, an item of several results maybe
maker(node) -> Node          the call that wrote the memory of a value
strides_as(value, sizes)     of a view of these sizes; None if the value has to be copied for that
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from csc.ir import graph as g

VIEWS = frozenset(
    {
        "aten::t", "aten::view", "aten::_unsafe_view", "aten::transpose", "aten::permute", "aten::expand",
        "aten::unsqueeze", "aten::squeeze", "aten::slice", "aten::select", "aten::alias", "aten::detach",
        "aten::as_strided", "aten::split", "aten::split_with_sizes", "aten::unbind", "aten::diagonal", "aten::unfold",
    }
)  # fmt: skip
OF_ALL = frozenset({"aten::t", "aten::view", "aten::transpose", "aten::permute"})  # that have all entries of a value
# Their results lie in memory in their own way, whatever their inputs do; csc's own operators are known to do as traced.
OWN_LAYOUT = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::linear", "aten::matmul", "aten::embedding"})


def is_view(node: fx.Node) -> bool:
    """True if the node's result shares the storage of its first argument; a reshape, if that one's strides allow it."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    return g.op_name(node) in VIEWS or (g.op_name(node) == "aten::reshape" and _shares(node.args[0], node))


def base(node: fx.Node) -> fx.Node:
    """See the module."""
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def maker(node: fx.Node) -> fx.Node:
    """The call, or the placeholder, whose memory a view or an item of several results looks at."""
    seen = base(node)
    while seen.op == "call_function" and seen.target is operator.getitem:
        seen = base(seen.args[0])  # type: ignore[arg-type]
    return seen


def strides_as(value: torch.Tensor, sizes: torch.Size) -> tuple[int, ...] | None:
    """See the module."""
    alike = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    try:
        return alike.view(sizes).stride()
    except RuntimeError:
        return None


def _shares(operand: Any, node: fx.Node) -> bool:
    before, after = operand.meta["val"], node.meta["val"]
    if not all(isinstance(size, int) for size in (*before.shape, *before.stride(), *after.shape)):
        return False
    return strides_as(before, after.shape) is not None
