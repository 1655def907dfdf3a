"""Rules of single operations for following samples, where the table of links does not say all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from csc.analysis.operators.execution import is_view
from csc.analysis.operators.table import (
    BATCH_NORMS,
    CASTS,
    CLASSES,
    COPIES,
    ELEMENTS,
    EXACT_COPIES,
    LABELS,
    LINEAR,
    LOOK_UPS,
    MADE,
    PRODUCTS,
    RECURRENT,
    SAMPLES,
    SEQUENCES,
    Use,
    filled_with,
    look_up,
    shape_of,
)
from csc.analysis.samples import arithmetic_rules as arithmetic
from csc.analysis.samples.propagation import (
    ALONG_SAMPLES,
    BY_NUMBER,
    EVERY_OTHER,
    FIXED,
    NONE,
    NOT_LINEAR,
    OF_OTHERS,
    SEARCHES,
    STATISTIC,
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
    Whole,
    number_of,
    of,
    powers_of,
    rows_of,
    times,
    uses_of,
)
from csc.analysis.symbolic import given
from csc.ir import graph as g
from csc.ir.program import speaks_of_beginnings

# --- Rules of layers and of calls with several results, for following samples ----------------------------------------


def attention_rule(following: SamplePropagation, node: fx.Node) -> State:
    """Samples apart; those packed in one sequence are kept apart by a mask that the model's own code made of them."""
    bound = g.bind(node)
    query, mask = of(following, bound["query"]), of(following, bound.get("attn_mask"))
    along = len(shape_of(node)) - 2
    if isinstance(query, SampleRows) and query.axis[0] == along and isinstance(mask, NewTensor):
        if any(of(following, bound[which]) != query for which in ("key", "value")):
            raise Lost(EVERY_OTHER)
        return query
    return following.by_links(node)


def batch_norm_rule(following: SamplePropagation, node: fx.Node) -> State:
    """By running statistics samples stay apart."""
    bound = g.bind(node)
    state = of(following, bound["input"])
    if bound.get("training") or bound.get("running_mean") is None:
        raise Lost("normalises by statistics of all samples")
    if any(of(following, operand) != Whole() for operand in node.all_input_nodes if operand is not bound["input"]):
        raise Lost(EVERY_OTHER)
    if not isinstance(state, SampleRows) or state.axis[0] == 1 or state.powers:
        raise Lost(UNKNOWN)
    return state


def recurrent_rule(following: SamplePropagation, node: fx.Node) -> State:
    """Each sample has a state of its own, which starts as zeros or as rows of samples."""
    bound = g.bind(node)
    if "batch_sizes" in bound or "input" not in bound:
        raise Lost(UNKNOWN)
    state, along = of(following, bound["input"]), 0 if bound["batch_first"] else 1
    if not isinstance(state, SampleRows) or state.axis != (along, 1) or state.powers:
        raise Lost(UNKNOWN)
    starts: Any = bound["hx"]
    for start in starts if isinstance(starts, (list, tuple)) else [starts]:
        start_state = of(following, start)
        if start_state != replace(state, axis=(1, 1)):
            raise Lost(UNKNOWN)
    if any(of(following, weight) != Whole() for weight in bound["params"]):
        raise Lost(EVERY_OTHER)
    return state


def item_rule(following: SamplePropagation, node: fx.Node) -> State:
    """One of several results; of tensors that were broadcast together each is its own operand, and so are the outputs
    of a function with a backward of its own.
    """
    several: Any = node.args[0]
    if g.op_name(several) == "csc::own_gradient":
        return of(following, several.args[0][node.args[1]])
    if g.op_name(several) in RECURRENT and node.args[1]:
        state = of(following, several)  # what every layer ends with: [layers, samples, width]
        return replace(state, axis=(1, 1)) if isinstance(state, SampleRows) else state
    if g.op_name(several) != "aten::broadcast_tensors":
        return of(following, several)
    operand: fx.Node = several.args[0][node.args[1]]
    state = of(following, operand)
    if isinstance(state, SampleRows | RowNumbers):
        return replace(state, axis=(state.axis[0] + len(shape_of(node)) - len(shape_of(operand)), state.axis[1]))
    return state


def broadcast_rule(following: SamplePropagation, node: fx.Node) -> State:
    """Looked at one by one, as its results are taken."""
    return NewTensor()


# --- Rules of loss functions for following samples: what they are a sum of, and what it is divided by ----------------


UNREDUCED, MEAN, SUM = 0, 1, 2  # values of ATen's `reduction` argument


def _labels(following: SamplePropagation, node: fx.Node) -> State:
    """Cross entropy: a mean over the labels that are not ignored, or over their weights."""
    bound = g.bind(node)
    logits, target, weight = bound["self"], bound["target"], bound.get("weight")
    state, target_state = following.states[logits], following.states[target]
    if not isinstance(state, SampleRows) or not isinstance(target_state, SampleRows | NewTensor):
        raise Lost(UNKNOWN if isinstance(state, SampleRows | NewTensor) else NOT_LINEAR)
    if isinstance(weight, fx.Node) and following.states[weight] != Whole():
        raise Lost("weighs classes by values of the batch")
    rows = replace(state, axis=_walked(following, node).axis)
    if bound["reduction"] != MEAN or target.meta["val"].dtype.is_floating_point:
        return _reduced(bound["reduction"], rows)
    if any(operand not in following.of_batch for operand in (target, weight) if isinstance(operand, fx.Node)):
        raise Lost("is a mean over labels that are not known from the batch alone")
    return PartsOfSum(frozenset({(Count("labels", node.name), -1)}))


def _walked(following: SamplePropagation, node: fx.Node) -> SampleRows:
    """The samples of all operands, which the loss must walk along together; the axis is that of its terms."""
    combined: Any = None
    uses = uses_of(node)
    for use in uses:
        state = following.states[use.node]
        if isinstance(state, SampleRows):
            walk: Any = use.ends[state.axis[0]].walk
            if walk is None or walk == CLASSES:
                raise Lost(ALONG_SAMPLES)
            if state.powers:
                raise Lost(NOT_LINEAR)
            moved = replace(state, axis=(walk, state.axis[1]))
            combined = moved if combined is None else following.together(combined, moved)
        elif not isinstance(state, NewTensor) and state != Whole():
            raise Lost(NOT_LINEAR)
    if combined is None:
        raise Lost(UNKNOWN)
    for use in uses:
        along = [dim for dim, end in use.ends.items() if end.walk == combined.axis[0]]
        if isinstance(following.states[use.node], NewTensor) and not any(shape_of(use.node)[dim] > 1 for dim in along):
            raise Lost(STATISTIC)
        if following.states[use.node] == Whole() and any(following._varies(use.node, dim) for dim in along):
            raise Lost(EVERY_OTHER)
    return combined


def _terms(following: SamplePropagation, node: fx.Node) -> State:
    """A term for each pair of entries, each sample, or each sequence."""
    return _reduced(g.bind(node)["reduction"], _walked(following, node))


def _reduced(reduction: int, rows: SampleRows) -> State:
    if reduction == MEAN:
        return PartsOfSum(frozenset({(rows_of(rows.entry), -1)}))
    return rows if reduction == UNREDUCED else PartsOfSum()


LOSS_RULES: dict[str, Callable[[SamplePropagation, fx.Node], State]] = {
    **dict.fromkeys(LABELS, _labels),
    **dict.fromkeys((*ELEMENTS, *SAMPLES, *SEQUENCES), _terms),
}


# --- Rules of calls that move rows, for following samples ------------------------------------------------------------


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
    once = isinstance(state, SampleRows) and not state.powers and (start, stop, step) == (0, 1, 1)
    if once and _is_repeated(following, node.args[0]):
        return Whole()
    raise Lost("takes some of the samples")


def _is_repeated(following: SamplePropagation, node: Any) -> bool:
    """Whether each sample has the same, which was there once before."""
    return g.op_name(node) == "aten::expand" and of(following, node.args[0]) == Whole()


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
    states = [of(following, tensor) for tensor in bound["tensors"] if shape_of(tensor) != (0,)]
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
    for use in indices:
        index_state = of(following, use.node)
        if isinstance(index_state, PartsOfSum):
            raise Lost(UNKNOWN)
        if isinstance(index_state, SampleRows | RowNumbers):
            if index_state.axis[0] not in use.link:
                raise Lost(UNKNOWN)
            axis = (use.link.index(index_state.axis[0]), index_state.axis[1])
            if by is not None and (by.axis != axis or by.count != index_state.count):
                raise Lost(EVERY_OTHER)
            by = replace(index_state, axis=axis)
    picked = {place: of(following, use.node) for place, use in zip(table.ends, indices)}
    numbered = [place for place, state in picked.items() if isinstance(state, RowNumbers)]
    of_made = NewTensor() in picked.values()
    if isinstance(state, PartsOfSum):
        if by is not None or of_made:
            raise Lost(NOT_LINEAR)
        return PartsOfSum(powers)
    if isinstance(state, RowNumbers):
        raise Lost("computes with the numbers of samples")
    if not isinstance(state, SampleRows):
        if numbered:
            raise Lost("looks samples up by their number in what is the same for every batch")
        if isinstance(by, SampleRows) and isinstance(state, NewTensor):
            raise Lost(STATISTIC)
        if isinstance(by, SampleRows):
            return replace(by, powers=powers)
        return NewTensor() if of_made or isinstance(state, NewTensor) else Whole(powers)
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
        own_number = (
            out[begin] != shape_of(table.node)[place]
        )  # rows of their own number, not the same in another order
        entry = _made_entry(next(use.node for end, use in zip(table.ends, indices) if end == place))
        return SampleRows(
            (begin, _inner(out[begin], state.count)), state.count, entry if own_number else state.entry, powers
        )
    outermost = shape_of(table.node)[place] == inner * state.count
    if not isinstance(row, RowNumbers) or numbered != [place] or not outermost:
        raise Lost("picks some of the samples")
    fits = row.step * row.count == inner * state.count and row.count == state.count
    if row.sequences:  # of which each sample has as many as it has rows here
        fits = row.step == inner == 1
    if not fits:
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
        NewTensor()
        if any(isinstance(of(following, index), NewTensor) for index in indices if index is not None)
        else None
    )
    if picked is not None:
        return state
    shape = torch.empty(shape_of(table), device="meta")[
        tuple(slice(None) if index is None else torch.empty(shape_of(index), dtype=torch.int64, device="meta")
              for index in indices)
    ].shape  # fmt: skip
    written = _looked_up(following, look_up(table, indices, tuple(shape)), tuple(shape), NONE)  # type: ignore[arg-type]
    if isinstance(value, SampleRows) and isinstance(written, SampleRows):
        axis = value.axis[0] + len(shape) - len(shape_of(values))
        if (axis, value.axis[1]) != written.axis:
            raise Lost(EVERY_OTHER)
    elif value != Whole():
        raise Lost(UNKNOWN)
    elif isinstance(written, SampleRows):
        axis = written.axis[0] - len(shape) + len(shape_of(values))
        if axis >= 0 and following._varies(values, axis):  # type: ignore[arg-type]
            raise Lost(FIXED)
    return state


def scatter_in_order_rule(following: SamplePropagation, node: fx.Node) -> State:
    """`masked_scatter`: rows go to places in the order of samples. How many each sample has is checked before the
    step (csc.analysis.batch_limits).
    """
    whole, mask, source = node.args[:3]
    of_source = of(following, source)
    if isinstance(of_source, SampleRows) and not following.outermost(source, of_source):  # type: ignore[arg-type]
        raise Lost("takes rows in another order than that of samples")
    if not isinstance(of_source, SampleRows | NewTensor | Mixed):
        raise Lost("puts rows that are the same for every batch where samples have places, one behind the other")
    if powers_of(of_source) or powers_of(of(following, whole)):
        raise Lost(NOT_LINEAR)
    placed = [(tensor, of(following, tensor)) for tensor in (whole, mask)]
    result: Any = None
    for tensor, state in placed:
        if isinstance(state, SampleRows):
            shift = len(shape_of(node)) - len(shape_of(tensor))
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


# --- Rules of reductions and products, for following samples ---------------------------------------------------------


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
    rows = [
        (use.ends.get(state.axis[0]), state) for use, state in zip(factors, states) if isinstance(state, SampleRows)
    ]
    walks = {None if end is None else end.walk for end, _ in rows}
    if not rows or None in walks:
        return False
    if len(walks) > 1 or len({(state.axis[1], state.count) for _, state in rows}) > 1:
        raise Lost(EVERY_OTHER)
    for use, state in zip(factors, states):
        along = [dim for dim, end in use.ends.items() if end.walk in walks]
        if isinstance(state, Whole) and any(following._varies(use.node, dim) for dim in along):
            raise Lost(FIXED)
    return True


# --- Rules of whole numbers and of tensors made in a size, for following samples -------------------------------------


Rule = Callable[[SamplePropagation, fx.Node], State]


def size_rule(following: SamplePropagation, node: fx.Node) -> State:
    """Of a dimension, or of all of them: how many numbers a tensor has."""
    operand, *dim = node.args
    state = of(following, operand)
    if isinstance(state, Mixed):
        return state
    counted = [size % len(shape_of(operand)) for size in dim] or range(len(shape_of(operand)))  # type: ignore[operator]
    if isinstance(state, SampleRows | RowNumbers) and state.axis[0] in counted:
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
    """Twice a number of samples, as `cat` of two views has them, is one too."""
    states = [of(following, value) for value in node.meta["given"][0]]
    if any(isinstance(state, NewTensor) for state in states):
        return NewTensor()
    powers = {state.powers for state in states if isinstance(state, Whole)}
    rows = [_rows_counted(following, count) for count in powers]
    alike = len(powers) == 1 or (g.op_name(node) == "add" and None not in rows and len(set(rows)) == 1)
    if not alike or not all(isinstance(s, Whole) for s in states):
        raise Lost("adds something to a number of samples")
    return states[0]


def _rows_counted(following: SamplePropagation, powers: Powers) -> int | None:
    """How many rows of an entry a number counts, once or several times over; None for another number."""
    if len(powers) != 1:
        return None
    ((count, power),) = powers
    entries = [
        entry for entry in following.entries.values() if isinstance(entry, SampleRows) and entry.entry == count.name
    ]
    return entries[0].count if entries and count.kind == "rows" and count.plain and power == 1 else None


def same_number_rule(following: SamplePropagation, node: fx.Node) -> State:
    return of(following, node.meta["given"][0][0])


def _axis_of_sizes(following: SamplePropagation, sizes: Any) -> tuple[int, int, int, str] | None:
    """(dim, inner, count, entry) of the dimension that a number of samples gives a size. Lost if there are two: rows of
    samples have one such dimension.
    """
    axis = None
    for dim, size in enumerate(sizes if isinstance(sizes, (list, tuple)) else [sizes]):
        state = of(following, size)
        if isinstance(state, Mixed):
            raise Lost("has a size that csc cannot tell from the samples")
        if not isinstance(state, Whole) or not state.powers:
            continue
        if axis is not None:
            raise Lost(BY_NUMBER)
        ((count, power), *more) = state.powers
        if more or power != 1 or count.kind != "rows":
            raise Lost("has a size that csc cannot tell from the samples")
        rows = next(
            (s for s in following.entries.values() if isinstance(s, SampleRows) and s.entry == count.name), None
        )
        if rows is None or number_of(size) % rows.count:
            raise Lost("has a size that csc cannot tell from the samples")
        axis = dim, number_of(size) // rows.count, rows.count, rows.entry
    return axis


def filled_rule(following: SamplePropagation, node: fx.Node) -> State:
    """`zeros`, `full` and the like: rows where a number of samples is a size."""
    bound = given(node)
    sizes = bound.get("size")
    axis = _axis_of_sizes(following, sizes)
    value = of(following, bound.get("s" if g.op_name(node) == "aten::scalar_tensor" else "fill_value"))
    if not isinstance(value, Whole):
        raise Lost(UNKNOWN)
    if any(isinstance(of(following, size), NewTensor) for size in sizes or ()):
        return NewTensor()
    if axis is None:
        return Whole(value.powers)
    dim, inner, count, entry = axis
    return SampleRows((dim, inner), count, entry, value.powers)


def range_rule(following: SamplePropagation, node: fx.Node) -> State:
    bound = given(node)
    ends = [of(following, bound.get(which)) for which in ("start", "step")]
    if any(isinstance(state, NewTensor) for state in (*ends, of(following, bound["end"]))):
        return NewTensor()
    axis = _axis_of_sizes(following, [bound["end"]])
    if axis is None:
        return Whole()
    if (
        any(state != Whole() for state in ends)
        or number_of(bound.get("start", 0))
        or number_of(bound.get("step", 1)) != 1
    ):
        raise Lost("counts samples")
    _, inner, count, entry = axis
    return RowNumbers((0, inner), count, entry, inner, (0, inner - 1))


def scattered_sum_rule(following: SamplePropagation, node: fx.Node) -> State:
    """`scatter_add` and `index_add` into zeros: with all rows of samples along the dimension, a sum over these."""
    bound = g.bind(node)
    source = of(following, bound.get("src", bound.get("source")))
    numbers, along = of(following, bound["index"]), bound["dim"] % len(shape_of(node))
    plain = filled_with(bound["self"]) == 0 and bound.get("alpha", 1) == 1
    if plain and isinstance(numbers, RowNumbers) and numbers.sequences and isinstance(source, SampleRows):
        return _summed_by_sequence(following, node, source, numbers)
    if not plain or not isinstance(source, SampleRows) or source.axis[0] != along or source.spare is not None:
        return following.by_links(node)
    if not isinstance(numbers, SampleRows) or numbers.powers or numbers.axis != source.axis:
        raise Lost(UNKNOWN)
    return PartsOfSum(source.powers)


def _summed_by_sequence(
    following: SamplePropagation, node: fx.Node, source: SampleRows, numbers: RowNumbers
) -> SampleRows:
    """A row for each packed sequence, of all its rows."""
    bound = g.bind(node)
    into, dim = of(following, bound["self"]), bound["dim"] % len(shape_of(node))
    own = numbers.is_own and numbers.step == 1 and (numbers.axis, numbers.count) == (source.axis, source.count)
    if not own or source.spare is not None or not isinstance(into, SampleRows) or into.powers or into.axis != (dim, 1):
        raise Lost("sums rows by the numbers of packed sequences into what has no row for each of these")
    return replace(into, powers=source.powers)


def sequence_rule(following: SamplePropagation, node: fx.Node) -> State:
    """`bucketize(arange(tokens), cu_seqlens[1:], right=True)`: which packed sequence each token is of. With all of
    `cu_seqlens` it is one more. A sequence is in one microbatch (csc.capture.batch), and its number counts from there.
    """
    bound, name = g.bind(node), SEARCHES[g.op_name(node)]
    boundaries, skipped = _beginnings(bound[name])
    tokens, states = of(following, bound["self"]), [of(following, used) for used in node.all_input_nodes]
    lost = next((state for state in states if isinstance(state, Mixed)), None)
    right = bound.get("right") or bound.get("side") == "right"
    all_tokens = (
        isinstance(tokens, RowNumbers)
        and not tokens.sequences
        and tokens.within == (0, tokens.step - 1)
        and tokens.step * tokens.count == prod(shape_of(bound["self"]))
    )
    if boundaries and right and all_tokens and isinstance(tokens, RowNumbers):
        return replace(tokens, step=1, within=(1 - skipped, 1 - skipped), sequences=boundaries)
    return Mixed(lost.node, lost.why) if lost is not None else following.by_links(node)


def _beginnings(node: fx.Node) -> tuple[str, int]:
    """The entry that says where packed sequences begin, and how many of these are left out in front; ("", 0) if a value
    is none.
    """
    skipped = 0
    while node.op == "call_function":
        if g.op_name(node) == "aten::slice":
            bound = g.bind(node)
            size = shape_of(bound["self"])[0]
            start, stop, step = slice(bound["start"], bound["end"], bound["step"]).indices(size)
            if (stop, step) != (size, 1) or len(shape_of(node)) > 1:
                return "", 0
            skipped += start
        elif g.op_name(node) not in CASTS | EXACT_COPIES:
            return "", 0
        node = node.args[0]  # type: ignore[assignment]
    role = node.meta["role"]
    begins = role[0] == "input" and speaks_of_beginnings(role[1]) and skipped <= 1
    return (role[1], skipped) if begins else ("", 0)


def batch_loss_rule(following: SamplePropagation, node: fx.Node) -> State:
    """What microbatches hand to a loss over the whole batch: its gradients come back for each, and are added up."""
    return PartsOfSum()


def expand_rule(following: SamplePropagation, node: fx.Node) -> State:
    """`expand` and `repeat`: of what is the same for every batch, a copy for each sample."""
    bound = given(node)
    state, sizes = of(following, bound["self"]), bound.get("size", bound.get("repeats"))
    if state == Whole():
        axis = _axis_of_sizes(following, sizes)
        if any(isinstance(of(following, size), NewTensor) for size in sizes or ()):
            return NewTensor()
        if axis is None:
            return Whole()
        dim, _, count, entry = axis
        place = dim - len(shape_of(node)) + len(shape_of(bound["self"]))
        if g.op_name(node) == "aten::expand" and place >= 0 and shape_of(bound["self"])[place] > 1:
            raise Lost(FIXED)
        return SampleRows((dim, shape_of(node)[dim] // count), count, entry)
    return following.by_links(node, linear=True)


# --- Rules of single operations for following samples, where the table of links does not say all ---------------------


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return {f"aten::{name}": rule for name in names.split()}


_SCALED = _each("mul", arithmetic.product_rule(1)) | _each("div", arithmetic.product_rule(-1))
RULES: dict[str, Rule] = {
    "mul": number_rule(1),
    **dict.fromkeys(("truediv", "floordiv"), number_rule(-1)),
    **dict.fromkeys(("add", "sub"), number_sum_rule),
    **dict.fromkeys(("sym_float", "int", "sym_int", "neg"), same_number_rule),
    **dict.fromkeys(MADE, filled_rule),
    **dict.fromkeys(LINEAR, arithmetic.linear_rule),
    **dict.fromkeys(PRODUCTS, contraction_rule),
    **dict.fromkeys(BATCH_NORMS, batch_norm_rule),
    **dict.fromkeys(RECURRENT, recurrent_rule),
    **dict.fromkeys(LOOK_UPS, look_up_rule),
    **LOSS_RULES,
    **_each("sym_size sym_numel", size_rule),
    **_each("arange", range_rule),
    **_each("expand repeat", expand_rule),
    **_SCALED,
    **_each("add sub rsub", arithmetic.sum_rule),
    **_each("stack", arithmetic.stack_rule),
    **_each("pow reciprocal", arithmetic.power_rule),
    **_each("clamp clamp_min", arithmetic.clamp_rule),
    **_each("_to_copy to", arithmetic.cast_rule),
    **_each("where masked_fill", arithmetic.choice_rule),
    **_each("sum mean sum_to_size", reduction_rule),
    **_each("einsum", contraction_rule),
    **_each("slice", slice_rule),
    **_each("split split_with_sizes chunk unsafe_split", split_rule),
    **_each("cat", join_rule),
    **_each("index_put", index_put_rule),
    **_each("masked_scatter", scatter_in_order_rule),
    **_each("repeat_interleave", repeat_each_rule),
    **_each("argsort", order_rule),
    **_each("scatter_add index_add", scattered_sum_rule),
    **dict.fromkeys(SEARCHES, sequence_rule),
    **_each("slice_scatter", overwritten_rule),
    **_each("type_as", typed_rule),
    **_each("scaled_dot_product_attention", attention_rule),
    **_each("broadcast_tensors", broadcast_rule),
    "csc::incoming": arithmetic.incoming_rule,
    "csc::own_gradient": arithmetic.own_gradient_rule,
    "csc::with_hooks": arithmetic.hooked_rule,
    "csc::to_batch_loss": batch_loss_rule,
    "getitem": item_rule,
}
_OF_TERMS = (
    arithmetic.linear_rule, arithmetic.sum_rule, arithmetic.stack_rule, arithmetic.cast_rule, reduction_rule,
)  # fmt: skip
OF_TERMS = frozenset({*_SCALED, *(name for name, rule in RULES.items() if rule in _OF_TERMS)})
