"""Rules of arithmetic, for following samples: what keeps the powers of counts, and what changes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from csc.analysis.operators.execution import is_view
from csc.analysis.operators.table import CASTS, COPIES, FILLED, RESHAPES, filled_with, is_linear, links, shape_of
from csc.analysis.samples.propagation import (
    EVERY_OTHER,
    NONE,
    NOT_LINEAR,
    UNKNOWN,
    Count,
    Lost,
    Mixed,
    NewTensor,
    PartsOfSum,
    Powers,
    RowNumbers,
    SamplePropagation,
    SampleRows,
    State,
    TermOfSum,
    Terms,
    Whole,
    number_of,
    of,
    powers_of,
    times,
)
from csc.analysis.symbolic import given
from csc.ir import graph as g

# --- Between which numbers the whole numbers of a value lie, as far as its calls say, whatever the batch -------------
#
# Places within a sample are such: `arange(n) * length + place` is a row of the sample itself only where `place` is at
# least 0 and less than `length`. `mask.sum(1) - 1` is -1 for a sample without tokens: the last row of the sample
# before.


Bounds = tuple[int, int]
MOVES = COPIES | CASTS | RESHAPES | {"aten::expand", "aten::repeat", "aten::index", "aten::index_select"}


def bounds(value: Any) -> Bounds | None:
    """Returns the least and the largest number that a value can hold; None where that is not known. value: a node of
    csc.analysis.sized, or a number.
    """
    val = g.tensor_value(value) if isinstance(value, fx.Node) else None
    if val is None:
        number = number_of(value)
        return (number, number) if isinstance(number, int) and not isinstance(number, bool) else None
    if val.dtype is torch.bool:
        return 0, 1
    if value.op != "call_function" or val.dtype.is_floating_point:
        return None
    filled = filled_with(value)
    if isinstance(filled, int) and not isinstance(filled, bool):
        return filled, filled
    name = g.op_name(value)
    if is_view(value) or name in MOVES:
        return bounds(value.args[0])
    rule = RULES.get(name)
    return rule(value, given(value)) if rule is not None else None


def _sum(_: fx.Node, bound: Any, sign: int = 1) -> Bounds | None:
    left, other = bounds(bound["self"]), bounds(bound["other"])
    if left is None or other is None or bound.get("alpha", 1) != 1:
        return None
    least, most = other if sign > 0 else (-other[1], -other[0])
    return left[0] + least, left[1] + most


def _product(_: fx.Node, bound: Any) -> Bounds | None:
    left, other = bounds(bound["self"]), bounds(bound["other"])
    if left is None or other is None:
        return None
    products = [left * right for left in left for right in other]
    return min(products), max(products)


def _total(node: fx.Node, bound: Any) -> Bounds | None:
    """Of a `sum`: as many as are added up."""
    term_bounds = bounds(bound["self"])
    if term_bounds is None:
        return None
    number = prod(shape_of(bound["self"])) // max(1, prod(shape_of(node)))
    return term_bounds[0] * number, term_bounds[1] * number


def _place(_: fx.Node, bound: Any) -> Bounds:
    """Of an `argmax`."""
    shape, dim = shape_of(bound["self"]), bound.get("dim")
    return 0, (prod(shape) if dim is None else shape[dim]) - 1


def _range(node: fx.Node, bound: Any) -> Bounds | None:
    start, step, size = bound.get("start", 0), bound.get("step", 1), shape_of(node)[0]
    if not isinstance(start, int) or not isinstance(step, int) or not size:
        return None
    ends = start, start + step * (size - 1)
    return min(ends), max(ends)


def _clamped(_: fx.Node, bound: Any) -> Bounds | None:
    least, most = bound.get("min"), bound.get("max")
    value_bounds = bounds(bound["self"])
    if not all(bound_value is None or isinstance(bound_value, int) for bound_value in (least, most)):
        return None
    if value_bounds is None:
        return (least, most) if least is not None and most is not None else None
    lower = value_bounds[0] if least is None else max(value_bounds[0], least)
    upper = value_bounds[1] if least is None else max(value_bounds[1], least)
    return (lower, upper) if most is None else (min(lower, most), min(upper, most))


def _remainder(_: fx.Node, bound: Any) -> Bounds | None:
    divisor = bound.get("other")
    return (0, divisor - 1) if isinstance(divisor, int) and divisor > 0 else None


RULES: dict[str, Callable[[fx.Node, Any], Bounds | None]] = {
    "aten::add": _sum, "aten::sub": lambda node, bound: _sum(node, bound, -1), "aten::mul": _product,
    "aten::sum": _total, "aten::argmax": _place, "aten::argmin": _place, "aten::arange": _range,
    "aten::clamp": _clamped, "aten::clamp_min": _clamped, "aten::clamp_max": _clamped, "aten::remainder": _remainder,
}  # fmt: skip


# --- Rules of arithmetic, for following samples: what keeps the powers of counts, and what changes them --------------


Rule = Callable[[SamplePropagation, fx.Node], State]
OFTEN = "by more than one of them, or multiplied by one"


def product_rule(sign: int) -> Rule:
    """Entry by entry: `mul` with sign 1, `div` with -1."""

    def rule(following: SamplePropagation, node: fx.Node) -> State:
        bound = given(node)
        one, other = bound["self"], bound["other"]
        if bound.get("rounding_mode") is not None:
            return following.by_links(node)
        left, right = of(following, one), of(following, other)
        if isinstance(left, Terms) or isinstance(right, Terms):
            return _scaled_terms(following, one, other, sign)
        if sign < 0 or (isinstance(left, SampleRows | PartsOfSum) and isinstance(right, PartsOfSum)):
            right = _as_count(following, other, right)
        if sign > 0 and isinstance(left, PartsOfSum) and isinstance(right, SampleRows | PartsOfSum):
            left = _as_count(following, one, left)
        if isinstance(right, PartsOfSum) and (sign < 0 or isinstance(left, SampleRows | PartsOfSum)):
            raise Lost(NOT_LINEAR)
        if isinstance(left, PartsOfSum) and isinstance(right, SampleRows):
            raise Lost(NOT_LINEAR)
        if isinstance(left, NewTensor) or isinstance(right, NewTensor):
            _check_made(one if isinstance(left, NewTensor) else other, right if isinstance(left, NewTensor) else left)
        for state, value, factor in ((left, one, other), (right, other, one)):
            if isinstance(state, PartsOfSum) or (isinstance(state, SampleRows) and len(shape_of(value)) <= 2):
                _check_literal(following, factor)
        if isinstance(left, RowNumbers) or isinstance(right, RowNumbers):
            return _scaled_numbers(following, node, one, other, sign)
        return _pointwise(following, node, {one: left, other: right}, times(powers_of(left), powers_of(right), sign))

    return rule


def _as_count(following: SamplePropagation, value: Any, state: State) -> State:
    """A sum made of the batch alone as the number that it is."""
    count = following.counting(value) if isinstance(value, fx.Node) else None
    return Whole(frozenset({(count, 1)})) if count is not None and state == PartsOfSum() else state


def _check_made(value: fx.Node, other: State) -> None:
    """What was made for a microbatch is for its rows; a single number may be anything."""
    if isinstance(other, PartsOfSum) or (isinstance(other, SampleRows) and prod(shape_of(value)) == 1):
        raise Lost("scales by a number that was made for the microbatch")


def _check_literal(following: SamplePropagation, value: Any) -> None:
    """In a trace for one number of samples, a literal that is a multiple of it may be that number, and so may be what
    is computed from literals alone.
    """
    if not following.specialised:
        return
    if isinstance(value, fx.Node):
        if _of_literals(value) and following.states[value] == Whole() and prod(shape_of(value)) == 1:
            raise Lost("scales the loss by a number that may be that of the samples: the trace has it as a number")
        return
    if isinstance(value, complex) or not float(value).is_integer():
        return
    counts = {state.count for state in following.entries.values() if isinstance(state, SampleRows)}
    if any(value and value % count == 0 for count in counts):
        raise Lost(
            f"scales the loss by {value}, which may be the number of samples: the trace has it as a plain number"
        )


def _of_literals(node: fx.Node) -> bool:
    """Whether a value is computed from plain numbers alone."""
    if node.op != "call_function":
        return False
    return g.op_name(node) in FILLED or all(map(_of_literals, node.all_input_nodes))


def _scaled_numbers(following: SamplePropagation, node: fx.Node, one: Any, other: Any, sign: int) -> State:
    """Row numbers times a whole number."""
    numbers, factor = (one, other) if isinstance(of(following, one), RowNumbers) else (other, one)
    state = of(following, numbers)
    factor = number_of(factor)
    if sign < 0 or not isinstance(factor, int) or isinstance(factor, bool) or not isinstance(state, RowNumbers):
        raise Lost("computes with the numbers of samples")
    within = state.within and (state.within[0] * factor, state.within[1] * factor) if factor >= 0 else None
    return replace(state, step=state.step * factor, within=within)


def _scaled_terms(following: SamplePropagation, one: Any, other: Any, sign: int) -> Terms:
    """Terms times what is the same for every batch, or over it."""
    terms, factor = (other, one) if sign > 0 and isinstance(of(following, other), Terms) else (one, other)
    state = of(following, terms)
    if not isinstance(state, Terms) or of(following, factor) != Whole():
        raise Lost(NOT_LINEAR)
    _check_literal(following, factor)
    return state


def _pointwise(following: SamplePropagation, node: fx.Node, states: dict[Any, State], powers: Powers) -> State:
    """The result of a product, its operands taken for these states."""
    operand_states = [states.get(operand, following.states[operand]) for operand in following.operands(node)]
    if any(isinstance(state, PartsOfSum) for state in operand_states):
        return PartsOfSum(powers)
    if any(isinstance(state, SampleRows) for state in operand_states):
        kept = {operand: following.states[operand] for operand in states if isinstance(operand, fx.Node)}
        following.states.update({one: states[one] for one in kept})
        try:
            return following._joined(node, powers)
        finally:
            following.states.update(kept)
    return NewTensor() if any(isinstance(state, NewTensor) for state in operand_states) else Whole(powers)


def sum_rule(following: SamplePropagation, node: fx.Node) -> State:
    """`add` and `sub`: terms of one kind."""
    bound = given(node)
    terms = [bound["self"], bound["other"]]
    states = [of(following, value) for value in terms]
    if of(following, bound.get("alpha", 1)) != Whole():
        raise Lost(UNKNOWN)
    numbers = [state for state in states if isinstance(state, RowNumbers)]
    if numbers:
        return _offset_numbers(following, node, terms, states)
    _check_statistics(terms, states)
    for value, state, other, rest in zip(terms, states, reversed(terms), reversed(states)):
        if isinstance(state, PartsOfSum) and isinstance(rest, Whole) and not isinstance(other, fx.Node):
            count = following.counting(value) if isinstance(value, fx.Node) else None
            plain = g.op_name(node) != "aten::rsub" and rest.powers == NONE
            if count is not None and plain and isinstance(other, (int, float)) and value is terms[0]:
                sign = -1 if g.op_name(node) == "aten::sub" else 1
                return Whole(frozenset({(replace(count, added=sign * float(other)), 1)}))
    # A loop over losses begins with 0, or with zeros for each expert.
    operands = {place: state for place, state in enumerate(states) if not _is_nothing(terms[place], state)}
    return _added(following, node, operands)


def _is_nothing(value: Any, state: State) -> bool:
    """Zeros that are rows of samples are something: they make as many of what is added."""
    return state == Whole() and (filled_with(value) == 0 if isinstance(value, fx.Node) else value == 0)


def _added(following: SamplePropagation, node: fx.Node, operands: Mapping[int, State]) -> State:
    """The sum of terms. One that is the same for every batch is a mean of itself, whatever it is a mean over."""
    states = list(operands.values())
    parts = {state.powers for state in states if isinstance(state, PartsOfSum)}
    if not parts and not any(isinstance(state, Terms) for state in states):
        return following.by_links(node, linear=True)
    if any(isinstance(state, SampleRows | RowNumbers | NewTensor) for state in states):
        raise Lost(EVERY_OTHER)
    if len(parts) == 1 and all(isinstance(state, PartsOfSum | Whole) for state in states):
        (powers,) = parts
        beside = [dict(times(powers, state.powers, -1)) for state in states if isinstance(state, Whole)]
        if all(list(missing.values()) == [-1] for missing in beside) and not (beside and _may_be_zero(powers)):
            return PartsOfSum(powers)
    return Terms(frozenset().union(*(_terms(following, node, place, state) for place, state in operands.items())))


def _may_be_zero(powers: Powers) -> bool:
    """Whether a microbatch may have 0 of a number that it is divided by, and yet something to divide: that weighs
    what a mean over it would not.
    """
    return any(count.kind == "value" and count.least <= 0 and count.added <= 0 for count, _ in powers)


def _terms(following: SamplePropagation, node: fx.Node, place: int, state: State) -> frozenset[TermOfSum]:
    """Those of one operand; none of a sum over samples, which is not divided."""
    if isinstance(state, Terms):
        return state.terms
    if state == Whole():
        rows = next(state.entry for state in following.entries.values() if isinstance(state, SampleRows))
        return frozenset({TermOfSum(node.name, place, Count("rows", rows))})
    if not isinstance(state, PartsOfSum):
        raise Lost("adds a term that is the same for every microbatch to one that is a sum over them")
    if not state.powers:
        return frozenset()
    ((count, power), *more) = state.powers
    if more or power != -1:
        raise Lost(f"adds terms of the loss that are divided by different numbers, one {OFTEN}")
    return frozenset({TermOfSum(node.name, place, count)})


def _check_statistics(terms: Sequence[Any], states: Sequence[State]) -> None:
    """A single number that was made for a microbatch is another one in the batch."""
    for value, state, other in zip(terms, states, reversed(states)):
        if isinstance(state, NewTensor) and isinstance(other, SampleRows) and prod(shape_of(value)) == 1:
            raise Lost("adds a number that was made for the microbatch")


def _offset_numbers(following: SamplePropagation, node: fx.Node, terms: Sequence[Any], states: list[State]) -> State:
    """Row numbers, and places within each sample."""
    numbers, *more = [state for state in states if isinstance(state, RowNumbers)]
    name = g.op_name(node)
    if more or name == "aten::rsub" or (name == "aten::sub" and states[1] is numbers):
        raise Lost("computes with the numbers of samples")
    result = None
    for operand, link in links(node):
        state = following.states[operand]
        if isinstance(state, SampleRows | RowNumbers):
            moved = following.moved(node, operand, link, state)
            if result is not None and result.axis != moved.axis:
                raise Lost(EVERY_OTHER)
            result = moved
    assert result is not None
    offset = bounds(terms[0] if states[1] is numbers else terms[1])
    if offset is not None and name == "aten::sub":
        offset = -offset[1], -offset[0]
    alpha = given(node).get("alpha", 1)
    known = numbers.within is not None and offset is not None and alpha == 1
    within = (numbers.within[0] + offset[0], numbers.within[1] + offset[1]) if known else None  # type: ignore[index]
    return replace(numbers, axis=result.axis, within=within)


def stack_rule(following: SamplePropagation, node: fx.Node) -> State:
    """`stack`: terms of a loss beside each other, which are summed later."""
    values: Any = given(node)["tensors"]
    states = dict(enumerate(of(following, value) for value in values))
    if all(isinstance(state, PartsOfSum | Terms | Whole) for state in states.values()):
        return _added(following, node, states)
    return following.by_links(node, linear=True)


def power_rule(following: SamplePropagation, node: fx.Node) -> State:
    bound = given(node)
    base, exponent = bound["self"], bound.get("exponent", -1)
    state = _as_count(following, base, of(following, base))
    if isinstance(state, Whole) and isinstance(exponent, (int, float)) and float(exponent).is_integer():
        return Whole(frozenset((count, power * int(exponent)) for count, power in state.powers if exponent))
    return following.by_links(node)


def clamp_rule(following: SamplePropagation, node: fx.Node) -> State:
    """A count that is not let become zero."""
    bound = given(node)
    value, least = bound["self"], bound.get("min")
    state = _as_count(following, value, of(following, value))
    if isinstance(state, Whole) and state.powers and isinstance(least, (int, float)) and bound.get("max") is None:
        ((count, power), *more) = state.powers
        if not more and power == 1 and count.kind == "value" and least > count.least:
            return Whole(frozenset({(replace(count, least=float(least)), 1)}))
    return following.by_links(node)


def linear_rule(following: SamplePropagation, node: fx.Node) -> State:
    """A pad adds what it pads with, so that only of none of it the sum of parts is a part of the sum."""
    return following.by_links(node, linear=is_linear(node))


def cast_rule(following: SamplePropagation, node: fx.Node) -> State:
    exact = node.meta["val"].dtype.is_floating_point or not node.args[0].meta["val"].dtype.is_floating_point  # type: ignore[union-attr]
    return following.by_links(node, linear=exact and node.meta["val"].dtype is not torch.bool)


def choice_rule(following: SamplePropagation, node: fx.Node) -> State:
    """`where`, `masked_fill`: zero has any power."""
    bound = given(node)
    condition = bound.get("condition", bound.get("mask"))
    values = [bound[which] for which in ("self", "other", "value") if which in bound]
    states = [of(following, value) for value in values if not is_zero(value)]
    if powers_of(of(following, condition)):
        raise Lost(NOT_LINEAR)
    powers = {powers_of(state) for state in states}
    if powers <= {NONE}:
        return following.by_links(node)
    if len(powers) > 1 or any(isinstance(state, PartsOfSum) for state in states):
        raise Lost(NOT_LINEAR)
    return following.by_links(node, powers=powers.pop())


def is_zero(value: Any) -> bool:
    """Whether a value is zero in all its entries, as its own call says."""
    if isinstance(value, fx.Node):
        return is_zero(value.args[0] if g.op_name(value) == "aten::lift_fresh_copy" else filled_with(value))
    return isinstance(value, (int, float)) and value == 0


# --- Rules of functions with a backward of their own (csc.kernels.own_gradient), for following samples ---------------
#
# The gradient of a batch's loss at its rows is that of its microbatches, one behind the other; at what is the same for
# every batch it is the sum of theirs; and at a sum over samples it is the same for all. What the backward of a
# function makes of it must be that again for its inputs. The loss of a microbatch is weighted before its backward
# starts, so gradients that come in are those of the batch, not shares of them.


def incoming_rule(following: SamplePropagation, node: fx.Node) -> State:
    """The gradient of the value that a function gave."""
    return _of_gradient(of(following, node.args[0]))


def own_gradient_rule(following: SamplePropagation, node: fx.Node) -> State:
    """Its results are the outputs (csc.analysis.samples.rules.item_rule): here it is seen to what the backward
    does.
    """
    _, inputs, gradients = node.args[:3]
    for value, gradient in zip(inputs, gradients):  # type: ignore[arg-type]
        if is_zero(gradient) or not isinstance(gradient, fx.Node):
            continue
        if not _agree(_of_gradient(of(following, value)), of(following, gradient)):
            raise Lost("has a backward that gives no gradient for each sample, or for what all share no sum of them")
    return NewTensor()


def hooked_rule(following: SamplePropagation, node: fx.Node) -> State:
    return of(following, node.args[0])


def _of_gradient(value: State) -> State:
    """What the gradient of a value is to the samples: one over all powers of counts that the value is multiplied by."""
    if isinstance(value, SampleRows):
        return replace(value, powers=times(NONE, value.powers, -1))
    if isinstance(value, Whole):
        return PartsOfSum(times(NONE, value.powers, -1))
    if isinstance(value, PartsOfSum):
        return Whole(times(NONE, value.powers, -1))
    if isinstance(value, Terms):
        raise Lost("has a backward for terms of the loss that are divided by different numbers")
    if isinstance(value, RowNumbers | Mixed):
        raise Lost("has a backward for the numbers of samples")
    return value


def _agree(wanted: Any, actual: Any) -> bool:
    if isinstance(wanted, SampleRows) and isinstance(actual, SampleRows):
        same = wanted.axis[1] * wanted.count == actual.axis[1] * actual.count
        return wanted.axis[0] == actual.axis[0] and same and wanted.powers == actual.powers
    return bool(wanted == actual)
