"""Tokens that are sorted by expert, worked on group by group and put back: whether each keeps to itself.

Terms
  rows     what a value has one of for each choice of an expert: k a token, all those of a token together
  order    a sort of rows by their expert, known by its call
  moved    in such an order. Each row's expert is that of its own key, however many rows there are and wherever they
           come to stand: what is made of a row is the same whichever others are sorted with it

    follow(node, known, dims) -> SortedRows | TOKENS | why not (str) | None   None if the call has nothing to do with it

    Before   keys, order = sort(experts);  x[order // k];  ends = cumsum(histc(keys));  grouped_mm(x, weights, ends)
    After    back = index_put(empty, [order], arange(n));  y[back] : rows where they were
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import fx

from csc.analysis.operators.table import COPIES, GROUPED, SIZED_VIEWS
from csc.analysis.tokens import mixes
from csc.ir import graph as g

Dims = Callable[[fx.Node], tuple[int, ...]]
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
    given = known.get(first) if first is not None else None
    if name == "aten::histc" and first is not None and given is None and dims(first) == (0,):
        return SortedRows("counts", None, _uncast(first))
    if not any(used in known for used in node.all_input_nodes):
        return None
    if node.target is operator.getitem:
        return _part(node, known)
    if given is not None and name in COPIES:
        return given
    found: SortedRows | str | None = None
    if name == "aten::floor_divide" and given is not None and given.kind == "order" and isinstance(node.args[1], int):
        found = replace(given, kind="tokens_of", each=node.args[1])
    elif name in ("aten::index", "aten::index_select"):
        found = _picked(node, known, dims)
    elif name in UNWRITTEN and given is not None and given.kind == "order":
        found = replace(given, kind="rows")
    elif name in ("aten::index_put", "aten::index_put_"):
        found = _inverse(node, known)
    elif name == "aten::histc" and given is not None and given.kind == "keys":
        found = replace(given, kind="counts", order=None)
    elif name == "aten::cumsum" and given is not None and given.kind == "counts":
        found = replace(given, kind="ends")
    elif name in GROUPED:
        found = _grouped(node, known, dims)
    return found or _along(node, known, dims)


def positions(node: fx.Node) -> fx.Node | None:
    """Of the call that inverts an order: the row numbers that it puts, as many as there are rows."""
    value = g.bind(node)["values"] if g.op_name(node) in ("aten::index_put", "aten::index_put_") else None
    return value if isinstance(value, fx.Node) and g.op_name(value) == "aten::arange" else None


def _sorted(node: fx.Node, known: Known, dims: Dims) -> SortedRows | str | None:
    """Rows in the order of their keys; or an order that is sorted, which gives the way back."""
    operand = node.args[0]
    if not isinstance(operand, fx.Node) or not dims(operand):
        return None
    given, bound = known.get(operand), g.bind(node)
    if operand.meta["val"].dim() != 1:
        return None if given is None else _along(node, known, dims)
    if bound["descending"] or (given is not None and given.kind != "order"):
        return "sorts tokens"
    only = g.op_name(node) == "aten::argsort"
    if given is not None:
        return replace(given, kind="back" if only else "sorted_order")
    return SortedRows("order" if only else "sorted", node, _uncast(operand))


def _part(node: fx.Node, known: Known) -> SortedRows | str:
    """What a sort returns, or one of several results that are all moved."""
    given = known[node.args[0]]  # type: ignore[index]
    if given.kind == "sorted_order":
        return replace(given, kind="back") if node.args[1] == 1 else "sorts places"
    if given.kind == "sorted":
        return replace(given, kind="order" if node.args[1] == 1 else "keys")
    return given


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
    (index, *others), numbers = bound["indices"], positions(node)
    by = known.get(index)
    if by is None or by.kind != "order" or others or bound["accumulate"] or numbers is None:
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
    given, until = known.get(rows), known.get(ends)
    if given is None or until is None or given.kind != "rows" or until.kind != "ends" or dims(rows) != (0,):
        return None
    if until.keys is not given.keys or weights in known or dims(weights) or weights.meta["val"].dim() != 3:
        return None
    return given if weights.meta["val"].shape[0] == _rows(ends) else None


def _along(node: fx.Node, known: Known, dims: Dims) -> SortedRows | str:
    """A call that makes each row's result from that row alone."""
    with_rows = [used for used in node.all_input_nodes if dims(used) or used in known]
    found = [known[used] for used in with_rows if used in known]
    if len(found) < len(with_rows) or len({(one.order, one.keys) for one in found}) > 1:
        return "combines rows sorted by expert with rows that are not"
    if any(one.kind not in ("rows", "keys") for one in found):
        return "counts rows of all tokens, or makes something of their places"
    if g.op_name(node) in SIZED_VIEWS:
        same = dims(node) == dims(with_rows[0]) == (0,) and _rows(node) == _rows(with_rows[0])
        why = None if same else "joins or cuts rows that are sorted by expert"
    else:
        why = mixes(node, dims)
    return why or replace(found[0], kind="rows", each=1)


def _rows(node: fx.Node) -> int:
    return int(node.meta["val"].shape[0])


def _uncast(node: fx.Node) -> fx.Node:
    """The value that this one is a copy of, or whole numbers in another type that has room for them."""
    while g.op_name(node) in COPIES and isinstance(node.args[0], fx.Node):
        before, after = (one.meta["val"].dtype for one in (node.args[0], node))
        whole = not before.is_floating_point and not before.is_complex
        if before != after and not (whole and after in ROOMY):
            break
        node = node.args[0]
    return node
