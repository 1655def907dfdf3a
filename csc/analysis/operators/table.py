"""The table of operator rules: how the dimensions of a call's operands relate to those of its result.

    relation(node) -> Relation | None               None for an operation that csc does not know
    relation_of_features(node)                      and of products of groups of rows, for other dimensions than rows
    is_linear(node)                                 whether it is a linear map of its operand
    links(node) -> [(operand, Link)]                where each operand's dimensions are in the result

The terms are those of csc.analysis.operators.relation. What else is known of operations stands beside the rules:
which are views (memory), draw (randomness), are made of sizes or values (made), are copies or casts (moves), compare
(pointwise), are products (products), normalise (reductions); how they run, and in which dtype (work). Nothing else
of csc lists operations by what they are: who names one elsewhere looks for a pattern, or makes that call.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from csc.analysis.operators import made, moves, pointwise, products, reductions, spatial
from csc.analysis.operators.relation import Call, Link, Relation, Rule, shape_of
from csc.ir import graph as g
from csc.torch_private.exported import OpOverload

RULES: dict[str, Rule] = {
    **pointwise.RULES, **made.RULES, **moves.RULES, **products.RULES, **reductions.RULES, **spatial.RULES,
}  # fmt: skip
SIZES = moves.SIZES | made.SIZES
# Twice the operand, twice the result; and the result of a sum of operands is the sum of their results. See is_linear.
LINEAR = moves.COPIES - moves.CASTS | moves.UNSQUEEZED | {f"aten::{name}" for name in (
    "transpose", "permute", "t", "select", "lift_fresh_copy", "neg", "unbind", "stack", "dropout", "diagonal", "flip",
    "pad", "constant_pad_nd", "view_as_complex", "view_as_real", "real", "imag", "complex", "conj", "_conj",
    "conj_physical", "_conj_physical", "resolve_conj", "_neg_view", "resolve_neg", "select_scatter",
    *reductions.FOURIER,
)}  # fmt: skip
# On shards the same as on the whole, whatever their arguments: what they do along an axis is blocked in the trees.
SAME_ON_SHARDS = moves.COPIES | reductions.NORMS | {f"aten::{name}" for name in (
    "permute", "transpose", "t", "unsqueeze", "squeeze", "cat", "stack", "unbind", "select", "slice_scatter",
    "index_select", "prelu", "_weight_norm", *reductions.NORMALISING,
)} | {moves.GATHER}  # fmt: skip


def relation(node: fx.Node) -> Relation | None:
    """Of a call. Operands that are in no Use are some of which nothing is known."""
    if node.target is operator.getitem:
        return Relation(tuple(moves.getitem(node)))
    if not isinstance(node.target, OpOverload):
        return None
    name = g.op_name(node)
    rule = RULES.get(name, pointwise.broadcasting if pointwise.is_pointwise(node) else None)
    return _related(node, rule) if rule is not None else None


def relation_of_features(node: fx.Node) -> Relation | None:
    """As `relation`, and of products of groups of rows, whose rows stay together."""
    return _related(node, products.grouped) if g.op_name(node) in products.GROUPED else relation(node)


def _related(node: fx.Node, rule: Rule) -> Relation | None:
    name = g.op_name(node)
    uses = rule(Call(node, name, g.bind(node), shape_of(node)))
    return Relation(tuple(uses), SIZES.get(name, "")) if uses else None


def is_linear(node: fx.Node) -> bool:
    """Whether a call is one of LINEAR, and adds nothing of its own, as a pad with another number than 0 does."""
    return g.op_name(node) in LINEAR and not (g.op_name(node) in moves.PADS and g.bind(node).get("value"))


def links(node: fx.Node) -> list[tuple[fx.Node, Link]]:
    found = relation(node)
    return [(use.node, use.link) for use in found.uses] if found is not None else []


def resized(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: list[int]) -> tuple[Any, Any]:
    """Arguments of a call that lists the sizes of its result, with these in their place."""
    listed = SIZES.get(g.op_name(node), "size")
    place = [argument.name for argument in node.target._schema.arguments].index(listed)  # type: ignore[union-attr]
    if place < len(args):
        return (*args[:place], sizes, *args[place + 1 :]), kwargs
    return args, {**kwargs, listed: sizes}
