"""A row that a model keeps where it would keep none, as in `keep[0] |= ~keep.any()` of a mask of images.

A microbatch without any row to keep then has a *spare* one, which the whole batch does not keep. Computing with it row
by row harms nobody, and where the rows that this very mask keeps are scattered to the places that samples have for them
(as many as are kept, which is checked before the step) there is none for it. Adding it up would do harm, and so would a
place for it, which rows have that are scattered as they are, or that another mask selects.

    written_to(node) -> (mask, spare) | None      what `select_scatter` writes to; spare: it may keep one row more;
                                                  None: it writes something else, or is another call
    without_spare(mask) -> mask                   before a spare row is kept; the mask itself if none is
    spare_of_order(order) -> mask | None          of the mask that an `argsort` puts first, without its spare row; None:
                                                  it has none
"""

from __future__ import annotations

from typing import Any

from torch import fx

from csc.analysis.operators.table import EXACT_COPIES, shape_of
from csc.ir import graph as g

EITHER, NOT = ("aten::bitwise_or", "aten::logical_or", "aten::__or__"), ("aten::bitwise_not", "aten::logical_not")


def written_to(node: fx.Node) -> tuple[fx.Node, bool] | None:
    """See the module. Of a mask with one dimension."""
    if g.op_name(node) != "aten::select_scatter":
        return None
    bound = g.bind(node)
    mask, written, place = bound["self"], _uncopied(bound["src"]), bound["index"]
    if len(shape_of(mask)) != 1:
        return None
    if _is_entry(written, mask, place):
        return mask, False
    if g.op_name(written) not in EITHER:
        return None
    entries = [_is_entry(one, mask, place) for one in written.all_input_nodes]
    nones = [_is_none(one, mask) for one in written.all_input_nodes]
    return (mask, True) if entries in ([True, False], [False, True]) and nones == entries[::-1] else None


def without_spare(mask: fx.Node) -> fx.Node:
    """See the module."""
    found, spares = mask, False
    while (before := written_to(found)) is not None:
        found, spares = before[0], spares or before[1]
    return found if spares else mask


def spare_of_order(order: Any) -> fx.Node | None:
    """See the module."""
    others = order.args[0]
    if g.op_name(order) != "aten::argsort" or g.op_name(others) != "aten::logical_not":
        return None
    kept = without_spare(others.args[0])
    return None if kept is others.args[0] else kept


def _uncopied(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and g.op_name(node) in EXACT_COPIES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_entry(node: fx.Node, mask: fx.Node, place: Any) -> bool:
    if g.op_name(node) != "aten::select":
        return False
    bound = g.bind(node)
    return bound["self"] is mask and bound["index"] == place


def _is_none(node: fx.Node, mask: fx.Node) -> bool:
    """Whether a value says that nothing of the mask is kept."""
    if g.op_name(node) not in NOT:
        return False
    found: Any = node.args[0]
    return g.op_name(found) == "aten::any" and found.all_input_nodes == [mask] and not shape_of(found)
