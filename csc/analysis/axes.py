"""Which dimension of each value counts the tokens of a sequence, found from the attentions that run along it.

Terms
  axis   (dim, inner): index i of dimension `dim` belongs to token i // inner % tokens. inner is 1 unless a reshape has
         joined the tokens with what stood behind them; the dimension is longer than `tokens` where it joined any
  link   see csc.analysis.operators.relation

    axes(calls, attentions, tokens) -> {node: Axis}        of the calls and of what enters them
    apart(node, found, tokens) -> bool                     whether a call makes every token's result from that token

Axes are followed from queries, keys and values through links, both ways, until nothing new is found. Nothing is
guessed from sizes: a dimension is an axis because the operations in between carry it. `apart` does not trust the axes
either: it checks a call against those of its own operands.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from torch import fx

from csc.analysis.operators.moves import RESHAPES
from csc.analysis.operators.products import ATTENTION
from csc.analysis.operators.relation import Axis, Link, reshaped, shape_of
from csc.analysis.operators.table import links
from csc.analysis.tokens import mixes
from csc.ir import graph as g

OF_ATTENTION: Axis = (2, 1)  # q, k, v, out: [B, H, T, D]; log-sum-exp: [B, H, T]


def axes(calls: Sequence[fx.Node], attentions: Sequence[fx.Node], tokens: int) -> dict[fx.Node, Axis]:
    """The axis of every value that attentions along `tokens` lead to, among the calls and their operands."""
    found: dict[fx.Node, Axis] = {}
    for node in attentions:
        for value in (node, *node.args[:3]):
            if isinstance(value, fx.Node) and shape_of(value)[2] == tokens:
                found[value] = OF_ATTENTION
    count = -1
    while len(found) != count:
        count = len(found)
        for node in calls:
            for operand, link in links(node):
                if node not in found and operand in found:
                    _enter(found, node, _onward(node, operand, link, found[operand], tokens))
        for node in reversed(calls):
            for operand, link in links(node):
                if node in found and operand not in found:
                    _enter(found, operand, _back(node, operand, link, found[node], tokens))
    return found


def apart(node: fx.Node, found: Mapping[fx.Node, Axis], tokens: int) -> bool:
    """True if each token's result comes from the same token of the operands that have tokens, at least one of which
    has. False says nothing against the call: it may have to see all tokens, or csc does not know.
    """
    own, linked = found.get(node), links(node)
    with_tokens = [used for used in node.all_input_nodes if used in found]
    if own is None or not with_tokens or not {used for used, _ in linked}.issuperset(with_tokens):
        return False
    if g.op_name(node) == ATTENTION:
        return _attention_apart(node, found)
    if g.op_name(node) in RESHAPES or node.target is operator.getitem:
        return all(_onward(node, used, link, found[used], tokens) == own for used, link in linked)
    for used, link in linked:
        along = link[own[0]]
        if found.get(used) != (None if along is None else (along, own[1])):
            return False
    return g.is_view(node) or mixes(node, lambda value: (found[value][0],) if value in found else ()) is None


def _attention_apart(node: fx.Node, found: Mapping[fx.Node, Axis]) -> bool:
    """Queries of the sequence, over its own keys or over keys that every rank has whole."""
    query, key, value, packed = node.args[:4]
    if found.get(query) != OF_ATTENTION:  # type: ignore[arg-type]
        return False
    whole = key not in found and value not in found
    return (whole and packed is None) or (found.get(key) == found.get(value) == OF_ATTENTION)  # type: ignore[arg-type]


def _enter(found: dict[fx.Node, Axis], node: fx.Node, axis: Axis | None) -> None:
    if axis is not None:
        found[node] = axis


def _onward(node: fx.Node, operand: fx.Node, link: Link, axis: Axis, tokens: int) -> Axis | None:
    """From an operand's axis to the result's."""
    if g.op_name(node) in RESHAPES:
        return reshaped(shape_of(operand), shape_of(node), axis, tokens)
    return (link.index(axis[0]), axis[1]) if axis[0] in link else None


def _back(node: fx.Node, operand: fx.Node, link: Link, axis: Axis, tokens: int) -> Axis | None:
    """From the result's axis to an operand's."""
    if g.op_name(node) in RESHAPES:
        return reshaped(shape_of(node), shape_of(operand), axis, tokens)
    along = link[axis[0]]
    return None if along is None else (along, axis[1])
