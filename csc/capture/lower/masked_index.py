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

from csc.analysis.operators.table import COPIES, ELEMENTS, LABELS, NORMS, RESHAPES, is_pointwise, links
from csc.analysis.tokens import mixes
from csc.capture.lower.rows_in_place import RowsInPlace, refused
from csc.capture.lower.same_value import same_value
from csc.capture.lower.selected_sums import by_their_number, each, of_each, reduced
from csc.capture.lower.selections import is_scattered, mask_of
from csc.capture.lower.unselected_rows import is_only_moved, made_by, stays_finite
from csc.ir import graph as g
from csc.ir.graph import replace_call
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
        self.graph, self.rows = graph, RowsInPlace(graph, mode)
        self.in_place = self.rows.in_place
        self.numbers: set[fx.Node] = set()  # in place, too: 0 in the first row, 1 in the second
        self.infinite: set[fx.Node] = set()  # in place: rows that were not selected may be

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
            mask = self.rows.call(node, aten.logical_and.default, mask, self.in_place[whole])
        if is_only_moved(node):  # a call of its own: rows that were selected are one value, the whole another
            rows = self.rows.made(node, aten.alias.default, (whole,), {}, whole.meta["val"])
        elif (calls := made_by(whole, node, mask)) is not None:
            rows = self._made_of_zeros(node, calls, mask)
        else:
            rows = self.rows.zeroed(node, whole, mask)
        replace_call(node, rows)
        self.in_place[rows] = mask

    def _made_of_zeros(self, node: fx.Node, calls: list[fx.Node], mask: fx.Node) -> fx.Node:
        """What a linear layer and copies make, where rows that the mask leaves out are zeros before."""
        first: Any = calls[0].args[0]
        if mask.meta["val"].dim() != first.meta["val"].dim() - 1:
            sizes = [self.rows.size(node, first, dim) for dim in range(first.meta["val"].dim() - 1)]
            mask = self.rows.call(node, aten.reshape.default, mask, sizes)
        made = {first: self.rows.zeroed(node, first, mask)}
        for call in calls:
            with self.graph.inserting_before(node):
                made[call] = g.copy_node(self.graph, call, {**{one: one for one in call.all_input_nodes}, **made})
        return made[calls[-1]]

    def _among_selected(self, node: fx.Node, whole: fx.Node, mask: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Rows in place and a mask of them that is in place, too, both with one dimension for the rows."""
        theirs, its_own = self.in_place.get(whole), self.in_place.get(mask)
        alike = theirs is not None and its_own is not None and same_value(theirs, its_own, shaped=False)
        if not alike or its_own is None or mask.meta["val"].dim() != its_own.meta["val"].dim():
            raise refused(node, "looks among rows that a mask has selected, by what is no mask of these")
        return self.rows.flat(node, whole), self.rows.flat(node, mask)

    def _mask_of_rows(self, node: fx.Node) -> fx.Node:
        """Of a `masked_select`, whose mask is broadcast: that of its rows if it says the same of all that is in a row,
        and what is selected is read in rows again; else that of its elements.
        """
        whole, mask = node.args
        assert isinstance(whole, fx.Node) and isinstance(mask, fx.Node)
        shape, given = list(whole.meta["val"].shape), list(mask.meta["val"].shape)
        front = len(shape) - len(given)
        if front < 0 or any(all_ == 1 and size != 1 for size, all_ in zip(given, shape[front:])):
            raise refused(node, "selects from what a mask makes larger")
        rest = next((number for number, size in enumerate(reversed(given)) if size != 1), len(given))
        in_rows = [list(one.meta["val"].shape[1:]) == shape[-rest:] for one in node.users if g.op_name(one) in RESHAPES]
        if len(in_rows) < len(node.users) or not all(in_rows) or rest == len(shape):
            rest = 0
        for _ in range(rest):
            mask = self.rows.call(node, aten.squeeze.dim, mask, -1)
        lead = [self.rows.size(node, whole, dim) for dim in range(len(shape) - rest)]
        wide = front or any(size == 1 and all_ != 1 for size, all_ in zip(given, lead))
        return self.rows.call(node, aten.expand.default, mask, lead) if wide else mask

    def _find(self, node: fx.Node) -> None:
        """`torch.where(mask)`: the places of all elements, along each dimension."""
        mask: Any = node.args[0]
        if mask in self.in_place:
            raise refused(node, "counts places among rows that a mask has selected")
        if mask.meta["val"].dtype is not torch.bool:
            mask = self.rows.call(node, aten.ne.Scalar, mask, 0)
        shape = [self.rows.size(node, mask, dim) for dim in range(mask.meta["val"].dim())]
        flat = self.rows.call(node, aten.reshape.default, mask, [-1])
        for one in list(node.users):
            dim: Any = one.args[1]
            along = self.rows.call(node, aten.arange.default, shape[dim], device=mask.meta["val"].device)
            column = self.rows.call(node, aten.view.default, along, [-1, *[1] * (len(shape) - dim - 1)])
            places = self.rows.call(node, aten.expand.default, column, shape)
            rows = self.rows.call(node, aten.reshape.default, places, [-1])
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
            raise refused(node, "adds rows, of which a mask has selected some")
        assert isinstance(rows, fx.Node)
        node.replace_input_with(rows, self.rows.zeroed(node, rows, masks[0]))

    def _write(self, node: fx.Node, mask: fx.Node) -> None:
        """`x[mask] = values`."""
        whole, _, values, *accumulate = node.args
        if accumulate and accumulate[0]:
            raise refused(node, "adds to the rows that a mask selects")
        assert isinstance(whole, fx.Node) and isinstance(values, fx.Node)
        if whole in self.in_place or mask in self.in_place:
            self._write_selected(node, whole, mask, values)
            return
        rest = whole.meta["val"].dim() - mask.meta["val"].dim()
        chosen = self.rows.column(node, mask, rest)
        its_own = values in self.in_place and same_value(self.in_place[values], mask)
        if its_own or (values.meta["val"].dim() <= rest and values not in self.in_place):
            new = self.rows.made(node, aten.where.self, (chosen, values, whole), {}, whole.meta["val"])
        else:
            source = self.rows.together(node, values) if values in self.in_place else values
            new = self.rows.made(node, aten.masked_scatter.default, (whole, chosen, source), {}, whole.meta["val"])
        replace_call(node, new)

    def _write_selected(self, node: fx.Node, whole: fx.Node, mask: fx.Node, values: fx.Node) -> None:
        """`x[mask][others] = values`: one for all of these rows."""
        whole, mask = self._among_selected(node, whole, mask)
        rest = whole.meta["val"].dim() - 1
        if values in self.in_place or values.meta["val"].dim() > rest:
            raise refused(node, "writes rows among those that a mask has selected")
        chosen = self.rows.column(node, mask, rest)
        new = self.rows.made(node, aten.where.self, (chosen, values, whole), {}, whole.meta["val"])
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
            node.replace_input_with(given[0], self.rows.together(node, given[0]))
            return
        if name == "aten::index_add":
            self._add(node)
            return
        if any(not same_value(self.in_place[one], self.in_place[given[0]], shaped=False) for one in given[1:]):
            raise refused(node, "takes rows that one mask has selected beside those of another")
        if name in LABELS[:2] and node.args[1] in self.in_place:
            self._leave_out(node)
            return
        if name == "aten::broadcast_tensors":
            self._as_they_are(node, given)
            return
        if name in ELEMENTS:
            self._entry_by_entry(node)
            return
        if reduced(self.rows, node):
            return
        if name == "aten::sym_size":
            self._count(node, given[0])
            return
        if name in RESHAPES:
            self._reshape(node)
            return
        if name in NORMS and g.bind(node).get("eps") == 0:
            raise refused(node, "divides rows, of which a mask has selected some, by a deviation that may be 0 (eps=0)")
        self._check_rows(node, given)
        self.rows.place(node, next(used for used in node.all_input_nodes if used in self.in_place))
        if not stays_finite(node):
            self.infinite.add(node)

    def _as_they_are(self, node: fx.Node, given: list[fx.Node]) -> None:
        """Broadcast operands of one shape."""
        operands: Any = node.args[0]
        if len(given) == len(operands) and len({self.in_place[one].meta["val"].dim() for one in given}) > 1:
            operands = [self.rows.flat(node, one) for one in operands]
        shapes = {tuple(map(str, one.meta["val"].shape)) for one in operands}
        if len(given) < len(operands) or len(shapes) > 1:
            raise refused(node, "makes rows, of which a mask has selected some, larger")
        for item in list(node.users):
            place: Any = item.args[1]
            replace_call(item, operands[place])
        self.graph.erase_node(node)

    def _entry_by_entry(self, loss: fx.Node) -> None:
        """A loss that is a sum or a mean of one for each entry."""
        entries = each(self.rows, loss)
        self._check_rows(entries, [used for used in entries.all_input_nodes if used in self.in_place])
        self.rows.place(entries, next(used for used in entries.all_input_nodes if used in self.in_place))
        of_each(self.rows, loss, entries)

    def _zero_inputs(self, node: fx.Node) -> None:
        """See csc.capture.lower.unselected_rows."""
        for used in [one for one in node.all_input_nodes if one in self.in_place]:
            finite = stays_finite(node) or used in self.rows.zeros or not used.meta["val"].is_floating_point()
            if used in self.infinite or not finite:
                node.replace_input_with(used, self.rows.zeroed(node, used, self.in_place[used]))

    def _count(self, node: fx.Node, rows: fx.Node) -> None:
        """The number of selected rows: reshapes do without it; what it is the size of is made for all rows instead."""
        sized = [user for user in node.users if g.op_name(user) not in RESHAPES]
        if not sized:
            return
        flat = self.rows.flat(node, rows)
        for user in sized:
            name = g.op_name(user)
            sizes = list(user.args[1] if name == "aten::expand" else user.args[0]) if name in SIZED else []  # type: ignore
            if name == "aten::arange" and user.args == (node,):
                user.args = (self.rows.size(node, flat, 0),)
                self.numbers.add(user)
            elif sizes and sizes[0] is node and node not in sizes[1:]:
                user.update_arg(int(name == "aten::expand"), [self.rows.size(node, flat, 0), *sizes[1:]])
            elif by_their_number(self.rows, node, flat, user):
                continue
            else:
                raise refused(node, "computes with the number of rows that a mask selects")
            if not any(used in self.in_place for used in user.all_input_nodes):  # the same in every row, or its number
                self.rows.place(user, flat)

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
                raise refused(node, "computes with the numbers of rows that a mask selects")
        self.rows.place(node, next(used for used in node.all_input_nodes if used in self.in_place))

    def _check_rows(self, node: fx.Node, given: list[fx.Node]) -> None:
        """A call that is no reshape: it must compute row by row. Operands with the rows of the selection alone are
        brought in place.
        """
        pointwise = is_pointwise(node) or g.op_name(node) in ELEMENTS
        if pointwise and len({self.in_place[used].meta["val"].dim() for used in given}) > 1:
            for used in given:
                node.replace_input_with(used, self.rows.flat(node, used))
            given = [used for used in node.all_input_nodes if used in self.in_place]
        for used in node.all_input_nodes if pointwise else ():
            if self.rows.has_their_number(used, node):
                rows = self.rows.spread(node, used, given[0])
                node.replace_input_with(used, rows)
                self.in_place[rows] = self.in_place[given[0]]
        if pointwise or g.op_name(node) in ALONG_ROWS or self._widened(node):
            return
        for used in given:  # it counts its dimensions: one for the rows, as it had
            node.replace_input_with(used, self.rows.flat(node, used))
        try:
            node.meta["val"] = self.rows.value(node.target, node.args, node.kwargs)
        except (RuntimeError, ValueError) as error:
            raise refused(node, "cannot be run on all rows, of which a mask has selected some") from error
        if any(used in self.in_place and 0 in link and link[0] != 0 for used, link in links(node)):
            raise refused(node, "turns the rows that a mask has selected")
        why = mixes(node, lambda one: (0,) if one in self.in_place or one is node else ())
        if why is not None:
            raise refused(node, f"{why}, of which a mask has selected some")

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
            raise refused(node, "joins or cuts rows that a mask has selected")
        else:
            flat = self.rows.flat(node, before)
            rows = self.rows.size(node, flat, 0) if -1 in shape[1:] else -1
            node.args = (flat, [rows, *shape[1:]])
            self.rows.place(node, flat)

    def _leave_out(self, loss: fx.Node) -> None:
        """Targets that were not selected are ignored, and their logits with them; without a reduction they give 0."""
        bound = g.bind(loss)
        targets: fx.Node = bound["target"]
        if bound["self"] not in self.in_place:
            raise refused(loss, "compares rows that a mask selects with others")
        if targets.meta["val"].is_floating_point():  # of which none can be ignored
            raise refused(loss, "compares rows that a mask selects with probabilities")
        none = self.rows.call(loss, aten.full_like.default, targets, bound["ignore_index"])
        counted = self.rows.call(loss, aten.where.self, self.in_place[targets], targets, none)
        self.in_place[counted] = self.in_place[targets]
        loss.replace_input_with(targets, self.rows.flat(loss, counted))
        loss.replace_input_with(bound["self"], self.rows.flat(loss, bound["self"]))
        if bound["reduction"] == 0:
            self.rows.place(loss, g.bind(loss)["target"])
            self.rows.zeros.add(loss)
