"""Rules of whole numbers and of tensors made in a size, for following samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from csc.analysis.operators.table import shape_of
from csc.analysis.samples.operands import number_of, of
from csc.analysis.samples.propagation import SamplePropagation
from csc.analysis.samples.states import (
    FIXED,
    UNKNOWN,
    Lost,
    Mixed,
    NewTensor,
    RowNumbers,
    SampleRows,
    State,
    Whole,
    rows_of,
    times,
)
from csc.analysis.sized import given
from csc.ir import graph as g

Rule = Callable[[SamplePropagation, fx.Node], State]


def size_rule(following: SamplePropagation, node: fx.Node) -> State:
    operand, dim = node.args[0], node.args[1]
    state = of(following, operand)
    if isinstance(state, Mixed):
        return state
    if isinstance(state, SampleRows | RowNumbers) and state.axis[0] == dim % len(shape_of(operand)):  # type: ignore[operator]
        return Whole(frozenset({(rows_of(state.entry), 1)}))
    return NewTensor() if isinstance(state, NewTensor) else Whole()


def number_rule(sign: int) -> Rule:
    """A product or quotient of whole numbers."""

    def rule(following: SamplePropagation, node: fx.Node) -> State:
        one, other = (of(following, value) for value in node.meta["given"][0][:2])
        if isinstance(one, NewTensor) or isinstance(other, NewTensor):
            return NewTensor()
        if not isinstance(one, Whole) or not isinstance(other, Whole):
            raise Lost(UNKNOWN)
        left, right = map(number_of, node.meta["given"][0][:2])
        if node.target.__name__ == "floordiv" and (one.powers or other.powers) and left % max(right, 1):  # type: ignore[union-attr]
            raise Lost("rounds a number of samples")
        return Whole(times(one.powers, other.powers, sign))

    return rule


def number_sum_rule(following: SamplePropagation, node: fx.Node) -> State:
    states = [of(following, value) for value in node.meta["given"][0]]
    if any(isinstance(one, NewTensor) for one in states):
        return NewTensor()
    if len({one.powers for one in states if isinstance(one, Whole)}) > 1 or not all(
        isinstance(s, Whole) for s in states
    ):
        raise Lost("adds something to a number of samples")
    return states[0]


def same_number_rule(following: SamplePropagation, node: fx.Node) -> State:
    return of(following, node.meta["given"][0][0])


def _axis_of_sizes(following: SamplePropagation, sizes: Any) -> tuple[int, int, int, str] | None:
    """(dim, inner, count, entry) of the dimension that a number of samples gives a size."""
    for dim, size in enumerate(sizes if isinstance(sizes, (list, tuple)) else [sizes]):
        state = of(following, size)
        if isinstance(state, Mixed):
            raise Lost("has a size that csc cannot tell from the samples")
        if isinstance(state, Whole) and state.powers:
            ((count, power), *more) = state.powers
            if more or power != 1 or count.kind != "rows":
                raise Lost("has a size that csc cannot tell from the samples")
            rows = next(
                (s for s in following.entries.values() if isinstance(s, SampleRows) and s.entry == count.name), None
            )
            if rows is None or number_of(size) % rows.count:
                raise Lost("has a size that csc cannot tell from the samples")
            return dim, number_of(size) // rows.count, rows.count, rows.entry
    return None


def filled_rule(following: SamplePropagation, node: fx.Node) -> State:
    """`zeros`, `full` and the like: rows where a number of samples is a size."""
    bound = given(node)
    sizes = bound.get("size")
    found = _axis_of_sizes(following, sizes)
    value = of(following, bound.get("s" if g.op_name(node) == "aten::scalar_tensor" else "fill_value"))
    if not isinstance(value, Whole):
        raise Lost(UNKNOWN)
    if found is None:
        made = any(isinstance(of(following, size), NewTensor) for size in sizes or [])
        return NewTensor() if made else Whole(value.powers)
    dim, inner, count, entry = found
    return SampleRows((dim, inner), count, entry, value.powers)


def range_rule(following: SamplePropagation, node: fx.Node) -> State:
    bound = given(node)
    ends = [of(following, bound.get(which)) for which in ("start", "step")]
    if any(isinstance(one, NewTensor) for one in (*ends, of(following, bound["end"]))):
        return NewTensor()
    found = _axis_of_sizes(following, [bound["end"]])
    if found is None:
        return Whole()
    if any(one != Whole() for one in ends) or number_of(bound.get("start", 0)) or number_of(bound.get("step", 1)) != 1:
        raise Lost("counts samples")
    _, inner, count, entry = found
    return RowNumbers((0, inner), count, entry, inner, (0, inner - 1))


def expand_rule(following: SamplePropagation, node: fx.Node) -> State:
    """`expand` and `repeat`: of what is the same for every batch, a copy for each sample."""
    bound = given(node)
    state, sizes = of(following, bound["self"]), bound.get("size", bound.get("repeats"))
    if state == Whole():
        found = _axis_of_sizes(following, sizes)
        if found is None:
            return NewTensor() if any(isinstance(of(following, size), NewTensor) for size in sizes or ()) else Whole()
        dim, _, count, entry = found
        own = dim - len(shape_of(node)) + len(shape_of(bound["self"]))
        if g.op_name(node) == "aten::expand" and own >= 0 and shape_of(bound["self"])[own] > 1:
            raise Lost(FIXED)
        return SampleRows((dim, shape_of(node)[dim] // count), count, entry)
    return following.by_links(node, linear=True)
