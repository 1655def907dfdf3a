"""Writes into tensors that a model has made itself, as operations that give new ones.

Terms
  memory      a tensor and its views; its *root* is the tensor that was made
  stale       a view that was made before something was written to its memory

    without_writes(graph) -> fx.Graph | None      None if a write is of a kind that is left to torch

A write to a view gives a new view, and from it, view by view, a new root. What is read afterwards is read off the new
root; views that are stale are then made again. Torch's own functionalisation does that by running the whole graph,
twice: for a scan over tokens, which writes in each turn of a loop, that is most of a capture.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from csc.analysis.operators.execution import is_random
from csc.ir import graph as g
from csc.ir.graph import add_traced_call, values_of
from csc.torch_private.exported import OpOverload
from csc.torch_private.traces import python_kernels

aten = torch.ops.aten


class _LeftToTorch(Exception):
    """A write that has no form here."""


def without_writes(graph: fx.Graph) -> fx.Graph | None:
    """The same graph, functional. Every operation of it says by its schema what it writes to and of what it gives a
    view. Writes to what comes from outside, through views of which no operation is the reverse, and of random numbers
    are left to torch.
    """
    made = _Made()
    try:
        for node in graph.nodes:
            made.add(node)
    except _LeftToTorch:
        return None
    return made.graph


class _Made:
    """The functional graph as it grows. By nodes of the graph with writes: what stands for them now, of what they are
    views, and how often their memory had been written to when what stands for them was made.
    """

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._now: dict[fx.Node, fx.Node] = {}
        self._same: dict[fx.Node, fx.Node] = {}  # what a write returns: that to which it wrote
        self._parent: dict[fx.Node, fx.Node] = {}
        self._made_at: dict[fx.Node, int] = {}
        self._writes: dict[fx.Node, int] = {}  # by root

    def add(self, node: fx.Node) -> None:
        if g.mutates(node):
            self._write(node)
            return
        viewed = _viewed(node)
        if viewed is not None:
            self._parent[node] = self._one(viewed)
        self._now[node] = self.graph.node_copy(node, self._current)
        self._made_at[node] = self._writes.get(self._root(node), 0)

    def _one(self, node: fx.Node) -> fx.Node:
        return self._same.get(node, node)

    def _root(self, node: fx.Node) -> fx.Node:
        while node in self._parent:
            node = self._parent[node]
        return node

    def _current(self, node: fx.Node) -> fx.Node:
        """What holds the values that a node has now."""
        node = self._one(node)
        writes = self._writes.get(self._root(node), 0)
        if self._made_at[node] != writes:
            again = self.graph.node_copy(node, self._current)
            again.meta["val"] = _value(again.target, again.args, again.kwargs)
            self._now[node], self._made_at[node] = again, writes
        return self._now[node]

    def _write(self, node: fx.Node) -> None:
        operation = _counterpart(node)
        target = self._one(node.args[0])  # type: ignore[arg-type]
        root = self._root(target)
        if root.op != "call_function" or is_random(node):
            raise _LeftToTorch
        arguments, keywords = fx.map_arg(node.args, self._current), fx.map_arg(node.kwargs, self._current)
        written = self._call(node, operation, *arguments, **keywords)
        if not _alike(written.meta["val"], self._current(target).meta["val"]):
            raise _LeftToTorch
        new = [(target, written)]
        while target in self._parent:
            parent = self._parent[target]
            written = self._put(node, target, self._current(parent), written)
            target = parent
            new.append((target, written))
        self._writes[root] = self._writes.get(root, 0) + 1
        for one, value in new:
            self._now[one], self._made_at[one] = value, self._writes[root]
        self._same[node] = self._one(node.args[0])  # type: ignore[arg-type]

    def _put(self, write: fx.Node, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
        """A tensor with `part` in place of the view of it."""
        if not isinstance(view.target, OpOverload):  # one of several views
            raise _LeftToTorch
        name, arguments = g.op_name(view), view.args[1:]
        rest, keywords = fx.map_arg(arguments, self._current), fx.map_arg(view.kwargs, self._current)
        if name in SCATTERS:
            return self._call(write, SCATTERS[name], whole, part, *rest, **keywords)
        if name in ("aten::transpose", "aten::t"):
            return self._call(write, view.target, part, *rest)
        if name == "aten::unsqueeze":
            return self._call(write, aten.squeeze.dim, part, *rest)
        if name == "aten::alias":
            return part
        size = list(whole.meta["val"].shape)
        if name == "aten::view" and all(type(one) is int for one in size) and _is_dense(whole) and _is_dense(part):
            return self._call(write, aten.view.default, part, size)
        raise _LeftToTorch

    def _call(self, like: fx.Node, operation: OpOverload, *arguments: Any, **keywords: Any) -> fx.Node:
        val = _value(operation, arguments, keywords)
        return add_traced_call(self.graph, operation, arguments, keywords, val=val, like=like)


SCATTERS: dict[str, OpOverload] = {
    "aten::select": aten.select_scatter.default,
    "aten::slice": aten.slice_scatter.default,
    "aten::diagonal": aten.diagonal_scatter.default,
}


def _viewed(node: fx.Node) -> fx.Node | None:
    """The operand of which the result is a view; of one of several results, all of them, if they are views."""
    if node.target is operator.getitem:
        several: Any = node.args[0]
        return several if _viewed(several) is not None else None
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    bound = g.bind(node)
    operands = [bound.get(one.name) for one in node.target._schema.arguments if one.alias_info is not None]
    return next((one for one in operands if isinstance(one, fx.Node)), None)


def _counterpart(node: fx.Node) -> OpOverload:
    """The operation that gives what another one writes to its first argument, and to that alone."""
    assert isinstance(node.target, OpOverload)
    schema = node.target._schema
    written = [one.alias_info is not None and one.alias_info.is_write for one in schema.arguments]
    name = schema.name.removeprefix("aten::")
    packet: Any = getattr(aten, name.removesuffix("_"), None)
    if not name.endswith("_") or name.startswith("_") or not written[0] or any(written[1:]) or packet is None:
        raise _LeftToTorch
    overload = node.target._overloadname
    found: OpOverload | None = getattr(packet, overload, None) if overload in packet.overloads() else None
    if found is None or found._schema.is_mutable or not isinstance(node.args[0], fx.Node):
        raise _LeftToTorch
    names = [one.name for one in found._schema.arguments]
    views = any(one.alias_info is not None for one in found._schema.arguments)  # x.t_() is no write
    if views or names != [one.name for one in schema.arguments] or len(found._schema.returns) != 1:
        raise _LeftToTorch
    return found


def _value(operation: Any, arguments: Any, keywords: Any) -> Any:
    """The type that an operation gives."""
    given, named = values_of((arguments, keywords))
    try:
        with torch.no_grad(), python_kernels():
            return operation(*given, **named)
    except Exception as error:
        raise _LeftToTorch from error


def _alike(one: Any, other: Any) -> bool:
    """Whether a tensor is as another one that it takes the place of."""
    return bool(one.dtype == other.dtype and one.device == other.device and tuple(one.shape) == tuple(other.shape))


def _is_dense(node: fx.Node) -> bool:
    """Whether it lies in memory row by row."""
    return bool(node.meta["val"].is_contiguous())
