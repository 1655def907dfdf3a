"""Functions with a backward of their own in a forward graph (see csc.kernels.own_gradient).

backwards(graph) -> {node: nodes}       of each csc::own_gradient the calls of its backward, in order
settle(graph)                           of a captured graph: functions that nothing trains before are no functions,
                                        hooks are where the gradient of their tensor is whole
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import fx

from csc.analysis import gradient_flow
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir import graph as rewrite
from csc.ir.program import Checkpoint

INCOMING, OWN, HOOKED, CHECKPOINTED = "csc::incoming", "csc::own_gradient", "csc::with_hooks", "csc::checkpointed"


def is_own(node: fx.Node) -> bool:
    """Whether a call ends the backward of a function."""
    return node.op == "call_function" and g.op_name(node) == OWN


def backwards(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Of each function the calls that depend on the gradients which come in, and its gradients on them."""
    position = {node: place for place, node in enumerate(graph.nodes)}
    after: set[fx.Node] = set()  # what comes in, and all that is made of it
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in g.calls(graph):
        if is_own(node):
            own: set[fx.Node] = set()
            stack = [one for one in _nodes(node, 2) if one in after]
            while stack:
                one = stack.pop()
                if one not in own:
                    own.add(one)
                    stack += [used for used in one.all_input_nodes if used in after]
            found[node] = sorted(own, key=position.__getitem__)
        elif g.op_name(node) == INCOMING or any(used in after for used in node.all_input_nodes):
            after.add(node)
    return found


def settle(graph: fx.Graph) -> tuple[Checkpoint, ...]:
    """Change a captured graph in place, whose backward parts may have been run by modules within their function's.
    Returns its reentrant checkpoints.
    """
    carrying = gradient_flow.carrying(graph)
    for node in list(graph.nodes):
        if is_own(node) and not any(one in carrying for one in _nodes(node, 1)):
            _replace(graph, node, node.args[0])
    hooks: dict[fx.Node, fx.Node] = {}  # by the value that they are on, the last
    for node, part in backwards(graph).items():
        for one in part:
            one.meta["module"] = node.meta["module"]
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
    asking = {one for mark in marks if not mark.args[1] for one in _nodes(mark, 0)}
    found = []
    for mark in marks:
        if mark.args[1]:
            inputs = _nodes(mark, 0)
            around = gradient_flow.sources(inputs)
            inside = gradient_flow.sources(_nodes(mark, 1), until=inputs)
            before, own = (_parameters(nodes) for nodes in (around, inside))
            found.append(Checkpoint(before, own, not asking.isdisjoint(around), str(mark.args[2])))
    return tuple(found)


def _parameters(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    roles = (node.meta["role"] for node in nodes if node.op == "placeholder")
    return tuple(sorted(name for kind, name in roles if kind == "parameter"))


def _replace(graph: fx.Graph, node: fx.Node, values: Any) -> None:
    """Let these values stand for a call's results."""
    for user in list(node.users):
        rewrite.replace_call(user, values[user.args[1]])
    graph.erase_node(node)


def _compose(hooks: dict[fx.Node, fx.Node], node: fx.Node, part: list[fx.Node]) -> None:
    """A second hook on a value is given what the first one returned."""
    (value,) = _nodes(node, 1)
    if value in hooks:
        (before,) = _nodes(hooks[value], 2)
        for one in part:
            if g.op_name(one) == INCOMING:
                one.replace_all_uses_with(before)
    hooks[value] = node


def _nodes(node: fx.Node, place: int) -> list[fx.Node]:
    """The nodes in a list that a call is given."""
    return [one for one in node.args[place] if isinstance(one, fx.Node)]  # type: ignore[union-attr]


def _everywhere(graph: fx.Graph, value: fx.Node, node: fx.Node) -> None:
    """Let all that reads a value read what its hook gives."""
    position = {one: place for place, one in enumerate(graph.nodes)}
    readers = [one for one in value.users if not is_own(one) and g.op_name(one) != INCOMING]
    if any(position[one] < position[node] for one in readers):
        raise InputError(
            "a hook is put on a tensor that was read before",
            g.line(node),
            "call register_hook right after the tensor is made",
        )
    with graph.inserting_after(node):
        hooked = rewrite.add_call(graph, operator.getitem, (node, 0), val=value.meta["val"], like=node)
    for one in readers:
        one.replace_input_with(value, hooked)
