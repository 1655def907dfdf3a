"""Which dimension of each value counts the tokens of a sequence, found from the attentions that run along it.

Terms
  axis   (dim, inner): index i of dimension `dim` belongs to token i // inner % tokens. inner is 1 unless a reshape has
         joined the tokens with what stood behind them; the dimension is longer than `tokens` where it joined any
  link   of a call and one of its operands: for each dimension of the result, the operand's dimension that it walks
         along with, index by index; None where there is none

    axes(calls, attentions, tokens) -> {node: Axis}        of the calls and of what enters them
    apart(node, found, tokens) -> bool                     whether a call makes every token's result from that token

Axes are followed from queries, keys and values through links, both ways, until nothing new is found. Nothing is
guessed from sizes: a dimension is an axis because the operations in between carry it. `apart` does not trust the axes
either: it checks a call against those of its own operands.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from csc.analysis.tokens import ALONG, NORMS, PRODUCTS, is_pointwise, mixes
from csc.ir import graph as g
from csc.torch_private import OpOverload

Axis = tuple[int, int]
Link = tuple[int | None, ...]

ATTENTION = "csc::attention"
OF_ATTENTION: Axis = (2, 1)  # q, k, v, out: [B, H, T, D]; log-sum-exp: [B, H, T]
RESHAPES = {"aten::view", "aten::_unsafe_view", "aten::reshape"}
REDUCTIONS = {"aten::mean", "aten::sum", "aten::amax", "aten::amin", "aten::var", "aten::linalg_vector_norm"}
_ELEMENTWISE = {"aten::clone", "aten::_to_copy", "aten::type_as", "aten::contiguous", "aten::lift_fresh_copy",
                "aten::native_dropout", "aten::dropout"}  # fmt: skip
_OTHER_VIEWS = {"aten::as_strided", "aten::diagonal", "aten::unfold"}  # their dimensions are not those of the operand
_STRIDES = (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079)  # primes: no product of sizes is one of them


def axes(calls: Sequence[fx.Node], attentions: Sequence[fx.Node], tokens: int) -> dict[fx.Node, Axis]:
    """The axis of every value that attentions along `tokens` lead to, among the calls and their operands."""
    found: dict[fx.Node, Axis] = {}
    for node in attentions:
        for value in (node, *node.args[:3]):
            if isinstance(value, fx.Node) and _shape(value)[2] == tokens:
                found[value] = OF_ATTENTION
    count = -1
    while len(found) != count:
        count = len(found)
        for node in calls:
            for operand, link in _links(node):
                if node not in found and operand in found:
                    _enter(found, node, _onward(node, operand, link, found[operand], tokens))
        for node in reversed(calls):
            for operand, link in _links(node):
                if node in found and operand not in found:
                    _enter(found, operand, _back(node, operand, link, found[node], tokens))
    return found


def apart(node: fx.Node, found: Mapping[fx.Node, Axis], tokens: int) -> bool:
    """True if each token's result comes from the same token of the operands that have tokens, at least one of which
    has. False says nothing against the call: it may have to see all tokens, or csc does not know.
    """
    own, links = found.get(node), _links(node)
    with_tokens = [used for used in node.all_input_nodes if used in found]
    if own is None or not with_tokens or not {used for used, _ in links}.issuperset(with_tokens):
        return False
    if g.op_name(node) == ATTENTION:
        return _attention_apart(node, found)
    if g.op_name(node) in RESHAPES or node.target is operator.getitem:
        return all(_onward(node, used, link, found[used], tokens) == own for used, link in links)
    for used, link in links:
        along = link[own[0]]
        if found.get(used) != (None if along is None else (along, own[1])):
            return False
    return g.is_view(node) or mixes(node, lambda value: (found[value][0],) if value in found else ()) is None


def _attention_apart(node: fx.Node, found: Mapping[fx.Node, Axis]) -> bool:
    """Queries of the sequence, over its own keys or over keys that every rank has whole."""
    query, key, value, packed = node.args[:4]
    if found.get(query) != OF_ATTENTION:  # type: ignore[arg-type]
        return False
    whole = key not in found and value not in found
    return (whole and packed is None) or (found.get(key) == found.get(value) == OF_ATTENTION)  # type: ignore[arg-type]


def _enter(found: dict[fx.Node, Axis], node: fx.Node, axis: Axis | None) -> None:
    if axis is not None:
        found[node] = axis


def _onward(node: fx.Node, operand: fx.Node, link: Link, axis: Axis, tokens: int) -> Axis | None:
    """From an operand's axis to the result's."""
    if g.op_name(node) in RESHAPES:
        return _reshaped(_shape(operand), _shape(node), axis, tokens)
    return (link.index(axis[0]), axis[1]) if axis[0] in link else None


def _back(node: fx.Node, operand: fx.Node, link: Link, axis: Axis, tokens: int) -> Axis | None:
    """From the result's axis to an operand's."""
    if g.op_name(node) in RESHAPES:
        return _reshaped(_shape(node), _shape(operand), axis, tokens)
    along = link[axis[0]]
    return None if along is None else (along, axis[1])


def _reshaped(one: Sequence[int], other: Sequence[int], axis: Axis, tokens: int) -> Axis | None:
    """The axis after a reshape: where the same stretch of the flat memory counts tokens, if one dimension holds it."""
    step = prod(one[axis[0] + 1 :]) * axis[1]  # elements from one token to the next
    for dim, size in enumerate(other):
        behind = prod(other[dim + 1 :])
        if behind and step % behind == 0 and (behind * size) % (step * tokens) == 0:
            return dim, step // behind
    return None


def _shape(node: fx.Node) -> tuple[int, ...]:
    """Of a value, or of the first of several."""
    val: Any = node.meta["val"]
    return tuple((val[0] if isinstance(val, (tuple, list)) else val).shape)


def _links(node: fx.Node) -> list[tuple[fx.Node, Link]]:
    """The link of every tensor operand that csc knows something about."""
    name = g.op_name(node)
    if node.target is operator.getitem:
        return [(used, _same(_shape(used), _item_shape(node))) for used in node.all_input_nodes]
    if not isinstance(node.target, OpOverload):
        return []
    bound, out = g.bind(node), _shape(node)
    if name in RESHAPES:
        return [(node.args[0], ())]  # type: ignore[list-item]
    if name == ATTENTION:
        whole: Link = (0, 1, 2, None)
        return [(used, whole if i == 0 else (0, None, None, None)) for i, used in enumerate(node.args[:3])]  # type: ignore[misc]
    if name in PRODUCTS:
        return _of_product(node, out)
    if name in NORMS:
        first = len(out) - len(bound["normalized_shape"])
        return [(node.args[0], tuple(d if d < first else None for d in range(len(out))))]  # type: ignore[list-item]
    if name in ("aten::embedding", "aten::one_hot"):
        indices = bound["indices" if name == "aten::embedding" else "self"]
        return [(indices, (*range(len(out) - 1), None))]
    if name in REDUCTIONS:
        return [(node.args[0], _of_reduction(node, bound, out))]  # type: ignore[list-item]
    if name == "aten::stack":
        dim = bound["dim"] % len(out)
        return [(one, tuple(None if d == dim else d - (d > dim) for d in range(len(out)))) for one in bound["tensors"]]
    if g.is_view(node) and name not in _OTHER_VIEWS:
        return [(node.args[0], _of_view(node))]  # type: ignore[list-item]
    if name in ALONG:
        given: Any = bound["tensors"] if name == "aten::cat" else [node.args[0]]
        dim = bound[ALONG[name]]
        skipped = range(len(out)) if dim is None else {dim % len(out)}
        return [
            (one, tuple(None if d in skipped else e for d, e in enumerate(_same(_shape(one), out)))) for one in given
        ]
    if name in _ELEMENTWISE:
        return [(node.args[0], _same(_shape(node.args[0]), out))]  # type: ignore[arg-type, list-item]
    if is_pointwise(node):
        return [(used, _same(_shape(used), out, from_right=True)) for used in node.all_input_nodes]
    return []


def _same(operand: Sequence[int], out: Sequence[int], from_right: bool = False) -> Link:
    """Dimension by dimension, counted from the left or as broadcasting does; None where sizes differ."""
    shift = len(out) - len(operand) if from_right else 0
    return tuple(
        d - shift if 0 <= d - shift < len(operand) and operand[d - shift] == size else None
        for d, size in enumerate(out)
    )  # fmt: skip


def _item_shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape) if isinstance(node.meta["val"], torch.Tensor) else ()


def _of_product(node: fx.Node, out: Sequence[int]) -> list[tuple[fx.Node, Link]]:
    left, right = (node.args[place] for place in PRODUCTS[g.op_name(node)])
    found: list[tuple[fx.Node, Link]] = []
    if isinstance(left, fx.Node):
        found.append((left, (*_same(_shape(left)[:-1], out[:-1], from_right=True), None)))
    if isinstance(right, fx.Node) and g.op_name(node) != "aten::linear" and len(_shape(right)) > 1:
        batch = _same(_shape(right)[:-2], out[:-2], from_right=True)
        found.append((right, (*batch, None, len(_shape(right)) - 1)))
    added = [used for used in node.all_input_nodes if used not in (left, right)]
    if g.op_name(node) != "aten::linear":
        found += [(used, _same(_shape(used), out, from_right=True)) for used in added]
    return found


def _of_reduction(node: fx.Node, bound: Mapping[str, Any], out: Sequence[int]) -> Link:
    given = _shape(node.args[0])  # type: ignore[arg-type]
    along = bound[ALONG[g.op_name(node)]]
    along = range(len(given)) if along is None else [along] if isinstance(along, int) else along
    gone = {dim % len(given) for dim in along}
    if len(out) == len(given):
        return tuple(None if d in gone else d for d in range(len(given)))
    return tuple(d for d in range(len(given)) if d not in gone)


def _of_view(node: fx.Node) -> Link:
    """Which dimensions a view keeps: seen from the strides that it gives to memory with strides of our choice."""
    operand: Any = node.args[0]
    given = _shape(operand)
    if len(given) > len(_STRIDES):
        return (None,) * len(_shape(node))
    strides = _STRIDES[: len(given)]
    seen: Any = node.target(torch.empty_strided(given, strides, device="meta"), *node.args[1:], **node.kwargs)  # type: ignore[operator]
    seen = seen[0] if isinstance(seen, (tuple, list)) else seen
    of_stride = {stride: dim for dim, stride in enumerate(strides)}
    dims = [of_stride.get(stride) for stride in seen.stride()]
    return tuple(e if e is not None and given[e] == size > 1 else None for e, size in zip(dims, seen.shape))
