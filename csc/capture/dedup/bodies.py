"""Equal layers in the graph: the operations of the one that was traced, copied for those that do the same.

Terms: see csc.capture.dedup.layers, which puts the marks into the trace.
  body     the operations of a first, between its inputs and its outputs

    bodies(graph, module_of, batch) -> {mark: body}     of a flat functional graph; CannotRepeat if one is not closed
    copied(again, body, mapping, own, copy)             what stands for an again's results
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from csc.ir import graph as g

NOT_COPIED = frozenset({"csc::opaque"})  # names the one module that it runs


class CannotRepeat(Exception):
    """A layer was not a function of its arguments after all: the model has to be traced whole."""


@dataclass(frozen=True)
class Body:
    """The operations of the first at `path`, in order."""

    path: str
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def is_first(node: fx.Node) -> bool:
    """Whether a call marks a layer that was traced."""
    return node.op == "call_function" and g.op_name(node) == "csc::layer_first"


def is_again(node: fx.Node) -> bool:
    """Whether a call stands for a layer that does what another one did."""
    return node.op == "call_function" and g.op_name(node) == "csc::layer_again"


def bodies(
    graph: fx.Graph, module_of: Callable[[fx.Node], str], batch: Collection[fx.Node] = ()
) -> dict[fx.Node, Body]:
    """What each first that is repeated does, by its mark in a flat functional graph. module_of: path of the module that
    ran a node; batch: the placeholders of batch entries. CannotRepeat if one reads or gives away what it should not.
    """
    marks: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if is_first(node) and node.users and marks.setdefault(node.args[2], node) is not node:
            raise CannotRepeat(f"{node.args[2]} is called in several ways")
    inside: dict[Any, set[fx.Node]] = {path: set() for path in marks}
    position: dict[fx.Node, int] = {}
    for place, node in enumerate(graph.nodes):
        position[node] = place
        path = _around(module_of(node), marks) if node.op == "call_function" and not is_first(node) else None
        if path is not None:
            inside[path].add(node)
    return {mark: _body(mark, inside[path], position, module_of, batch) for path, mark in marks.items()}


def _around(module: str, paths: Collection[Any]) -> str | None:
    """The one of these paths that a module is at or below."""
    while module and module not in paths:
        module = module.rpartition(".")[0]
    return module or None


def _body(
    mark: fx.Node,
    inside: set[fx.Node],
    position: Mapping[fx.Node, int],
    module_of: Callable[[fx.Node], str],
    batch: Collection[fx.Node],
) -> Body:
    """inside: the calls that modules at and below the first's path ran."""
    marked: Any = mark.args
    inputs, outputs, path = tuple(marked[0]), tuple(marked[1]), marked[2]
    found: set[fx.Node] = set()
    stack = [node for node in outputs if node not in inputs]
    while stack:
        node = stack.pop()
        if node in found or node in inputs or (node.op == "placeholder" and node not in batch):
            continue
        if node in inside:
            found.add(node)
            stack.extend(node.all_input_nodes)
        elif isinstance(node.meta.get("val"), torch.Tensor):
            raise CannotRepeat(f"{path} reads {node.name}, which it was not given")
    for node in inside.difference(outputs):
        if g.op_name(node) in NOT_COPIED:
            raise CannotRepeat(f"{path} runs {g.op_name(node)}")
        for user in node.users:
            if user is not mark and user not in inside and isinstance(node.meta.get("val"), torch.Tensor):
                raise CannotRepeat(f"{module_of(user) or 'the model'} reads {node.name} of {path}")
    return Body(path, tuple(sorted(found, key=position.__getitem__)), inputs, outputs)


def copied(
    again: fx.Node,
    body: Body,
    mapping: Mapping[fx.Node, Any],
    own: Callable[[fx.Node, str, str], Any],
    copy: Callable[[fx.Node, Callable[[fx.Node], Any]], fx.Node],
) -> list[Any]:
    """Copies a first's body for a layer that repeats it; returns what stands for its results.

    mapping: from the nodes before it. own(placeholder, path, of): the parameter or buffer of the layer at path `of`
    that a placeholder is for the layer at `path`. copy(node, lookup): appends a copy of an operation.
    """
    called: Any = again.args
    _, _, inputs, path = called
    inner: dict[fx.Node, Any] = {}
    for given, now in zip(body.inputs, inputs, strict=True):
        if inner.setdefault(given, mapping[now]) is not mapping[now]:
            raise CannotRepeat(f"two arguments of {body.path} are one tensor, those of {path} are two")

    def lookup(node: fx.Node) -> Any:
        if node in inner:
            return inner[node]
        return own(node, body.path, path) if node.op == "placeholder" else mapping[node]

    for node in body.nodes:
        inner[node] = copy(node, lookup)
        inner[node].meta["module"] = path + inner[node].meta["module"].removeprefix(body.path)
    return [inner[node] if node in inner else mapping[node] for node in body.outputs]
