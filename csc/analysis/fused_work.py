"""What F, B or W costs with `fuse=True`: element-wise work runs in few kernels; values in between stay in them.

Terms: a call is *fusible* if it is element-wise, a reduction or a cast, as Inductor fuses them. A *group* is fusible
calls that hand values to each other, over views too. It is one kernel, which reads what comes from outside once and
writes what is read outside.

    fused(graph, calls) -> Kernels        calls: (node, its kernel), in order
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from csc.analysis.kernel_calls import KernelCall, Kernels
from csc.analysis.operators.execution import FUSED_REDUCTIONS
from csc.analysis.operators.views import is_view, maker
from csc.ir import graph as g


def fused(graph: fx.Graph, calls: Sequence[tuple[fx.Node, KernelCall]]) -> Kernels:
    """The kernels, each group in the place of its first call."""
    kernel = dict(calls)
    place = {node: i for i, (node, _) in enumerate(calls)}
    group: dict[fx.Node, fx.Node] = {}
    for node, _ in calls:
        if _fusible(node):
            makers = [group[made] for one in node.all_input_nodes if (made := maker(one)) in group]
            first = min(makers, key=lambda one: place[one], default=node)
            for other in {*makers} - {first}:
                group.update({one: first for one, head in group.items() if head is other})
            group[node] = first
    members: dict[fx.Node, list[fx.Node]] = {}
    for node, first in group.items():
        members.setdefault(first, []).append(node)
    found = []
    for node, call in calls:
        if node not in group:
            found.append(call)
        elif node in members:
            found.append(_together(node, members[node], kernel))
    return Kernels(tuple(found))


def _together(first: fx.Node, members: Sequence[fx.Node], kernel: dict[fx.Node, KernelCall]) -> KernelCall:
    inside = set(members)
    read = {made: None for one in members for used in one.all_input_nodes if (made := maker(used)) not in inside}
    written = [one for one in members if any(user not in inside for user in _readers(one))]
    moved = sum(_bytes(one) for one in (*read, *written))
    return KernelCall("fused", kernel[first].dtype, sum(kernel[one].flops for one in members), moved)


def _fusible(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or g.op_name(node) in FUSED_REDUCTIONS


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads a value, through views."""
    found = []
    for user in node.users:
        view = user.op == "call_function" and (user.target is operator.getitem or is_view(user))
        found += _readers(user) if view else [user]
    return found


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.itemsize if isinstance(value, torch.Tensor) else 0
