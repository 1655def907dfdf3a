"""Which whole numbers of the batch have to be rows of a table: token ids go as they are into an embedding.

table_limits(graph) -> {batch entry: (parameter, rows)}       the smallest table of each entry
"""

from __future__ import annotations

from typing import Any

from torch import fx

from csc.analysis.operators.moves import CASTS, COPIES, EMBEDDING, SAME_NUMBERS
from csc.ir import graph as g


def table_limits(graph: fx.Graph) -> dict[str, tuple[str, int]]:
    """Of a graph in plain sizes or in symbols; tables whose number of rows is a symbol are left out."""
    found: dict[str, tuple[str, int]] = {}
    for node in g.calls(graph):
        if g.op_name(node) != EMBEDDING:
            continue
        bound = g.bind(node)
        table, ids = _origin(bound["weight"], COPIES | CASTS), _origin(bound["indices"], SAME_NUMBERS)
        rows: Any = bound["weight"].meta["val"].shape[0]
        if table[0] == "parameter" and ids[0] == "input" and isinstance(rows, int):
            found[ids[1]] = min(found.get(ids[1], (table[1], rows)), (table[1], rows), key=lambda one: one[1])
    return found


def _origin(node: fx.Node, through: set[str]) -> tuple[str, str]:
    """The role of the placeholder that a value is; ("", "") if it is computed."""
    while node.op == "call_function" and g.op_name(node) in through and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.meta["role"] if node.op == "placeholder" else ("", "")
