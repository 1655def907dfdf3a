"""Whether an operation keeps the tokens of a sequence apart, so that ranks may each run it on some of them.

Which dimensions count tokens is found by csc.analysis.axes.

    mixes(node, dims) -> str | None                   why a call must see the whole sequence; None if it need not
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx

from csc.analysis.operators.randomness import DROPOUTS, draws
from csc.analysis.operators.relation import Use, several, shape_of
from csc.analysis.operators.table import relation
from csc.ir import graph as g

Dims = Callable[[fx.Node], tuple[int, ...]]

_UNKNOWN = "is an operation of which csc does not know that it keeps tokens apart"
_ALONG = "works along the tokens"
_CROSSES = "combines every token with every other"
_WHY = {
    "contracted": "sums over tokens", "padded": "pads tokens", "repeated": "repeats the sequence",
    "picked": _UNKNOWN, "regrouped": _UNKNOWN, "grouped": _UNKNOWN,
}  # fmt: skip


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
