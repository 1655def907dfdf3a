"""What is known of a graph's values whatever the batch is: constants, places of keys, tables that a mask looks up.

folded(node) -> Tensor, one_number(node) -> float, slots(node) -> c of `arange + c`  None where the batch decides
table(node) -> Node, restarting(node) -> Node
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from csc.analysis.operators.execution import is_random
from csc.analysis.operators.table import EXACT_COPIES, UNSQUEEZED
from csc.ir import graph as g


def one_number(value: Any) -> float | None:
    """The one number that a scalar or constant node holds; None if there is none."""
    if isinstance(value, (int, float)):
        return float(value)
    constant = folded(value) if isinstance(value, fx.Node) else None
    if constant is None or not constant.numel() or not bool((constant == constant.flatten()[0]).all()):
        return None
    return float(constant.flatten()[0])


def table(node: fx.Node) -> fx.Node | None:
    """The [B, T] or [T] values that a node holds for each query or each key: without views, and without an index that
    counts through all of them.
    """
    while node.op == "call_function":
        name = g.op_name(node)
        source = node.args[0]
        if name in EXACT_COPIES or name in UNSQUEEZED or name == "aten::slice":
            if not isinstance(source, fx.Node) or source.meta["val"].numel() != node.meta["val"].numel():
                return node
        elif name == "aten::index":
            if not _counts_through(node):
                return node
        else:
            return node
        node = source  # type: ignore[assignment]
    return node


def _counts_through(node: fx.Node) -> bool:
    """`x[samples, places]` with both counting from 0 to the end: all of x, in order."""
    source, given = node.args[0], node.args[1]
    shape = source.meta["val"].shape  # type: ignore[union-attr]
    if not isinstance(given, (list, tuple)) or len(given) != len(shape):
        return False
    for one, size in zip(given, shape):
        value = folded(one) if isinstance(one, fx.Node) else None
        if value is None or not torch.equal(value.flatten(), torch.arange(size)):
            return False
    return True


def restarting(groups: fx.Node | None) -> fx.Node | None:
    """The positions p if the node numbers their runs, `cumsum(diff(p) != 1)`; None if it is anything else."""
    for name in ("aten::cumsum", "aten::ne", "aten::diff"):
        if groups is None or groups.op != "call_function" or g.op_name(groups) != name:
            return None
        along = g.bind(groups).get("dim", -1)
        if name == "aten::ne" and g.bind(groups).get("other") != 1:
            return None
        if name != "aten::ne" and along not in (-1, groups.meta["val"].dim() - 1):
            return None
        if name == "aten::diff" and g.bind(groups).get("n", 1) != 1:
            return None
        groups = groups.args[0]  # type: ignore[assignment]
    return groups


def slots(node: fx.Node) -> int | None:
    """The constant c if the node is arange + c along keys, whatever the batch; None if it is anything else."""
    value = folded(node)
    if value is None or not value.numel():
        return None
    row = value.flatten() if value.dim() < 2 else value.flatten(0, -2)[0]
    offset = int(row.flatten()[0])
    steps = torch.arange(value.shape[-1]) + offset
    return offset if bool((value == steps).all()) else None


def folded(node: fx.Node) -> torch.Tensor | None:
    """The node's value if it depends on nothing but numbers (no batch, parameter or constant); None otherwise."""
    values: dict[fx.Node, Any] = {}
    stack = [node]
    while stack:
        current = stack[-1]
        if current.op != "call_function" or is_random(current):
            return None
        missing = [used for used in current.all_input_nodes if used not in values]
        if missing:
            stack += missing
            continue
        stack.pop()
        keywords = {key: "cpu" if key == "device" else value for key, value in current.kwargs.items()}
        evaluate: Callable[..., Any] = current.target  # type: ignore[assignment]
        values[current] = evaluate(
            *fx.map_arg(current.args, values.__getitem__), **fx.map_arg(keywords, values.__getitem__)
        )
    return values[node]
