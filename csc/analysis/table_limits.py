"""Which whole numbers of the batch have to be rows of a table: token ids go as they are into an embedding.

table_limits(graph) -> {batch entry: (parameter, rows)}       the smallest table of each entry
"""

from __future__ import annotations

from typing import Any

from torch import fx

from csc.ir import graph as g

# What hands on all numbers of its first operand, and no others.
_SAME_NUMBERS = {f"aten::{name}" for name in (
    "view", "_unsafe_view", "reshape", "clone", "contiguous", "alias", "detach", "unsqueeze", "squeeze", "transpose",
    "permute", "t", "expand", "_to_copy", "to", "lift_fresh_copy",
)}  # fmt: skip
_COPIES = {"aten::_to_copy", "aten::to", "aten::clone", "aten::detach", "aten::alias"}  # of a table: it is as long


def table_limits(graph: fx.Graph) -> dict[str, tuple[str, int]]:
    """Of a graph in plain sizes or in symbols; tables whose number of rows is a symbol are left out."""
    found: dict[str, tuple[str, int]] = {}
    for node in g.calls(graph):
        if g.op_name(node) != "aten::embedding":
            continue
        bound = g.bind(node)
        table, ids = _origin(bound["weight"], _COPIES), _origin(bound["indices"], _SAME_NUMBERS)
        rows: Any = bound["weight"].meta["val"].shape[0]
        if table[0] == "parameter" and ids[0] == "input" and isinstance(rows, int):
            found[ids[1]] = min(found.get(ids[1], (table[1], rows)), (table[1], rows), key=lambda one: one[1])
    return found


def _origin(node: fx.Node, through: set[str]) -> tuple[str, str]:
    """The role of the placeholder that a value is; ("", "") if it is computed."""
    while node.op == "call_function" and g.op_name(node) in through and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.meta["role"] if node.op == "placeholder" else ("", "")
