"""Which dimensions of each value count the tokens of a sequence: one propagation over the table of operators.

Terms
  axis   (dim, inner): index i of dimension `dim` belongs to token i // inner % count. inner is 1 unless a reshape has
         joined the tokens with what stood behind them; the dimension is longer than `count` where it joined any
  link   see csc.analysis.operators.table

    counting(calls, seeds) -> {node: dims}                 of the calls and of what enters them, from any value
    axes(calls, attentions, tokens) -> {node: Axis}        the same, from attentions
    apart(node, found, tokens) -> bool                     whether a call makes every token's result from that token

Axes are followed through calls, both ways, until nothing new is found. Nothing is guessed from sizes: a dimension is an
axis because the operations in between carry it. `axes` keeps to calls where an axis walks along; `counting` goes on
where tokens are mixed, so that whoever spreads them meets that call and can refuse it. Neither is trusted: `apart`
checks a call against the axes of its own operands, and so does csc.analysis.tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod

from torch import fx

from csc.analysis.operators.execution import is_view
from csc.analysis.operators.table import (
    ATTENTION,
    RESHAPES,
    Axis,
    Link,
    Relation,
    Use,
    alike,
    links,
    relation,
    reshaped,
    several,
    shape_of,
)
from csc.analysis.tokens import mixes
from csc.ir import graph as g

OF_ATTENTION: Axis = (2, 1)  # q, k, v, out: [B, H, T, D]; log-sum-exp: [B, H, T]
_Counted = tuple[int, int, int]  # an axis, and how many tokens it counts


def counting(calls: Iterable[fx.Node], seeds: Iterable[tuple[fx.Node, int]]) -> dict[fx.Node, tuple[int, ...]]:
    """The dimensions that count the tokens which these dimensions of these values count."""
    found = _followed(calls, [(node, (dim, 1, shape_of(node)[dim])) for node, dim in seeds], _mixed)
    return {node: tuple(sorted({axis[0] for axis in own})) for node, own in found.items()}


def axes(calls: Iterable[fx.Node], attentions: Iterable[fx.Node], tokens: int) -> dict[fx.Node, Axis]:
    """The axis of every value that attentions along `tokens` lead to; of none that has several."""
    ends = (value for node in attentions for value in (node, *node.args[:3]) if isinstance(value, fx.Node))
    seeds = [(value, (*OF_ATTENTION, tokens)) for value in ends if shape_of(value)[2] == tokens]
    return {node: own[0][:2] for node, own in _followed(calls, seeds, _walked).items() if len(own) == 1}


def _followed(
    calls: Iterable[fx.Node],
    seeds: Sequence[tuple[fx.Node, _Counted]],
    near: Callable[[fx.Node, Relation, fx.Node, _Counted], Iterable[tuple[fx.Node, _Counted]]],
) -> dict[fx.Node, list[_Counted]]:
    """All axes that these lead to. near(call, its relation, value, axis): what an axis of a value, which is the call or
    one of its operands, is in the others.
    """
    known = {node: relation(node) or _unknown(node) for node in calls}
    found: dict[fx.Node, list[_Counted]] = {}
    todo = list(seeds)
    while todo:
        value, axis = todo.pop()
        if axis in found.setdefault(value, []):
            continue
        found[value].append(axis)
        for call in (value, *value.users):
            if call in known:
                todo += near(call, known[call], value, axis)
    return found


def _unknown(node: fx.Node) -> Relation:
    """Of a call that the table does not have: dimensions of one place and size may be the same. Whoever spreads tokens
    asks the table again, and refuses the call.
    """
    out = shape_of(node)
    return Relation(tuple(
        Use(used, tuple(d if d < len(given) and alike(given[d], size) else None for d, size in enumerate(out)))
        for used in node.all_input_nodes if (given := shape_of(used))
    ))  # fmt: skip


def _walked(call: fx.Node, found: Relation, value: fx.Node, axis: _Counted) -> Iterator[tuple[fx.Node, _Counted]]:
    """The axes that walk along with one: tokens stay apart and in their order."""
    for use in found.uses:
        other = use.node if value is call else call
        if value not in (call, use.node):
            continue
        if g.op_name(call) in RESHAPES:
            place = reshaped(shape_of(value), shape_of(other), axis[:2], axis[2])
            if place is not None:
                yield other, (*place, axis[2])
        elif value is call and (along := use.link[axis[0]]) is not None:
            yield other, (along, *axis[1:])
        elif value is not call and axis[0] in use.link:
            yield other, (use.link.index(axis[0]), *axis[1:])


def _mixed(call: fx.Node, found: Relation, value: fx.Node, axis: _Counted) -> Iterator[tuple[fx.Node, _Counted]]:
    """These, and those that count the same tokens, or some of them with others, in any order."""
    yield from _walked(call, found, value, axis)
    size = shape_of(value)[axis[0]]
    if g.op_name(call) in RESHAPES:
        yield from _grouped(call, axis) if value is call else ()
        return
    for use in found.uses:
        if value is call:
            pairs = [(use.node, dim) for dim in range(len(shape_of(use.node)))
                     if (end := use.end(dim)) is not None and end.dim == axis[0]]  # fmt: skip
        else:
            own = [end for one in found.uses if one.node is value and (end := one.end(axis[0])) is not None]
            pairs = [(call, end.dim) for end in own if end.dim is not None]
            walks = {end.walk for end in own} - {None}
            pairs += [(use.node, dim) for dim in range(len(shape_of(use.node)))
                      if (end := use.end(dim)) is not None and end.walk in walks]  # fmt: skip
        for other, dim in pairs:
            becomes = shape_of(other)[dim]
            if size == becomes:
                yield other, (dim, *axis[1:])
            elif axis[1:] == (1, size) and several(becomes):
                yield other, (dim, 1, becomes)


def _grouped(call: fx.Node, axis: _Counted) -> Iterator[tuple[fx.Node, _Counted]]:
    """Where a reshape has taken neighbouring tokens apart: the dimension of its operand that counts groups of them."""
    (operand,), shape = call.all_input_nodes, shape_of(call)
    given = shape_of(operand)
    if axis[1] == 1 and reshaped(shape, given, axis[:2], axis[2]) is None:
        whole = prod(shape[axis[0] + 1 :]) * axis[2]
        yield from (
            (operand, (d, 1, size)) for d, size in enumerate(given) if several(size) and prod(given[d:]) == whole
        )


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
        return all(_carried(node, used, link, found[used], tokens) == own for used, link in linked)
    for used, link in linked:
        along = link[own[0]]
        if found.get(used) != (None if along is None else (along, own[1])):
            return False
    return is_view(node) or mixes(node, lambda value: (found[value][0],) if value in found else ()) is None


def _attention_apart(node: fx.Node, found: Mapping[fx.Node, Axis]) -> bool:
    """Queries of the sequence, over its own keys or over keys that every rank has whole."""
    query, key, value, packed = node.args[:4]
    if found.get(query) != OF_ATTENTION:  # type: ignore[arg-type]
        return False
    whole = key not in found and value not in found
    return (whole and packed is None) or (found.get(key) == found.get(value) == OF_ATTENTION)  # type: ignore[arg-type]


def _carried(node: fx.Node, operand: fx.Node, link: Link, axis: Axis, tokens: int) -> Axis | None:
    """The result's axis that is an operand's."""
    if g.op_name(node) in RESHAPES:
        return reshaped(shape_of(operand), shape_of(node), axis, tokens)
    return (link.index(axis[0]), axis[1]) if axis[0] in link else None
