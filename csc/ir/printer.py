"""A Program as text: the same bytes from run to run, made to be read and diffed."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from csc.ir import graph as g
from csc.ir.program import Program, Region, Template, Variant


def program_text(
    program: Program, regions: tuple[str, ...] | None = None, stages: tuple[int, ...] | None = None
) -> str:
    """The whole Program, or only some regions (with their templates) or stages."""
    return "\n".join(_lines(program, regions, stages)) + "\n"


def _lines(program: Program, regions: tuple[str, ...] | None, stages: tuple[int, ...] | None) -> Iterator[str]:
    if stages is not None:
        regions = tuple(name for stage in program.stages if stage.index in stages for name in stage.regions)
    whole = regions is None
    yield f"program {program.name}"
    for item in program.inputs:
        symbolic = f"  symbolic {list(item.dynamic)}" if item.dynamic and not program.shared else ""
        yield f"  input {item.name} : {g.type_text_of(item.dtype, item.shape)}{symbolic}"
    trained = sum(p.numel for p in program.parameters if p.trainable)
    total = sum(p.numel for p in program.parameters)
    yield f"  parameters {len(program.parameters)}, {total:,} numbers, {trained:,} trainable"
    if program.loss_weight:
        yield f"  loss weighted by {program.loss_weight}"
    if not program.regions:
        yield from graph_lines("forward", program.graph)
        return
    chosen = [r for r in program.regions if whole or r.name in (regions or ())]
    yield ""
    for region in chosen:
        yield from _region_lines(region, program)
    if whole and program.shared is not None:
        yield from graph_lines("shared", program.shared, returns=program.shared.output_node().meta["names"])
    if program.variants:
        for name in dict.fromkeys(region.variant for region in chosen):
            yield from _variant_lines(program.variants[name])
    else:
        for name in dict.fromkeys(region.template for region in chosen):
            yield from _template_lines(program.templates[name])
    for stage in program.stages:
        if (stages is None and whole) or (stages is not None and stage.index in stages):
            parts = "F" + ("B" if stage.has_b else "") + ("W" if stage.has_w else "")
            held = f"{stage.regions[0]} ... {stage.regions[-1]}  ({len(stage.regions)} regions)"
            yield f"\nstage {stage.index}  rank {stage.rank}  {parts}  {held}"
            for m in program.messages:
                if stage.index in (m.source, m.destination):
                    yield f"  {m.kind} {m.source}>{m.destination}  {', '.join(m.values)}"
    if program.schedule is not None and (whole or stages is not None):
        yield "\nschedule"
        yield from (line for line in str(program.schedule).splitlines())


def _region_lines(region: Region, program: Program) -> Iterator[str]:
    needs = f"  needs{' dx' if region.needs_dx else ''}{' dw' if region.needs_dw else ''}" if region.variant else ""
    if region.variant and not (region.needs_dx or region.needs_dw):
        needs = "  needs nothing"
    yield f"region {region.name}  {region.variant or region.template}{needs}"
    for title, names in (("reads", region.activations), ("tables", region.shared), ("makes", region.outputs)):
        if names:
            yield f"  {title} {', '.join(names)}"


def _template_lines(template: Template) -> Iterator[str]:
    if template.joint is None:
        yield from graph_lines(f"template {template.name}", template.graph)
    else:
        yield from graph_lines(f"template {template.name}, joint", template.joint)


def _variant_lines(variant: Variant) -> Iterator[str]:
    if variant.forward is None:
        yield from graph_lines(f"variant {variant.name}", variant.pruned)
        return
    parts = (variant.forward, variant.backward_input, variant.backward_weight, variant.backward)
    for letter, part in zip(("F", "B", "W", "BW"), parts):
        if part is not None:
            yield from graph_lines(f"variant {variant.name}, {letter}", part)


def graph_lines(title: str, graph: fx.Graph, returns: tuple[str, ...] = ()) -> Iterator[str]:
    """A graph, one node a line: `%name : type = op(arguments)   # source`."""
    yield f"\n{title}"
    for node in graph.nodes:
        if node.op == "placeholder":
            kind, label = node.meta["role"]
            yield f"  %{node.name} : {g.type_text(node.meta['val'])} = {kind} {label}"
        elif node.op == "call_function":
            arguments = ", ".join([_text(a) for a in node.args] + [f"{k}={_text(v)}" for k, v in node.kwargs.items()])
            line = f"  %{node.name} : {g.type_text(node.meta['val'])} = {_op(node)}({arguments})"
            if node.meta.get("in_place"):
                line += " in place"
            source = node.meta.get("source")
            yield f"{line}  # {source}" if source else line
        else:
            names = f"  # {', '.join(returns)}" if returns else ""
            yield f"  return {_text(node.args[0])}{names}"


def _op(node: fx.Node) -> str:
    return str(node.target) if "." in str(node.target) else g.short_op(node)


def _text(argument: object) -> str:
    if isinstance(argument, fx.Node):
        return f"%{argument.name}"
    if isinstance(argument, list):
        return "[" + ", ".join(map(_text, argument)) + "]"
    if isinstance(argument, tuple):
        return "(" + ", ".join(map(_text, argument)) + ")"
    return str(argument)
