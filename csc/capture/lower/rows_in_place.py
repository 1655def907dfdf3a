"""Selections of rows by a mask as values of all rows, each where it was.

Terms: see csc.capture.lower.masked_index.

    rows = RowsInPlace(graph, mode)       .in_place: to the mask of the rows that were selected     .zeros
    rows.flat, .zeroed, .spread, .together(like, value)      the same rows otherwise: calls in front of `like`
    rows.call(like, target, ...), .place(node, as_these)     a call with its value; a call whose rows are in place
    refused(node, why) -> InputError
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.graph import add_call, values_of
from csc.torch_private.traces import FakeTensorMode

aten = torch.ops.aten


class RowsInPlace:
    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self.graph, self.mode = graph, mode
        self.in_place: dict[fx.Node, fx.Node] = {}
        self.zeros: set[fx.Node] = set()  # in place: rows that were not selected are zeros
        self.numbers: dict[fx.Node, fx.Node] = {}  # by mask, how many it selects

    def zeroed(self, like: fx.Node, rows: fx.Node, mask: fx.Node) -> fx.Node:
        """The same, with zeros in rows that the mask leaves out."""
        others = self.call(like, aten.logical_not.default, mask)
        others = self.column(like, others, rows.meta["val"].dim() - mask.meta["val"].dim())
        found = self.call(like, aten.masked_fill.Scalar, rows, others, 0)
        self.in_place[found] = mask
        self.zeros.add(found)
        return found

    def flat(self, like: fx.Node, rows: fx.Node) -> fx.Node:
        """Rows in place with one dimension for the rows, and so is their mask."""
        mask = self.in_place[rows]
        if mask.meta["val"].dim() == 1:
            return rows
        rest = list(rows.meta["val"].shape[mask.meta["val"].dim() :]) if rows.meta["val"].dim() else []
        if any(not isinstance(size, int) for size in rest):
            raise refused(like, "selects rows whose own size varies")
        flat = self.call(like, aten.reshape.default, rows, [-1, *rest])
        self.in_place[flat] = self.call(like, aten.reshape.default, mask, [-1])
        return flat

    def has_their_number(self, used: fx.Node, node: fx.Node) -> bool:
        """Whether an operand has a row for each row that was selected."""
        value = g.tensor_value(used)
        if used in self.in_place or value is None or value.dim() != node.meta["val"].dim() or not value.dim():
            return False
        return not isinstance(value.shape[0], int) or value.shape[0] != 1

    def spread(self, like: fx.Node, rows: fx.Node, selected: fx.Node) -> fx.Node:
        """Rows, as many as a mask selects, in the places of those that it does; zeros elsewhere."""
        rest = list(rows.meta["val"].shape[1:])
        rows_dims = self.in_place[selected].meta["val"].dim()
        mask = self.column(like, self.in_place[selected], len(rest))
        nothing = self.call(like, aten.zeros_like.default, mask, dtype=rows.meta["val"].dtype)
        nothing = self.call(like, aten.expand.default, nothing, [*[-1] * rows_dims, *rest])
        return self.made(like, aten.masked_scatter.default, (nothing, mask, rows), {}, nothing.meta["val"])

    def together(self, like: fx.Node, rows: fx.Node) -> fx.Node:
        """The selected rows first, in order, then the others; who reads only the first ones reads the selection."""
        rows = self.flat(like, rows)
        others = self.call(like, aten.logical_not.default, self.in_place[rows])
        order = self.call(like, aten.argsort.stable, others, stable=True)
        return self.call(like, aten.index_select.default, rows, 0, order)

    def column(self, like: fx.Node, mask: fx.Node, rest: int) -> fx.Node:
        """The mask with dimensions of 1 behind, to be broadcast over a row."""
        for _ in range(rest):
            mask = self.call(like, aten.unsqueeze.default, mask, -1)
        return mask

    def place(self, node: fx.Node, rows: fx.Node) -> None:
        """The call's result has its rows in place, as these do."""
        node.meta["val"] = self.value(node.target, node.args, node.kwargs)
        self.in_place[node] = self.in_place[rows]

    def size(self, like: fx.Node, node: fx.Node, dim: int) -> Any:
        size = node.meta["val"].shape[dim]
        return size if isinstance(size, int) else self.made(like, aten.sym_size.int, (node, dim), {}, size)

    def call(self, like: fx.Node, target: Any, *arguments: Any, **keywords: Any) -> fx.Node:
        return self.made(like, target, arguments, keywords, self.value(target, arguments, keywords))

    def value(self, target: Any, arguments: Any, keywords: Any) -> Any:
        arguments, keywords = values_of((arguments, keywords))
        with self.mode:
            return target(*arguments, **keywords)

    def made(self, like: fx.Node, target: Any, arguments: Any, keywords: Any, value: Any) -> fx.Node:
        with self.graph.inserting_before(like):
            return add_call(self.graph, target, arguments, keywords, val=value, like=like)


def refused(node: fx.Node, why: str) -> InputError:
    """Of a call that reads selected rows."""
    return InputError(
        f"{g.op_name(node)} {why}: how many is known only when the batch is there",
        node.meta.get("source") or node.meta.get("module") or "model",
        "keep all rows and give those that do not count no weight (torch.where, a label of -100), or select them in "
        "the data loader",
    )
