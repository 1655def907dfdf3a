"""The verifier's question of a Program that is divided over tensor-parallel ranks: is every sum there, and there once.

    verify_on(mesh, program, after, checked)                 VerificationError, with the value
    verify_placements(program, after, checked, apart, over)  the same, over the ranks of one axis

With components whose layers fewer ranks divide than others', it is asked twice for each number of these: over the ranks
that hold the same, and over those that divide it. What meets ranks along the other of these axes does the same on each
along the one. What another number of ranks divides is asked for itself, and taken for equal on all.

Terms: see csc.analysis.placements.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from csc.analysis.placements import ELSEWHERE, EQUAL, PART, UNKNOWN, Followed, Placement, said
from csc.ir import graph as g
from csc.ir.groups import CONTEXT_GROUP, Group
from csc.ir.mesh import Mesh, on_fewer, on_more
from csc.ir.program import Box, Parameter, Program, Region, Template, Variant
from csc.ir.verifier import VerificationError

Held = Mapping[tuple[str, str], Placement]  # by the role of a placeholder


@dataclass(frozen=True)
class CheckedGraphs:
    """What was looked at in a run of passes, over the ranks of one axis. sound: graphs, with marks of how, that need no
    other look.
    """

    followed: Followed = field(default_factory=Followed)
    sound: set[tuple[fx.Graph, int]] = field(default_factory=set)


@dataclass(frozen=True)
class Over:
    """Ranks that are asked about. group: all of tp, or one of what that is made of; single: components of which there
    is one copy; within: groups over tp are of such ranks of one copy; others: components that are not asked about.
    """

    group: Group = Group.TENSOR
    single: frozenset[str] = frozenset()
    within: bool = False
    others: frozenset[str] = frozenset()

    @property
    def axis(self) -> str:
        return "tp" if self.group == Group.TENSOR else str(self.group)

    def boxes(self, parameter: Parameter) -> tuple[Box, ...]:
        """Of one of its groups."""
        if self.group.kind == "copies":
            return parameter.boxes[:: self.group.size]
        return parameter.boxes[: self.group.size] if self.group.kind == "division" else parameter.boxes

    def parts(self, parameter: Parameter, component: str) -> bool:
        """Whether gradients are."""
        if self.group.kind == "copies":
            return component not in self.single and (parameter.parts or parameter.copied > 0)
        return parameter.parts

    def elsewhere(self, program: Program) -> set[tuple[str, str]]:
        """The roles of what leads to ranks along another axis."""
        assert program.shared is not None
        roles = {node.meta["role"] for node in g.placeholders(program.shared)}
        over_cp = {role for role in roles if role[0] == CONTEXT_GROUP[0]}
        if self.axis == "tp":
            return over_cp
        groups = {role for role in roles if role[0] == "tensor" and role[1] not in ("number", self.axis)}
        others = {one.component for one in program.contexts if one.axis not in ("cp", "tp", self.axis)}
        plans = {("context", f"{component}.plan") for component in others}
        return {*over_cp, *groups, *plans, *[("tensor", "number")] * self.within}


ALL = Over()


def verify_on(mesh: Mesh, program: Program, after: str, checked: dict[str, CheckedGraphs]) -> None:
    """checked: by axis; grows."""
    for over, loose in _asked(mesh, {region.component for region in program.regions}).items():
        verify_placements(program, after, checked.setdefault(over.axis, CheckedGraphs()), loose, over)


def _asked(mesh: Mesh, components: Collection[str]) -> Mapping[Over, Collection[str]]:
    """With the components of which each rank computes other samples or tokens."""
    fewer, more = set(on_fewer(mesh)), set(on_more(mesh))
    whole = {component for component, tp in mesh.components if tp == 1} | more
    apart = {component for component, tp in mesh.components if tp < mesh.tp_ranks(component)} - fewer | more
    if not mesh.divisions:
        return {ALL: apart}
    own = on_fewer(mesh) | {component: mesh.dividing(component) for component in mesh.held_in_copies}
    found = dict[Over, Collection[str]]()
    for size in mesh.divisions:
        alone = size == mesh.tp  # groups of which there are several at positions with more ranks alone
        single = frozenset(set(components) - set(mesh.held_in_copies) if alone else fewer)
        others = frozenset(component for component, ranks in own.items() if ranks != size)
        found[Over(Group.copies(size), single, alone, others)] = apart
        found[Over(Group.division(size), others=others)] = whole
    return found


def verify_placements(
    program: Program, after: str, checked: CheckedGraphs, apart: Collection[str] = (), over: Over = ALL
) -> None:
    """Raise VerificationError unless what regions hand on and gradients are whole where they have to be.

    checked: grows. apart: components of which each rank computes other samples or tokens: of what is equal among their
    calls a gradient may be a part up to the parameters.
    """
    if not any(parameter.boxes or parameter.parts or parameter.copied for parameter in program.parameters):
        return
    parameters = {one.name: one for one in program.parameters}
    made: dict[str, Placement] = {}
    loose = {
        value for region in program.regions
        for value, node in zip(region.outputs, g.outputs(program.templates[region.template].graph))
        if region.component in apart or (isinstance(node, fx.Node) and g.op_name(node) == "csc::share")
    }  # fmt: skip
    tables = _tables(program, over, checked.followed)
    left: dict[object, list[Placement]] = {}  # what equal regions hand on
    entering: dict[str, dict[tuple[str, str], Placement]] = {}
    asked = [region for region in program.regions if region.component not in over.others]
    made.update({v: EQUAL for region in program.regions if region.component in over.others for v in region.outputs})
    for region in asked:
        template = program.templates[region.template]
        held = _held(region, template, made, tables, [_of(parameters[name], over) for name in region.parameters])
        like = (region.template, tuple(held.items()))
        if like not in left:
            left[like] = _outputs(checked.followed, template.graph, held)
        made.update(zip(region.outputs, left[like]))
        entering[region.name] = held
    _gradients_enter(program, asked, made, loose, entering, checked.followed)
    seen: set[object] = set()
    for region in asked:  # in this order: what is amiss in one makes those behind it unknown
        held, free = entering[region.name], tuple(value in loose for value in region.activations)
        parts = tuple(over.parts(parameters[name], region.component) for name in region.parameters)
        key = (region.template, region.variant, free, tuple(held.items()), parts)
        if key in seen:
            continue
        seen.add(key)
        for problem in _problems(program, region, program.templates[region.template], held, parts, free, checked):
            raise VerificationError(
                f"invariant 6: {region.name}: {problem}", f"after pass {after}", "report it: a pass of csc is wrong"
            )


def _gradients_enter(
    program: Program, asked: Sequence[Region], made: Mapping[str, Placement], loose: Collection[str],
    entering: Mapping[str, dict[tuple[str, str], Placement]], followed: Followed,
) -> None:  # fmt: skip
    """Enter what the gradients are that a region is given: as their values are, or parts where they may be."""
    back, known = dict(made), dict[object, dict[str, Placement]]()
    for region in reversed(asked):
        template, held = program.templates[region.template], entering[region.name]
        held |= {("tangent", name): back[value] for name, value in zip(template.outputs, region.outputs)}
        held |= {("tangent", name): back[value] for name, value in zip(template.activations, region.activations)}
        free = tuple(value in loose for value in region.activations)
        key = (region.template, free, tuple(held.items()))
        if key not in known:
            known[key] = _parts_back(followed, template, held, free)
        back |= {value: known[key][name] for name, value in zip(template.activations, region.activations)
                 if name in known[key]}  # fmt: skip


def _parts_back(followed: Followed, template: Template, held: Held, free: Sequence[bool]) -> dict[str, Placement]:
    """What leaves for the activations of whose gradients it may be a part, where it is one or nobody knows."""
    if template.joint is None or not any(free):
        return {}
    types = _outputs(followed, template.joint, held)[len(template.outputs) :]
    return {name: one for name, one, may in zip(template.activations, types, free) if may and one in (PART, UNKNOWN)}


def _tables(program: Program, over: Over, followed: Followed) -> dict[str, Placement]:
    """Of what is made of the batch, which all ranks have; some of it may be a rank's own samples."""
    if program.shared is None:
        return {}
    names = program.shared.output_node().meta["names"]
    given: dict[tuple[str, str], Placement] = {n.meta["role"]: EQUAL for n in g.placeholders(program.shared)}
    given |= {("context", f"{one.component}.tokens"): 0 for one in program.contexts if one.axis in ("tp", over.axis)}
    given |= dict.fromkeys(over.elsewhere(program) & given.keys(), ELSEWHERE)
    return dict(zip(names, _outputs(followed, program.shared, given)))


def _held(
    region: Region,
    template: Template,
    made: Mapping[str, Placement],
    tables: Mapping[str, Placement],
    own: Sequence[Placement],
) -> dict[tuple[str, str], Placement]:
    types = [*(made[name] for name in region.activations), *(tables[name] for name in region.shared), *own]
    return {node.meta["role"]: one for node, one in zip(g.placeholders(template.graph), types, strict=True)}


def _of(parameter: Parameter, over: Over) -> Placement:
    """Equal on all ranks, or divided along a dimension."""
    boxes = over.boxes(parameter)
    dims = {dim for box in boxes for dim, ranges in enumerate(box) if tuple(ranges) != tuple(boxes[0][dim])}
    return EQUAL if not dims else dims.pop() if len(dims) == 1 else UNKNOWN


def _given(graph: fx.Graph, held: Held) -> dict[fx.Node, Placement]:
    return {node: held.get(node.meta["role"], UNKNOWN) for node in g.placeholders(graph)}


def _outputs(followed: Followed, graph: fx.Graph, held: Held) -> list[Placement]:
    types = followed.of(graph, _given(graph, held)).held
    return [types[node] if isinstance(node, fx.Node) else EQUAL for node in g.outputs(graph)]


def _problems(
    program: Program, region: Region, template: Template, held: Held, parts: Sequence[bool], free: Sequence[bool],
    checked: CheckedGraphs,
) -> Iterator[str]:  # fmt: skip
    variant = program.variants.get(region.variant)
    graphs = [template.graph, template.joint, variant.pruned if variant is not None else None]
    for graph in graphs:
        mark = -1 - abs(hash((len(graph.nodes), free, tuple(parts)))) if graph is not None else 0
        if graph is None or (graph, mark) in checked.sound:
            continue
        yield from checked.followed.of(graph, _given(graph, held)).problems
        types = _outputs(checked.followed, graph, held)
        for name, one in zip(template.outputs, types):
            if one == PART:
                yield f"{name} leaves as a part of a sum that nothing has added up"
        yield from _gradients(template, types[len(template.outputs) :], free, parts, g.outputs(graph))
        checked.sound.add((graph, mark))
    if variant is not None and variant.forward is not None and (variant.forward, 0) not in checked.sound:
        yield from _of_functions(checked.followed, variant, template, held)
        checked.sound.add((variant.forward, 0))


def _of_functions(followed: Followed, variant: Variant, template: Template, held: Held) -> Iterator[str]:
    """What is wrong with F, B, W and BW: each value has to be what it is in the graph that they were divided from."""
    pruned = followed.of(variant.pruned, _given(variant.pruned, held))
    whole = {node.name: one for node, one in pruned.held.items()}
    results = [whole[one.name] for one in g.outputs(variant.pruned) if one is not None]
    ahead = len(template.outputs)
    back = ahead + sum(variant.dx)
    parts = {
        "F": (variant.forward, results[:ahead]), "B": (variant.backward_input, results[ahead:back]),
        "W": (variant.backward_weight, results[back:]), "BW": (variant.backward, results[ahead:]),
    }  # fmt: skip
    for letter, (graph, wanted) in parts.items():
        if graph is None:
            continue
        given = {
            node: whole.get(node.name, UNKNOWN) if node.meta["role"][0] == "saved"
            else held.get(node.meta["role"], UNKNOWN) for node in g.placeholders(graph)
        }  # fmt: skip
        found = followed.of(graph, given)
        types = found.held
        yield from (f"{letter}: {problem}" for problem in found.problems)
        leaving = _leaving(graph) if letter != "BW" else [one for some in g.outputs(graph) for one in some]
        for node, one in zip(leaving, wanted) if len(leaving) == len(wanted) else ():
            if UNKNOWN not in (types[node], one) and types[node] != one:
                yield f"{letter} gives %{node.name}, which is {said(types[node])}, where {said(one)} is to come"
        for node, one in types.items():
            if UNKNOWN not in (one, whole.get(node.name, UNKNOWN)) and one != whole[node.name]:
                yield f"{letter}: %{node.name} is {said(one)}, and was {said(whole[node.name])} before pass split"


def _gradients(
    template: Template,
    types: Sequence[Placement],
    free: Sequence[bool],
    parts: Sequence[bool],
    outputs: Sequence[object],
) -> Iterator[str]:
    """What is wrong with those of activations and of parameters, in their order."""
    made = outputs[len(template.outputs) :]
    for name, one, may in zip(template.activations, types, free):
        if one == PART and not may:
            yield f"the gradient of {name} is a part of a sum that nothing has added up"
    first = len(template.activations)
    for name, summed, one, node in zip(template.parameters, parts, types[first:], made[first:]):
        if one == PART and not summed:
            yield f"the gradient of {name} is a part of a sum that nothing adds up"
        if one == EQUAL and summed and node is not None:
            yield f"the gradient of {name} is whole on each rank, and REDUCE would add it up over tp"


def _leaving(graph: fx.Graph) -> list[fx.Node]:
    """What a function gives, without what it keeps for the next."""
    results = g.outputs(graph)
    first = results[0] if len(results) == 2 and isinstance(results[0], (tuple, list)) else results
    return [one for one in first if isinstance(one, fx.Node)]
