"""Selections of rows by a mask (`features[mask]`), whose size depends on values, in sizes that do not.

Terms
  selection  `x[mask]`, `x.masked_select(mask)`: the rows of x where a mask is true, one after the other
  in place   a selection of which all rows were kept, each where it is in x. What is computed from it row by row is in
             place too. Rows that the mask leaves out must not count in the end: where rows are written back through
             the mask, scattered to other places, or are the targets of a loss.

    without_selections(graph, mode)      changes a captured graph, in place
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from csc.analysis.operators.moves import COPIES, RESHAPES
from csc.analysis.operators.pointwise import is_pointwise
from csc.analysis.operators.reductions import NORMS
from csc.analysis.operators.table import links
from csc.analysis.tokens import mixes
from csc.capture.lower.same_value import same_value
from csc.capture.lower.selections import is_scattered, mask_of
from csc.capture.lower.unselected_rows import is_only_moved, stays_finite
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.rewrite import add_call, replace_call, values_of
from csc.torch_private.traces import FakeTensorMode

aten = torch.ops.aten
ALONG_ROWS = {"aten::linear", "aten::embedding"} | NORMS | COPIES  # whatever dimensions stand in front
SIZED = {"aten::full", "aten::zeros", "aten::ones", "aten::expand"}


def without_selections(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Rewrite selections by masks, and writes to them.

    Before    %rows : f32[u0, 8] = aten.index(%x, [%mask]);  %y = aten.add(%rows, 1);  aten.index_put(%x, [%mask], %y)
    After     %rows : f32[2, 10, 8] = aten.alias(%x);  %y = aten.add(%rows, 1);  aten.where(%mask, %y, %x)

    `torch.where(mask)` gives the places of all elements, in place; what is then looked up at these and added at others
    (`out.index_add_(0, places, rows)`, as the experts of a mixture do) is in place, and adds zeros where nothing was
    selected.

    Raises InputError, with the source line, where rows that were not selected would count.
    """
    _Rewriting(graph, mode).run()


class _Rewriting:
    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self.graph, self.mode = graph, mode
        self.in_place: dict[fx.Node, fx.Node] = {}  # to the mask of the rows that were selected
        self.numbers: set[fx.Node] = set()  # in place, too: 0 in the first row, 1 in the second
        self.infinite: set[fx.Node] = set()  # in place: rows that were not selected may be
        self.zeroed: set[fx.Node] = set()  # in place: those rows are zeros

    def run(self) -> None:
        for node in g.calls(self.graph):
            self._zero_inputs(node)
            mask = mask_of(node)
            if mask is not None and g.op_name(node) == "aten::index":
                self._select(node, mask)
            elif mask is not None:
                self._write(node, mask)
            elif g.op_name(node) == "aten::masked_select":
                self._select(node, self._mask_of_rows(node))
            elif g.op_name(node) == "aten::where" and len(node.args) == 1:
                self._find(node)
            elif any(used in self.in_place for used in node.all_input_nodes):
                self._carry_on(node)

    def _select(self, node: fx.Node, mask: fx.Node) -> None:
        whole: Any = node.args[0]
        if whole in self.in_place or mask in self.in_place:
            whole, mask = self._among_selected(node, whole, mask)
            mask = self._call(node, aten.logical_and.default, mask, self.in_place[whole])
        if is_only_moved(node):  # a call of its own: rows that were selected are one value, the whole another
            rows = self._made(node, aten.alias.default, (whole,), {}, whole.meta["val"])
        else:
            rows = self._zeroed(node, whole, mask)
        replace_call(node, rows)
        self.in_place[rows] = mask

    def _among_selected(self, node: fx.Node, whole: fx.Node, mask: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Rows in place and a mask of them that is in place, too, both with one dimension for the rows."""
        theirs, its_own = self.in_place.get(whole), self.in_place.get(mask)
        alike = theirs is not None and its_own is not None and same_value(theirs, its_own, shaped=False)
        if not alike or its_own is None or mask.meta["val"].dim() != its_own.meta["val"].dim():
            raise _refused(node, "looks among rows that a mask has selected, by what is no mask of these")
        return self._flat(node, whole), self._flat(node, mask)

    def _mask_of_rows(self, node: fx.Node) -> fx.Node:
        """Of a `masked_select`, whose mask is broadcast: that of its rows if it says the same of all that is in a row,
        and what is selected is read in rows again; else that of its elements.
        """
        whole, mask = node.args
        assert isinstance(whole, fx.Node) and isinstance(mask, fx.Node)
        shape, given = list(whole.meta["val"].shape), list(mask.meta["val"].shape)
        front = len(shape) - len(given)
        if front < 0 or any(all_ == 1 and size != 1 for size, all_ in zip(given, shape[front:])):
            raise _refused(node, "selects from what a mask makes larger")
        rest = next((number for number, size in enumerate(reversed(given)) if size != 1), len(given))
        in_rows = [list(one.meta["val"].shape[1:]) == shape[-rest:] for one in node.users if g.op_name(one) in RESHAPES]
        if len(in_rows) < len(node.users) or not all(in_rows) or rest == len(shape):
            rest = 0
        for _ in range(rest):
            mask = self._call(node, aten.squeeze.dim, mask, -1)
        lead = [self._size(node, whole, dim) for dim in range(len(shape) - rest)]
        wide = front or any(size == 1 and all_ != 1 for size, all_ in zip(given, lead))
        return self._call(node, aten.expand.default, mask, lead) if wide else mask

    def _find(self, node: fx.Node) -> None:
        """`torch.where(mask)`: the places of all elements, along each dimension."""
        mask: Any = node.args[0]
        if mask in self.in_place:
            raise _refused(node, "counts places among rows that a mask has selected")
        if mask.meta["val"].dtype is not torch.bool:
            mask = self._call(node, aten.ne.Scalar, mask, 0)
        shape = [self._size(node, mask, dim) for dim in range(mask.meta["val"].dim())]
        flat = self._call(node, aten.reshape.default, mask, [-1])
        for one in list(node.users):
            dim: Any = one.args[1]
            along = self._call(node, aten.arange.default, shape[dim], device=mask.meta["val"].device)
            column = self._call(node, aten.view.default, along, [-1, *[1] * (len(shape) - dim - 1)])
            places = self._call(node, aten.expand.default, column, shape)
            rows = self._call(node, aten.reshape.default, places, [-1])
            replace_call(one, rows)
            self.in_place[rows] = flat
        self.graph.erase_node(node)

    def _add(self, node: fx.Node) -> None:
        """`whole.index_add(0, places, rows)`: nothing is added for rows that were not selected."""
        whole, dim, places, rows, *_ = node.args
        masks = [self.in_place.get(one) for one in (places, rows)]  # type: ignore[arg-type]
        if (
            dim != 0
            or whole in self.in_place
            or not isinstance(masks[0], fx.Node)
            or not same_value(masks[0], masks[1])
        ):
            raise _refused(node, "adds rows, of which a mask has selected some")
        assert isinstance(rows, fx.Node)
        node.replace_input_with(rows, self._zeroed(node, rows, masks[0]))

    def _write(self, node: fx.Node, mask: fx.Node) -> None:
        """`x[mask] = values`."""
        whole, _, values, *accumulate = node.args
        if accumulate and accumulate[0]:
            raise _refused(node, "adds to the rows that a mask selects")
        assert isinstance(whole, fx.Node) and isinstance(values, fx.Node)
        if whole in self.in_place or mask in self.in_place:
            self._write_selected(node, whole, mask, values)
            return
        rest = whole.meta["val"].dim() - mask.meta["val"].dim()
        chosen = self._column(node, mask, rest)
        its_own = values in self.in_place and same_value(self.in_place[values], mask)
        if its_own or (values.meta["val"].dim() <= rest and values not in self.in_place):
            new = self._made(node, aten.where.self, (chosen, values, whole), {}, whole.meta["val"])
        else:
            source = self._together(node, values) if values in self.in_place else values
            new = self._made(node, aten.masked_scatter.default, (whole, chosen, source), {}, whole.meta["val"])
        replace_call(node, new)

    def _write_selected(self, node: fx.Node, whole: fx.Node, mask: fx.Node, values: fx.Node) -> None:
        """`x[mask][others] = values`: one for all of these rows."""
        whole, mask = self._among_selected(node, whole, mask)
        rest = whole.meta["val"].dim() - 1
        if values in self.in_place or values.meta["val"].dim() > rest:
            raise _refused(node, "writes rows among those that a mask has selected")
        chosen = self._column(node, mask, rest)
        new = self._made(node, aten.where.self, (chosen, values, whole), {}, whole.meta["val"])
        replace_call(node, new)
        self.in_place[new] = self.in_place[whole]

    def _carry_on(self, node: fx.Node) -> None:
        """A call that reads rows in place."""
        name = g.op_name(node)
        given = [used for used in node.all_input_nodes if used in self.in_place]
        if any(used in self.numbers for used in given):
            self._by_number(node)
            return
        if name == "aten::masked_scatter" and given == [node.args[2]]:
            node.replace_input_with(given[0], self._together(node, given[0]))
            return
        if name == "aten::index_add":
            self._add(node)
            return
        if any(not same_value(self.in_place[one], self.in_place[given[0]], shaped=False) for one in given[1:]):
            raise _refused(node, "takes rows that one mask has selected beside those of another")
        if name == "aten::cross_entropy_loss" and node.args[1] in self.in_place:
            self._leave_out(node)
            return
        if name == "aten::sym_size":
            self._count(node, given[0])
            return
        if name in RESHAPES:
            self._reshape(node)
            return
        if name in NORMS and g.bind(node).get("eps") == 0:
            raise _refused(
                node, "divides rows, of which a mask has selected some, by a deviation that may be 0 (eps=0)"
            )
        self._check_rows(node, given)
        self._place(node, next(used for used in node.all_input_nodes if used in self.in_place))
        if not stays_finite(node):
            self.infinite.add(node)

    def _zero_inputs(self, node: fx.Node) -> None:
        """See csc.capture.lower.unselected_rows."""
        for used in [one for one in node.all_input_nodes if one in self.in_place]:
            finite = stays_finite(node) or used in self.zeroed or not used.meta["val"].is_floating_point()
            if used in self.infinite or not finite:
                node.replace_input_with(used, self._zeroed(node, used, self.in_place[used]))

    def _zeroed(self, like: fx.Node, rows: fx.Node, mask: fx.Node) -> fx.Node:
        """The same, with zeros in rows that the mask leaves out."""
        others = self._call(like, aten.logical_not.default, mask)
        others = self._column(like, others, rows.meta["val"].dim() - mask.meta["val"].dim())
        found = self._call(like, aten.masked_fill.Scalar, rows, others, 0)
        self.in_place[found] = mask
        self.zeroed.add(found)
        return found

    def _count(self, node: fx.Node, rows: fx.Node) -> None:
        """The number of selected rows: reshapes do without it; what it is the size of is made for all rows instead."""
        sized = [user for user in node.users if g.op_name(user) not in RESHAPES]
        if not sized:
            return
        flat = self._flat(node, rows)
        for user in sized:
            name = g.op_name(user)
            sizes = list(user.args[1] if name == "aten::expand" else user.args[0]) if name in SIZED else []  # type: ignore
            if name == "aten::arange" and user.args == (node,):
                user.args = (self._size(node, flat, 0),)
                self.numbers.add(user)
            elif sizes and sizes[0] is node and node not in sizes[1:]:
                user.update_arg(int(name == "aten::expand"), [self._size(node, flat, 0), *sizes[1:]])
            else:
                raise _refused(node, "computes with the number of rows that a mask selects")
            if not any(used in self.in_place for used in user.all_input_nodes):  # the same in every row, or its number
                self._place(user, flat)

    def _by_number(self, node: fx.Node) -> None:
        """Rows looked up by their own number, in place as in the selection, are the rows themselves."""
        name = g.op_name(node)
        if name == "aten::unsqueeze" and node.args[1] != 0:
            self.numbers.add(node)
        else:
            table, index = node.args[0], [*(node.args[1] if name == "aten::index" else ()), None]  # type: ignore[misc]
            by = [used for used in node.all_input_nodes if used in self.numbers]
            ranks = [one.meta["val"].dim() for one in index if isinstance(one, fx.Node)]
            theirs = by == [index[0]] and table not in by and ranks[0] == max(ranks)  # their dimension stays the first
            if not theirs or not same_value(self.in_place.get(table), self.in_place[by[0]]):  # type: ignore[arg-type]
                raise _refused(node, "computes with the numbers of rows that a mask selects")
        self._place(node, next(used for used in node.all_input_nodes if used in self.in_place))

    def _check_rows(self, node: fx.Node, given: list[fx.Node]) -> None:
        """A call that is no reshape: it must compute row by row. Operands with the rows of the selection alone are
        brought in place.
        """
        pointwise = is_pointwise(node)
        if pointwise and len({self.in_place[used].meta["val"].dim() for used in given}) > 1:
            for used in given:
                node.replace_input_with(used, self._flat(node, used))
            given = [used for used in node.all_input_nodes if used in self.in_place]
        for used in node.all_input_nodes if pointwise else ():
            if self._has_their_number(used, node):
                rows = self._spread(node, used, given[0])
                node.replace_input_with(used, rows)
                self.in_place[rows] = self.in_place[given[0]]
        if pointwise or g.op_name(node) in ALONG_ROWS or self._widened(node):
            return
        for used in given:  # it counts its dimensions: one for the rows, as it had
            node.replace_input_with(used, self._flat(node, used))
        try:
            node.meta["val"] = self._value(node.target, node.args, node.kwargs)
        except (RuntimeError, ValueError) as error:
            raise _refused(node, "cannot be run on all rows, of which a mask has selected some") from error
        if any(used in self.in_place and 0 in link and link[0] != 0 for used, link in links(node)):
            raise _refused(node, "turns the rows that a mask has selected")
        why = mixes(node, lambda one: (0,) if one in self.in_place or one is node else ())
        if why is not None:
            raise _refused(node, f"{why}, of which a mask has selected some")

    def _widened(self, node: fx.Node) -> bool:
        """Whether a call is an `expand` of each row."""
        rows: Any = node.args[0]
        if g.op_name(node) != "aten::expand" or rows not in self.in_place:
            return False
        return bool(node.meta["val"].dim() == rows.meta["val"].dim() and self.in_place[rows].meta["val"].dim() == 1)

    def _reshape(self, node: fx.Node) -> None:
        """One that leaves rows as they are, or cuts each; or that only a scatter reads: it takes values in order."""
        before: Any = node.args[0]
        shape: Any = node.args[1]
        one_row = list(before.meta["val"].shape[self.in_place[before].meta["val"].dim() :])
        new_row = list(node.meta["val"].shape[1:])
        if new_row == one_row or is_scattered(node):
            replace_call(node, before)
        elif torch.Size(one_row).numel() != torch.Size(new_row).numel():
            raise _refused(node, "joins or cuts rows that a mask has selected")
        else:
            flat = self._flat(node, before)
            rows = self._size(node, flat, 0) if -1 in shape[1:] else -1
            node.args = (flat, [rows, *shape[1:]])
            self._place(node, flat)

    def _flat(self, like: fx.Node, rows: fx.Node) -> fx.Node:
        """Rows in place with one dimension for the rows, and so is their mask."""
        mask = self.in_place[rows]
        if mask.meta["val"].dim() == 1:
            return rows
        rest = list(rows.meta["val"].shape[mask.meta["val"].dim() :]) if rows.meta["val"].dim() else []
        if any(not isinstance(size, int) for size in rest):
            raise _refused(like, "selects rows whose own size varies")
        flat = self._call(like, aten.reshape.default, rows, [-1, *rest])
        self.in_place[flat] = self._call(like, aten.reshape.default, mask, [-1])
        return flat

    def _has_their_number(self, used: fx.Node, node: fx.Node) -> bool:
        """Whether an operand has a row for each row that was selected."""
        value = g.tensor_value(used)
        if used in self.in_place or value is None or value.dim() != node.meta["val"].dim() or not value.dim():
            return False
        return not isinstance(value.shape[0], int) or value.shape[0] != 1

    def _spread(self, like: fx.Node, rows: fx.Node, selected: fx.Node) -> fx.Node:
        """Rows, as many as a mask selects, in the places of those that it does; zeros elsewhere."""
        rest = list(rows.meta["val"].shape[1:])
        rows_dims = self.in_place[selected].meta["val"].dim()
        mask = self._column(like, self.in_place[selected], len(rest))
        nothing = self._call(like, aten.zeros_like.default, mask, dtype=rows.meta["val"].dtype)
        nothing = self._call(like, aten.expand.default, nothing, [*[-1] * rows_dims, *rest])
        return self._made(like, aten.masked_scatter.default, (nothing, mask, rows), {}, nothing.meta["val"])

    def _together(self, like: fx.Node, rows: fx.Node) -> fx.Node:
        """The selected rows first, in order, then the others; who reads only the first ones reads the selection."""
        rows = self._flat(like, rows)
        others = self._call(like, aten.logical_not.default, self.in_place[rows])
        order = self._call(like, aten.argsort.stable, others, stable=True)
        return self._call(like, aten.index_select.default, rows, 0, order)

    def _leave_out(self, loss: fx.Node) -> None:
        """Targets that were not selected are ignored, and their logits with them."""
        bound = g.bind(loss)
        targets: fx.Node = bound["target"]
        if bound["reduction"] not in (1, 2) or bound["self"] not in self.in_place:
            raise _refused(loss, "gives one loss for each row that a mask selects")
        if targets.meta["val"].is_floating_point():  # of which none can be ignored
            raise _refused(loss, "compares rows that a mask selects with probabilities")
        none = self._call(loss, aten.full_like.default, targets, bound["ignore_index"])
        counted = self._call(loss, aten.where.self, self.in_place[targets], targets, none)
        self.in_place[counted] = self.in_place[targets]
        loss.replace_input_with(targets, self._flat(loss, counted))
        loss.replace_input_with(bound["self"], self._flat(loss, bound["self"]))

    def _column(self, like: fx.Node, mask: fx.Node, rest: int) -> fx.Node:
        """The mask with dimensions of 1 behind, to be broadcast over a row."""
        for _ in range(rest):
            mask = self._call(like, aten.unsqueeze.default, mask, -1)
        return mask

    def _place(self, node: fx.Node, rows: fx.Node) -> None:
        """The call's result has its rows in place, as these do."""
        node.meta["val"] = self._value(node.target, node.args, node.kwargs)
        self.in_place[node] = self.in_place[rows]

    def _size(self, like: fx.Node, node: fx.Node, dim: int) -> Any:
        size = node.meta["val"].shape[dim]
        return size if isinstance(size, int) else self._made(like, aten.sym_size.int, (node, dim), {}, size)

    def _call(self, like: fx.Node, target: Any, *arguments: Any, **keywords: Any) -> fx.Node:
        return self._made(like, target, arguments, keywords, self._value(target, arguments, keywords))

    def _value(self, target: Any, arguments: Any, keywords: Any) -> Any:
        arguments, keywords = values_of((arguments, keywords))
        with self.mode:
            return target(*arguments, **keywords)

    def _made(self, like: fx.Node, target: Any, arguments: Any, keywords: Any, value: Any) -> fx.Node:
        with self.graph.inserting_before(like):
            return add_call(self.graph, target, arguments, keywords, val=value, like=like)


def _refused(node: fx.Node, why: str) -> InputError:
    return InputError(
        f"{g.op_name(node)} {why}: how many is known only when the batch is there",
        node.meta.get("source") or node.meta.get("module") or "model",
        "keep all rows and give those that do not count no weight (torch.where, a label of -100), or select them in "
        "the data loader",
    )
