"""Pass `prune`: specialise the joint graphs to the frozen set; no gradient is computed that nobody needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from csc.analysis import gradient_flow
from csc.errors import CscError, InputError
from csc.ir import graph as g
from csc.ir.graph import add_call, narrow_outputs, replace_call, unique
from csc.ir.groups import Group
from csc.ir.program import LOSS, Options, Pass, Program, Region, Template, Variant
from csc.torch_private.exported import OpOverload


@dataclass(frozen=True)
class PrunePass(Pass):
    """Keep of each joint graph what the frozen set needs; regions that need the same share a variant.

    Ensures   `dx` and `dw` of every region; a frozen parameter has no gradient node; an activation with nothing
              trainable above it has no gradient; values computed only for removed gradients are gone.
    Before    joint(x, w, d_out) -> out, d_x, d_w
    After     w frozen: (x, w, d_out) -> out, d_x;   nothing trainable upstream: (x, w) -> out
    """

    requires: ClassVar = ("differentiated", "frozen")
    establishes: ClassVar = ("pruned",)
    breaks: ClassVar = ("differentiated",)

    def __call__(self, program: Program, options: Options) -> Program:
        trainable = {p.name for p in program.parameters if p.trainable}
        needy: set[str] = set()  # values that something trainable lies above
        marked: list[Region] = []
        for region in program.regions:
            template = program.templates[region.template]
            dx = tuple(
                differs and i in template.inexact and value in needy
                for i, (value, differs) in enumerate(zip(region.activations, template.activation_gradients))
            )
            dw = tuple(
                differs and name in trainable for name, differs in zip(region.parameters, template.parameter_gradients)
            )
            reached = gradient_flow.outputs_reached(
                template.graph, dx, dw, len(template.activations), len(template.shared)
            )
            needy.update(v for i, v in enumerate(region.outputs) if i in reached and i in template.differentiable)
            marked.append(replace(region, dx=dx, dw=dw))
        _check_chain(marked, program)

        gradients_given = {
            LOSS,
            *(v for region in marked for v, has_gradient in zip(region.activations, region.dx) if has_gradient),
        }
        variants: dict[str, Variant] = {}
        by_need: dict[Any, str] = {}
        final: list[Region] = []
        for region in marked:
            template = program.templates[region.template]
            tangents = tuple(
                i in template.differentiable
                and v in needy
                and v in gradients_given
                and (region.needs_dx or region.needs_dw)
                for i, v in enumerate(region.outputs)
            )
            key = (region.template, region.dx, region.dw, tangents)
            if key not in by_need:
                by_need[key] = unique(_variant_name(template, region), variants)
                pruned = specialise(template, region.dx, region.dw, tangents)
                variants[by_need[key]] = Variant(by_need[key], template.name, region.dx, region.dw, tangents, pruned)
            final.append(replace(region, variant=by_need[key]))
        if options.microbatches * math.prod(options.mesh.sizes(Group.DATA)) > 1:
            for variant in variants.values():
                _check_counts(variant.pruned)
        return replace(program, regions=tuple(final), variants=variants)


def _check_counts(graph: fx.Graph) -> None:
    """A gradient by how often an index comes is another one for a part of the batch."""
    for node in g.calls(graph):
        backward = isinstance(node.target, OpOverload) and "backward" in g.op_name(node)
        if backward and g.bind(node).get("scale_grad_by_freq"):
            raise InputError(
                "an embedding has scale_grad_by_freq, which counts indices in the whole batch",
                g.line(node),
                "leave it out, freeze the table, or train with microbatches=1 and without dp and cp",
            )


def _variant_name(template: Template, region: Region) -> str:
    if region.needs_dx and (region.needs_dw or not region.parameters):
        return template.name
    if region.needs_dx:
        return f"{template.name}_frozen"
    return f"{template.name}_first" if region.needs_dw else f"{template.name}_forward_only"


def _check_chain(regions: Sequence[Region], program: Program) -> None:
    """Every needed gradient has someone to compute it."""
    available = {LOSS}
    for region in reversed(regions):
        template = program.templates[region.template]
        for i, value in enumerate(region.activations):
            if region.dx[i] and i in template.threaded and value not in available:
                raise CscError(
                    f"the gradient of {value} has no last reader",
                    region.name,
                    "report this model: csc cut it wrongly",
                )
            if region.dx[i]:
                available.add(value)


def specialise(template: Template, dx: Sequence[bool], dw: Sequence[bool], tangents: Sequence[bool]) -> fx.Graph:
    """The joint graph with only the wanted gradients: dead nodes, unused tangents and masked outputs removed."""
    assert template.joint is not None
    graph, _ = g.copy_graph(template.joint)
    results = list(g.outputs(graph))
    first = len(template.outputs)
    wanted = [*dx, *dw]
    kept = results[:first] + [r if keep else None for r, keep in zip(results[first:], wanted)]
    graph.output_node().args = (tuple(kept),)
    changed = True
    while changed:
        changed = bool(g.erase_dead(graph)) | narrow_outputs(graph)
    present = {template.outputs[i] for i, here in enumerate(tangents) if here}
    present |= {template.activations[i] for i in template.threaded if dx[i]}
    for node in g.placeholders(graph):
        kind, name = node.meta["role"]
        if kind == "tangent" and not node.users and name not in present:
            graph.erase_node(node)
        elif kind == "tangent" and name not in present:
            _zero(graph, node)
    return graph


def _zero(graph: fx.Graph, tangent: fx.Node) -> None:
    """An output that the loss depends on only through paths without a gradient: its gradient is zero."""
    val = tangent.meta["val"]
    with graph.inserting_after(tangent):
        where = {"dtype": val.dtype, "device": val.device}
        zero = add_call(graph, torch.ops.aten.full.default, (list(val.shape), 0.0), where, val=val)
    replace_call(tangent, zero)
