"""Rules of single operations for following samples, where the table of links does not say all.

RULES: {operation: rule}        rule(following, node) -> State; Lost if the call mixes samples
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from csc.analysis.links import links, shape_of
from csc.analysis.sample_losses import LOSS_RULES
from csc.analysis.samples import (
    ALONG_SAMPLES,
    EVERY_OTHER,
    FILLED,
    FIXED,
    NONE,
    NOT_LINEAR,
    UNKNOWN,
    Count,
    Following,
    Lost,
    Made,
    Mixed,
    Numbers,
    Parts,
    Powers,
    Rows,
    State,
    Whole,
    times,
)
from csc.analysis.sized import given
from csc.analysis.tokens import PRODUCTS
from csc.ir import graph as g

Rule = Callable[[Following, fx.Node], State]


def _of(following: Following, value: Any) -> State:
    return following.states[value] if isinstance(value, fx.Node) else Whole()


def _number_of(value: Any) -> Any:
    return value.meta["val"] if isinstance(value, fx.Node) else value


# sizes and other whole numbers


def _size(following: Following, node: fx.Node) -> State:
    of, dim = node.args[0], node.args[1]
    state = _of(following, of)
    if isinstance(state, Mixed):
        return state
    if isinstance(state, Rows | Numbers) and state.axis[0] == dim % len(shape_of(of)):  # type: ignore[operator, arg-type]
        return Whole(frozenset({(Count("rows", state.entry), 1)}))
    return Made() if isinstance(state, Made) else Whole()


def _number(sign: int) -> Rule:
    """A product or quotient of whole numbers."""

    def rule(following: Following, node: fx.Node) -> State:
        one, other = (_of(following, value) for value in node.meta["given"][0][:2])
        if isinstance(one, Made) or isinstance(other, Made):
            return Made()
        if not isinstance(one, Whole) or not isinstance(other, Whole):
            raise Lost(UNKNOWN)
        left, right = map(_number_of, node.meta["given"][0][:2])
        if node.target.__name__ == "floordiv" and (one.powers or other.powers) and left % max(right, 1):  # type: ignore[union-attr]
            raise Lost("rounds a number of samples")
        return Whole(times(one.powers, other.powers, sign))

    return rule


def _number_sum(following: Following, node: fx.Node) -> State:
    states = [_of(following, value) for value in node.meta["given"][0]]
    if any(isinstance(one, Made) for one in states):
        return Made()
    if len({one.powers for one in states if isinstance(one, Whole)}) > 1 or not all(
        isinstance(s, Whole) for s in states
    ):
        raise Lost("adds something to a number of samples")
    return states[0]


def _same_number(following: Following, node: fx.Node) -> State:
    return _of(following, node.meta["given"][0][0])


# tensors made in a size


def _axis_of_sizes(following: Following, sizes: Any) -> tuple[int, int, int, str] | None:
    """(dim, inner, count, entry) of the dimension that a number of samples gives a size."""
    for dim, size in enumerate(sizes if isinstance(sizes, (list, tuple)) else [sizes]):
        state = _of(following, size)
        if isinstance(state, Mixed):
            raise Lost("has a size that csc cannot tell from the samples")
        if isinstance(state, Whole) and state.powers:
            ((count, power), *more) = state.powers
            if more or power != 1 or count.kind != "rows":
                raise Lost("has a size that csc cannot tell from the samples")
            rows = next((s for s in following.entries.values() if isinstance(s, Rows) and s.entry == count.name), None)
            if rows is None or _number_of(size) % rows.count:
                raise Lost("has a size that csc cannot tell from the samples")
            return dim, _number_of(size) // rows.count, rows.count, rows.entry
    return None


def _filled(following: Following, node: fx.Node) -> State:
    """`zeros`, `full` and the like: rows where a number of samples is a size."""
    bound = given(node)
    sizes = bound.get("size")
    found = _axis_of_sizes(following, sizes)
    value = _of(following, bound.get("fill_value"))
    if not isinstance(value, Whole):
        raise Lost(UNKNOWN)
    if found is None:
        made = any(isinstance(_of(following, size), Made) for size in sizes or [])
        return Made() if made else Whole(value.powers)
    dim, inner, count, entry = found
    return Rows((dim, inner), count, entry, value.powers)


def _range(following: Following, node: fx.Node) -> State:
    bound = given(node)
    ends = [_of(following, bound.get(which)) for which in ("start", "step")]
    if any(isinstance(one, Made) for one in (*ends, _of(following, bound["end"]))):
        return Made()
    found = _axis_of_sizes(following, [bound["end"]])
    if found is None:
        return Whole()
    if (
        any(one != Whole() for one in ends)
        or _number_of(bound.get("start", 0))
        or _number_of(bound.get("step", 1)) != 1
    ):
        raise Lost("counts samples")
    _, inner, count, entry = found
    return Numbers((0, inner), count, entry, inner)


def _expand(following: Following, node: fx.Node) -> State:
    """`expand` and `repeat`: of what is the same for every batch, a copy for each sample."""
    bound = given(node)
    state, sizes = _of(following, bound["self"]), bound.get("size", bound.get("repeats"))
    if state == Whole():
        found = _axis_of_sizes(following, sizes)
        if found is None:
            return Made() if any(isinstance(_of(following, size), Made) for size in sizes or ()) else Whole()
        dim, _, count, entry = found
        own = dim - len(shape_of(node)) + len(shape_of(bound["self"]))
        if g.op_name(node) == "aten::expand" and own >= 0 and shape_of(bound["self"])[own] > 1:
            raise Lost(FIXED)
        return Rows((dim, shape_of(node)[dim] // count), count, entry)
    return following.by_links(node, linear=True)


# arithmetic


def _product(sign: int) -> Rule:
    """Entry by entry: `mul` with sign 1, `div` with -1."""

    def rule(following: Following, node: fx.Node) -> State:
        bound = given(node)
        one, other = bound["self"], bound["other"]
        if bound.get("rounding_mode") is not None:
            return following.by_links(node)
        left, right = _of(following, one), _of(following, other)
        if sign < 0 or (isinstance(left, Rows | Parts) and isinstance(right, Parts)):
            right = _as_count(following, other, right)
        if sign > 0 and isinstance(left, Parts) and isinstance(right, Rows | Parts):
            left = _as_count(following, one, left)
        if isinstance(right, Parts) and (sign < 0 or isinstance(left, Rows | Parts)):
            raise Lost(NOT_LINEAR)
        if isinstance(left, Parts) and isinstance(right, Rows):
            raise Lost(NOT_LINEAR)
        if isinstance(left, Made) or isinstance(right, Made):
            _check_made(one if isinstance(left, Made) else other, right if isinstance(left, Made) else left)
        for state, value, factor in ((left, one, other), (right, other, one)):
            if isinstance(state, Parts) or (isinstance(state, Rows) and len(shape_of(value)) <= 2):
                _check_literal(following, factor)
        if isinstance(left, Numbers) or isinstance(right, Numbers):
            return _scaled_numbers(following, node, one, other, sign)
        return _pointwise(following, node, {one: left, other: right}, times(_powers(left), _powers(right), sign))

    return rule


def _powers(state: State) -> Powers:
    return state.powers if isinstance(state, Whole | Rows | Parts) else NONE


def _as_count(following: Following, value: Any, state: State) -> State:
    """A sum made of the batch alone as the number that it is."""
    count = following.counting(value) if isinstance(value, fx.Node) else None
    return Whole(frozenset({(count, 1)})) if count is not None and state == Parts() else state


def _check_made(value: fx.Node, other: State) -> None:
    """What was made for a microbatch is for its rows; a single number may be anything."""
    if isinstance(other, Parts) or (isinstance(other, Rows) and prod(shape_of(value)) == 1):
        raise Lost("scales by a number that was made for the microbatch")


def _check_literal(following: Following, value: Any) -> None:
    """In a trace for one number of samples, a literal that is a multiple of it may be that number, and so may be what
    is computed from literals alone.
    """
    if not following.specialised:
        return
    if isinstance(value, fx.Node):
        if _of_literals(value) and following.states[value] == Whole() and prod(shape_of(value)) == 1:
            raise Lost("scales the loss by a number that may be that of the samples: the trace has it as a number")
        return
    if not float(value).is_integer():
        return
    counts = {state.count for state in following.entries.values() if isinstance(state, Rows)}
    if any(value and value % count == 0 for count in counts):
        raise Lost(
            f"scales the loss by {value}, which may be the number of samples: the trace has it as a plain number"
        )


def _of_literals(node: fx.Node) -> bool:
    """Whether a value is computed from plain numbers alone."""
    if node.op != "call_function":
        return False
    return g.op_name(node) in FILLED or all(map(_of_literals, node.all_input_nodes))


def _scaled_numbers(following: Following, node: fx.Node, one: Any, other: Any, sign: int) -> State:
    """Row numbers times a whole number."""
    numbers, factor = (one, other) if isinstance(_of(following, one), Numbers) else (other, one)
    state = _of(following, numbers)
    factor = _number_of(factor)
    if sign < 0 or not isinstance(factor, int) or isinstance(factor, bool) or not isinstance(state, Numbers):
        raise Lost("computes with the numbers of samples")
    return replace(state, step=state.step * factor)


def _pointwise(following: Following, node: fx.Node, states: dict[Any, State], powers: Powers) -> State:
    """The result of a product, its operands taken for these states."""
    found = [states.get(one, following.states[one]) for one in following.operands(node)]
    if any(isinstance(one, Parts) for one in found):
        return Parts(powers)
    if any(isinstance(one, Rows) for one in found):
        kept = {one: following.states[one] for one in states if isinstance(one, fx.Node)}
        following.states.update({one: states[one] for one in kept})
        try:
            return following._joined(node, powers)
        finally:
            following.states.update(kept)
    return Made() if any(isinstance(one, Made) for one in found) else Whole(powers)


def _sum(following: Following, node: fx.Node) -> State:
    """`add` and `sub`: terms of one kind."""
    bound = given(node)
    terms = [bound["self"], bound["other"]]
    states = [_of(following, value) for value in terms]
    if _of(following, bound.get("alpha", 1)) != Whole():
        raise Lost(UNKNOWN)
    numbers = [state for state in states if isinstance(state, Numbers)]
    if numbers:
        return _offset_numbers(following, node, states)
    for value, state, other, rest in zip(terms, states, reversed(terms), reversed(states)):
        if isinstance(state, Parts) and isinstance(rest, Whole) and not isinstance(other, fx.Node):
            count = following.counting(value) if isinstance(value, fx.Node) else None
            plain = g.op_name(node) != "aten::rsub" and rest.powers == NONE
            if count is not None and plain and isinstance(other, (int, float)) and value is terms[0]:
                sign = -1 if g.op_name(node) == "aten::sub" else 1
                return Whole(frozenset({(replace(count, added=sign * float(other)), 1)}))
    return added(following, node, states)


def added(following: Following, node: fx.Node, states: list[State]) -> State:
    """The sum of terms. One that is the same for every batch is a mean of itself, whatever it is a mean over."""
    parts = {state.powers for state in states if isinstance(state, Parts)}
    if not parts:
        return following.by_links(node, linear=True)
    if len(parts) > 1:
        raise Lost("adds terms of the loss that are divided by different numbers")
    (powers,) = parts
    for state in states:
        if isinstance(state, Rows | Numbers | Made):
            raise Lost(EVERY_OTHER)
        if isinstance(state, Whole):
            missing = dict(times(powers, state.powers, -1))
            if len(missing) != 1 or next(iter(missing.values())) != -1:
                raise Lost("adds a term that is the same for every microbatch to one that is a sum over them")
    return Parts(powers)


def _offset_numbers(following: Following, node: fx.Node, states: list[State]) -> State:
    """Row numbers, and places within each sample."""
    numbers, *others = [state for state in states if isinstance(state, Numbers)]
    if others:
        raise Lost("computes with the numbers of samples")
    result = None
    for one, link in links(node):
        state = following.states[one]
        if isinstance(state, Rows | Numbers):
            moved = following.moved(node, one, link, state)
            if result is not None and result.axis != moved.axis:
                raise Lost(EVERY_OTHER)
            result = moved
    assert result is not None
    return Numbers(result.axis, numbers.count, numbers.entry, numbers.step)


def _power(following: Following, node: fx.Node) -> State:
    bound = given(node)
    base, exponent = bound["self"], bound.get("exponent", -1)
    state = _as_count(following, base, _of(following, base))
    if isinstance(state, Whole) and isinstance(exponent, (int, float)) and float(exponent).is_integer():
        return Whole(frozenset((count, power * int(exponent)) for count, power in state.powers if exponent))
    return following.by_links(node)


def _clamp(following: Following, node: fx.Node) -> State:
    """A count that is not let become zero."""
    bound = given(node)
    value, least = bound["self"], bound.get("min")
    state = _as_count(following, value, _of(following, value))
    if isinstance(state, Whole) and state.powers and isinstance(least, (int, float)) and bound.get("max") is None:
        ((count, power), *more) = state.powers
        if not more and power == 1 and count.kind == "value" and least > count.least:
            return Whole(frozenset({(replace(count, least=float(least)), 1)}))
    return following.by_links(node)


def _linear(following: Following, node: fx.Node) -> State:
    return following.by_links(node, linear=True)


def _cast(following: Following, node: fx.Node) -> State:
    exact = node.meta["val"].dtype.is_floating_point or not node.args[0].meta["val"].dtype.is_floating_point  # type: ignore[union-attr]
    return following.by_links(node, linear=exact and node.meta["val"].dtype is not torch.bool)


def _choice(following: Following, node: fx.Node) -> State:
    """`where`, `masked_fill`: zero has any power."""
    bound = given(node)
    condition = bound.get("condition", bound.get("mask"))
    values = [bound[which] for which in ("self", "other", "value") if which in bound]
    states = [_of(following, value) for value in values if not _is_zero(value)]
    if _powers(_of(following, condition)):
        raise Lost(NOT_LINEAR)
    powers = {_powers(state) for state in states}
    if powers <= {NONE}:
        return following.by_links(node)
    if len(powers) > 1 or any(isinstance(state, Parts) for state in states):
        raise Lost(NOT_LINEAR)
    return following.by_links(node, powers=powers.pop())


def _is_zero(value: Any) -> bool:
    if isinstance(value, fx.Node):
        made = g.op_name(value)
        if made in ("aten::zeros_like", "aten::zeros", "aten::new_zeros"):
            return True
        filled = made in ("aten::scalar_tensor", "aten::full", "aten::full_like", "aten::lift_fresh_copy")
        return filled and len(value.args) > 0 and _is_zero(value.args[-1 if made != "aten::full" else 1])
    return isinstance(value, (int, float)) and value == 0


# reductions and products


def _reduction(following: Following, node: fx.Node) -> State:
    """`sum` and `mean`."""
    bound, operand = given(node), node.args[0]
    state = _of(following, operand)
    along = bound.get("dim")
    rank = len(shape_of(operand))  # type: ignore[arg-type]
    dims = range(rank) if along is None or along == [] else [along] if isinstance(along, int) else along
    if isinstance(state, Rows) and state.axis[0] in {dim % max(rank, 1) for dim in dims}:
        mean = g.op_name(node) == "aten::mean"
        return Parts(times(state.powers, frozenset({(Count("rows", state.entry), 1)}), -1) if mean else state.powers)
    return following.by_links(node, linear=True)


def _contraction(following: Following, node: fx.Node) -> State:
    bound = given(node)
    left, right = (node.args[place] for place in PRODUCTS[g.op_name(node)])
    one, other = _of(following, left), _of(following, right)
    added_to = bound.get("bias", bound.get("self") if g.op_name(node) in ("aten::addmm", "aten::baddbmm") else None)
    powers = times(_powers(one), _powers(other))
    if added_to is not None and (powers or isinstance(one, Parts) or isinstance(other, Parts)):
        raise Lost(NOT_LINEAR)
    if isinstance(one, Parts) or isinstance(other, Parts):
        if not (isinstance(one, Whole) or isinstance(other, Whole)):
            raise Lost(NOT_LINEAR)
        return Parts(powers)
    last = len(shape_of(left)) - 1  # type: ignore[arg-type]
    rank = len(shape_of(right))  # type: ignore[arg-type]
    summed = rank - 1 if g.op_name(node) == "aten::linear" else max(rank - 2, 0)
    if isinstance(one, Rows) and isinstance(other, Rows) and one.axis[0] == last and other.axis[0] == summed:
        if one.axis != (last, other.axis[1]) or one.count != other.count or added_to is not None:
            raise Lost(EVERY_OTHER)
        return Parts(powers)
    if isinstance(other, Rows) and g.op_name(node) == "aten::linear" and isinstance(one, Rows):
        raise Lost(EVERY_OTHER)
    return following.by_links(node, powers=powers)


def _einsum(following: Following, node: fx.Node) -> State:
    equation: str = node.args[0].replace(" ", "")  # type: ignore[union-attr]
    operands: Any = node.args[1]
    if "." in equation or "->" not in equation:
        raise Lost(UNKNOWN)
    terms, result = equation.split("->")
    states = [_of(following, one) for one in operands]
    powers = NONE
    for state in states:
        powers = times(powers, _powers(state))
    if any(isinstance(state, Parts) for state in states):
        if sum(not isinstance(state, Whole) for state in states) > 1:
            raise Lost(NOT_LINEAR)
        return Parts(powers)
    rows = [(term[state.axis[0]], state) for term, state in zip(terms.split(","), states) if isinstance(state, Rows)]
    if any(isinstance(state, Numbers) for state in states):
        raise Lost("computes with the numbers of samples")
    if not rows:
        return Made() if any(isinstance(state, Made) for state in states) else Whole(powers)
    letter, found = rows[0]
    for other, state in rows:
        if other != letter or state.axis[1] * state.count != found.axis[1] * found.count or state.count != found.count:
            raise Lost(EVERY_OTHER)
    for term, state, one in zip(terms.split(","), states, operands):
        if isinstance(state, Whole) and letter in term and following._varies(one, term.index(letter)):
            raise Lost(FIXED)
    if letter not in result:
        return Parts(powers)
    return Rows((result.index(letter), found.axis[1]), found.count, found.entry, powers)


# rows that are moved


def _slice(following: Following, node: fx.Node) -> State:
    state, bound = _of(following, node.args[0]), g.bind(node)
    if not isinstance(state, Rows | Numbers) or bound["dim"] % len(shape_of(node)) != state.axis[0]:
        return following.by_links(node, linear=True)
    size, block = shape_of(node.args[0])[state.axis[0]], state.axis[1] * state.count  # type: ignore[arg-type]
    start, stop, step = slice(bound["start"], bound["end"], bound["step"]).indices(size)
    if (start, stop, step) == (0, size, 1):
        return state
    if isinstance(state, Rows) and step == 1 and start % block == 0 and stop % block == 0:
        return state
    raise Lost("takes some of the samples")


def _split(following: Following, node: fx.Node) -> State:
    state, bound = _of(following, node.args[0]), g.bind(node)
    dim = bound.get("dim", 0) % len(shape_of(node.args[0]))  # type: ignore[arg-type]
    if isinstance(state, Rows) and g.op_name(node) != "aten::unbind" and dim == state.axis[0]:
        block = state.axis[1] * state.count
        if any(part.shape[dim] % block for part in node.meta["val"]):
            if state.entry not in following.apart and not state.powers:
                return Made()
            raise Lost("takes samples apart")
        return state
    return following.by_links(node, linear=True)


def _join(following: Following, node: fx.Node) -> State:
    """`cat`: behind each other along another dimension, or whole batches one behind the other."""
    bound = g.bind(node)
    states = [_of(following, one) for one in bound["tensors"] if shape_of(one) != (0,)]
    dim = bound.get("dim", 0) % len(shape_of(node))
    along = [state for state in states if isinstance(state, Rows) and state.axis[0] == dim]
    if not along:
        return following.by_links(node, linear=True)
    first = states[0]
    if any(isinstance(state, Made) for state in states) and all(isinstance(state, Made | Rows) for state in states):
        return along[0]
    if not all(isinstance(s, Rows) and (s.axis, s.count, s.powers) == (first.axis, first.count, first.powers)  # type: ignore[union-attr]
               for s in states):  # fmt: skip
        raise Lost("puts something behind the samples")
    return first


def _index(following: Following, node: fx.Node) -> State:
    """`x[i, j]`: row numbers pick each sample's own."""
    table: Any = node.args[0]
    indices: Any = list(node.args[1])  # type: ignore[arg-type]
    return _looked_up(following, table, indices, shape_of(node), _powers(_of(following, table)))


def _looked_up(following: Following, table: fx.Node, indices: list[Any], out: tuple[int, ...], powers: Powers) -> State:
    """The state of what indices pick from a table; of rows picked by the numbers of their samples, each its own."""
    state = _of(following, table)
    used = [(place, one) for place, one in enumerate(indices) if one is not None]
    rank = max(len(shape_of(one)) for _, one in used)
    places = [place for place, _ in used]
    front = places != list(range(places[0], places[0] + len(places)))
    begin = 0 if front else places[0]
    by: Any = None
    for _, one in used:
        own = _of(following, one)
        if isinstance(own, Parts):
            raise Lost(UNKNOWN)
        if isinstance(own, Rows | Numbers):
            axis = (own.axis[0] + rank - len(shape_of(one)) + begin, own.axis[1])
            if by is not None and (by.axis != axis or by.count != own.count):
                raise Lost(EVERY_OTHER)
            by = replace(own, axis=axis)
    numbered = [place for place, one in used if isinstance(_of(following, one), Numbers)]
    made = any(isinstance(_of(following, one), Made) for _, one in used)
    if isinstance(state, Parts):
        if by is not None or made:
            raise Lost(NOT_LINEAR)
        return Parts(powers)
    if isinstance(state, Numbers):
        raise Lost("computes with the numbers of samples")
    if not isinstance(state, Rows):
        if numbered:
            raise Lost("looks samples up by their number in what is the same for every batch")
        if isinstance(by, Rows):
            return replace(by, powers=powers)
        return Made() if made or isinstance(state, Made) else Whole(powers)
    place, inner = state.axis
    if place >= len(indices) or indices[place] is None:
        if by is not None:
            raise Lost(EVERY_OTHER)
        behind = place - sum(p < place for p in places) + (rank if front or places[0] < place else 0)
        return replace(state, axis=(behind, inner))
    row = _of(following, indices[place])
    if isinstance(row, Made):
        if isinstance(by, Rows):
            return replace(by, powers=powers)
        return Rows((begin, _inner(out[begin], state.count)), state.count, state.entry, powers)
    if not isinstance(row, Numbers) or numbered != [place] or not _outermost_of(following, table, state):
        raise Lost("picks some of the samples")
    if row.step * row.count != inner * state.count or row.count != state.count:
        raise Lost("picks some of the samples")
    return Rows(by.axis, row.count, row.entry, powers)


def _inner(size: int, count: int) -> int:
    return size // count if size % count == 0 else 1


def _outermost_of(following: Following, table: fx.Node, state: Rows) -> bool:
    return shape_of(table)[state.axis[0]] == state.axis[1] * state.count


def _index_select(following: Following, node: fx.Node) -> State:
    table, dim, index = node.args[:3]
    dim = dim % max(len(shape_of(table)), 1)  # type: ignore[operator, arg-type]
    return _looked_up(following, table, [None] * dim + [index], shape_of(node), _powers(_of(following, table)))  # type: ignore[arg-type]


def _embedding(following: Following, node: fx.Node) -> State:
    table, index = node.args[:2]
    return _looked_up(following, table, [index], shape_of(node), _powers(_of(following, table)))  # type: ignore[arg-type]


def _index_put(following: Following, node: fx.Node) -> State:
    """Written to each sample's own places."""
    table, values = node.args[0], node.args[2]
    indices: Any = node.args[1]
    state, value = _of(following, table), _of(following, values)
    if not isinstance(state, Rows | Made) or _powers(state) or _powers(value) or isinstance(value, Parts):
        raise Lost(UNKNOWN)
    if isinstance(state, Made):
        return state
    picked = Made() if any(isinstance(_of(following, one), Made) for one in indices if one is not None) else None
    if picked is not None:
        return state
    shape = torch.empty(shape_of(table), device="meta")[  # type: ignore[arg-type]
        tuple(slice(None) if one is None else torch.empty(shape_of(one), dtype=torch.int64, device="meta")
              for one in indices)
    ].shape  # fmt: skip
    written = _looked_up(following, table, list(indices), tuple(shape), NONE)  # type: ignore[arg-type]
    if isinstance(value, Rows) and isinstance(written, Rows):
        own = value.axis[0] + len(shape) - len(shape_of(values))  # type: ignore[arg-type]
        if (own, value.axis[1]) != written.axis:
            raise Lost(EVERY_OTHER)
    elif value != Whole():
        raise Lost(UNKNOWN)
    elif isinstance(written, Rows):
        own = written.axis[0] - len(shape) + len(shape_of(values))  # type: ignore[arg-type]
        if own >= 0 and following._varies(values, own):  # type: ignore[arg-type]
            raise Lost(FIXED)
    return state


def _scatter_in_order(following: Following, node: fx.Node) -> State:
    """`masked_scatter`: rows go to places in the order of samples. How many each sample has is checked before the
    step (csc.placeholders).
    """
    whole, mask, source = node.args[:3]
    of_source = _of(following, source)
    if isinstance(of_source, Rows) and not following.outermost(source, of_source):  # type: ignore[arg-type]
        raise Lost("takes rows in another order than that of samples")
    if not isinstance(of_source, Rows | Made | Mixed):
        raise Lost("puts rows that are the same for every batch where samples have places, one behind the other")
    if _powers(of_source) or _powers(_of(following, whole)):
        raise Lost(NOT_LINEAR)
    placed = [(one, _of(following, one)) for one in (whole, mask)]
    result: Any = None
    for one, state in placed:
        if isinstance(state, Rows):
            shift = len(shape_of(node)) - len(shape_of(one))  # type: ignore[arg-type]
            moved = replace(state, axis=(state.axis[0] + shift, state.axis[1]))
            result = moved if result is None else following.together(result, moved)
        elif not isinstance(state, Whole | Made):
            raise Lost(UNKNOWN)
    if result is None:
        return Made()
    if not following.outermost(node, result):
        raise Lost("takes rows in another order than that of samples")
    return result


def _repeat_each(following: Following, node: fx.Node) -> State:
    """`repeat_interleave`: each row of a sample stays in it."""
    bound = given(node)
    state, repeats, dim = _of(following, bound["self"]), bound.get("repeats"), bound.get("dim")
    if isinstance(state, Whole) and _of(following, repeats) == Whole():
        return state
    if isinstance(_of(following, repeats), Made):
        if not isinstance(state, Rows):
            return Made()
        return replace(state, axis=(state.axis[0], _inner(shape_of(node)[state.axis[0]], state.count)))
    if not isinstance(state, Rows) or not isinstance(repeats, int) or (dim is None and state.axis[0]):
        raise Lost(UNKNOWN)
    if dim is None:
        return replace(state, axis=(0, prod(shape_of(node)) // state.count))
    if dim % len(shape_of(node)) == state.axis[0]:
        return replace(state, axis=(state.axis[0], state.axis[1] * repeats))
    return state


def _same_dims(following: Following, node: fx.Node) -> State:
    """Works along one dimension of two operands that have the same ones."""
    bound = g.bind(node)
    dim = bound["dim"] % len(shape_of(node))
    found: Any = None
    for used in node.all_input_nodes:
        state = _of(following, used)
        shift = 1 if g.op_name(node) == "aten::select_scatter" and used is node.args[1] else 0
        if isinstance(state, Rows):
            own = state.axis[0] + (shift if state.axis[0] >= dim else 0)
            if own == dim:
                raise Lost(ALONG_SAMPLES)
            moved = replace(state, axis=(own, state.axis[1]))
            found = moved if found is None else following.together(found, moved)
        elif state != Whole() and not isinstance(state, Made):
            raise Lost(UNKNOWN)
    return found if found is not None else Made()


def _order(following: Following, node: fx.Node) -> State:
    """`argsort`: of a mask, those that it has first, each as they were."""
    mask: Any = node.args[0]
    state = _of(following, mask)
    if isinstance(state, Rows) and state.axis[0] == g.bind(node).get("dim", -1) % len(shape_of(mask)):
        stable = g.bind(node).get("stable") and mask.meta["val"].dtype is torch.bool
        if not stable or len(shape_of(mask)) != 1 or not following.outermost(mask, state):
            raise Lost("sorts samples")
    return following.by_links(node)


def _overwritten(following: Following, node: fx.Node) -> State:
    """`slice_scatter` over all samples: those of the other operand."""
    table, other = node.args[:2]
    states, dim = (_of(following, table), _of(following, other)), g.bind(node).get("dim", 0) % len(shape_of(node))
    same = shape_of(table) == shape_of(other)  # type: ignore[arg-type]
    along = any(isinstance(state, Rows) and state.axis[0] == dim for state in states)
    if along and same and all(state in (states[1], Whole()) or isinstance(state, Rows) for state in states):
        return states[1] if isinstance(states[1], Rows) else following.by_links(node)
    return following.by_links(node)


def _typed(following: Following, node: fx.Node) -> State:
    """`type_as`: the second operand is looked at for its type alone."""
    state = _of(following, node.args[0])
    if _powers(state) or isinstance(state, Parts):
        raise Lost(NOT_LINEAR)
    return state


# layers


def _attention(following: Following, node: fx.Node) -> State:
    """Samples apart; those packed in one sequence are kept apart by a mask that the model's own code made of them."""
    bound = g.bind(node)
    query, mask = _of(following, bound["query"]), _of(following, bound.get("attn_mask"))
    along = len(shape_of(node)) - 2
    if isinstance(query, Rows) and query.axis[0] == along and isinstance(mask, Made):
        if any(_of(following, bound[which]) != query for which in ("key", "value")):
            raise Lost(EVERY_OTHER)
        return query
    return following.by_links(node)


def _batch_norm(following: Following, node: fx.Node) -> State:
    bound = g.bind(node)
    state = _of(following, bound["input"])
    if bound.get("training", bound.get("use_input_stats")) or bound.get("running_mean") is None:
        raise Lost("normalises by statistics of all samples")
    if not isinstance(state, Rows) or state.axis[0] == 1 or state.powers:
        raise Lost(UNKNOWN)
    return state


def _item(following: Following, node: fx.Node) -> State:
    """One of several results; of tensors that were broadcast together, each is its own operand."""
    several: Any = node.args[0]
    if g.op_name(several) != "aten::broadcast_tensors":
        return _of(following, several)
    operand: fx.Node = several.args[0][node.args[1]]
    state = _of(following, operand)
    if isinstance(state, Rows | Numbers):
        return replace(state, axis=(state.axis[0] + len(shape_of(node)) - len(shape_of(operand)), state.axis[1]))
    return state


def _broadcast(following: Following, node: fx.Node) -> State:
    """Looked at one by one, as its results are taken."""
    return Made()


_BINARY = {"mul": _number(1), "truediv": _number(-1), "floordiv": _number(-1), "add": _number_sum, "sub": _number_sum,
           "sym_float": _same_number, "int": _same_number, "sym_int": _same_number, "neg": _same_number}  # fmt: skip
_FILLED = ("full", "zeros", "ones", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full", "new_empty",
           "scalar_tensor")  # fmt: skip
_LINEAR = ("view", "_unsafe_view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze", "select", "alias",
           "detach", "clone", "contiguous", "lift_fresh_copy", "neg", "unbind", "stack", "dropout", "diagonal",
           "flip", "pad", "constant_pad_nd")  # fmt: skip

RULES: dict[str, Rule] = {
    **_BINARY,
    **{f"aten::{name}": _filled for name in _FILLED},
    **{f"aten::{name}": _linear for name in _LINEAR},
    **dict.fromkeys(PRODUCTS, _contraction),
    **LOSS_RULES,
    "aten::sym_size": _size,
    "aten::arange": _range,
    "aten::expand": _expand,
    "aten::repeat": _expand,
    "aten::mul": _product(1),
    "aten::div": _product(-1),
    "aten::add": _sum,
    "aten::sub": _sum,
    "aten::rsub": _sum,
    "aten::pow": _power,
    "aten::reciprocal": _power,
    "aten::clamp": _clamp,
    "aten::clamp_min": _clamp,
    "aten::_to_copy": _cast,
    "aten::to": _cast,
    "aten::where": _choice,
    "aten::masked_fill": _choice,
    "aten::sum": _reduction,
    "aten::mean": _reduction,
    "aten::einsum": _einsum,
    "aten::slice": _slice,
    "aten::split": _split,
    "aten::split_with_sizes": _split,
    "aten::chunk": _split,
    "aten::cat": _join,
    "aten::index": _index,
    "aten::index_select": _index_select,
    "aten::embedding": _embedding,
    "aten::index_put": _index_put,
    "aten::masked_scatter": _scatter_in_order,
    "aten::repeat_interleave": _repeat_each,
    "aten::select_scatter": _same_dims,
    "aten::scaled_dot_product_attention": _attention,
    "aten::batch_norm": _batch_norm,
    "aten::argsort": _order,
    "aten::slice_scatter": _overwritten,
    "aten::type_as": _typed,
    "aten::broadcast_tensors": _broadcast,
    "getitem": _item,
}
