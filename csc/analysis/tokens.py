"""Whether operations keep the tokens of a sequence apart, so that ranks may each run them on some of the tokens."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch
from torch import fx

from csc.analysis.operators import table
from csc.analysis.operators.execution import DROPOUTS, draws, is_view
from csc.analysis.operators.table import (
    ATTENTION,
    COPIES,
    GROUPED,
    RESHAPES,
    SIZED_VIEWS,
    Axis,
    Link,
    Relation,
    Use,
    alike,
    links,
    relation,
    reshaped,
    several,
    shape_of,
)
from csc.ir import graph as g

# --- Whether an operation keeps the tokens of a sequence apart, so that ranks may each run it on some of them --------
#
# Here, too, is what a graph does with several operations.
#
# Which dimensions count tokens is found by csc.analysis.tokens.


Dims = Callable[[fx.Node], tuple[int, ...]]

_UNKNOWN = "is an operation of which csc does not know that it keeps tokens apart"
_ALONG = "works along the tokens"
_CROSSES = "combines every token with every other"
_WHY = {
    "contracted": "sums over tokens", "padded": "pads tokens", "repeated": "repeats the sequence",
    "picked": _UNKNOWN, "regrouped": _UNKNOWN, "grouped": _UNKNOWN,
}  # fmt: skip

# What makes a sum of the entries of a dimension, with whatever weights, or looks them up by other values.
_ADDS = {
    "getitem", table.HEAD, *table.LABELS, *table.ELEMENTS, *table.NORMS, table.ATTENTION,
    table.SDPA, *(f"aten::{name}" for name in (
        *table.NORMALISING, "sum", "mean", "nansum", "var", "std", "var_mean", "std_mean", "cumsum", "logsumexp",
        "linalg_vector_norm", "linear", "mm", "bmm", "addmm", "baddbmm", "matmul", "dot", "mv", "einsum", "convolution",
        "conv1d", "conv2d", "conv3d", "embedding", "index", "index_select", "gather", "masked_scatter", "roll", "flip",
        "avg_pool1d", "avg_pool2d", "upsample_bilinear2d", "upsample_bicubic2d", "glu", "repeat_interleave",
    )),
}  # fmt: skip
_MOVES = ("broadcast", "cut", "joined", "repeated", "padded", "grouped", "regrouped", "unread")


def chooses(graph: fx.Graph, width: int) -> str:
    """The first call that picks some of several tokens by what was computed of them (a maximum, an order, rows by
    computed numbers), or of which csc does not know: a token that it passes over in one batch may count in another.
    All others add tokens up, so that one which counts at all counts in every batch.

    graph: of a whole model, in plain sizes. width: of rows of tokens; whatever size it divides may count them.
    """
    computed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["role"][0] == "parameter":
            computed.add(node)
        elif node.op == "call_function" and computed.intersection(node.all_input_nodes):
            computed.add(node)
            if _chooses(node, computed, width):
                return f"{g.op_name(node)} at {g.place(node)}"
    return ""


def _chooses(node: fx.Node, computed: set[fx.Node], width: int) -> bool:
    tokens = {
        used: [dim for dim, size in enumerate(shape_of(used)) if size and size % width == 0]
        for used in computed.intersection(node.all_input_nodes)
        if isinstance(used.meta["val"], torch.Tensor)
    }
    if not any(tokens.values()):
        return False
    name, operator_relation = g.op_name(node), relation(node)
    if name in _ADDS:
        return any(dims and not used.meta["val"].is_floating_point() for used, dims in tokens.items())
    if operator_relation is None or not tokens.keys() <= {use.node for use in operator_relation.uses}:
        return True
    ends = [use.end(dim) for use in operator_relation.uses for dim in tokens.get(use.node, ())]
    return any(end is not None and end.how not in _MOVES for end in ends)


def mixes(node: fx.Node, dims: Dims) -> str | None:
    """None if the call computes every token's result from that token alone; else what it does, as a phrase.

    dims: the token dimensions of a value. Calls that name the sizes of their result (reshapes) are not for here:
    whether they tear tokens apart depends on sizes.
    """
    with_tokens = {used for used in node.all_input_nodes if dims(used)}
    if not with_tokens or node.target is operator.getitem:
        return None
    operator_relation = relation(node)
    if (
        operator_relation is None
        or operator_relation.sizes
        or not with_tokens <= {use.node for use in operator_relation.uses}
    ):
        return _UNKNOWN
    if draws(node) and g.op_name(node) not in DROPOUTS:
        return "draws a random number for every token"
    token_dims = dims(node) if isinstance(node.meta["val"], torch.Tensor) else None
    if token_dims is not None and len(token_dims) > 1:
        factors = any(use.ends[d].how == "contracted" for use in operator_relation.uses for d in use.ends)
        return "multiplies tokens with tokens" if factors else _CROSSES
    whys = (_of_operand(use, dims(use.node), token_dims) for use in operator_relation.uses)
    return next((why for why in whys if why is not None), None)


def _of_operand(use: Use, tokens: Sequence[int], own: Sequence[int] | None) -> str | None:
    """What becomes of an operand's tokens. own: the dimensions of the result that count tokens, if it is one tensor."""
    for dim in tokens:
        end = use.end(dim)
        if end is not None and end.how != "unread":
            return _WHY.get(end.how, _ALONG)
        if end is None and own is not None and use.link.index(dim) not in own:
            return _CROSSES
    for dim in own or ():
        along = use.link[dim]
        if along is not None and along not in tokens and several(shape_of(use.node)[along]):
            return "combines the tokens of some operands with the first of others"
        if not tokens and any(end.dim == dim and end.how == "cut" for end in use.ends.values()):
            return "combines the tokens of some operands with the first of others"
    return None


# --- Tokens that are sorted by expert, worked on group by group and put back: whether each keeps to itself -----------
#
# Terms
#   rows     what a value has one of for each choice of an expert: k a token, all those of a token together
#   order    a sort of rows by their expert, known by its call
#   moved    in such an order. Each row's expert is that of its own key, however many rows there are and wherever they
#            come to stand: what is made of a row is the same whichever others are sorted with it
#
#     Before   keys, order = sort(experts);  x[order // k];  ends = cumsum(histc(keys));  grouped_mm(x, weights, ends)
#     After    back = index_put(empty, [order], arange(n));  y[back] : rows where they were


ROOMY = (torch.int32, torch.int64, torch.float32, torch.float64)
UNWRITTEN = {"aten::empty_like", "aten::zeros_like"}


@dataclass(frozen=True)
class SortedRows:
    """What is known of a value that a sort of rows leads to.

    order: the sort. keys: what was sorted or counted, before it was cast. kind: sorted (what the sort returns),
    sorted_order (of an order that is sorted), rows (in its order), keys (what the rows were sorted by, in order), order
    (where each row came from), tokens_of (the token that each row is of), back (where each row went), counts and ends
    (of the rows of each expert).
    each: rows of a token, of `tokens_of`.
    """

    kind: Literal["sorted", "sorted_order", "rows", "keys", "order", "tokens_of", "back", "counts", "ends"]
    order: fx.Node | None
    keys: fx.Node
    each: int = 1


TOKENS: Literal["tokens"] = "tokens"
Known = Mapping[fx.Node, SortedRows]


def follow(node: fx.Node, known: Known, dims: Dims) -> SortedRows | str | None:
    """What a call makes of moved rows: TOKENS if they are where they were, or a phrase that says why that is not known.

    known: of the operands. dims: the token dimensions of a value.
    """
    name = g.op_name(node)
    if name in ("aten::sort", "aten::argsort"):
        return _sorted(node, known, dims)
    first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    first_rows = known.get(first) if first is not None else None
    if name == "aten::histc" and first is not None and first_rows is None and dims(first) == (0,):
        return SortedRows("counts", None, _uncast(first))
    if not any(used in known for used in node.all_input_nodes):
        return None
    if node.target is operator.getitem:
        return _part(node, known)
    if first_rows is not None and name in COPIES:
        return first_rows
    rows: SortedRows | str | None = None
    if (
        name == "aten::floor_divide"
        and first_rows is not None
        and first_rows.kind == "order"
        and isinstance(node.args[1], int)
    ):
        rows = replace(first_rows, kind="tokens_of", each=node.args[1])
    elif name in ("aten::index", "aten::index_select"):
        rows = _picked(node, known, dims)
    elif name in UNWRITTEN and first_rows is not None and first_rows.kind == "order":
        rows = replace(first_rows, kind="rows")
    elif name in ("aten::index_put", "aten::index_put_"):
        rows = _inverse(node, known)
    elif name == "aten::histc" and first_rows is not None and first_rows.kind == "keys":
        rows = replace(first_rows, kind="counts", order=None)
    elif name == "aten::cumsum" and first_rows is not None and first_rows.kind == "counts":
        rows = replace(first_rows, kind="ends")
    elif name in GROUPED:
        rows = _grouped(node, known, dims)
    return rows or _along(node, known, dims)


def positions(node: fx.Node) -> fx.Node | None:
    """Of the call that inverts an order: the row numbers that it puts, as many as there are rows."""
    value = g.bind(node)["values"] if g.op_name(node) in ("aten::index_put", "aten::index_put_") else None
    return value if isinstance(value, fx.Node) and g.op_name(value) == "aten::arange" else None


def _sorted(node: fx.Node, known: Known, dims: Dims) -> SortedRows | str | None:
    """Rows in the order of their keys; or an order that is sorted, which gives the way back."""
    operand = node.args[0]
    if not isinstance(operand, fx.Node) or not dims(operand):
        return None
    operand_rows, bound = known.get(operand), g.bind(node)
    if operand.meta["val"].dim() != 1:
        return None if operand_rows is None else _along(node, known, dims)
    if bound["descending"] or (operand_rows is not None and operand_rows.kind != "order"):
        return "sorts tokens"
    only = g.op_name(node) == "aten::argsort"
    if operand_rows is not None:
        return replace(operand_rows, kind="back" if only else "sorted_order")
    return SortedRows("order" if only else "sorted", node, _uncast(operand))


def _part(node: fx.Node, known: Known) -> SortedRows | str:
    """What a sort returns, or one of several results that are all moved."""
    rows = known[node.args[0]]  # type: ignore[index]
    if rows.kind == "sorted_order":
        return replace(rows, kind="back") if node.args[1] == 1 else "sorts places"
    if rows.kind == "sorted":
        return replace(rows, kind="order" if node.args[1] == 1 else "keys")
    return rows


def _picked(node: fx.Node, known: Known, dims: Dims) -> SortedRows | str | None:
    """Rows picked by an order, rows put back, or a table looked up by what rows hold."""
    base, index = node.args[0], node.args[1]
    if g.op_name(node) == "aten::index_select":
        index, along = node.args[2], node.args[1]
        if along != 0:
            return None
    elif isinstance(index, (list, tuple)) and len(index) == 1:
        index = index[0]
    if not isinstance(index, fx.Node) or not isinstance(base, fx.Node) or index not in known:
        return None
    by, of, rows = known[index], known.get(base), _rows(index)
    if by.kind in ("rows", "keys") and of is None and not dims(base) and index.meta["val"].dim() == 1:
        return replace(by, kind="rows")
    if dims(base) != (0,) or index.meta["val"].dim() != 1:
        return None
    if by.kind == "back" and of is not None and of.kind in ("rows", "keys") and of.order is by.order:
        return TOKENS
    if by.kind == "order" and of is None and _rows(base) == rows:
        return replace(by, kind="rows")
    if by.kind == "tokens_of" and of is None and _rows(base) * by.each == rows:
        return replace(by, kind="rows", each=1)
    return None


def _inverse(node: fx.Node, known: Known) -> SortedRows | None:
    """`back[order] = arange(rows)`: every place is written, since an order has each once."""
    bound = g.bind(node)
    (index, *more), numbers = bound["indices"], positions(node)
    by = known.get(index)
    if by is None or by.kind != "order" or more or bound["accumulate"] or numbers is None:
        return None
    if _counts_up(numbers) != _rows(index) or bound["self"].meta["val"].shape != index.meta["val"].shape:
        return None
    return replace(by, kind="back")


def _counts_up(node: fx.Node) -> int | None:
    """To where an arange counts from 0 by 1."""
    start, step = g.bind(node).get("start", 0), g.bind(node).get("step", 1)
    return _rows(node) if (start, step) == (0, 1) else None


def _grouped(node: fx.Node, known: Known, dims: Dims) -> SortedRows | None:
    """Rows times the weights of their groups, where groups are counted from the keys that the rows are sorted by."""
    bound = g.bind(node)
    rows, weights, ends = (bound[name] for name in GROUPED[g.op_name(node)])
    row_order, until = known.get(rows), known.get(ends)
    if row_order is None or until is None or row_order.kind != "rows" or until.kind != "ends" or dims(rows) != (0,):
        return None
    if until.keys is not row_order.keys or weights in known or dims(weights) or weights.meta["val"].dim() != 3:
        return None
    return row_order if weights.meta["val"].shape[0] == _rows(ends) else None


def _along(node: fx.Node, known: Known, dims: Dims) -> SortedRows | str:
    """A call that makes each row's result from that row alone."""
    with_rows = [used for used in node.all_input_nodes if dims(used) or used in known]
    rows = [known[used] for used in with_rows if used in known]
    if len(rows) < len(with_rows) or len({(state.order, state.keys) for state in rows}) > 1:
        return "combines rows sorted by expert with rows that are not"
    if any(state.kind not in ("rows", "keys") for state in rows):
        return "counts rows of all tokens, or makes something of their places"
    if g.op_name(node) in SIZED_VIEWS:
        same = dims(node) == dims(with_rows[0]) == (0,) and _rows(node) == _rows(with_rows[0])
        why = None if same else "joins or cuts rows that are sorted by expert"
    else:
        why = mixes(node, dims)
    return why or replace(rows[0], kind="rows", each=1)


def _rows(node: fx.Node) -> int:
    return int(node.meta["val"].shape[0])


def _uncast(node: fx.Node) -> fx.Node:
    """The value that this one is a copy of, or whole numbers in another type that has room for them."""
    while g.op_name(node) in COPIES and isinstance(node.args[0], fx.Node):
        before, after = (value.meta["val"].dtype for value in (node.args[0], node))
        whole = not before.is_floating_point and not before.is_complex
        if before != after and not (whole and after in ROOMY):
            break
        node = node.args[0]
    return node


# --- Whether calls on tokens meet them in one order ------------------------------------------------------------------
#
# Two things change the order: what a reshape joins with a token, and a sort of tokens by expert.
#
# Terms: a *place* is the tokens [start, stop) of the sequence that a value has. A *step* is how many neighbours in the
# dimension that counts tokens belong to one of them: 1, unless a reshape has joined tokens with what stood behind
# them.


Place = tuple[int, int]


class TokenOrder:
    """The order of tokens in the values of one graph. dims: which dimensions of a node count tokens."""

    def __init__(self, dims: Callable[[fx.Node], tuple[int, ...]]) -> None:
        self._dims = dims
        self._steps: dict[fx.Node, int | None] = {}
        self._moved: dict[fx.Node, SortedRows] = {}  # those whose tokens are sorted by expert

    def follow(self, node: fx.Node) -> SortedRows | str | None:
        """What becomes of tokens that are sorted by expert; None for a call that has none."""
        return follow(node, self._moved, self._dims)

    def mixed(self, node: fx.Node, place: Place) -> bool:
        """Whether a call's operands have their tokens in different orders."""
        return len({step for used in node.all_input_nodes if (step := self.step(used, place)) is not None}) > 1

    def keep(self, node: fx.Node, place: Place, found: SortedRows | str) -> bool:
        """Notes the order of tokens in a call that was followed. Returns False if the call combines tokens with others.
        Rows that a sort picks have their tokens where the sorted keys had theirs, and so have rows put back.
        """
        if isinstance(found, SortedRows):
            self._moved[node] = found
        known = [self._moved[used] for used in node.all_input_nodes if used in self._moved]
        sort = next((state.order for state in known if state.order is not None), None)
        step = None if sort is None else self.step(sort.args[0], place)
        if found == TOKENS:
            self._steps[node] = step
            return True
        step_size = next((state.each for state in known if state.kind == "tokens_of"), 1)
        steps = [own for used in node.all_input_nodes if (own := self.step(used, place)) is not None]
        return not known or all(own * step_size == step for own in steps)

    def step(self, node: Any, place: Place) -> int | None:
        """Returns how many neighbours belong to one token; None where no single dimension counts tokens, or not in
        their order.
        """
        if not isinstance(node, fx.Node) or g.tensor_value(node) is None or len(self._dims(node)) != 1:
            return None
        if node in self._moved:
            return None
        if node not in self._steps:
            self._steps[node] = self._step_of(node, place)
        return self._steps[node]

    def _step_of(self, node: fx.Node, place: Place) -> int | None:
        (dim,), shape, length = self._dims(node), node.meta["val"].shape, place[1] - place[0]
        producer: Any = node.args[0] if node.target is operator.getitem else node
        operands = [used for used in producer.all_input_nodes if self._dims(used)]
        if g.op_name(node) in RESHAPES and len(operands) == 1 and len(self._dims(operands[0])) == 1:
            before = self.step(operands[0], place)
            if before is None:
                return None
            axis = reshaped(operands[0].meta["val"].shape, shape, (self._dims(operands[0])[0], before), length)
            return axis[1] if axis is not None and axis[0] == dim else None
        if shape[dim] == length:
            return 1
        steps = {step for used in operands if (step := self.step(used, place)) is not None}
        return steps.pop() if len(steps) == 1 else None


# --- Which dimensions of each value count the tokens of a sequence: one propagation over the table of operators ------
#
# Terms
#   axis   (dim, inner): index i of dimension `dim` belongs to token i // inner % count. inner is 1 unless a reshape has
#          joined the tokens with what stood behind them; the dimension is longer than `count` where it joined any
#   link   see csc.analysis.operators.table
#
# Axes are followed through calls, both ways, until nothing new is found. Nothing is guessed from sizes: a dimension is
# an axis because the operations in between carry it. `axes` keeps to calls where an axis walks along; `counting` goes
# on where tokens are mixed, so that whoever spreads them meets that call and can refuse it. Neither is trusted:
# `apart` checks a call against the axes of its own operands, and so does csc.analysis.tokens.


OF_ATTENTION: Axis = (2, 1)  # q, k, v, out: [B, H, T, D]; log-sum-exp: [B, H, T]
_Counted = tuple[int, int, int]  # an axis, and how many tokens it counts


def counting(calls: Iterable[fx.Node], seeds: Iterable[tuple[fx.Node, int]]) -> dict[fx.Node, tuple[int, ...]]:
    """The dimensions that count the tokens which these dimensions of these values count."""
    counted = _followed(calls, [(node, (dim, 1, shape_of(node)[dim])) for node, dim in seeds], _mixed)
    return {node: tuple(sorted({axis[0] for axis in node_axes})) for node, node_axes in counted.items()}


def axes(calls: Iterable[fx.Node], attentions: Iterable[fx.Node], tokens: int) -> dict[fx.Node, Axis]:
    """The axis of every value that attentions along `tokens` lead to; of none that has several."""
    ends = (value for node in attentions for value in (node, *node.args[:3]) if isinstance(value, fx.Node))
    seeds = [(value, (*OF_ATTENTION, tokens)) for value in ends if shape_of(value)[2] == tokens]
    return {
        node: node_axes[0][:2] for node, node_axes in _followed(calls, seeds, _walked).items() if len(node_axes) == 1
    }


def _followed(
    calls: Iterable[fx.Node],
    seeds: Sequence[tuple[fx.Node, _Counted]],
    near: Callable[[fx.Node, Relation, fx.Node, _Counted], Iterable[tuple[fx.Node, _Counted]]],
) -> dict[fx.Node, list[_Counted]]:
    """All axes that these lead to. near(call, its relation, value, axis): what an axis of a value, which is the call or
    one of its operands, is in the others.
    """
    known = {node: relation(node) or _unknown(node) for node in calls}
    axes_of: dict[fx.Node, list[_Counted]] = {}
    todo = list(seeds)
    while todo:
        value, axis = todo.pop()
        if axis in axes_of.setdefault(value, []):
            continue
        axes_of[value].append(axis)
        for call in (value, *value.users):
            if call in known:
                todo += near(call, known[call], value, axis)
    return axes_of


def _unknown(node: fx.Node) -> Relation:
    """Of a call that the table does not have: dimensions of one place and size may be the same. Whoever spreads tokens
    asks the table again, and refuses the call.
    """
    out = shape_of(node)
    return Relation(tuple(
        Use(used, tuple(d if d < len(shape) and alike(shape[d], size) else None for d, size in enumerate(out)))
        for used in node.all_input_nodes if (shape := shape_of(used))
    ))  # fmt: skip


def _walked(call: fx.Node, found: Relation, value: fx.Node, axis: _Counted) -> Iterator[tuple[fx.Node, _Counted]]:
    """The axes that walk along with one: tokens stay apart and in their order."""
    for use in found.uses:
        other = use.node if value is call else call
        if value not in (call, use.node):
            continue
        if g.op_name(call) in RESHAPES:
            place = reshaped(shape_of(value), shape_of(other), axis[:2], axis[2])
            if place is not None:
                yield other, (*place, axis[2])
        elif value is call and (along := use.link[axis[0]]) is not None:
            yield other, (along, *axis[1:])
        elif value is not call and axis[0] in use.link:
            yield other, (use.link.index(axis[0]), *axis[1:])


def _mixed(call: fx.Node, found: Relation, value: fx.Node, axis: _Counted) -> Iterator[tuple[fx.Node, _Counted]]:
    """These, and those that count the same tokens, or some of them with others, in any order."""
    yield from _walked(call, found, value, axis)
    size = shape_of(value)[axis[0]]
    if g.op_name(call) in RESHAPES:
        yield from _grouped_axis(call, axis) if value is call else ()
        return
    for use in found.uses:
        if value is call:
            pairs = [(use.node, dim) for dim in range(len(shape_of(use.node)))
                     if (end := use.end(dim)) is not None and end.dim == axis[0]]  # fmt: skip
        else:
            ends = [end for use in found.uses if use.node is value and (end := use.end(axis[0])) is not None]
            pairs = [(call, end.dim) for end in ends if end.dim is not None]
            walks = {end.walk for end in ends} - {None}
            pairs += [(use.node, dim) for dim in range(len(shape_of(use.node)))
                      if (end := use.end(dim)) is not None and end.walk in walks]  # fmt: skip
        for other, dim in pairs:
            becomes = shape_of(other)[dim]
            if size == becomes:
                yield other, (dim, *axis[1:])
            elif axis[1:] == (1, size) and several(becomes):
                yield other, (dim, 1, becomes)


def _grouped_axis(call: fx.Node, axis: _Counted) -> Iterator[tuple[fx.Node, _Counted]]:
    """Where a reshape has taken neighbouring tokens apart: the dimension of its operand that counts groups of them."""
    (operand,), shape = call.all_input_nodes, shape_of(call)
    given = shape_of(operand)
    if axis[1] == 1 and reshaped(shape, given, axis[:2], axis[2]) is None:
        size_behind = prod(shape[axis[0] + 1 :]) * axis[2]
        yield from (
            (operand, (d, 1, size)) for d, size in enumerate(given) if several(size) and prod(given[d:]) == size_behind
        )


def apart(node: fx.Node, found: Mapping[fx.Node, Axis], tokens: int) -> bool:
    """True if each token's result comes from the same token of the operands that have tokens, at least one of which
    has. False says nothing against the call: it may have to see all tokens, or csc does not know.
    """
    axis, linked = found.get(node), links(node)
    with_tokens = [used for used in node.all_input_nodes if used in found]
    if axis is None or not with_tokens or not {used for used, _ in linked}.issuperset(with_tokens):
        return False
    if g.op_name(node) == ATTENTION:
        return _attention_apart(node, found)
    if g.op_name(node) in RESHAPES or node.target is operator.getitem:
        return all(_carried(node, used, link, found[used], tokens) == axis for used, link in linked)
    for used, link in linked:
        along = link[axis[0]]
        if found.get(used) != (None if along is None else (along, axis[1])):
            return False
    return is_view(node) or mixes(node, lambda value: (found[value][0],) if value in found else ()) is None


def _attention_apart(node: fx.Node, found: Mapping[fx.Node, Axis]) -> bool:
    """Queries of the sequence, over its own keys or over keys that every rank has whole."""
    query, key, value, packed = node.args[:4]
    if found.get(query) != OF_ATTENTION:  # type: ignore[arg-type]
        return False
    whole = key not in found and value not in found
    return (whole and packed is None) or (found.get(key) == found.get(value) == OF_ATTENTION)  # type: ignore[arg-type]


def _carried(node: fx.Node, operand: fx.Node, link: Link, axis: Axis, tokens: int) -> Axis | None:
    """The result's axis that is an operand's."""
    if g.op_name(node) in RESHAPES:
        return reshaped(shape_of(operand), shape_of(node), axis, tokens)
    return (link.index(axis[0]), axis[1]) if axis[0] in link else None
