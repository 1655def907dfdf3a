"""What enters and leaves calls that run on a rank's own tokens, by what the ranks have in common otherwise.

Terms
  parts    context-parallel ranks: each has its part of every gradient, whatever it belongs to, and REDUCE adds them up
  equal    tensor-parallel ranks: what others compute is the same on all of them, gradients included

    edge.start(graph)                                  placeholders that the calls below need
    edge.whole(call, shard, plan, dim, tokens)         a shard as others read it
    edge.own(call, used, whole, own, dim, slots)       a rank's shard of what others made. used: it in the old graph
    edge.read(call, used, whole)                       a value without tokens, as calls on shards read it
    edge.parts                                         parameters whose gradients are parts over the axis
    remedy(axis, component)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import torch
from csc.kernels.collectives import SHARE
from csc.kernels.context import GATHER, OWN, WHOLE
from csc.passes.tensor import group_number
from torch import fx

from csc.analysis.gradient_flow import carrying_calls
from csc.ir import graph as g
from csc.ir.graph import unique
from csc.torch_private.traces import FakeTensorMode


def remedy(axis: str, component: str) -> str:
    """For a component that cannot be on shards."""
    if axis == "cp":
        return f"leave {component} out of `context`: every rank then computes it whole"
    return f"leave {component} out of the mesh, so that its layers are divided as those of other components are"


SELECT = torch.ops.aten.index_select.default
Write = Callable[..., fx.Node]  # call(target, *arguments)


class ShardEdge(Protocol):
    axis: str

    @property
    def parts(self) -> Collection[str]: ...

    def start(self, graph: fx.Graph) -> None: ...

    def whole(self, call: Write, shard: fx.Node, plan: fx.Node, dim: int, tokens: int) -> fx.Node: ...

    def own(
        self, call: Write, used: fx.Node, whole: fx.Node, own: Mapping[str, fx.Node], dim: int, slots: int
    ) -> fx.Node: ...

    def read(self, call: Write, used: fx.Node, whole: fx.Node) -> fx.Node: ...


class PartsEdge:
    axis = "cp"
    parts: frozenset[str] = frozenset()

    def start(self, graph: fx.Graph) -> None:
        """Nothing."""

    def whole(self, call: Write, shard: fx.Node, plan: fx.Node, dim: int, tokens: int) -> fx.Node:
        return call(GATHER, shard, plan, dim, tokens)

    def own(
        self, call: Write, used: fx.Node, whole: fx.Node, own: Mapping[str, fx.Node], dim: int, slots: int
    ) -> fx.Node:
        return call(SELECT, whole, dim, own["tokens"])

    def read(self, call: Write, used: fx.Node, whole: fx.Node) -> fx.Node:
        return whole


class EqualEdge:
    """axis: tp, or one of what it is made of. local: the calls that run on shards. parts: of the parameters that lead
    to these alone.
    """

    def __init__(
        self, graph: fx.Graph, local: Collection[fx.Node], dims: Callable[[fx.Node], Any], mode: FakeTensorMode,
        axis: str,
    ) -> None:  # fmt: skip
        self.axis = axis
        self._names, self._mode = {node.name for node in graph.nodes}, mode
        self._carrying = carrying_calls(graph)
        self._inside = _inside(graph, local, self._carrying, dims)
        self.parts = {node.meta["role"][1] for node in self._inside if node.op == "placeholder"}

    def start(self, graph: fx.Graph) -> None:
        """The number of the group."""
        with self._mode:
            number = torch.empty((), dtype=torch.int64)
        name, role = group_number(self.axis)
        self.group = g.add_placeholder(graph, unique(name, self._names), number, role)

    def whole(self, call: Write, shard: fx.Node, plan: fx.Node, dim: int, tokens: int) -> fx.Node:
        return call(WHOLE, shard, plan, dim, tokens)

    def own(
        self, call: Write, used: fx.Node, whole: fx.Node, own: Mapping[str, fx.Node], dim: int, slots: int
    ) -> fx.Node:
        if used in self._carrying:
            return call(OWN, whole, own["plan"], dim, slots, True)
        return call(SELECT, whole, dim, own["tokens"])

    def read(self, call: Write, used: fx.Node, whole: fx.Node) -> fx.Node:
        return call(SHARE, whole, self.group) if used in self._carrying and used not in self._inside else whole


def _inside(
    graph: fx.Graph, local: Collection[fx.Node], carried: Collection[fx.Node], dims: Callable[[fx.Node], Any]
) -> set[fx.Node]:
    """The values without tokens that lead to calls on shards alone, made of nothing else that carries a gradient."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in carried and node not in local and not dims(node):
            found |= {node} if all(user in local or user in found for user in node.users) else set()
    while True:
        torn = {
            node for node in found
            if any(used in carried and used not in found for used in node.all_input_nodes)
            or any(user not in local and user not in found for user in node.users)
        }  # fmt: skip
        if not torn:
            return found
        found -= torn
