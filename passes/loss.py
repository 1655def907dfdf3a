"""Pass `loss`: how the losses of microbatches combine into the loss of the whole batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.program import Options, Program
from csc.torch_private import OpOverload

TOKEN_LOSSES = {"aten::cross_entropy_loss", "aten::nll_loss_nd", "aten::nll_loss"}
MEAN, SUM = 1, 2  # values of ATen's `reduction` argument


def loss(program: Program, options: Options) -> Program:
    """Find what the loss averages over, and count it.

    Requires  pass `shapes`.
    Ensures   `loss_weight` is "tokens", "mean" or "sum"; for "tokens" the graph's second output counts the microbatch's
              labels, from the batch alone.
    Before    %loss = aten.cross_entropy_loss(%logits, %labels);  return (%loss,)
    After     %counted = aten.sum(aten.ne(%labels, -100));        return (%loss, %counted)
    """
    (result,) = g.outputs(program.graph)
    weight, target, ignored = combined(result, options)
    if weight != "tokens":
        return replace(program, loss_weight=weight)
    graph, mapping = g.copy_graph(program.graph)
    assert target is not None
    labels = mapping[target]
    with program.fake_mode, graph.inserting_before(graph.output_node()):
        mask = graph.call_function(torch.ops.aten.ne.Scalar, (labels, ignored))
        mask.meta.update(val=labels.meta["val"] != ignored, source="", module="")
        count = graph.call_function(torch.ops.aten.sum.default, (mask,))
        count.meta.update(val=mask.meta["val"].sum(), source="", module="", hint="counted_labels")
    graph.output_node().args = ((mapping[result], count),)
    return replace(program, graph=graph, loss_weight="tokens")


def combined(result: Any, options: Options) -> tuple[str, fx.Node | None, int]:
    """(weight, labels, ignored label) as the options want it, for this number of microbatches.

    InputError if the options ask for what the loss is not, or if it cannot be told and there are several microbatches.
    """
    weight, target, ignored = reduction(result)
    if options.loss_weight != "auto" and options.loss_weight != weight:
        weight, target = options.loss_weight, None if options.loss_weight != "tokens" else target
    if weight == "tokens" and target is None:
        raise InputError(
            "the loss is no mean over labels, so its labels cannot be counted", "loss_weight='tokens'",
            "use loss_weight='mean' or 'sum'",
        )  # fmt: skip
    if not weight:
        if options.microbatches * options.mesh.dp > 1:
            raise InputError(
                f"csc cannot see what the loss averages over (it ends in {g.short_op(result)})",
                result.meta.get("source") or "model output",
                "say how the losses of microbatches combine: loss_weight='mean' (each counts the same) or 'sum'; or "
                "use one microbatch and dp=1",
            )
        weight = "mean"
    return weight, target, ignored


def reduction(result: Any) -> tuple[str, fx.Node | None, int]:
    """(weight, labels, ignored label) of the op that the loss ends in; ("", None, 0) if it cannot be told."""
    node = result
    while isinstance(node, fx.Node) and _scales_only(node):
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return "", None, 0
    name, bound = g.op_name(node), g.bind(node) if isinstance(node.target, OpOverload) else {}
    if name in TOKEN_LOSSES and bound.get("weight") is None:
        reduction = bound.get("reduction", MEAN)
        target = bound["target"]
        if reduction == MEAN and target.meta["val"].dtype is torch.int64 and not _depends_on_parameters(target):
            return "tokens", target, int(bound.get("ignore_index", -100))
        if reduction == SUM:
            return "sum", None, 0
    if name in (
        "aten::mse_loss",
        "aten::l1_loss",
        "aten::smooth_l1_loss",
        "aten::binary_cross_entropy_with_logits",
    ):
        return {MEAN: "mean", SUM: "sum"}.get(bound.get("reduction", MEAN), ""), None, 0
    if name == "aten::mean":
        return "mean", None, 0
    if name == "aten::sum":
        return "sum", None, 0
    return "", None, 0


def _scales_only(node: fx.Node) -> bool:
    """Casts, views and products with a literal: they do not change what is averaged over."""
    if node.op != "call_function":
        return False
    if g.op_name(node) in ("aten::mul", "aten::div"):
        return isinstance(node.args[0], fx.Node) and not isinstance(node.args[1], fx.Node)
    return g.is_view(node) or g.op_name(node) in ("aten::_to_copy", "aten::clone")


def _depends_on_parameters(node: fx.Node) -> bool:
    return any(found.meta.get("role", ("",))[0] == "parameter" for found in g.ancestors([node]))
