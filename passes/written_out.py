"""Attentions that a model writes out: two products with a softmax between them.

written_out(node) -> what scaled_dot_product_attention would be given, and `softcap`; None for any other call

scores = q @ k.T * scale;  scores = tanh(scores / cap) * cap;  softmax(scores + mask, -1) @ v
"""

from __future__ import annotations

from typing import Any

from torch import fx

from csc.analysis.operators.table import COPIES, STOPS
from csc.ir import graph as g

TRANSPOSED = ((2, 3), (3, 2), (-1, -2), (-2, -1))


def written_out(node: fx.Node) -> dict[str, Any] | None:
    """The operands by their names in the operator's schema. key: as it was, before it was transposed; where nothing
    transposed it, `transposed_key` is there in its place.
    """
    if not _is_product(node):
        return None
    weights: Any
    value: Any
    mask: Any
    weights, value = node.args
    while g.op_name(weights) in COPIES - STOPS:
        weights = weights.args[0]
    if g.op_name(weights) not in ("aten::softmax", "aten::_softmax") or weights.args[1] not in (-1, 3):
        return None
    scores, mask = weights.args[0], None
    if g.op_name(scores) == "aten::add" and not scores.kwargs:
        left, right = scores.args
        if _number(left) is None and _number(right) is None:
            scores, mask = (left, right) if _cap(left)[1] or _scaled(left) is not None else (right, left)
    capped, cap = _cap(scores)
    found = _scaled(capped)
    if found is None:
        return None
    product, scale = found
    query, key = product.args
    if (
        query.meta["val"].shape[:2] != key.meta["val"].shape[:2]
        or value.meta["val"].shape[:2] != key.meta["val"].shape[:2]
    ):
        return None
    operands = {"query": query, "value": value, "attn_mask": mask, "scale": scale, "softcap": cap}
    operands |= {"dropout_p": 0.0, "is_causal": False}
    if g.op_name(key) == "aten::transpose" and tuple(key.args[1:]) in TRANSPOSED:
        return operands | {"key": key.args[0]}
    return operands | {"transposed_key": key}


def _is_product(node: Any) -> bool:
    if not isinstance(node, fx.Node) or g.op_name(node) != "aten::matmul":
        return False
    return all(isinstance(one, fx.Node) and one.meta["val"].dim() == 4 for one in node.args)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _times(node: Any) -> tuple[Any, float] | None:
    """What is multiplied by a number, or divided by it."""
    name = g.op_name(node) if isinstance(node, fx.Node) else ""
    if name not in ("aten::mul", "aten::div") or len(node.args) != 2 or node.kwargs:
        return None
    number = _number(node.args[1])
    if not number:
        return None
    return node.args[0], number if name == "aten::mul" else 1 / number


def _scaled(node: Any) -> tuple[Any, float] | None:
    """A product of queries and keys, and the number that it is multiplied by."""
    if _is_product(node):
        return node, 1.0
    found = _times(node)
    return (found[0], found[1]) if found is not None and _is_product(found[0]) else None


def _cap(node: Any) -> tuple[Any, float]:
    """What `tanh(x / cap) * cap` holds down, and cap; 0 if nothing is."""
    outer = _times(node)
    if outer is None or g.op_name(outer[0]) != "aten::tanh":
        return node, 0.0
    inner = _times(outer[0].args[0])
    if inner is None or abs(inner[1] * outer[1] - 1) > 1e-12:
        return node, 0.0
    return inner[0], outer[1]
