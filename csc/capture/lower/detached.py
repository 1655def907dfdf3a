"""Writes into detached tensors: eager's gradient flows from what is written, although not to where it came from.

Terms
  memory    tensors that are views of each other are one memory; a graph node stands for one of them
  detached  reached through `detach()`: in eager PyTorch a write there makes the tensor require a gradient, and the
            memory behind it holds the written values too

    own_memory(graph)      give every detached tensor that is written to memory of its own

Where writes become functional (torch's functionalisation), `detach` counts as a view: after a write the view is made
anew, which would cut off the gradient of what was written. A copy is no view. It is the same to the model as long as
nobody reads the memory by its other names afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from csc.capture.lower.recorded import source_of
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.graph import add_traced_call
from csc.torch_private.exported import OpOverload

DETACH = "aten::detach"
NO_TENSORS = frozenset({"placeholder", "get_attr"})


def own_memory(graph: fx.Graph) -> None:
    """InputError, with the line, if the memory of a tensor that is detached and written to is read by another name
    afterwards. Writes to parameters, buffers and batch entries stay what they are.
    """
    views = _Views(graph)
    places = {node: place for place, node in enumerate(graph.nodes)}
    first: dict[fx.Node, fx.Node] = {}  # write of each detach
    for node in graph.nodes:
        cut = views.detached(_written(node))
        if cut is not None and views.memory(cut).op not in NO_TENSORS:
            first.setdefault(cut, node)
    for cut, write in first.items():
        for one in views.of(cut):
            after = [reader for reader in one.users if places[reader] > places[write] and _reads(reader, views)]
            if after and not views.passes(one, cut):
                raise InputError(
                    "the model writes to a detached tensor, and reads the memory that it shares by another name "
                    "afterwards",
                    source_of(after[0]) or source_of(write) or "model",
                    "write to a copy: x.detach().clone()",
                )
    for cut in first:
        _copied(graph, cut)


def _reads(node: fx.Node, views: _Views) -> bool:
    """A view alone reads nothing."""
    return node not in views.parent or g.mutates(node)


class _Views:
    """Which tensor each view is one of. parent: of views and of the results of writes."""

    def __init__(self, graph: fx.Graph) -> None:
        self.parent: dict[fx.Node, fx.Node] = {}
        self._same: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            of = _viewed(node, self.parent)
            if of is not None:
                self.parent[node] = of
            self._same.setdefault(self.memory(node), []).append(node)

    def memory(self, node: fx.Node) -> fx.Node:
        """The first node of its memory."""
        *_, found = self._way(node)
        return found

    def of(self, node: fx.Node) -> list[fx.Node]:
        """All nodes of its memory, in order."""
        return self._same[self.memory(node)]

    def detached(self, node: Any) -> fx.Node | None:
        """The first detach() on the way from a view back to its memory; None if there is none."""
        return next((one for one in self._way(node) if one.op == "call_function" and g.op_name(one) == DETACH), None)

    def passes(self, node: fx.Node, cut: fx.Node) -> bool:
        """Whether a detach() is on the way back."""
        return any(one is cut for one in self._way(node))

    def _way(self, node: Any) -> Iterator[fx.Node]:
        while isinstance(node, fx.Node):
            yield node
            node = self.parent.get(node)


def _viewed(node: fx.Node, parent: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    """The operand that the result may be a view of, or is itself."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return node.args[0] if node.args[0] in parent else None  # type: ignore[return-value]
    if not isinstance(node.target, OpOverload):
        return None
    schema = node.target._schema
    if not schema.returns or schema.returns[0].alias_info is None:
        return None
    bound = g.bind(node)
    operands = [bound.get(argument.name) for argument in schema.arguments if argument.alias_info is not None]
    found = next((one for one in operands if isinstance(one, fx.Node)), None)
    return None if found is None or _is_copy(node, found) else found


def _is_copy(node: fx.Node, operand: fx.Node) -> bool:
    """Of a call that gives its operand as it is where it can, such as `to`."""
    before, after = (one.meta.get("val") for one in (operand, node))
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.dtype is not after.dtype or before.device != after.device


def _written(node: fx.Node) -> Any:
    """What a call writes to; None if it writes to nothing."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    for argument in node.target._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            return g.bind(node).get(argument.name)
    return None


def _copied(graph: fx.Graph, cut: fx.Node) -> None:
    with graph.inserting_after(cut):
        copy = add_traced_call(graph, torch.ops.aten.clone.default, (cut,), val=cut.meta["val"], like=cut)
    cut.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
