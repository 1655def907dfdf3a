"""Selections of rows by a mask (`features[mask]`), whose size depends on values, in sizes that do not."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from csc.analysis.operators.table import (
    CASTS,
    COPIES,
    ELEMENTS,
    LABELS,
    NORMS,
    RESHAPES,
    SLICE,
    UNSQUEEZED,
    is_pointwise,
    links,
)
from csc.analysis.tokens import mixes
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.graph import add_call, replace_call, values_of
from csc.torch_private.traces import FakeTensorMode

# --- Calls that select rows by a mask, write to them, or take them in order ------------------------------------------


def mask_of(node: fx.Node) -> fx.Node | None:
    """The mask of `x[mask]` or `x[mask] = ...`, if that is what a call does."""
    if g.op_name(node) not in ("aten::index", "aten::index_put"):
        return None
    indices: Any = node.args[1]
    first = indices[0] if indices else None
    if not isinstance(first, fx.Node) or any(index is not None for index in indices[1:]):
        return None
    return first if first.meta["val"].dtype in (torch.bool, torch.uint8) else None


def is_scattered(node: fx.Node) -> bool:
    """Whether only scatters read it, which take values in order whatever their shape, or copies for these."""
    return all(
        g.op_name(user) == "aten::masked_scatter"
        or (g.op_name(user) in ("aten::clone", "aten::_to_copy") and is_scattered(user))
        for user in node.users
    )


# --- Whether two values of a graph are the same, as far as how they are computed tells -------------------------------


END = sys.maxsize  # of a slice that has none
_ALL = {(start, end, step) for start in (0, None) for end in (END, None) for step in (1, None)}


def same_value(one: Any, other: Any, shaped: bool = True) -> bool:
    """Whether they are made by the same calls of the same values. shaped: False: but for the shapes in which the same
    entries lie. What is made of several values is as their shapes have them broadcast, and what works along a dimension
    as that has it: those are looked at with their shapes. Two draws of random numbers are never the same.
    """
    return _same(one, other, shaped, {})


def _same(left: Any, other: Any, shaped: bool, known: dict[Any, bool]) -> bool:
    """known: what was found of pairs before, which many values may be made of."""
    if not isinstance(left, fx.Node) or not isinstance(other, fx.Node):
        return bool(left == other)
    if not shaped:
        left, other = _unshaped(left), _unshaped(other)
    if left is other:
        return True
    if left.op != "call_function" or left.target != other.target or len(left.args) != len(other.args):
        return False
    key = left, other, shaped
    if key not in known:
        draws = torch.Tag.nondeterministic_seeded in getattr(left.target, "tags", ())
        inner = shaped or len(left.all_input_nodes) > 1 or not is_pointwise(left)
        alike = not draws and left.kwargs == other.kwargs
        known[key] = alike and all(_same(*pair, inner, known) for pair in zip(left.args, other.args))
    return known[key]


def _unshaped(node: Any) -> fx.Node:
    """What a value is laid out from."""
    while g.op_name(node) in UNSQUEEZED | COPIES - CASTS or _is_all(node):
        node = node.args[0]
    operand: fx.Node = node
    return operand


def _is_all(node: fx.Node) -> bool:
    """Whether it is a slice of a whole dimension, as `x[:, None]` writes one."""
    return g.op_name(node) == SLICE and (*node.args[2:], *(None, None, None)[len(node.args) - 2 :]) in _ALL


# --- Selections of rows by a mask as values of all rows, each where it was -------------------------------------------
#
# Terms: see csc.capture.lower.masked_index.


aten = torch.ops.aten


class RowsInPlace:
    """The selections of one graph. in_place: to the mask of the rows that were selected. Calls are added in front of a
    node `like`.
    """

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode) -> None:
        self.graph, self.mode = graph, mode
        self.in_place: dict[fx.Node, fx.Node] = {}
        self.zeros: set[fx.Node] = set()  # in place: rows that were not selected are zeros
        self.numbers: dict[fx.Node, fx.Node] = {}  # by mask, how many it selects

    def zeroed(self, like: fx.Node, rows: fx.Node, mask: fx.Node) -> fx.Node:
        """The same, with zeros in rows that the mask leaves out."""
        unselected = self.call(like, aten.logical_not.default, mask)
        unselected = self.column(like, unselected, rows.meta["val"].dim() - mask.meta["val"].dim())
        zeroed = self.call(like, aten.masked_fill.Scalar, rows, unselected, 0)
        self.in_place[zeroed] = mask
        self.zeros.add(zeroed)
        return zeroed

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
        unselected = self.call(like, aten.logical_not.default, self.in_place[rows])
        order = self.call(like, aten.argsort.stable, unselected, stable=True)
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
        """Returns a new call in front of `like`, with its value."""
        return self.made(like, target, arguments, keywords, self.value(target, arguments, keywords))

    def value(self, target: Any, arguments: Any, keywords: Any) -> Any:
        arguments, keywords = values_of((arguments, keywords))
        with self.mode:
            return target(*arguments, **keywords)

    def made(self, like: fx.Node, target: Any, arguments: Any, keywords: Any, value: Any) -> fx.Node:
        with self.graph.inserting_before(like):
            return add_call(self.graph, target, arguments, keywords, val=value, like=like)


def refused(node: fx.Node, why: str) -> InputError:
    """Returns the error for a call that reads selected rows."""
    return InputError(
        f"{g.op_name(node)} {why}: how many is known only when the batch is there",
        node.meta.get("source") or node.meta.get("module") or "model",
        "keep all rows and give those that do not count no weight (torch.where, a label of -100), or select them in "
        "the data loader",
    )


# --- Sums, means and losses over rows that a mask selects, and how many these are ------------------------------------
#
# Terms: see csc.capture.lower.masked_index. Rows that were not selected are zeros in a sum; a mean divides by how many
# the mask selects. In 16 bits a mean adds up in float32, as PyTorch's own does.


REDUCED = ("aten::sum", "aten::mean")
ARITHMETIC = ("aten::mul", "aten::div")
NARROW = (torch.float16, torch.bfloat16)
NONE, MEAN, SUM = 0, 1, 2  # what becomes of a loss for each entry


def reduced(rows: RowsInPlace, node: fx.Node) -> bool:
    """Puts a sum or mean over rows in place where `node` was. Returns False, with nothing changed, for any other call.
    Those along what is in a row leave rows in place.
    """
    if g.op_name(node) not in REDUCED:
        return False
    bound = g.bind(node)
    tensor: fx.Node = bound["self"]
    dims: list[int] | None = bound.get("dim") or None
    if dims is not None:
        tensor = rows.flat(node, tensor)
        dims = [dim % tensor.meta["val"].dim() for dim in dims]
        if 0 not in dims:
            return False
    mean = _reduced(rows, node, tensor, dims, bound.get("keepdim", False), bound["dtype"])
    replace_call(node, mean)
    return True


def _reduced(
    rows: RowsInPlace,
    node: fx.Node,
    tensor: fx.Node,
    dims: Sequence[int] | None,
    keepdim: bool,
    dtype: torch.dtype | None,
) -> fx.Node:
    mask, val = rows.in_place[tensor], tensor.meta["val"]
    zeroed = tensor if tensor in rows.zeros else rows.zeroed(node, tensor, mask)
    along = range(val.dim()) if dims is None else dims

    def total(dtype: torch.dtype | None) -> fx.Node:
        if dims is None:
            return rows.call(node, aten.sum.default, zeroed, dtype=dtype)
        return rows.call(node, aten.sum.dim_IntList, zeroed, list(dims), keepdim, dtype=dtype)

    if g.op_name(node) == "aten::sum" or (g.op_name(node) in ELEMENTS and g.bind(node)["reduction"] == SUM):
        return total(dtype)
    result = dtype or val.dtype
    sizes = [val.shape[dim] for dim in along if dim >= mask.meta["val"].dim()]
    if not all(isinstance(size, int) for size in sizes):
        raise refused(node, "takes a mean over rows, of which a mask has selected some, whose own size varies")
    result_node = rows.call(
        node, aten.div.Tensor, total(torch.float32 if result in NARROW else dtype), _number(rows, mask)
    )
    if math.prod(sizes) != 1:
        result_node = rows.call(node, aten.div.Tensor, result_node, math.prod(sizes))
    return (
        result_node
        if result_node.meta["val"].dtype is result
        else rows.call(node, aten._to_copy.default, result_node, dtype=result)
    )


def _number(rows: RowsInPlace, mask: fx.Node) -> fx.Node:
    """How many a mask selects: one value for all masks that are the same, so that terms of a loss are seen to be
    divided by the same. It stands right behind the mask, as who asks first may stand behind who asks next.
    """
    known = next((number for number in rows.numbers if same_value(number, mask, shaped=False)), None)
    if known is None:
        behind = mask.next
        while behind.op == "placeholder":
            behind = behind.next
        rows.numbers[mask] = rows.call(behind, aten.sum.default, mask)
    return rows.numbers[known or mask]


def each(rows: RowsInPlace, loss: fx.Node) -> fx.Node:
    """Returns a loss entry by entry, of all rows: before rows are placed and entries reduced."""
    bound = g.bind(loss) | {"reduction": NONE}
    keyword = [argument.name for argument in loss.target._schema.arguments if argument.kwarg_only]  # type: ignore[union-attr]
    arguments = tuple(value for name, value in bound.items() if name not in keyword)
    keywords = {name: bound[name] for name in keyword}
    operands = [operand for operand in loss.all_input_nodes if operand in rows.in_place]
    widest = max(operands, key=lambda operand: operand.meta["val"].dim() - rows.in_place[operand].meta["val"].dim())
    return rows.made(loss, loss.target, arguments, keywords, rows.flat(loss, widest).meta["val"])


def of_each(rows: RowsInPlace, loss: fx.Node, entries: fx.Node) -> None:
    """Puts the sum or mean of these entries in the loss' place, or the entries themselves where the loss reduces
    nothing.
    """
    if g.bind(loss)["reduction"] == NONE:
        replace_call(loss, entries)
        return
    replace_call(loss, _reduced(rows, loss, entries, None, False, None))


def by_their_number(rows: RowsInPlace, size: fx.Node, selected: fx.Node, user: fx.Node) -> bool:
    """Returns whether `user` computes with how many rows there are, and has been replaced. size: the number of rows, of
    which Python has a multiple perhaps.
    """
    factors = [argument for argument in user.args if argument is not size]
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
    quotient = rows.call(user, target, value, number)
    replace_call(user, rows.call(user, aten._to_copy.default, quotient, dtype=dtype) if dtype in NARROW else quotient)
    return True


# --- What rows that a mask leaves out may do to others: nothing, unless they come to hold what is no number ----------
#
# Terms: see csc.capture.lower.masked_index. Such rows have a gradient of 0, and 0 times infinity is no number: a
# layer's weight, which adds up over all rows, would have it too. So they hold zeros from the selection on, and again
# wherever a call may make something infinite of them. They may be no numbers in the model itself: what attention makes
# of padding. Logits are many, so what a loss over classes reads is made of zeros, by the layer that makes it.
#
# Nor do they look up what is not there: a label of -100, by which `gather` or an embedding reads, is 0 in their place.


LOSSES = {"aten::cross_entropy_loss": (0, 1), "aten::nll_loss_nd": (0, 1)}  # what they read as which arguments
WRITES = {
    "aten::index_put": (2,),
    "aten::masked_scatter": (2,),
    "aten::index_add": (2, 3),
}
FINITE = {
    f"aten::{name}"
    for name in (
        "add", "sub", "rsub", "mul", "neg", "abs", "relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu", "elu",
        "softplus", "sin", "cos", "clamp", "maximum", "minimum", "where", "masked_fill", "dropout", "native_dropout",
    )
}  # fmt: skip


# What they look up by which argument.
INDICES = {
    "aten::embedding": 1, "aten::gather": 2, "aten::index": 1, "aten::index_add": 2, "aten::index_select": 2,
    "aten::one_hot": 0, "aten::take_along_dim": 1,
}  # fmt: skip


def looks_up_by(call: fx.Node, value: fx.Node) -> bool:
    """Returns whether numbers are places at which a call looks something up."""
    places: Any = call.args[INDICES[g.op_name(call)]] if g.op_name(call) in INDICES else None
    return value is places or (isinstance(places, (list, tuple)) and any(place is value for place in places))


def is_only_moved(selection: fx.Node) -> bool:
    """Returns whether a selection is read only by writes, or, of whole numbers, by losses: calls that do not compute
    with rows that were left out.
    """
    return _is_only_read(selection, WRITES if _has_numbers(selection) else WRITES | LOSSES)


def made_by(selected: fx.Node, selection: fx.Node, mask: fx.Node) -> list[fx.Node] | None:
    """Returns the linear layer and the copies that make what is selected from, the layer first. Returns None where
    others read them, or more than losses read the selection.
    """
    rows = selected.meta["val"].dim() - 1
    if not _is_only_read(selection, LOSSES) or len(selected.users) > 1 or mask.meta["val"].dim() != rows:
        return None
    chain = [selected]
    while g.op_name(chain[0]) in COPIES | RESHAPES:
        before: fx.Node = chain[0].args[0]  # type: ignore[assignment]
        if len(before.users) > 1 or str(before.meta["val"].shape[-1:]) != str(selected.meta["val"].shape[-1:]):
            return None
        chain.insert(0, before)
    return chain if g.op_name(chain[0]) == "aten::linear" else None


def _is_only_read(selection: fx.Node, by: Mapping[str, tuple[int, ...]]) -> bool:
    for user in selection.users:
        name = g.op_name(user)
        places = [place for place, argument in enumerate(user.args) if argument is selection]
        if name == "aten::sym_size" or (places and set(places) <= set(by.get(name, ()))):
            continue
        if name not in RESHAPES | COPIES or not _is_only_read(user, by):
            return False
    return True


def _has_numbers(value: fx.Node) -> bool:
    val = value.meta["val"]
    return bool(val.is_floating_point() or val.is_complex())


def stays_finite(call: fx.Node) -> bool:
    """Returns whether a call gives finite numbers, and a finite gradient, for any rows of finite numbers. Whole powers
    are as good as products; what is no pointwise call adds up, or normalises.
    """
    name = g.op_name(call)
    value = g.tensor_value(call)
    if value is None or not (value.is_floating_point() or value.is_complex()):
        return True
    if name == "aten::pow":
        power = call.args[1]
        return isinstance(power, int) and power >= 1
    return not is_pointwise(call) or name in FINITE | COPIES


# --- Selections of rows by a mask (`features[mask]`), whose size depends on values, in sizes that do not -------------
#
# Terms
#   selection  `x[mask]`, `x.masked_select(mask)`: the rows of x where a mask is true, one after the other
#   in place   a selection of which all rows were kept, each where it is in x. What is computed from it row by row is in
#              place too. Rows that the mask leaves out must not count in the end: where rows are written back through
#              the mask, scattered to other places, or are the targets of a loss.


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
        self.places: set[fx.Node] = set()  # in place: those of all elements, each of which is there
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
        values = {first: self.rows.zeroed(node, first, mask)}
        for call in calls:
            with self.graph.inserting_before(node):
                values[call] = g.copy_node(
                    self.graph, call, {**{operand: operand for operand in call.all_input_nodes}, **values}
                )
        return values[calls[-1]]

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
        shape, mask_shape = list(whole.meta["val"].shape), list(mask.meta["val"].shape)
        front = len(shape) - len(mask_shape)
        if front < 0 or any(all_ == 1 and size != 1 for size, all_ in zip(mask_shape, shape[front:])):
            raise refused(node, "selects from what a mask makes larger")
        rest = next((number for number, size in enumerate(reversed(mask_shape)) if size != 1), len(mask_shape))
        in_rows = [
            list(user.meta["val"].shape[1:]) == shape[-rest:] for user in node.users if g.op_name(user) in RESHAPES
        ]
        if len(in_rows) < len(node.users) or not all(in_rows) or rest == len(shape):
            rest = 0
        for _ in range(rest):
            mask = self.rows.call(node, aten.squeeze.dim, mask, -1)
        lead = [self.rows.size(node, whole, dim) for dim in range(len(shape) - rest)]
        wide = front or any(size == 1 and all_ != 1 for size, all_ in zip(mask_shape, lead))
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
        for user in list(node.users):
            dim: Any = user.args[1]
            along = self.rows.call(node, aten.arange.default, shape[dim], device=mask.meta["val"].device)
            column = self.rows.call(node, aten.view.default, along, [-1, *[1] * (len(shape) - dim - 1)])
            places = self.rows.call(node, aten.expand.default, column, shape)
            rows = self.rows.call(node, aten.reshape.default, places, [-1])
            replace_call(user, rows)
            self.in_place[rows] = flat
            self.places.add(rows)
        self.graph.erase_node(node)

    def _add(self, node: fx.Node) -> None:
        """`whole.index_add(0, places, rows)`: nothing is added for rows that were not selected."""
        whole, dim, places, rows, *_ = node.args
        masks = [self.in_place.get(tensor) for tensor in (places, rows)]  # type: ignore[arg-type]
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
        operands = [used for used in node.all_input_nodes if used in self.in_place]
        if any(used in self.numbers for used in operands):
            self._by_number(node)
            return
        if name == "aten::masked_scatter" and operands == [node.args[2]]:
            node.replace_input_with(operands[0], self.rows.together(node, operands[0]))
            return
        if name == "aten::index_add":
            self._add(node)
            return
        if any(
            not same_value(self.in_place[operand], self.in_place[operands[0]], shaped=False) for operand in operands[1:]
        ):
            raise refused(node, "takes rows that one mask has selected beside those of another")
        if name in LABELS[:2] and node.args[1] in self.in_place:
            self._leave_out(node)
            return
        if name == "aten::broadcast_tensors":
            self._as_they_are(node, operands)
            return
        if name in ELEMENTS:
            self._entry_by_entry(node)
            return
        if reduced(self.rows, node):
            return
        if name == "aten::sym_size":
            self._count(node, operands[0])
            return
        if name in RESHAPES:
            self._reshape(node)
            return
        if name in NORMS and g.bind(node).get("eps") == 0:
            raise refused(node, "divides rows, of which a mask has selected some, by a deviation that may be 0 (eps=0)")
        self._check_rows(node, operands)
        self.rows.place(node, next(used for used in node.all_input_nodes if used in self.in_place))
        if not stays_finite(node):
            self.infinite.add(node)

    def _as_they_are(self, node: fx.Node, rows_given: list[fx.Node]) -> None:
        """Broadcast operands of one shape."""
        operands: Any = node.args[0]
        if (
            len(rows_given) == len(operands)
            and len({self.in_place[operand].meta["val"].dim() for operand in rows_given}) > 1
        ):
            operands = [self.rows.flat(node, operand) for operand in operands]
        shapes = {tuple(map(str, operand.meta["val"].shape)) for operand in operands}
        if len(rows_given) < len(operands) or len(shapes) > 1:
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
        """See csc.capture.lower.masked_index."""
        for used in [operand for operand in node.all_input_nodes if operand in self.in_place]:
            finite = stays_finite(node) or used in self.rows.zeros or not used.meta["val"].is_floating_point()
            if used in self.infinite or not finite or (looks_up_by(node, used) and not self._is_there(used)):
                node.replace_input_with(used, self.rows.zeroed(node, used, self.in_place[used]))

    def _is_there(self, places: fx.Node) -> bool:
        """Whether numbers are known to be places that there are, in rows that were not selected, too."""
        known = self.rows.zeros | self.places | self.numbers
        while g.op_name(places) in UNSQUEEZED | RESHAPES | COPIES and places not in known:
            places = places.args[0]  # type: ignore[assignment]
        return places in known

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
            ranks = [operand.meta["val"].dim() for operand in index if isinstance(operand, fx.Node)]
            theirs = by == [index[0]] and table not in by and ranks[0] == max(ranks)  # their dimension stays the first
            if not theirs or not same_value(self.in_place.get(table), self.in_place[by[0]]):  # type: ignore[arg-type]
                raise refused(node, "computes with the numbers of rows that a mask selects")
        self.rows.place(node, next(used for used in node.all_input_nodes if used in self.in_place))

    def _check_rows(self, node: fx.Node, operands: list[fx.Node]) -> None:
        """A call that is no reshape: it must compute row by row. Operands with the rows of the selection alone are
        brought in place.
        """
        pointwise = is_pointwise(node) or g.op_name(node) in ELEMENTS
        if pointwise and len({self.in_place[used].meta["val"].dim() for used in operands}) > 1:
            for used in operands:
                node.replace_input_with(used, self.rows.flat(node, used))
            operands = [used for used in node.all_input_nodes if used in self.in_place]
        for used in node.all_input_nodes if pointwise else ():
            if self.rows.has_their_number(used, node):
                rows = self.rows.spread(node, used, operands[0])
                node.replace_input_with(used, rows)
                self.in_place[rows] = self.in_place[operands[0]]
        if pointwise or g.op_name(node) in ALONG_ROWS or self._widened(node):
            return
        for used in operands:  # it counts its dimensions: one for the rows, as it had
            node.replace_input_with(used, self.rows.flat(node, used))
        try:
            node.meta["val"] = self.rows.value(node.target, node.args, node.kwargs)
        except (RuntimeError, ValueError) as error:
            raise refused(node, "cannot be run on all rows, of which a mask has selected some") from error
        if any(used in self.in_place and 0 in link and link[0] != 0 for used, link in links(node)):
            raise refused(node, "turns the rows that a mask has selected")
        why = mixes(node, lambda operand: (0,) if operand in self.in_place or operand is node else ())
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
