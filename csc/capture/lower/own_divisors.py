"""Smoothed cross entropies over weighted classes, as a sum and what it is divided by.

    with_own_divisors(graph, mode)      changes a captured graph, in place

By ATen's definition the mean of `cross_entropy(x, labels, weight=w, label_smoothing=s)` is a sum over tokens divided by
the sum of `w[label]`. Smoothing gives a token whose class weighs 0 a loss all the same. So where all labels of a
microbatch weigh 0 there is something to divide and nothing to divide by, though the whole batch has both: as a sum and
a divisor in the graph they are combined for the batch, as those of a user's own quotient are.
"""

from __future__ import annotations

import torch
from torch import fx

from csc.ir import graph as g
from csc.ir.graph import Writer, replace_call
from csc.torch_private.traces import FakeTensorMode

aten = torch.ops.aten
MEAN, SUM = 1, 2  # values of ATen's `reduction` argument


def with_own_divisors(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """See the module.

    Before    %loss = aten.cross_entropy_loss(%x, %labels, %w, 1, -100, 0.1)
    After     %sum = aten.cross_entropy_loss(%x, %labels, %w, 2, -100, 0.1);  %loss = aten.div(%sum, %divisor)
    """
    writer = Writer(graph, mode)
    for node in g.calls(graph):
        if g.op_name(node) == "aten::cross_entropy_loss" and _has_own_divisor(node):
            with graph.inserting_before(node):
                new = _quotient(writer, node)
            replace_call(node, new)


def _has_own_divisor(node: fx.Node) -> bool:
    bound = g.bind(node)
    weighted = bound.get("weight") is not None and bound["label_smoothing"] and bound["reduction"] == MEAN
    return bool(weighted) and not bound["target"].meta["val"].dtype.is_floating_point


def _quotient(writer: Writer, node: fx.Node) -> fx.Node:
    bound = g.bind(node)
    labels, weight, ignored = bound["target"], bound["weight"], bound["ignore_index"]
    arguments = bound["self"], labels, weight, SUM, ignored, bound["label_smoothing"]
    total = writer.call(node, aten.cross_entropy_loss.default, *arguments)
    counted = writer.call(node, aten.ne.Scalar, labels, ignored)
    classes = writer.call(node, aten.mul.Tensor, labels, counted)  # 0 where there is no label
    weights = writer.call(node, aten.mul.Tensor, writer.call(node, aten.index.Tensor, weight, [classes]), counted)
    return writer.call(node, aten.div.Tensor, total, writer.call(node, aten.sum.default, weights))
