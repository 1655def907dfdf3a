"""Calls that work element by element, their operands broadcast; and those that make a value as another one is.

AND, OR, NOT, COMPARISONS: logic; SCALES: of each entry by a number, ARITHMETIC: those and sums
NEUTRAL: {operation: the number with which it gives its first operand, to the bit}
RULES: {operation: rule}        see csc.analysis.operators.table
"""

from __future__ import annotations

import torch
from torch import fx

from csc.analysis.operators.relation import Call, End, Rule, Use, same, shape_of
from csc.ir import graph as g
from csc.torch_private.exported import OpOverload

AND = {"aten::__and__", "aten::bitwise_and", "aten::logical_and", "aten::mul"}  # of what is true or false
OR = {"aten::__or__", "aten::bitwise_or", "aten::logical_or"}
NOT = {"aten::bitwise_not", "aten::logical_not"}
SCALES = ("aten::mul", "aten::div")
ARITHMETIC = (*SCALES, "aten::add", "aten::sub")
NEUTRAL = {"aten::pow": 1, "aten::mul": 1, "aten::div": 1}  # no sum: -0.0 + 0.0 is 0.0
COMPARISONS = {"aten::le": "<=", "aten::lt": "<", "aten::ge": ">=", "aten::gt": ">", "aten::eq": "==", "aten::ne": "!="}

# Those that torch has not tagged as pointwise.
_BROADCASTING = ("where", "floor_divide", "rsub", "remainder", "polar", "complex", "hardswish", "mish",
                 "_prelu_kernel", "__and__", "__or__", "__xor__")  # fmt: skip
_BITWISE = {"aten::__and__", "aten::__or__", "aten::__xor__"}
_ELEMENTWISE = ("clone", "_to_copy", "contiguous", "lift_fresh_copy", "to", "masked_fill", "fill",
                "native_dropout", "dropout", "feature_dropout", "bernoulli", "zeros_like", "ones_like", "full_like",
                "empty_like", "rand_like", "randn_like", "log_sigmoid_forward")  # fmt: skip


def is_pointwise(node: fx.Node) -> bool:
    """Whether a call works element by element, broadcasting its operands. torch has not tagged `a & b` and its like."""
    if not isinstance(node.target, OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or g.op_name(node) in _BITWISE


def broadcasting(call: Call) -> list[Use]:
    return [Use(used, same(shape_of(used), call.out, from_right=True)) for used in call.tensors()]


def elementwise(call: Call) -> list[Use]:
    """The first operand lies as the result does; others are broadcast."""
    first = call.first()
    return [Use(used, same(shape_of(used), call.out, from_right=used is not first)) for used in call.tensors()]


def typed(call: Call) -> list[Use]:
    """`type_as`: the second operand is looked at for its type alone."""
    first = call.first()
    unread = [Use(used, (None,) * len(call.out), End("unread")) for used in call.tensors() if used is not first]
    return [Use(first, same(shape_of(first), call.out)), *unread]


def prelu(call: Call) -> list[Use]:
    """A slope for each channel, in dimension 1."""
    slopes = tuple(0 if d == 1 else None for d in range(len(call.out)))
    return [Use(call.bound["self"], tuple(range(len(call.out)))), Use(call.bound["weight"], slopes)]


RULES: dict[str, Rule] = {
    **{f"aten::{name}": broadcasting for name in _BROADCASTING},
    **{f"aten::{name}": elementwise for name in _ELEMENTWISE},
    "csc::dropout": elementwise,
    "aten::type_as": typed,
    "aten::prelu": prelu,
}
