"""Views whose input may lie in memory in another way than it did in the trace.

The strides in a trace are those of fake tensors. For elementwise operations whose inputs lie in different orders
(a transposed gradient and a saved value) some of them are not what the real operation gives: softplus_backward follows
its first input, its fake one does not. `aten.view` then fails on real tensors; `aten.reshape` is the same view where
there can be one, and a copy where not.

    with_reshapes(graph)      changes a traced graph, in place
"""

from __future__ import annotations

import torch
from torch import fx

from csc.analysis.operators.execution import OWN_LAYOUT, is_view
from csc.ir import graph as g


def with_reshapes(graph: fx.Graph) -> None:
    """Views of what comes from a value that is not contiguous, with no matrix product in between, become reshapes.

    Before    %x = aten.softplus_backward(%transposed, %y);  %z = aten.view(%x, [48, 4])
    After     %x = aten.softplus_backward(%transposed, %y);  %z = aten.reshape(%x, [48, 4])
    """
    uncertain: set[fx.Node] = set()
    for node in g.calls(graph):
        if g.op_name(node) in OWN_LAYOUT or g.op_name(node).startswith("csc::") or _made_contiguous(node):
            continue
        given = node.all_input_nodes
        if any(one in uncertain for one in given) or (_computed(node) and any(map(_strided, given))):
            uncertain.add(node)
            if g.op_name(node) == "aten::view":
                node.target = torch.ops.aten.reshape.default


def _made_contiguous(node: fx.Node) -> bool:
    return g.op_name(node) == "aten::clone" and node.kwargs.get("memory_format") is torch.contiguous_format


def _computed(node: fx.Node) -> bool:
    """Whether the result is made from several tensors; what one tensor gives follows that."""
    return not is_view(node) and len(node.all_input_nodes) > 1


def _strided(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.is_contiguous()
