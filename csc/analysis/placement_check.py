"""The verifier's question of a Program that is divided over tensor-parallel ranks: is every sum there, and there once.

    verify_placements(program, after, sound)        VerificationError, with the value

Terms: see csc.analysis.placements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from csc.analysis.placements import EQUAL, PART, UNKNOWN, Placement, problems, types_of
from csc.ir import graph as g
from csc.ir.program import Parameter, Program, Region, Template
from csc.ir.verifier import VerificationError

Held = Mapping[tuple[str, str], Placement]  # by the role of a placeholder


def verify_placements(program: Program, after: str, sound: set[tuple[fx.Graph, int]]) -> None:
    """Raise VerificationError unless what regions hand on and gradients are whole where they have to be.

    sound: graphs, with their numbers of nodes, that need no other look; grows.
    """
    if not any(parameter.boxes or parameter.parts for parameter in program.parameters):
        return
    parameters = {one.name: one for one in program.parameters}
    made: dict[str, Placement] = {}
    tables = _tables(program)
    left: dict[object, list[Placement]] = {}  # what equal regions hand on
    seen: set[object] = set()
    for region in program.regions:
        template = program.templates[region.template]
        own = [parameters[name] for name in region.parameters]
        held = _held(region, template, made, tables, own)
        like = (region.template, tuple(held.items()))
        if like not in left:
            left[like] = _outputs(template.graph, held)
        outputs = left[like]
        made.update(zip(region.outputs, outputs))
        key = (*like, region.variant)
        if key in seen:
            continue
        seen.add(key)
        held |= {("tangent", name): one for name, one in zip(template.outputs, outputs)}
        held |= {("tangent", name): made[value] for name, value in zip(template.activations, region.activations)}
        for problem in _problems(program, region, template, held, own, sound):
            raise VerificationError(
                f"invariant 6: {region.name}: {problem}", f"after pass {after}", "report it: a pass of csc is wrong"
            )


def _tables(program: Program) -> dict[str, Placement]:
    """Of what is made of the batch, which all ranks have; some of it may be a rank's own samples."""
    if program.shared is None:
        return {}
    names = program.shared.output_node().meta["names"]
    return dict(zip(names, _outputs(program.shared, {n.meta["role"]: EQUAL for n in g.placeholders(program.shared)})))


def _held(
    region: Region,
    template: Template,
    made: Mapping[str, Placement],
    tables: Mapping[str, Placement],
    own: Sequence[Parameter],
) -> dict[tuple[str, str], Placement]:
    types = [*(made[name] for name in region.activations), *(tables[name] for name in region.shared), *map(_of, own)]
    return {node.meta["role"]: one for node, one in zip(g.placeholders(template.graph), types, strict=True)}


def _of(parameter: Parameter) -> Placement:
    """Whole on every rank, or divided along a dimension."""
    whole = tuple(((0, size),) for size in parameter.shape)
    dims = {dim for box in parameter.boxes for dim, ranges in enumerate(box) if tuple(ranges) != whole[dim]}
    return EQUAL if not dims else dims.pop() if len(dims) == 1 else UNKNOWN


def _given(graph: fx.Graph, held: Held) -> dict[fx.Node, Placement]:
    return {node: held.get(node.meta["role"], UNKNOWN) for node in g.placeholders(graph)}


def _outputs(graph: fx.Graph, held: Held) -> list[Placement]:
    types = types_of(graph, _given(graph, held))
    return [types[node] if isinstance(node, fx.Node) else EQUAL for node in g.outputs(graph)]


def _problems(
    program: Program, region: Region, template: Template, held: Held, own: Sequence[Parameter],
    sound: set[tuple[fx.Graph, int]],
) -> Iterator[str]:  # fmt: skip
    variant = program.variants.get(region.variant)
    graphs = [template.graph, template.joint, variant.pruned if variant is not None else None]
    for graph in graphs:
        if graph is None or (graph, -len(graph.nodes)) in sound:
            continue
        yield from problems(graph, _given(graph, held))
        types = _outputs(graph, held)
        for name, one in zip(template.outputs, types):
            if one == PART:
                yield f"{name} leaves as a part of a sum that nothing has added up"
        yield from _gradients(template, types[len(template.outputs) :], held, own, g.outputs(graph))
        sound.add((graph, -len(graph.nodes)))


def _gradients(
    template: Template, types: Sequence[Placement], held: Held, own: Sequence[Parameter], outputs: Sequence[object]
) -> Iterator[str]:
    """What is wrong with those of activations and of parameters, in their order."""
    made = outputs[len(template.outputs) :]
    for name, one in zip(template.activations, types):
        if one == PART:
            yield f"the gradient of {name} is a part of a sum that nothing has added up"
    first = len(template.activations)
    for name, parameter, one, node in zip(template.parameters, own, types[first:], made[first:]):
        if one == PART and not parameter.parts:
            yield f"the gradient of {name} is a part of a sum that nothing adds up"
        if one == EQUAL and parameter.parts and node is not None:
            yield f"the gradient of {name} is whole on each rank, and REDUCE would add it up over tp"
