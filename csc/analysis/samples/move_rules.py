"""Rules of calls that move rows, for following samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from csc.analysis.operators.execution import is_view
from csc.analysis.operators.table import CASTS, COPIES, Use, look_up, shape_of
from csc.analysis.samples.operands import of, powers_of, uses_of
from csc.analysis.samples.propagation import SamplePropagation
from csc.analysis.samples.states import (
    EVERY_OTHER,
    FIXED,
    NONE,
    NOT_LINEAR,
    OF_OTHERS,
    UNKNOWN,
    Lost,
    Mixed,
    NewTensor,
    PartsOfSum,
    Powers,
    RowNumbers,
    SampleRows,
    State,
    Whole,
)
from csc.analysis.sized import given
from csc.ir import graph as g


def slice_rule(following: SamplePropagation, node: fx.Node) -> State:
    state, bound, (use,) = of(following, node.args[0]), g.bind(node), uses_of(node)
    if not isinstance(state, SampleRows | RowNumbers) or state.axis[0] not in use.ends:
        return following.by_links(node, linear=True)
    size, block = shape_of(node.args[0])[state.axis[0]], state.axis[1] * state.count
    start, stop, step = slice(bound["start"], bound["end"], bound["step"]).indices(size)
    if (start, stop, step) == (0, size, 1):
        return state
    if isinstance(state, SampleRows) and step == 1 and start % block == 0 and stop % block == 0:
        return state
    raise Lost("takes some of the samples")


def split_rule(following: SamplePropagation, node: fx.Node) -> State:
    state, (use,) = of(following, node.args[0]), uses_of(node)
    if isinstance(state, SampleRows) and state.axis[0] in use.ends:
        dim = state.axis[0]
        block = state.axis[1] * state.count
        if any(part.shape[dim] % block for part in node.meta["val"]):
            if state.entry not in following.apart and not state.powers:
                return NewTensor()
            raise Lost("takes samples apart")
        return state
    return following.by_links(node, linear=True)


def join_rule(following: SamplePropagation, node: fx.Node) -> State:
    """`cat`: behind each other along another dimension, or whole batches one behind the other."""
    bound = g.bind(node)
    states = [of(following, one) for one in bound["tensors"] if shape_of(one) != (0,)]
    dim = bound.get("dim", 0) % len(shape_of(node))
    along = [state for state in states if isinstance(state, SampleRows) and state.axis[0] == dim]
    if not along:
        return following.by_links(node, linear=True)
    first = states[0]
    if any(isinstance(state, NewTensor) for state in states) and all(
        isinstance(state, NewTensor | SampleRows) for state in states
    ):
        return along[0]
    if not all(isinstance(s, SampleRows) and (s.axis, s.count, s.powers) == (first.axis, first.count, first.powers)  # type: ignore[union-attr]
               for s in states):  # fmt: skip
        raise Lost("puts something behind the samples")
    return first


def look_up_rule(following: SamplePropagation, node: fx.Node) -> State:
    """`x[i, j]`, `index_select`, `embedding`: row numbers pick each sample's own."""
    return _looked_up(following, uses_of(node), shape_of(node), powers_of(of(following, uses_of(node)[0].node)))


def _looked_up(following: SamplePropagation, uses: Sequence[Use], out: tuple[int, ...], powers: Powers) -> State:
    """The state of what indices pick from a table; of rows picked by the numbers of their samples, each its own.

    uses: of the table, and of the indices by the places that they index.
    """
    table, *indices = uses
    state = of(following, table.node)
    by: Any = None
    for one in indices:
        own = of(following, one.node)
        if isinstance(own, PartsOfSum):
            raise Lost(UNKNOWN)
        if isinstance(own, SampleRows | RowNumbers):
            if own.axis[0] not in one.link:
                raise Lost(UNKNOWN)
            axis = (one.link.index(own.axis[0]), own.axis[1])
            if by is not None and (by.axis != axis or by.count != own.count):
                raise Lost(EVERY_OTHER)
            by = replace(own, axis=axis)
    picked = {place: of(following, one.node) for place, one in zip(table.ends, indices)}
    numbered = [place for place, one in picked.items() if isinstance(one, RowNumbers)]
    made = NewTensor() in picked.values()
    if isinstance(state, PartsOfSum):
        if by is not None or made:
            raise Lost(NOT_LINEAR)
        return PartsOfSum(powers)
    if isinstance(state, RowNumbers):
        raise Lost("computes with the numbers of samples")
    if not isinstance(state, SampleRows):
        if numbered:
            raise Lost("looks samples up by their number in what is the same for every batch")
        if isinstance(by, SampleRows):
            return replace(by, powers=powers)
        return NewTensor() if made or isinstance(state, NewTensor) else Whole(powers)
    place, inner = state.axis
    if place not in picked:
        if by is not None:
            raise Lost(EVERY_OTHER)
        return replace(state, axis=(table.link.index(place), inner))
    row = picked[place]
    if isinstance(row, NewTensor):
        if isinstance(by, SampleRows):
            return replace(by, powers=powers)
        begin = table.link.index(None)
        others = out[begin] != shape_of(table.node)[place]  # rows of their own number, not the same in another order
        entry = _made_entry(next(one.node for end, one in zip(table.ends, indices) if end == place))
        return SampleRows(
            (begin, _inner(out[begin], state.count)), state.count, entry if others else state.entry, powers
        )
    outermost = shape_of(table.node)[place] == inner * state.count
    if not isinstance(row, RowNumbers) or numbered != [place] or not outermost:
        raise Lost("picks some of the samples")
    if row.step * row.count != inner * state.count or row.count != state.count:
        raise Lost("picks some of the samples")
    if not row.is_own:
        raise Lost(OF_OTHERS)
    return SampleRows(by.axis, row.count, row.entry, powers)


def _made_entry(numbers: fx.Node) -> str:
    """The entry, made by the model's code, that has as many rows as there are of these numbers; "": none is known."""
    many = shape_of(numbers)[:1]
    while numbers.op == "call_function" and (is_view(numbers) or g.op_name(numbers) in COPIES | CASTS):
        numbers = numbers.args[0]  # type: ignore[assignment]
        if shape_of(numbers)[:1] != many:
            return ""
    return numbers.meta["role"][1] if numbers.op == "placeholder" and numbers.meta["role"][0] == "input" else ""


def _inner(size: int, count: int) -> int:
    return size // count if size % count == 0 else 1


def index_put_rule(following: SamplePropagation, node: fx.Node) -> State:
    """Written to each sample's own places."""
    table, values = node.args[0], node.args[2]
    indices: Any = node.args[1]
    state, value = of(following, table), of(following, values)
    if (
        not isinstance(state, SampleRows | NewTensor)
        or powers_of(state)
        or powers_of(value)
        or isinstance(value, PartsOfSum)
    ):
        raise Lost(UNKNOWN)
    if isinstance(state, NewTensor):
        return state
    picked = (
        NewTensor() if any(isinstance(of(following, one), NewTensor) for one in indices if one is not None) else None
    )
    if picked is not None:
        return state
    shape = torch.empty(shape_of(table), device="meta")[
        tuple(slice(None) if one is None else torch.empty(shape_of(one), dtype=torch.int64, device="meta")
              for one in indices)
    ].shape  # fmt: skip
    written = _looked_up(following, look_up(table, indices, tuple(shape)), tuple(shape), NONE)  # type: ignore[arg-type]
    if isinstance(value, SampleRows) and isinstance(written, SampleRows):
        own = value.axis[0] + len(shape) - len(shape_of(values))
        if (own, value.axis[1]) != written.axis:
            raise Lost(EVERY_OTHER)
    elif value != Whole():
        raise Lost(UNKNOWN)
    elif isinstance(written, SampleRows):
        own = written.axis[0] - len(shape) + len(shape_of(values))
        if own >= 0 and following._varies(values, own):  # type: ignore[arg-type]
            raise Lost(FIXED)
    return state


def scatter_in_order_rule(following: SamplePropagation, node: fx.Node) -> State:
    """`masked_scatter`: rows go to places in the order of samples. How many each sample has is checked before the
    step (csc.analysis.token_counts).
    """
    whole, mask, source = node.args[:3]
    of_source = of(following, source)
    if isinstance(of_source, SampleRows) and not following.outermost(source, of_source):  # type: ignore[arg-type]
        raise Lost("takes rows in another order than that of samples")
    if not isinstance(of_source, SampleRows | NewTensor | Mixed):
        raise Lost("puts rows that are the same for every batch where samples have places, one behind the other")
    if powers_of(of_source) or powers_of(of(following, whole)):
        raise Lost(NOT_LINEAR)
    placed = [(one, of(following, one)) for one in (whole, mask)]
    result: Any = None
    for one, state in placed:
        if isinstance(state, SampleRows):
            shift = len(shape_of(node)) - len(shape_of(one))
            moved = replace(state, axis=(state.axis[0] + shift, state.axis[1]))
            result = moved if result is None else following.together(result, moved)
        elif not isinstance(state, Whole | NewTensor):
            raise Lost(UNKNOWN)
    if result is None:
        return NewTensor()
    if not following.outermost(node, result):
        raise Lost("takes rows in another order than that of samples")
    return result


def repeat_each_rule(following: SamplePropagation, node: fx.Node) -> State:
    """`repeat_interleave`: each row of a sample stays in it."""
    bound = given(node)
    state, repeats, dim = of(following, bound["self"]), bound.get("repeats"), bound.get("dim")
    if isinstance(state, Whole) and of(following, repeats) == Whole():
        return state
    if isinstance(of(following, repeats), NewTensor):
        if not isinstance(state, SampleRows):
            return NewTensor()
        return replace(state, axis=(state.axis[0], _inner(shape_of(node)[state.axis[0]], state.count)))
    if not isinstance(state, SampleRows) or not isinstance(repeats, int) or (dim is None and state.axis[0]):
        raise Lost(UNKNOWN)
    if dim is None:
        return replace(state, axis=(0, prod(shape_of(node)) // state.count))
    if dim % len(shape_of(node)) == state.axis[0]:
        return replace(state, axis=(state.axis[0], state.axis[1] * repeats))
    return state


def order_rule(following: SamplePropagation, node: fx.Node) -> State:
    """`argsort`: of a mask, those that it has first, each as they were."""
    mask: Any = node.args[0]
    state = of(following, mask)
    if isinstance(state, SampleRows) and state.axis[0] == g.bind(node).get("dim", -1) % len(shape_of(mask)):
        stable = g.bind(node).get("stable") and mask.meta["val"].dtype is torch.bool
        if not stable or len(shape_of(mask)) != 1 or not following.outermost(mask, state):
            raise Lost("sorts samples")
    return following.by_links(node)


def overwritten_rule(following: SamplePropagation, node: fx.Node) -> State:
    """`slice_scatter` over all samples: those of the other operand."""
    table, other = node.args[:2]
    states, dim = (of(following, table), of(following, other)), g.bind(node).get("dim", 0) % len(shape_of(node))
    same = shape_of(table) == shape_of(other)
    along = any(isinstance(state, SampleRows) and state.axis[0] == dim for state in states)
    if along and same and all(state in (states[1], Whole()) or isinstance(state, SampleRows) for state in states):
        return states[1] if isinstance(states[1], SampleRows) else following.by_links(node)
    return following.by_links(node)


def typed_rule(following: SamplePropagation, node: fx.Node) -> State:
    """`type_as`: the second operand is looked at for its type alone."""
    state = of(following, node.args[0])
    if powers_of(state) or isinstance(state, PartsOfSum):
        raise Lost(NOT_LINEAR)
    return state
