"""Which whole numbers of the batch have to be rows of a table, or classes: token ids go as they are into an embedding,
labels into a cross entropy.

table_limits(graph) -> {batch entry: (parameter, rows)}             the smallest table of each entry
class_limits(graph) -> {batch entry: (classes, ignored, first)}     ignored: the number that is no class and may be
                                                                    there; first: the place of the first that is read
"""

from __future__ import annotations

import sys
from typing import Any

from torch import fx

from csc.analysis.operators.table import CASTS, COPIES, EMBEDDING, LABELS, PADS, SAME_NUMBERS, SLICE
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


def class_limits(graph: fx.Graph) -> dict[str, tuple[int, int, int]]:
    """Of a graph in plain sizes or in symbols; entries that calls read in two ways are left out."""
    found: dict[str, set[tuple[int, int, int]]] = {}
    for node in g.calls(graph):
        if g.op_name(node) not in LABELS:
            continue
        bound = g.bind(node)
        scores, target, ignored = bound["self"].meta["val"], bound["target"], bound["ignore_index"]
        classes: Any = scores.shape[1 if scores.dim() > 1 else 0]
        labels, first = _labels(target, ignored)
        if isinstance(classes, int) and labels and not target.meta["val"].is_floating_point():
            found.setdefault(labels, set()).add((classes, ignored, first))
    return {name: limits.pop() for name, limits in found.items() if len(limits) == 1}


def _labels(node: fx.Node, ignored: int) -> tuple[str, int]:
    """The batch entry whose numbers these are, from a place on its last dimension on, and perhaps ignored ones behind
    them: labels that are shifted. ("", 0) for anything else.
    """
    first = 0
    while node.op == "call_function" and isinstance(node.args[0], fx.Node):
        name = g.op_name(node)
        if name == SLICE:
            bound = g.bind(node)
            last = node.meta["val"].dim() - 1
            if bound["dim"] not in (-1, last) or not _from(bound):
                return "", 0
            first += bound["start"] or 0
        elif name in PADS:
            bound = g.bind(node)
            sides = list(bound["pad"])
            if sides[0] or len(sides) > 2 or bound.get("mode", "constant") != "constant" or bound["value"] != ignored:
                return "", 0
        elif name not in SAME_NUMBERS or (first and name not in COPIES):
            return "", 0
        node = node.args[0]
    role = node.meta["role"] if node.op == "placeholder" else ("", "")
    return (role[1], first) if role[0] == "input" else ("", 0)


def _from(bound: dict[str, Any]) -> bool:
    """Whether a slice has all from its start on."""
    start, end = bound["start"] or 0, bound["end"]
    return isinstance(start, int) and start >= 0 and bound["step"] == 1 and (end is None or end == sys.maxsize)


def _origin(node: fx.Node, through: set[str]) -> tuple[str, str]:
    """The role of the placeholder that a value is; ("", "") if it is computed."""
    while node.op == "call_function" and g.op_name(node) in through and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.meta["role"] if node.op == "placeholder" else ("", "")
