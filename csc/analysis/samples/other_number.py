"""Whether a model does the same to each sample, however many there are: two of its graphs compared, of so many samples
and of more.

    unlike(one, other, times, values) -> str        a phrase that says what is not the same; "": nothing
    named_alike(one, other) -> {name: name}         of calls of two graphs that are alike: of `other` in `one`

A trace that was made for one number of samples n has what Python made of that number as literals: `math.sqrt(n)`,
`torch.tensor(n)`, one branch of `if n > 8`. No rule for an operation can tell them from numbers of the model's own. In
the graph for another number of samples they are others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from csc.analysis.operators.table import CASTS, COPIES, COUNTED, EXPAND, RESHAPES, SLICE, STOPS
from csc.ir import graph as g
from csc.torch_private.exported import OpOverload

REPEATS = (COPIES - CASTS - STOPS) | {EXPAND, SLICE}
SIZES = frozenset({"size", "shape", "repeats"})  # arguments that say how large a result is, and nothing else

Values = Callable[[str], torch.Tensor]  # of a constant of the trace, by name


def unlike(one: fx.Graph, other: fx.Graph, times: int, values: tuple[Values, Values]) -> str:
    """one, other: of csc.analysis.sized; `other` is of so many times the samples. values: of each one's constants."""
    calls, others = _tensor_calls(one), _tensor_calls(other)
    same: dict[fx.Node, fx.Node] = {}
    for node, its in zip(calls, others):
        reshapes = {g.op_name(node), g.op_name(its)} <= RESHAPES
        if node.target is not its.target and not reshapes:
            return f"{g.op_name(node)} becomes {g.op_name(its)} ({g.line(node)})"
        assert isinstance(node.target, OpOverload)
        mine, theirs = g.bind(node), g.bind(its)
        for name, *both in zip(mine, mine.values(), theirs.values()):
            argument, its_argument = _sizes(node, its) if name == "size" and reshapes else both
            sizes = times if name in SIZES or COUNTED.get(g.op_name(node)) == name else 1
            if not _alike(argument, its_argument, same, sizes, values):
                return f"{g.op_name(node)} is given another '{name}' ({g.line(node)})"
        same[node] = its
    if len(calls) != len(others):
        return f"{len(others)} operations are made in place of {len(calls)}"
    return ""


def _sizes(*calls: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Of their results: what they are given may leave one out (-1)."""
    return tuple(tuple(node.meta["val"].shape) for node in calls)


def named_alike(one: fx.Graph, other: fx.Graph) -> dict[str, str]:
    """Graphs as captured, or of csc.analysis.sized."""
    return {its.name: node.name for node, its in zip(_tensor_calls(one), _tensor_calls(other), strict=True)}


def _tensor_calls(graph: fx.Graph) -> list[fx.Node]:
    """Without those that repeat a value for each of several samples, or copy it so that these lie one behind the other:
    for one there is nothing to do.
    """
    return [
        node for node in g.calls(graph)
        if isinstance(node.target, OpOverload) and not _is_number(node) and not _repeats(node)
    ]  # fmt: skip


def _repeats(node: fx.Node) -> bool:
    """Whether a call expands or copies a value, or takes all of it."""
    if node.op != "call_function" or g.op_name(node) not in REPEATS:
        return False
    sizes = [one.meta["val"].shape for one in (node, node.args[0])]  # type: ignore[union-attr]
    return g.op_name(node) != SLICE or sizes[0] == sizes[1]


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], (int, float, bool))


def _alike(one: Any, other: Any, same: dict[fx.Node, fx.Node], times: int, values: tuple[Values, Values]) -> bool:
    """times: by which a number may be larger, as it is a size."""
    if isinstance(one, fx.Node) and isinstance(other, fx.Node):
        one, other = _unexpanded(one), _unexpanded(other)
        if one.op == "placeholder" and other.op == "placeholder":
            return _given_alike(one, other, values)
        if one in same:
            return same[one] is other
        return one.args[1:] == other.args[1:] and _alike(one.args[0], other.args[0], same, 1, values)  # of several
    if isinstance(one, Sequence) and not isinstance(one, str):
        return (
            isinstance(other, Sequence)
            and len(one) == len(other)
            and all(_alike(*both, same, times, values) for both in zip(one, other))
        )
    return one == other or (times > 1 and isinstance(one, int) and isinstance(other, int) and one * times == other)


def _unexpanded(node: fx.Node) -> fx.Node:
    while _repeats(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _given_alike(one: fx.Node, other: fx.Node, values: tuple[Values, Values]) -> bool:
    """Entries of the batch, parameters and buffers by name; constants of the trace by what they hold."""
    (kind, name), (other_kind, other_name) = one.meta["role"][:2], other.meta["role"][:2]
    if kind != "constant" or other_kind != "constant":
        return (kind, name) == (other_kind, other_name)
    mine, theirs = values[0](name), values[1](other_name)
    return mine is theirs or (not mine.is_meta and mine.shape == theirs.shape and torch.equal(mine, theirs))
