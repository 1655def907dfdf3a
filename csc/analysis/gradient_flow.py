"""Where gradients can flow in a forward graph, whatever is frozen, and functions with a backward of their own."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from csc.analysis.operators.table import STOPS
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.program import Checkpoint

# --- Where gradients can flow in a forward graph, whatever is frozen -------------------------------------------------
#
# Terms
#   carries   a value that depends differentiably on some parameter
#   live      a value that the loss depends on differentiably


def carrying_calls(graph: fx.Graph, others: Collection[fx.Node] = ()) -> set[fx.Node]:
    """Nodes whose gradient reaches a parameter of floating-point or complex numbers, or one of other placeholders."""
    carrying: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if node in others or (node.meta["role"][0] == "parameter" and g.is_inexact(node)):
                carrying.add(node)
        elif _carries(node, carrying):
            carrying.add(node)
    return carrying


def live(nodes: Iterable[fx.Node], results: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that one of the results depends on differentiably, by way of `nodes` (in order of execution)."""
    alive = set(results)
    for node in reversed(list(nodes)):
        if node in alive and node.op == "call_function" and g.op_name(node) not in STOPS:
            alive.update(used for used in _differentiated(node) if _can_carry(used))
    return alive


def sources(nodes: Iterable[fx.Node], until: Collection[fx.Node] = ()) -> set[fx.Node]:
    """What nodes depend on differentiably, themselves included; nothing that is behind `until` alone."""
    reached: set[fx.Node] = set()
    stack = [node for node in nodes if node not in until]
    while stack:
        node = stack.pop()
        if node not in reached and _can_carry(node):
            reached.add(node)
            if node.op == "call_function" and g.op_name(node) not in STOPS:
                stack += [used for used in _differentiated(node) if used not in until]
    return reached


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
    reached = {inputs[i] for i, needed in enumerate(dx) if needed}
    reached |= {inputs[activations + shared + j] for j, needed in enumerate(dw) if needed}
    for node in g.calls(graph):
        if _carries(node, reached):
            reached.add(node)
    return {i for i, result in enumerate(g.outputs(graph)) if result in reached}


# --- Functions with a backward of their own in a forward graph (see csc.kernels.own_gradient) ------------------------


INCOMING, OWN, HOOKED, CHECKPOINTED = "csc::incoming", "csc::own_gradient", "csc::with_hooks", "csc::checkpointed"


def is_own(node: fx.Node) -> bool:
    """Whether a call ends the backward of a function."""
    return node.op == "call_function" and g.op_name(node) == OWN


def backwards(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Of each function the calls that depend on the gradients which come in, and its gradients on them."""
    position = {node: place for place, node in enumerate(graph.nodes)}
    after: set[fx.Node] = set()  # what comes in, and all that is made of it
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in g.calls(graph):
        if is_own(node):
            group: set[fx.Node] = set()
            stack = [reader for reader in _nodes(node, 2) if reader in after]
            while stack:
                call = stack.pop()
                if call not in group:
                    group.add(call)
                    stack += [used for used in call.all_input_nodes if used in after]
            groups[node] = sorted(group, key=position.__getitem__)
        elif g.op_name(node) == INCOMING or any(used in after for used in node.all_input_nodes):
            after.add(node)
    return groups


def settle(graph: fx.Graph) -> tuple[Checkpoint, ...]:
    """Change a captured graph in place, whose backward parts may have been run by modules within their function's.
    Returns its reentrant checkpoints.
    """
    carrying = carrying_calls(graph)
    for node in list(graph.nodes):
        if is_own(node) and not any(reader in carrying for reader in _nodes(node, 1)):
            _replace(graph, node, node.args[0])
    hooks: dict[fx.Node, fx.Node] = {}  # by the value that they are on, the last
    for node, part in backwards(graph).items():
        for member in part:
            member.meta["module"] = node.meta["module"]
        if node.args[3]:
            _compose(hooks, node, part)
    for value, node in hooks.items():
        _everywhere(graph, value, node)
    checkpoints = _checkpoints(graph)
    for node in g.calls(graph):
        if g.op_name(node) == HOOKED:
            node.replace_all_uses_with(node.all_input_nodes[0])
    g.erase_dead(graph)
    return checkpoints


def _checkpoints(graph: fx.Graph) -> tuple[Checkpoint, ...]:
    marks = [node for node in g.calls(graph) if g.op_name(node) == CHECKPOINTED]
    asking = {value for mark in marks if not mark.args[1] for value in _nodes(mark, 0)}
    checkpoints = []
    for mark in marks:
        if mark.args[1]:
            inputs = _nodes(mark, 0)
            around = sources(inputs)
            inside = sources(_nodes(mark, 1), until=inputs)
            before, inside_parameters = (_parameters(nodes) for nodes in (around, inside))
            checkpoints.append(Checkpoint(before, inside_parameters, not asking.isdisjoint(around), str(mark.args[2])))
    return tuple(checkpoints)


def _parameters(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    roles = (node.meta["role"] for node in nodes if node.op == "placeholder")
    return tuple(sorted(name for kind, name in roles if kind == "parameter"))


def _replace(graph: fx.Graph, node: fx.Node, values: Any) -> None:
    """Let these values stand for a call's results."""
    for user in list(node.users):
        g.replace_call(user, values[user.args[1]])
    graph.erase_node(node)


def _compose(hooks: dict[fx.Node, fx.Node], node: fx.Node, part: list[fx.Node]) -> None:
    """A second hook on a value is given what the first one returned."""
    (value,) = _nodes(node, 1)
    if value in hooks:
        (before,) = _nodes(hooks[value], 2)
        for call in part:
            if g.op_name(call) == INCOMING:
                call.replace_all_uses_with(before)
    hooks[value] = node


def _nodes(node: fx.Node, place: int) -> list[fx.Node]:
    """The nodes in a list that a call is given."""
    return [value for value in node.args[place] if isinstance(value, fx.Node)]  # type: ignore[union-attr]


def _everywhere(graph: fx.Graph, value: fx.Node, node: fx.Node) -> None:
    """Let all that reads a value read what its hook gives."""
    position = {call: place for place, call in enumerate(graph.nodes)}
    readers = [reader for reader in value.users if not is_own(reader) and g.op_name(reader) != INCOMING]
    if any(position[reader] < position[node] for reader in readers):
        raise InputError(
            "a hook is put on a tensor that was read before",
            g.line(node),
            "call register_hook right after the tensor is made",
        )
    with graph.inserting_after(node):
        hooked = g.add_call(graph, operator.getitem, (node, 0), val=value.meta["val"], like=node)
    for reader in readers:
        reader.replace_input_with(value, hooked)
