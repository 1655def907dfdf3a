"""The table of operator rules: how the dimensions of a call's operands relate to those of its result.

    relation(node) -> Relation | None               None for an operation that csc does not know
    links(node) -> [(operand, Link)]                where each operand's dimensions are in the result

The terms are those of csc.analysis.operators.relation. What else is known of an operation (whether it is linear, how
many bytes it moves) is for those who ask; which dimensions it touches is said here alone.
"""

from __future__ import annotations

import operator

from torch import fx

from csc.analysis.operators import made, moves, pointwise, products, reductions, spatial
from csc.analysis.operators.relation import Call, Link, Relation, Rule, shape_of
from csc.ir import graph as g
from csc.torch_private.exported import OpOverload

RULES: dict[str, Rule] = {
    **pointwise.RULES, **made.RULES, **moves.RULES, **products.RULES, **reductions.RULES, **spatial.RULES,
}  # fmt: skip
SIZES = moves.SIZES | made.SIZES


def relation(node: fx.Node) -> Relation | None:
    """Of a call. Operands that are in no Use are some of which nothing is known."""
    if node.target is operator.getitem:
        return Relation(tuple(moves.getitem(node)))
    if not isinstance(node.target, OpOverload):
        return None
    name = g.op_name(node)
    rule = RULES.get(name, pointwise.broadcasting if pointwise.is_pointwise(node) else None)
    if rule is None:
        return None
    uses = rule(Call(node, name, g.bind(node), shape_of(node)))
    return Relation(tuple(uses), SIZES.get(name, "")) if uses else None


def links(node: fx.Node) -> list[tuple[fx.Node, Link]]:
    found = relation(node)
    return [(use.node, use.link) for use in found.uses] if found is not None else []
