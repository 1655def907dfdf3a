"""Rules of reductions and products, for following samples."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from csc.analysis.operators.table import PRODUCTS, Use
from csc.analysis.samples.operands import of, powers_of, uses_of
from csc.analysis.samples.propagation import SamplePropagation
from csc.analysis.samples.states import (
    EVERY_OTHER,
    FIXED,
    NONE,
    NOT_LINEAR,
    Lost,
    PartsOfSum,
    SampleRows,
    State,
    Whole,
    rows_of,
    times,
)
from csc.analysis.sized import given
from csc.ir import graph as g


def reduction_rule(following: SamplePropagation, node: fx.Node) -> State:
    """`sum`, `mean`, and `sum_to_size`: what broadcasting made of a value, summed again."""
    (use,) = uses_of(node)
    state = of(following, use.node)
    if not isinstance(state, SampleRows):
        return following.by_links(node, linear=True)
    dim, inner = state.axis
    if use.end(dim) is None:
        return replace(state, axis=(use.link.index(dim), inner))
    rows = frozenset({(rows_of(state.entry), 1)})
    return PartsOfSum(times(state.powers, rows, -1) if g.op_name(node) == "aten::mean" else state.powers)


def contraction_rule(following: SamplePropagation, node: fx.Node) -> State:
    """Products of matrices and `einsum`: linear in every factor."""
    uses = uses_of(node)
    bound = given(node)
    added_to = bound.get("bias", bound.get("self") if PRODUCTS.get(g.op_name(node)) == (1, 2) else None)
    factors = [use for use in uses if use.node is not added_to]
    states = [of(following, use.node) for use in factors]
    powers = NONE
    for state in states:
        powers = times(powers, powers_of(state))
    parts = any(isinstance(state, PartsOfSum) for state in states)
    if added_to is not None and (powers or parts):
        raise Lost(NOT_LINEAR)
    if parts:
        if sum(not isinstance(state, Whole) for state in states) > 1:
            raise Lost(NOT_LINEAR)
        return PartsOfSum(powers)
    if added_to is None and _summed(following, factors, states):
        return PartsOfSum(powers)
    return following.by_links(node, powers=powers)


def _summed(following: SamplePropagation, factors: list[Use], states: list[State]) -> bool:
    """Whether the samples of all factors that have some are multiplied with each other, and summed."""
    rows = [(use.ends.get(one.axis[0]), one) for use, one in zip(factors, states) if isinstance(one, SampleRows)]
    walks = {None if end is None else end.walk for end, _ in rows}
    if not rows or None in walks:
        return False
    if len(walks) > 1 or len({(one.axis[1], one.count) for _, one in rows}) > 1:
        raise Lost(EVERY_OTHER)
    for use, state in zip(factors, states):
        along = [dim for dim, end in use.ends.items() if end.walk in walks]
        if isinstance(state, Whole) and any(following._varies(use.node, dim) for dim in along):
            raise Lost(FIXED)
    return True
