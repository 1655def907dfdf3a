"""Whether an operation keeps the tokens of a sequence apart, so that ranks may each run it on some of them; and what a
graph does with several of them.

Which dimensions count tokens is found by csc.analysis.axes.

    mixes(node, dims) -> str | None                   why a call must see the whole sequence; None if it need not
    chooses(graph, width) -> str                      the call that picks tokens by their values; "" if none does
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx

from csc.analysis.operators import table
from csc.analysis.operators.execution import DROPOUTS, draws
from csc.analysis.operators.table import Use, relation, several, shape_of
from csc.ir import graph as g

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
    name, found = g.op_name(node), relation(node)
    if name in _ADDS:
        return any(dims and not used.meta["val"].is_floating_point() for used, dims in tokens.items())
    if found is None or not tokens.keys() <= {use.node for use in found.uses}:
        return True
    ends = [use.end(dim) for use in found.uses for dim in tokens.get(use.node, ())]
    return any(end is not None and end.how not in _MOVES for end in ends)


def mixes(node: fx.Node, dims: Dims) -> str | None:
    """None if the call computes every token's result from that token alone; else what it does, as a phrase.

    dims: the token dimensions of a value. Calls that name the sizes of their result (reshapes) are not for here:
    whether they tear tokens apart depends on sizes.
    """
    given = {used for used in node.all_input_nodes if dims(used)}
    if not given or node.target is operator.getitem:
        return None
    found = relation(node)
    if found is None or found.sizes or not given <= {use.node for use in found.uses}:
        return _UNKNOWN
    if draws(node) and g.op_name(node) not in DROPOUTS:
        return "draws a random number for every token"
    own = dims(node) if isinstance(node.meta["val"], torch.Tensor) else None
    if own is not None and len(own) > 1:
        factors = any(use.ends[d].how == "contracted" for use in found.uses for d in use.ends)
        return "multiplies tokens with tokens" if factors else _CROSSES
    whys = (_of_operand(use, dims(use.node), own) for use in found.uses)
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
