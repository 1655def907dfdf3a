"""Pass `features`: what a frozen encoder makes comes with the batch, and its layers are no part of the step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from csc.passes.partition import stage_of
from csc.passes.split import divided
from torch import fx

from csc.analysis.operators.execution import draws
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.graph import identifier, unique
from csc.ir.groups import LOSS_WEIGHTS, OF_RANKS
from csc.ir.program import Features, Input, Options, Pass, Program, Region, Stage, Template, Variant

PICTURE = 3  # dimensions of one at least
ENTRY = "features."  # what the batch's names of features begin with
SPREAD = "is spread over ranks"
NAME = "features_"  # and those of tables, and of layer files


@dataclass(frozen=True)
class FeaturesPass(Pass):
    """With `options.features`, leave out the regions that make features of images or sounds and have nothing trainable
    above them.

    Ensures   what is left out depends on entries of floating point or pictures of bytes, on no token ids, no random
              number and nothing that trains; each of its values that a step reads is an entry of the batch, handed on
              by a region of its own; `features` has what was left out.
    Before    regions: vision.0, vision.1, projector;  inputs: pixel_values, input_ids
    After     regions: features.vision.1, projector;   inputs: input_ids, features.vision.1
    """

    requires: ClassVar = ("pruned",)
    establishes: ClassVar = ("features",)

    def __call__(self, program: Program, options: Options) -> Program:
        inexact = {item.name for item in program.inputs if _is_feature(item)}
        if not options.features or not inexact:
            return program
        reasons = _reasons(program)
        spread = next((name for name in _reading(program, inexact) if reasons[name].endswith(SPREAD)), None)
        if spread is not None:
            raise InputError(
                f"{spread} {SPREAD}, and what one of them makes is no feature to keep", "cache_features, encode_ahead",
                "use tp=1, give the encoder no dp or cp of its own and leave it out of context=; or leave "
                "cache_features (encode_ahead) out",
            )  # fmt: skip
        left_out = _left_out(program, inexact, {name for name, reason in reasons.items() if not reason})
        if not left_out:
            raise InputError(
                f"no features of {program.name} can be kept: {_why(program, inexact, reasons)}",
                "cache_features, encode_ahead",
                "freeze the whole encoder, in eval mode if it has dropout (encoder.eval()), or leave cache_features "
                "(encode_ahead) out",
            )
        inside = {region.name for region in left_out}
        rest = [region for region in program.regions if region.name not in inside]
        read = {value for region in rest for value in region.activations}
        values = tuple(value for region in left_out for value in region.outputs if value in read)
        behind = next(region.name for region in rest if values[0] in region.activations)
        note = f"{len(left_out)} regions are no part of a step, up to {', '.join(values)}: behind, {reasons[behind]}"
        return replace(_without(program, left_out, rest, values), notes=(*program.notes, note))


def _is_feature(entry: Input) -> bool:
    """Whether an entry holds pictures or sounds: floating point, or bytes by rows, columns and channels."""
    return entry.dtype.is_floating_point or (entry.dtype is torch.uint8 and len(entry.shape) >= PICTURE)


def _reasons(program: Program) -> dict[str, str]:
    """Of each region why it cannot be left out, "" if it can: a clause."""
    trainable = {parameter.name for parameter in program.parameters if parameter.trainable}
    tokens = {item.name for item in program.inputs if item.table is not None and item.name not in program.made}
    roles, maker = _roles(program), dict[str, str]()
    reasons: dict[str, str] = {}
    for region in program.regions:
        template = program.templates[region.template]
        read = {role for table in region.shared for role in roles[table]}
        trained = next((name for name in region.parameters if name in trainable), None)
        above = next((maker[value] for value in region.activations if reasons[maker[value]]), None)
        entries = {name for kind, name in read if kind == "input"}
        if trained is not None:
            reasons[region.name] = f"{trained!r} trains"
        elif above is not None:
            reasons[region.name] = f"{region.name} depends on {above}, and {reasons[above]}"
        elif any(kind == "random" for kind, _ in read) or any(map(draws, g.calls(template.graph))):
            reasons[region.name] = f"{region.name} draws random numbers (dropout in train mode)"
        elif LOSS_WEIGHTS in read:
            reasons[region.name] = f"{region.name} adds terms of the loss"
        elif template.divided or any(kind in OF_RANKS for kind, _ in read):
            reasons[region.name] = f"{region.name} {SPREAD}"
        elif entries & tokens:
            reasons[region.name] = f"{region.name} depends on token ids ({min(entries & tokens)!r})"
        else:
            reasons[region.name] = ""
        maker |= dict.fromkeys(region.outputs, region.name)
    return reasons


def _roles(program: Program) -> Mapping[str, set[tuple[str, str]]]:
    """What each table is made of."""
    if program.shared is None:
        return {}
    tables = zip(program.shared.output_node().meta["names"], g.outputs(program.shared))
    return {
        name: {node_above.meta["role"] for node_above in g.ancestors([node]) if node_above.op == "placeholder"}
        for name, node in tables
    }


def _left_out(program: Program, inexact: set[str], free: set[str]) -> list[Region]:
    """Of the regions that are free to be left out those that make something of inexact or images, and what these read;
    without those that nothing of the rest comes to depend on.
    """
    reading = set(_reading(program, inexact))
    maker = {value: region for region in program.regions for value in region.outputs}
    wanted: set[str] = set()
    waiting = [
        maker[value]
        for region in program.regions if region.name not in free
        for value in region.activations if maker[value].name in reading & free
    ]  # fmt: skip
    while waiting:
        region = waiting.pop()
        if region.name not in wanted:
            wanted.add(region.name)
            waiting += [maker[value] for value in region.activations]
    return [region for region in program.regions if region.name in wanted]


def _reading(program: Program, inexact: set[str]) -> list[str]:
    """The regions that depend on one of these entries, in order."""
    roles, reading, values = _roles(program), list[str](), set[str]()
    for region in program.regions:
        entries = {name for table in region.shared for kind, name in roles[table] if kind == "input"}
        if entries & inexact or values.intersection(region.activations):
            reading.append(region.name)
            values.update(region.outputs)
    return reading


def _why(program: Program, inexact: set[str], reasons: Mapping[str, str]) -> str:
    """The reason of the first region that makes something of images or inexact."""
    names = _reading(program, inexact)
    return next((reasons[name] for name in names if reasons[name]), "nothing of it is made of images or inexact alone")


def _without(program: Program, left_out: Sequence[Region], rest: Sequence[Region], values: tuple[str, ...]) -> Program:
    """The program whose values of the regions that are left out are entries of the batch."""
    assert program.shared is not None
    still = {table for region in rest for table in region.shared} | ({program.loss_tokens} - {""})
    before = _entries(program, still) | {program.combination.rows, *program.combination.whole}
    stage = stage_of(program, 0, 0, left_out, False)
    producer = {value: region for region in left_out for value in region.outputs}
    nodes = {value: _node(program, producer[value], value) for value in values}
    shared, names = _with_entries(program.shared, nodes)
    templates = {region.template: program.templates[region.template] for region in rest}
    variants = {region.variant: program.variants[region.variant] for region in rest}
    handing = dict[str, Region]()
    for value in values:
        template, variant = _handing_on(unique(f"{NAME}{_last(value)}", {**templates, **variants}), nodes[value])
        templates[template.name], variants[template.name] = template, variant
        handing[value] = replace(
            producer[value], name=ENTRY + value, kind="container", template=template.name, variant=variant.name,
            activations=(), shared=(names[value],), parameters=(), outputs=(value,), threaded=(), dx=(), dw=(),
        )  # fmt: skip
    entries = tuple(ENTRY + value for value in values)
    inputs = [item for item in program.inputs if item.name in before or item.name not in stage.inputs]
    inputs += [Input(e, tuple(nodes[v].meta["val"].shape), nodes[v].meta["val"].dtype) for e, v in zip(entries, values)]
    return replace(
        program, inputs=tuple(inputs), shared=shared, templates=templates, variants=variants,
        regions=tuple(_before_readers(rest, handing)),
        features=_apart(program, left_out, values, entries, stage, variants),
    )  # fmt: skip


def _apart(
    program: Program, left_out: Sequence[Region], values: tuple[str, ...], entries: tuple[str, ...], stage: Stage,
    taken: Mapping[str, Variant],
) -> Features:  # fmt: skip
    """What is left out, as a part of its own."""
    templates = {region.template: program.templates[region.template] for region in left_out}
    names, variants = dict[str, str](), dict[str, Variant]()
    for region in left_out:
        if region.variant not in names:
            names[region.variant] = unique(f"{NAME}{region.variant}", {**taken, **variants})
            variant = program.variants[region.variant]
            variants[names[region.variant]] = divided(
                replace(variant, name=names[region.variant]), templates[region.template]
            )
    regions = tuple(replace(region, variant=names[region.variant]) for region in left_out)
    return Features(regions, templates, variants, values, entries, stage)


def _entries(program: Program, tables: Collection[str]) -> set[str]:
    roles = _roles(program)
    return {name for table in tables for kind, name in roles[table] if kind == "input"}


def _node(program: Program, region: Region, value: str) -> fx.Node:
    """What makes a value in the region's template."""
    value_node = g.outputs(program.templates[region.template].graph)[region.outputs.index(value)]
    assert isinstance(value_node, fx.Node)
    return value_node


def _with_entries(shared: fx.Graph, nodes: Mapping[str, fx.Node]) -> tuple[fx.Graph, dict[str, str]]:
    """The shared graph with these values as tables that are entries of the batch, and their names."""
    names: dict[str, str] = {}
    taken = {node.name for node in shared.nodes} | set(shared.output_node().meta["names"])
    for value in nodes:
        names[value] = unique(f"{NAME}{_last(value)}", {*taken, *names.values()})
    entries = [(names[value], node.meta["val"], ("input", ENTRY + value)) for value, node in nodes.items()]
    return g.with_tables(shared, names.values(), entries), names


def _handing_on(name: str, node: fx.Node) -> tuple[Template, Variant]:
    """What a region of a value does that comes with the batch."""
    graph = fx.Graph()
    entered = g.add_placeholder(graph, "features", node.meta["val"], ("shared", "features"))
    graph.output((entered,))
    joint, _ = g.copy_graph(graph)
    pruned, _ = g.copy_graph(graph)
    template = Template(
        name=name, graph=graph, activations=(), shared=("features",), parameters=(), outputs=("features",),
        differentiable=(), inexact=(), threaded=(), joint=joint,
    )  # fmt: skip
    return template, Variant(name, name, (), (), (False,), pruned)


def _last(value: str) -> str:
    """The last words of a value's name: `layers_1`."""
    return identifier("_".join(value.split(".")[-2:]))


def _before_readers(rest: Sequence[Region], handing: dict[str, Region]) -> list[Region]:
    """Each value's region right before the first that reads it."""
    ordered, waiting = list[Region](), dict(handing)
    for region in rest:
        ordered += [waiting.pop(value) for value in dict.fromkeys(region.activations) if value in waiting]
        ordered.append(region)
    return ordered
