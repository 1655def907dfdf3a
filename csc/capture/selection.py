"""Selections of rows by a mask (`features[mask]`), whose size depends on values, in sizes that do not.

Terms
  selection  `x[mask]`: the rows of x where a mask is true, one after the other
  padded     a selection with as many rows as the mask has elements: the chosen rows first, in order, then the others.
             What is computed row by row from it is padded too. Only the chosen rows may count in the end: where they
             are scattered to as many places, added to a value that has just their number, or are a loss' targets.

    without_selections(graph, mode)      changes a captured graph, in place
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from csc.analysis.tokens import mixes
from csc.errors import InputError
from csc.ir import graph as g
from csc.torch_private import FakeTensorMode, OpOverload

aten = torch.ops.aten
RESHAPES = {"aten::view", "aten::reshape", "aten::_unsafe_view"}


def without_selections(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Rewrite selections by masks, and writes to them.

    Before    %rows : f32[u0, 32] = aten.index(%x, [%mask]);  aten.masked_scatter(%text, %where, %rows)
    After     %order = aten.argsort(aten.logical_not(%mask), stable=True);  %rows : f32[20, 32] = x[%order]; the same

    Raises InputError, with the source line, where rows that were not chosen would count.
    """
    _Rewriting(graph, mode).run()


class _Rewriting:
    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self.graph, self.mode = graph, mode
        self.padded: dict[fx.Node, fx.Node] = {}  # to the mask that chose its rows

    def run(self) -> None:
        for node in g.calls(self.graph):
            mask = _mask_of(node)
            if mask is not None and g.op_name(node) == "aten::index":
                self._select(node, mask)
            elif mask is not None:
                self._write(node, mask)
            elif any(used in self.padded for used in node.all_input_nodes):
                self._carry_on(node)

    def _select(self, node: fx.Node, mask: fx.Node) -> None:
        whole: Any = node.args[0]
        first = mask.meta["val"].dim()
        rest = list(whole.meta["val"].shape[first:])
        if any(not isinstance(size, int) for size in rest):
            raise _refused(node, "selects rows whose own size varies")
        order = self._order(node, mask)
        flat = self._call(node, aten.reshape.default, whole, [-1, *rest])
        rows = self._call(node, aten.index_select.default, flat, 0, order)
        node.replace_all_uses_with(rows)
        self.graph.erase_node(node)
        self.padded[rows] = mask

    def _order(self, node: fx.Node, mask: fx.Node) -> fx.Node:
        """Places of the mask's elements, the true ones first."""
        others = self._call(node, aten.logical_not.default, mask)
        flat = self._call(node, aten.reshape.default, others, [-1])
        return self._call(node, aten.argsort.stable, flat, stable=True)

    def _write(self, node: fx.Node, mask: fx.Node) -> None:
        """`x[mask] = values`."""
        whole, _, values, *accumulate = node.args
        if accumulate and accumulate[0]:
            raise _refused(node, "adds to the rows that a mask selects")
        assert isinstance(whole, fx.Node) and isinstance(values, fx.Node)
        missing = whole.meta["val"].dim() - mask.meta["val"].dim()
        for _ in range(missing):
            mask = self._call(node, aten.unsqueeze.default, mask, -1)
        if values.meta["val"].dim() <= missing and values not in self.padded:
            new = self._made(node, aten.where.self, (mask, values, whole), {}, whole.meta["val"])
        else:
            new = self._made(node, aten.masked_scatter.default, (whole, mask, values), {}, whole.meta["val"])
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    def _carry_on(self, node: fx.Node) -> None:
        """A call that reads padded values."""
        name = g.op_name(node)
        given = [used for used in node.all_input_nodes if used in self.padded]
        if name == "aten::masked_scatter" and given == [node.args[2]]:
            return
        if name == "aten::cross_entropy_loss" and node.args[1] in self.padded:
            self._leave_out(node)
            return
        if name == "aten::sym_size":
            if all(g.op_name(user) in RESHAPES for user in node.users):
                return
            raise _refused(node, "computes with the number of rows that a mask selects")
        if name in RESHAPES:
            self._reshape(node)
            return
        number = next((used for used in node.all_input_nodes if self._has_their_number(used, node, given)), None)
        if number is not None and _is_pointwise(node):
            self._cut(node, given, number)
            return
        why = mixes(node, lambda one: (0,) if one in self.padded or one is node else ())
        if why is not None:
            raise _refused(node, f"{why}, of which a mask has selected some")
        self.padded[node] = self.padded[given[0]]

    def _reshape(self, node: fx.Node) -> None:
        """One that keeps rows, or that only a scatter reads: it takes values in their order."""
        before: Any = node.args[0]
        shape: Any = node.args[1]
        widths = [list(one.meta["val"].shape[1:]) for one in (before, node)]
        keeps = torch.Size(widths[0]).numel() == torch.Size(widths[1]).numel()
        if not keeps and any(g.op_name(user) != "aten::masked_scatter" for user in node.users):
            raise _refused(node, "joins or cuts rows that a mask has selected")
        if keeps:
            node.args = (before, [-1, *shape[1:]])
        self.padded[node] = self.padded[before]

    @staticmethod
    def _has_their_number(used: fx.Node, node: fx.Node, given: list[fx.Node]) -> bool:
        value = g.tensor_value(used)
        if used in given or value is None or value.dim() != node.meta["val"].dim() or not value.dim():
            return False
        return not isinstance(value.shape[0], int) or value.shape[0] != 1

    def _cut(self, node: fx.Node, given: list[fx.Node], number: fx.Node) -> None:
        """The operands that are padded, without their last rows: the other operand has just the chosen ones."""
        size: Any = number.meta["val"].shape[0]
        if not isinstance(size, int):
            size = self._call(node, aten.sym_size.int, number, 0)
        for used in given:
            node.replace_input_with(used, self._call(node, aten.slice.Tensor, used, 0, 0, size))

    def _leave_out(self, loss: fx.Node) -> None:
        """Targets that no mask chose are ignored, and their logits with them."""
        bound = g.bind(loss)
        targets: fx.Node = bound["target"]
        mask = self.padded[targets]
        if bound["reduction"] not in (1, 2) or bound["label_smoothing"] or bound["self"] not in self.padded:
            raise _refused(loss, "gives one loss for each row that a mask selects")
        flat = self._call(loss, aten.reshape.default, mask, [-1])
        chosen = self._call(loss, aten.sum.default, flat)
        rows = self._call(
            loss, aten.cumsum.default, self._call(loss, aten.ones_like.default, flat, dtype=torch.int64), 0
        )
        counts = self._call(loss, aten.le.Tensor, rows, chosen)
        none = self._call(loss, aten.full_like.default, targets, bound["ignore_index"])
        loss.replace_input_with(targets, self._call(loss, aten.where.self, counts, targets, none))

    def _call(self, like: fx.Node, target: Any, *arguments: Any, **keywords: Any) -> fx.Node:
        with self.mode:
            args, kwargs = fx.map_arg((arguments, keywords), lambda n: n.meta["val"])
            return self._made(like, target, arguments, keywords, target(*args, **kwargs))

    def _made(self, like: fx.Node, target: Any, arguments: Any, keywords: Any, value: Any) -> fx.Node:
        with self.graph.inserting_before(like):
            node = self.graph.call_function(target, arguments, keywords)
        node.meta["val"] = value
        node.meta.update(source=like.meta.get("source", ""), module=like.meta.get("module", ""))
        return node


def _mask_of(node: fx.Node) -> fx.Node | None:
    """The mask of `x[mask]` or `x[mask] = ...`, if that is what a call does."""
    if g.op_name(node) not in ("aten::index", "aten::index_put"):
        return None
    indices: Any = node.args[1]
    first = indices[0] if indices else None
    if not isinstance(first, fx.Node) or any(one is not None for one in indices[1:]):
        return None
    return first if first.meta["val"].dtype in (torch.bool, torch.uint8) else None


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def _refused(node: fx.Node, why: str) -> InputError:
    return InputError(
        f"{g.op_name(node)} {why}: how many is known only when the batch is there",
        node.meta.get("source") or node.meta.get("module") or "model",
        "keep all rows and give those that do not count no weight (torch.where, a label of -100), or select them in "
        "the data loader",
    )
