"""Pass `loss`: how the losses of microbatches combine into the loss of the whole batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from csc.passes import loss_terms
from torch import fx

from csc.analysis.operators.execution import is_view
from csc.analysis.operators.table import COPIES, LABELS
from csc.analysis.samples.combining import assumed, proven
from csc.analysis.samples.rules import MEAN
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.graph import Writer
from csc.ir.program import Combination, Options, Program
from csc.torch_private.exported import OpOverload

aten = torch.ops.aten

OF_TERMS = "adds terms of the loss that are divided by different numbers"
ONE_SAMPLE = (
    "the model asks for the number of samples and was traced for one: that microbatches of one sample combine by their "
    "labels is read off the loss, and not proven"
)


def loss(program: Program, options: Options) -> Program:
    """Find what the loss is a sum over and what it is divided by, and count it.

    Requires  pass `shapes`.
    Ensures   `loss_weight` is "tokens", "mean", "sum" or "terms"; for "tokens" the graph's second output counts the
              microbatch's labels, or whatever else the loss is divided by, from the batch alone; for "terms" it counts
              that of each term, which is multiplied by a weight where it is added. `combination` says what is proven.
    Before    %loss = aten.cross_entropy_loss(%logits, %labels);  return (%loss,)
    After     %counted = aten.sum(aten.ne(%labels, -100));        return (%loss, %counted)
    """
    (result,) = g.outputs(program.graph)
    program, found = _combination(program)
    found = replace(found, summed=options.mesh.cp > 1 and labels_of(result) is None)
    weight = found.weight if options.loss_weight == "auto" else options.loss_weight
    counted = _named(program.graph, found.counted)
    if (options.mesh.cp > 1 and not found.summed) or not weight or (weight == "tokens" and counted is None):
        counted = labels_of(result)
        if options.loss_weight == "auto":
            weight = "mean" if counted is None else "tokens"
    if found.problem and _is_mean_of_one_sample(program, found, result):
        program = replace(program, notes=(*program.notes, ONE_SAMPLE))
        found = replace(found, problem="", where="")
    if weight == "terms":
        return _of_terms(program, found)
    program = replace(program, combination=found, loss_weight=weight)
    if weight != "tokens":
        return program
    if counted is None:
        raise InputError(
            "the loss is no mean over labels, so its labels cannot be counted", "loss_weight='tokens'",
            "use loss_weight='mean' or 'sum'",
        )  # fmt: skip
    graph, mapping = g.copy_graph(program.graph)
    with graph.inserting_before(graph.output_node()):
        count = loss_terms.counted(Writer(graph, program.fake_mode), mapping[counted])
    graph.output_node().args = ((mapping[result], count),)
    return replace(program, graph=graph)


def _of_terms(program: Program, found: Combination) -> Program:
    """If a pass has changed the calls that add terms, or what they are divided by, nothing is proven."""
    graph, mapping = g.copy_graph(program.graph)
    divisors, (result,) = found.divisors, g.outputs(program.graph)
    count = loss_terms.counts(program, graph, divisors)
    if count is not None:
        graph.output_node().args = ((mapping[result], count),)
    if count is None or not loss_terms.weighed(program, graph, found.terms, divisors):
        call = _named(program.graph, found.terms[0].call)
        refused = Combination(rows=found.rows, problem=OF_TERMS, where=g.place(call) if call is not None else "loss")
        labels = labels_of(result) is not None
        return replace(program, combination=refused, loss_weight="tokens" if labels else "mean")
    return replace(program, graph=graph, combination=found, loss_weight="terms")


def _combination(program: Program) -> tuple[Program, Combination]:
    """As another size of the capture has proven it for all, else as this one does."""
    assert program.symbolic is not None
    known, key = program.joints.combinations if program.joints is not None else {}, assumed(program)
    if key in known:
        return program, known[key]
    found, always = proven(program, program.symbolic)
    if always and program.joints is not None:
        joints = replace(program.joints, combinations={**known, key: found})
        program = replace(program, joints=joints)
    return program, found


def check_combination(program: Program, options: Options) -> None:
    """InputError if the batch is cut into microbatches and nothing proves how their losses combine."""
    problem = program.combination.problem
    if problem and options.loss_weight == "auto" and options.microbatches * options.mesh.dp > 1:
        raise InputError(
            f"csc cannot prove that the losses of microbatches make the loss of the batch: {problem}",
            program.combination.where,
            "use one microbatch and dp=1, with which the step is the model's own; or, if its samples do not depend on "
            "each other, say how their losses combine: loss_weight='mean' (by the number of samples) or 'sum'",
        )


def _is_mean_of_one_sample(program: Program, found: Combination, result: fx.Node) -> bool:
    """Whether a model that asks for the number of samples was traced for one, and its loss is a mean over labels.

    Then nothing in the graph tells what would be done to several; but microbatches have one sample each, so that none
    meets another in them. What the model does to a whole batch the check compares (csc.check).
    """
    rows = next((one.shape[one.samples :] for one in program.inputs if one.name == found.rows), ())
    return rows[:1] == (1,) and labels_of(result) is not None


def labels_of(result: Any) -> fx.Node | None:
    """The mean over integer labels, known from the batch alone, that a loss ends in; None if it ends otherwise."""
    node = result
    while isinstance(node, fx.Node) and _scales_only(node):
        node = node.args[0]
    if not isinstance(node, fx.Node) or g.op_name(node) not in LABELS:
        return None
    bound = g.bind(node)
    whole = bound["target"].meta["val"].dtype is torch.int64 and bound.get("weight") is None
    return node if whole and bound["reduction"] == MEAN and not g.reads_parameters([bound["target"]]) else None


def _scales_only(node: fx.Node) -> bool:
    """Casts, views and products with a literal: they do not change what is averaged over."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if g.op_name(node) in ("aten::mul", "aten::div"):
        return isinstance(node.args[0], fx.Node) and not isinstance(node.args[1], fx.Node)
    return is_view(node) or g.op_name(node) in COPIES


def _named(graph: fx.Graph, name: str) -> fx.Node | None:
    return next((node for node in graph.nodes if node.name == name), None) if name else None
