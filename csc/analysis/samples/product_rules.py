"""Rules of reductions and products, for following samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from csc.analysis.links import links, shape_of
from csc.analysis.samples.operands import of, powers_of
from csc.analysis.samples.propagation import (
    EVERY_OTHER,
    FIXED,
    NONE,
    NOT_LINEAR,
    UNKNOWN,
    Count,
    Following,
    Lost,
    NewTensor,
    PartsOfSum,
    RowNumbers,
    SampleRows,
    State,
    Whole,
    times,
)
from csc.analysis.sized import given
from csc.analysis.tokens import PRODUCTS
from csc.ir import graph as g


def reduction_rule(following: Following, node: fx.Node) -> State:
    """`sum` and `mean`."""
    bound, operand = given(node), node.args[0]
    state = of(following, operand)
    along = bound.get("dim")
    rank = len(shape_of(operand))  # type: ignore[arg-type]
    dims = range(rank) if along is None or along == [] else [along] if isinstance(along, int) else along
    if isinstance(state, SampleRows) and state.axis[0] in {dim % max(rank, 1) for dim in dims}:
        mean = g.op_name(node) == "aten::mean"
        return PartsOfSum(
            times(state.powers, frozenset({(Count("rows", state.entry), 1)}), -1) if mean else state.powers
        )
    return following.by_links(node, linear=True)


def sum_to_size_rule(following: Following, node: fx.Node) -> State:
    """What broadcasting made of a value, summed again."""
    ((operand, link),) = links(node)
    state = of(following, operand)
    if not isinstance(state, SampleRows):
        return following.by_links(node, linear=True)
    if state.axis[0] in link:
        return replace(state, axis=(link.index(state.axis[0]), state.axis[1]))
    return PartsOfSum(state.powers)


def contraction_rule(following: Following, node: fx.Node) -> State:
    bound = given(node)
    left, right = (node.args[place] for place in PRODUCTS[g.op_name(node)])
    one, other = of(following, left), of(following, right)
    added_to = bound.get("bias", bound.get("self") if g.op_name(node) in ("aten::addmm", "aten::baddbmm") else None)
    powers = times(powers_of(one), powers_of(other))
    if added_to is not None and (powers or isinstance(one, PartsOfSum) or isinstance(other, PartsOfSum)):
        raise Lost(NOT_LINEAR)
    if isinstance(one, PartsOfSum) or isinstance(other, PartsOfSum):
        if not (isinstance(one, Whole) or isinstance(other, Whole)):
            raise Lost(NOT_LINEAR)
        return PartsOfSum(powers)
    last = len(shape_of(left)) - 1  # type: ignore[arg-type]
    rank = len(shape_of(right))  # type: ignore[arg-type]
    summed = rank - 1 if g.op_name(node) == "aten::linear" else max(rank - 2, 0)
    if (
        isinstance(one, SampleRows)
        and isinstance(other, SampleRows)
        and one.axis[0] == last
        and other.axis[0] == summed
    ):
        if one.axis != (last, other.axis[1]) or one.count != other.count or added_to is not None:
            raise Lost(EVERY_OTHER)
        return PartsOfSum(powers)
    if isinstance(other, SampleRows) and g.op_name(node) == "aten::linear" and isinstance(one, SampleRows):
        raise Lost(EVERY_OTHER)
    return following.by_links(node, powers=powers)


def einsum_rule(following: Following, node: fx.Node) -> State:
    equation: str = node.args[0].replace(" ", "")  # type: ignore[union-attr]
    operands: Any = node.args[1]
    if "." in equation or "->" not in equation:
        raise Lost(UNKNOWN)
    terms, result = equation.split("->")
    states = [of(following, one) for one in operands]
    powers = NONE
    for state in states:
        powers = times(powers, powers_of(state))
    if any(isinstance(state, PartsOfSum) for state in states):
        if sum(not isinstance(state, Whole) for state in states) > 1:
            raise Lost(NOT_LINEAR)
        return PartsOfSum(powers)
    rows = [
        (term[state.axis[0]], state) for term, state in zip(terms.split(","), states) if isinstance(state, SampleRows)
    ]
    if any(isinstance(state, RowNumbers) for state in states):
        raise Lost("computes with the numbers of samples")
    if not rows:
        return NewTensor() if any(isinstance(state, NewTensor) for state in states) else Whole(powers)
    letter, found = rows[0]
    for other, state in rows:
        if other != letter or state.axis[1] * state.count != found.axis[1] * found.count or state.count != found.count:
            raise Lost(EVERY_OTHER)
    for term, state, one in zip(terms.split(","), states, operands):
        if isinstance(state, Whole) and letter in term and following._varies(one, term.index(letter)):
            raise Lost(FIXED)
    if letter not in result:
        return PartsOfSum(powers)
    return SampleRows((result.index(letter), found.axis[1]), found.count, found.entry, powers)
