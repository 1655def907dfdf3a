"""What F, B or W costs with `fuse=True`: element-wise work runs in few kernels; values in between stay in them.

Terms: a call is *fusible* if it is element-wise, a reduction or a cast, as Inductor fuses them. A *group* is fusible
calls that hand values to each other, over views too, with no other call on a way between them. It is one kernel, which
reads what comes from outside once and writes what is read outside. A call that may wait runs with its first reader.

    fusible(node) -> bool
    fused(graph, calls) -> Kernels        calls: (node, its kernel), in order
    within(graph) -> {node, ...}          calls whose results no memory holds: nobody outside of their kernel reads them
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import torch
from networkx.utils import UnionFind
from torch import fx

from csc.analysis.kernel_calls import KernelCall, Kernels
from csc.analysis.operators.execution import FUSED_REDUCTIONS, OF_MATRICES, is_view, maker
from csc.ir import graph as g

Groups = Mapping[fx.Node, fx.Node]  # by fusible call, one of its group, the same for all of them


def fusible(node: fx.Node) -> bool:
    """Whether Inductor makes the call part of its neighbours' kernel."""
    return is_elementwise(node) or g.op_name(node) in FUSED_REDUCTIONS


def is_elementwise(node: fx.Node) -> bool:
    """Whether each entry of the result follows from one of each operand."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def fused(graph: fx.Graph, calls: Sequence[tuple[fx.Node, KernelCall]]) -> Kernels:
    """The kernels, each group in the place of its first call."""
    kernel = dict(calls)
    members: dict[fx.Node, list[fx.Node]] = {}
    group = _groups(graph)
    for node in kernel:
        if node in group:
            members.setdefault(group[node], []).append(node)
    first = {nodes[0]: nodes for nodes in members.values()}
    found = []
    for node, call in calls:
        if node not in group:
            found.append(replace(call, compiled=call.op in OF_MATRICES | g.HEADS))
        elif node in first:
            found.append(_together(first[node], kernel))
    return Kernels(tuple(found))


def within(graph: fx.Graph) -> Set[fx.Node]:
    """Calls of which nothing is in memory, as every reader is in the same kernel."""
    group = _groups(graph)
    return {node for node, own in group.items() if all(group.get(one) is own for one in _readers(node))}


def _groups(graph: fx.Graph) -> Groups:
    """By levels: no way from a call to another of the same level leads over a call that is not fusible."""
    calls = [node for node in g.calls(graph) if node.target is not operator.getitem and not is_view(node)]
    level: dict[fx.Node, int] = {}
    for node in calls:
        makers = [made for used in node.all_input_nodes if (made := maker(used)) in level]
        level[node] = max((level[made] + (not fusible(made)) for made in makers), default=0)
    for node in reversed(calls):
        if fusible(node):
            waits = min((level.get(one, 0) for one in _readers(node)), default=0)
            level[node] = max(level[node], waits)
    joined = [node for node in calls if fusible(node)]
    groups = UnionFind(joined)
    for node in joined:
        makers = [made for used in node.all_input_nodes if level.get(made := maker(used)) == level[node]]
        groups.union(node, *filter(fusible, makers))
    return {node: groups[node] for node in joined}


def _together(members: Sequence[fx.Node], kernel: Mapping[fx.Node, KernelCall]) -> KernelCall:
    inside = set(members)
    read = {made: None for one in members for used in one.all_input_nodes if (made := maker(used)) not in inside}
    written = [one for one in members if any(user not in inside for user in _readers(one))]
    moved = sum(_bytes(one) for one in (*read, *written))
    return KernelCall("fused", kernel[members[0]].dtype, sum(kernel[one].flops for one in members), moved)


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads a value, through views."""
    found = []
    for user in node.users:
        view = user.op == "call_function" and (user.target is operator.getitem or is_view(user))
        found += _readers(user) if view else [user]
    return found


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    items = value if isinstance(value, (tuple, list)) else (value,)
    return sum(math.prod(one.shape) * one.itemsize for one in items if isinstance(one, torch.Tensor))
