"""Sums, means and losses over rows that a mask selects, and how many these are.

Terms: see csc.capture.lower.masked_index. Rows that were not selected are zeros in a sum; a mean divides by how many
the mask selects. In 16 bits a mean adds up in float32, as PyTorch's own does.

    reduced(rows, node) -> bool              whether `node` was a sum or mean over rows in place, and is done
    each(rows, loss) -> node                 a loss entry by entry, of all rows, before what is to be placed and reduced
    of_each(rows, loss, each)                puts the sum or mean of these in the loss' place
    by_their_number(rows, size, selected, user) -> bool     whether `user` computes with how many there are, and is done
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from csc.analysis.operators.table import ELEMENTS
from csc.capture.lower.rows_in_place import RowsInPlace, refused
from csc.capture.lower.same_value import same_value
from csc.ir import graph as g
from csc.ir.graph import replace_call

aten = torch.ops.aten
REDUCED = ("aten::sum", "aten::mean")
ARITHMETIC = ("aten::mul", "aten::div")
NARROW = (torch.float16, torch.bfloat16)
NONE, MEAN, SUM = 0, 1, 2  # what becomes of a loss for each entry


def reduced(rows: RowsInPlace, node: fx.Node) -> bool:
    """See the module. Those along what is in a row leave rows in place."""
    if g.op_name(node) not in REDUCED:
        return False
    bound = g.bind(node)
    given: fx.Node = bound["self"]
    dims: list[int] | None = bound.get("dim") or None
    if dims is not None:
        given = rows.flat(node, given)
        dims = [dim % given.meta["val"].dim() for dim in dims]
        if 0 not in dims:
            return False
    found = _reduced(rows, node, given, dims, bound.get("keepdim", False), bound["dtype"])
    replace_call(node, found)
    return True


def _reduced(
    rows: RowsInPlace,
    node: fx.Node,
    given: fx.Node,
    dims: Sequence[int] | None,
    keepdim: bool,
    dtype: torch.dtype | None,
) -> fx.Node:
    mask, val = rows.in_place[given], given.meta["val"]
    zeroed = given if given in rows.zeros else rows.zeroed(node, given, mask)
    along = range(val.dim()) if dims is None else dims

    def total(dtype: torch.dtype | None) -> fx.Node:
        if dims is None:
            return rows.call(node, aten.sum.default, zeroed, dtype=dtype)
        return rows.call(node, aten.sum.dim_IntList, zeroed, list(dims), keepdim, dtype=dtype)

    if g.op_name(node) == "aten::sum" or (g.op_name(node) in ELEMENTS and g.bind(node)["reduction"] == SUM):
        return total(dtype)
    result = dtype or val.dtype
    others = [val.shape[dim] for dim in along if dim >= mask.meta["val"].dim()]
    if not all(isinstance(size, int) for size in others):
        raise refused(node, "takes a mean over rows, of which a mask has selected some, whose own size varies")
    found = rows.call(node, aten.div.Tensor, total(torch.float32 if result in NARROW else dtype), _number(rows, mask))
    if math.prod(others) != 1:
        found = rows.call(node, aten.div.Tensor, found, math.prod(others))
    return found if found.meta["val"].dtype is result else rows.call(node, aten._to_copy.default, found, dtype=result)


def _number(rows: RowsInPlace, mask: fx.Node) -> fx.Node:
    """How many a mask selects: one value for all masks that are the same, so that terms of a loss are seen to be
    divided by the same. It stands right behind the mask, as who asks first may stand behind who asks next.
    """
    known = next((one for one in rows.numbers if same_value(one, mask, shaped=False)), None)
    if known is None:
        behind = mask.next
        while behind.op == "placeholder":
            behind = behind.next
        rows.numbers[mask] = rows.call(behind, aten.sum.default, mask)
    return rows.numbers[known or mask]


def each(rows: RowsInPlace, loss: fx.Node) -> fx.Node:
    """See the module."""
    bound = g.bind(loss) | {"reduction": NONE}
    keyword = [one.name for one in loss.target._schema.arguments if one.kwarg_only]  # type: ignore[union-attr]
    arguments = tuple(value for name, value in bound.items() if name not in keyword)
    keywords = {name: bound[name] for name in keyword}
    given = [one for one in loss.all_input_nodes if one in rows.in_place]
    widest = max(given, key=lambda one: one.meta["val"].dim() - rows.in_place[one].meta["val"].dim())
    return rows.made(loss, loss.target, arguments, keywords, rows.flat(loss, widest).meta["val"])


def of_each(rows: RowsInPlace, loss: fx.Node, entries: fx.Node) -> None:
    """See the module."""
    if g.bind(loss)["reduction"] == NONE:
        replace_call(loss, entries)
        return
    replace_call(loss, _reduced(rows, loss, entries, None, False, None))


def by_their_number(rows: RowsInPlace, size: fx.Node, selected: fx.Node, user: fx.Node) -> bool:
    """See the module. size: the number of rows, of which Python has a multiple perhaps."""
    factors = [one for one in user.args if one is not size]
    if user.target is operator.mul and len(factors) == 1 and isinstance(factors[0], int):
        times = factors[0]
        done = [_divided(rows, user, selected, times, reader) for reader in list(user.users)]
        if all(done):
            user.graph.erase_node(user)
        return all(done)
    return _divided(rows, size, selected, 1, user)


def _divided(rows: RowsInPlace, size: fx.Node, selected: fx.Node, times: int, user: fx.Node) -> bool:
    """A product with a number of rows, or a quotient by one, of what has no rows in place itself. Not one that is
    rounded to a whole number. In 16 bits the number would be rounded as a tensor, which Python's is not.
    """
    if g.op_name(user) not in ARITHMETIC or len(user.args) != 2 or user.args[1] is not size or user.kwargs:
        return False
    value: Any = user.args[0]
    if not isinstance(value, fx.Node) or value in rows.in_place or g.tensor_value(value) is None:
        return False
    number = _number(rows, rows.in_place[selected])
    if times != 1:
        number = rows.call(user, aten.mul.Tensor, number, times)
    target = aten.div.Tensor if g.op_name(user) == "aten::div" else aten.mul.Tensor
    dtype = value.meta["val"].dtype
    if dtype in NARROW:
        value = rows.call(user, aten._to_copy.default, value, dtype=torch.float32)
    found = rows.call(user, target, value, number)
    replace_call(user, rows.call(user, aten._to_copy.default, found, dtype=dtype) if dtype in NARROW else found)
    return True
