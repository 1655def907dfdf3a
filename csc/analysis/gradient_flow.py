"""Where gradients can flow in a forward graph, whatever is frozen.

Terms
  carries   a value that depends differentiably on some parameter
  live      a value that the loss depends on differentiably
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import fx

from csc.analysis.operators.table import STOPS
from csc.ir import graph as g


def carrying(graph: fx.Graph, others: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Nodes whose gradient reaches a parameter of floating-point or complex numbers, or one of other placeholders."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if node in others or (node.meta["role"][0] == "parameter" and g.is_inexact(node)):
                found.add(node)
        elif _carries(node, found):
            found.add(node)
    return found


def live(nodes: Iterable[fx.Node], results: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that one of the results depends on differentiably, by way of `nodes` (in order of execution)."""
    found = set(results)
    for node in reversed(list(nodes)):
        if node in found and node.op == "call_function" and g.op_name(node) not in STOPS:
            found.update(used for used in _differentiated(node) if _can_carry(used))
    return found


def sources(nodes: Iterable[fx.Node], until: Collection[fx.Node] = ()) -> set[fx.Node]:
    """What nodes depend on differentiably, themselves included; nothing that is behind `until` alone."""
    found: set[fx.Node] = set()
    stack = [node for node in nodes if node not in until]
    while stack:
        node = stack.pop()
        if node not in found and _can_carry(node):
            found.add(node)
            if node.op == "call_function" and g.op_name(node) not in STOPS:
                stack += [used for used in _differentiated(node) if used not in until]
    return found


def _carries(node: fx.Node, found: set[fx.Node]) -> bool:
    """True for a differentiable call of which an argument was found."""
    if node.op != "call_function" or g.op_name(node) in STOPS or not _can_carry(node):
        return False
    return any(used in found for used in _differentiated(node))


def _differentiated(node: fx.Node) -> list[fx.Node]:
    """What a call may give gradients to: a function with a backward of its own, to its inputs alone."""
    if g.op_name(node) == "csc::own_gradient":
        return list(node.args[1])  # type: ignore[arg-type]
    return node.all_input_nodes


def _can_carry(node: fx.Node) -> bool:
    """Floating-point and complex tensors do, and so do the tuples that hold some."""
    val = node.meta.get("val")
    if isinstance(val, (tuple, list)):
        dtypes = [item.dtype for item in val if isinstance(item, torch.Tensor)]
        return any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
    return g.is_inexact(node)


def outputs_reached(graph: fx.Graph, dx: Sequence[bool], dw: Sequence[bool], activations: int, shared: int) -> set[int]:
    """Positions of the outputs that depend differentiably on an activation marked in dx or a parameter marked in dw."""
    inputs = g.placeholders(graph)
    found = {inputs[i] for i, needed in enumerate(dx) if needed}
    found |= {inputs[activations + shared + j] for j, needed in enumerate(dw) if needed}
    for node in g.calls(graph):
        if _carries(node, found):
            found.add(node)
    return {i for i, result in enumerate(g.outputs(graph)) if result in found}
