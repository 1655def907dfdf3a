"""Between which numbers the whole numbers of a value lie, as far as its calls say, whatever the batch.

    bounds(value) -> (least, largest), or None if that is not known       of a node of csc.analysis.sized, or a number

Places within a sample are such: `arange(n) * length + place` is a row of the sample itself only where `place` is at
least 0 and less than `length`. `mask.sum(1) - 1` is -1 for a sample without tokens: the last row of the sample before.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import fx

from csc.analysis.operators.execution import is_view
from csc.analysis.operators.table import CASTS, COPIES, RESHAPES, filled_with, shape_of
from csc.analysis.samples.operands import number_of
from csc.analysis.sized import given
from csc.ir import graph as g

Bounds = tuple[int, int]
MOVES = COPIES | CASTS | RESHAPES | {"aten::expand", "aten::repeat", "aten::index", "aten::index_select"}


def bounds(value: Any) -> Bounds | None:
    """See the module."""
    val = g.tensor_value(value) if isinstance(value, fx.Node) else None
    if val is None:
        number = number_of(value)
        return (number, number) if isinstance(number, int) and not isinstance(number, bool) else None
    if val.dtype is torch.bool:
        return 0, 1
    if value.op != "call_function" or val.dtype.is_floating_point:
        return None
    filled = filled_with(value)
    if isinstance(filled, int) and not isinstance(filled, bool):
        return filled, filled
    name = g.op_name(value)
    if is_view(value) or name in MOVES:
        return bounds(value.args[0])
    rule = RULES.get(name)
    return rule(value, given(value)) if rule is not None else None


def _sum(_: fx.Node, bound: Any, sign: int = 1) -> Bounds | None:
    one, other = bounds(bound["self"]), bounds(bound["other"])
    if one is None or other is None or bound.get("alpha", 1) != 1:
        return None
    least, most = other if sign > 0 else (-other[1], -other[0])
    return one[0] + least, one[1] + most


def _product(_: fx.Node, bound: Any) -> Bounds | None:
    one, other = bounds(bound["self"]), bounds(bound["other"])
    if one is None or other is None:
        return None
    found = [left * right for left in one for right in other]
    return min(found), max(found)


def _total(node: fx.Node, bound: Any) -> Bounds | None:
    """Of a `sum`: as many as are added up."""
    each = bounds(bound["self"])
    if each is None:
        return None
    number = prod(shape_of(bound["self"])) // max(1, prod(shape_of(node)))
    return each[0] * number, each[1] * number


def _place(_: fx.Node, bound: Any) -> Bounds:
    """Of an `argmax`."""
    shape, dim = shape_of(bound["self"]), bound.get("dim")
    return 0, (prod(shape) if dim is None else shape[dim]) - 1


def _range(node: fx.Node, bound: Any) -> Bounds | None:
    start, step, size = bound.get("start", 0), bound.get("step", 1), shape_of(node)[0]
    if not isinstance(start, int) or not isinstance(step, int) or not size:
        return None
    ends = start, start + step * (size - 1)
    return min(ends), max(ends)


def _clamped(_: fx.Node, bound: Any) -> Bounds | None:
    least, most = bound.get("min"), bound.get("max")
    own = bounds(bound["self"])
    if not all(one is None or isinstance(one, int) for one in (least, most)):
        return None
    if own is None:
        return (least, most) if least is not None and most is not None else None
    lower = own[0] if least is None else max(own[0], least)
    upper = own[1] if least is None else max(own[1], least)
    return (lower, upper) if most is None else (min(lower, most), min(upper, most))


def _remainder(_: fx.Node, bound: Any) -> Bounds | None:
    divisor = bound.get("other")
    return (0, divisor - 1) if isinstance(divisor, int) and divisor > 0 else None


RULES: dict[str, Callable[[fx.Node, Any], Bounds | None]] = {
    "aten::add": _sum, "aten::sub": lambda node, bound: _sum(node, bound, -1), "aten::mul": _product,
    "aten::sum": _total, "aten::argmax": _place, "aten::argmin": _place, "aten::arange": _range,
    "aten::clamp": _clamped, "aten::clamp_min": _clamped, "aten::clamp_max": _clamped, "aten::remainder": _remainder,
}  # fmt: skip
