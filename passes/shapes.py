"""Pass `shapes`: give the symbolic graph the sizes of one microbatch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from csc.analysis.cutting import label
from csc.analysis.operators.execution import VIEWS
from csc.analysis.operators.table import COPIES, STOPS, filled_with
from csc.analysis.symbolic import called_value, given_value
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.capture_guards import Joints
from csc.ir.graph import Evaluation, add_call
from csc.ir.program import Input, Options, Pass, Program
from csc.torch_private.traces import FakeTensorMode, without_messages

# Ops that give back their argument when neither its sizes, strides nor dtype change.
IDENTITY_IF_UNCHANGED = (VIEWS | COPIES) - STOPS


@dataclass(frozen=True)
class ShapesPass(Pass):
    """Evaluate every size of the graph for the shapes in `program.inputs`.

    Ensures   no symbolic size is left; every `val` has a concrete shape; views, casts, broadcasts that change nothing
              are gone, but those that make a region of a parameter, which is there for any number of samples;
              whole numbers that have the sizes of a hidden state, and nothing else of it, do not depend on it.
    Before    %size = aten.sym_size.int(%input_ids, 1);  %view = aten.view(%x, [2, %size, 4])
    After     %view = aten.view(%x, [2, 20, 4])          : f32[2, 20, 4]
    """

    requires: ClassVar = ("captured",)
    establishes: ClassVar = ("sized",)

    def __call__(self, program: Program, options: Options) -> Program:
        joints = program.joints or Joints(FakeTensorMode(allow_non_fake_inputs=True))
        with without_messages():
            graph = _lowered(program, joints.mode)
        return replace(program, graph=graph, fake_mode=joints.mode, symbolic=program.graph, joints=joints)


def _lowered(program: Program, mode: FakeTensorMode) -> fx.Graph:
    """The graph in the sizes of `program.inputs`, its values in `mode`."""
    shape_of = {item.name: item.shape for item in program.inputs}
    graph = fx.Graph()
    mapping: dict[fx.Node, Any] = {}
    values: dict[fx.Node, Any] = {}
    evaluate = Evaluation(mode)
    learned: set[fx.Node] = set()  # of the new graph: what is computed with a parameter
    for node in program.graph.nodes:
        if node.op == "placeholder":
            kind, name = node.meta["role"]
            if kind == "input" and name not in shape_of:
                continue  # a batch entry that the loss does not use
            values[node] = given_value(node, shape_of, evaluate)
            mapping[node] = g.add_placeholder(graph, node.target, values[node], node.meta["role"])
            learned |= {mapping[node]} if kind == "parameter" else set()
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], mapping.__getitem__))
        else:
            _lower(node, graph, mapping, values, evaluate, program)
            new = mapping[node]
            if isinstance(new, fx.Node) and not learned.isdisjoint(new.all_input_nodes):
                mapping[node] = _filled(new) or new
                learned |= {mapping[node]} if mapping[node] is new else set()
    g.erase_dead(graph)
    return graph


def _lower(
    node: fx.Node,
    graph: fx.Graph,
    mapping: dict[fx.Node, Any],
    values: dict[fx.Node, Any],
    evaluate: Evaluation,
    program: Program,
) -> None:
    arguments = fx.map_arg(node.args, values.__getitem__)
    keywords = fx.map_arg(node.kwargs, values.__getitem__)
    try:
        target, result = called_value(node, arguments, keywords, evaluate)
    except Exception as error:
        raise _misfit(node, error, program.inputs) from error
    values[node] = result
    broadcast = _broadcast(node)
    if isinstance(result, (int, float, bool)):
        mapping[node] = result
    elif broadcast is not None and _same_layout(values[broadcast], result):
        mapping[node] = mapping[broadcast]
    elif g.op_name(node) in IDENTITY_IF_UNCHANGED and _same_layout(arguments[0], result) and not _stands(node, program):
        mapping[node] = mapping[node.args[0]]  # type: ignore[index]
    else:
        copied = g.copy_node(graph, node, mapping)
        copied.target = target
        copied.meta["val"] = result
        if g.op_name(node) == "aten::group_norm" and _may_lie_otherwise(arguments[0]):
            _copy_first(graph, copied)


def _may_lie_otherwise(images: Any) -> bool:
    """Whether real images may be in no format, though fake ones lie channel by channel: a dimension of one entry, such
    as that of a single sample, has a stride that operations on fake tensors get otherwise. `group_norm` copies images
    in no format; what is left of it, once it was run on fake ones, fails with them.
    """
    return images.dim() in (4, 5) and 1 in images.shape and not images.is_contiguous()


def _copy_first(graph: fx.Graph, node: fx.Node) -> None:
    """Let a call read a copy of its first operand that lies row by row."""
    images = node.args[0]
    layout = {"memory_format": torch.contiguous_format}
    with graph.inserting_before(node):
        val = images.meta["val"].clone(**layout)  # type: ignore[union-attr]
        copied = add_call(graph, torch.ops.aten.clone.default, (images,), layout, val=val, like=node)
    node.update_arg(0, copied)


def _broadcast(node: fx.Node) -> fx.Node | None:
    """The operand of which an item of `broadcast_tensors`, as losses call it, is made."""
    if node.target is not operator.getitem or g.op_name(node.args[0]) != "aten::broadcast_tensors":  # type: ignore[arg-type]
        return None
    return node.args[0].args[0][node.args[1]]  # type: ignore[union-attr, index, return-value]


def _stands(node: fx.Node, program: Program) -> bool:
    """Whether a view of a parameter, of as many samples as there are, is a region: in the code of no layer or part."""
    if len(node.all_input_nodes) == 1:
        return False
    source = node.all_input_nodes[0]
    while source.op != "placeholder" and len(source.all_input_nodes) == 1:
        source = source.all_input_nodes[0]
    if source.op != "placeholder" or source.meta["role"][0] != "parameter":
        return False
    return label(node.meta.get("module", ""), program.modules)[1] == "container"


def _filled(node: fx.Node) -> fx.Node | None:
    """Numbers that are all the same without what they take their sizes from; None for any other call."""
    val, number = node.meta["val"], filled_with(node)
    if not isinstance(number, (int, float)) or val.is_floating_point() or not val.is_contiguous():
        return None
    sizes, where = list(val.shape), {"dtype": val.dtype, "device": val.device}
    with node.graph.inserting_before(node):
        return add_call(node.graph, torch.ops.aten.full.default, (sizes, number), where, val=val, like=node)


def _misfit(node: fx.Node, error: Exception, inputs: Sequence[Input]) -> InputError:
    where = g.line(node)
    if type(error).__name__ in ("DynamicOutputShapeException", "DataDependentOutputException"):
        return InputError(
            f"the size of a result depends on the values in the batch ({g.op_name(node)})",
            where,
            "select with torch.where or masked_scatter instead of boolean indexing or nonzero, or make the selection "
            "in the data loader",
        )
    fault = f"{g.op_name(node)}: {str(error).splitlines()[0]}"
    labels = next((entry for entry in inputs if entry.name == "labels"), None)
    tokens = next((entry for entry in inputs if labels is not None and _beside(entry, labels)), None)
    if labels is not None and tokens is not None and labels.shape != tokens.shape:
        return InputError(
            f"the batch entry 'labels' is {list(labels.shape)} and {tokens.name!r} {list(tokens.shape)}, which do not "
            f"fit together ({fault})",
            where,
            "give a label for each token, -100 where none is to be learned; models of transformers shift them",
        )
    sizes = ", ".join(f"{entry.name} {list(entry.shape)}" for entry in inputs)
    axes = "".join(
        f"; the samples of {entry.name!r} are taken to lie along its dimension {entry.samples}: if it is the first,"
        f" say csc.compile(divide={{{entry.name!r}: 0}})"
        for entry in inputs
        if entry.samples
    )
    return InputError(
        f"the batch's shapes do not fit the model: {fault}",
        where,
        f"check the shapes of the batch entries against what the model expects: a microbatch has {sizes}{axes}",
    )


def _beside(entry: Input, labels: Input) -> bool:
    """Whether an entry has token ids, for all that its name says."""
    return entry is not labels and len(entry.shape) == len(labels.shape) > 1 and not entry.dtype.is_floating_point


def _same_layout(before: Any, after: Any) -> bool:
    return (
        isinstance(before, torch.Tensor)
        and isinstance(after, torch.Tensor)
        and before.shape == after.shape
        and before.stride() == after.stride()
        and before.dtype == after.dtype
        and before.device == after.device
    )
