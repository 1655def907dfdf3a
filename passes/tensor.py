"""Pass `tensor`: the layers of a model divided over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from csc.passes.tensor_choice import OddAxis, ShardChoice, chosen
from torch import fx

from csc.analysis.tensor_axes import fits
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.graph import unique
from csc.ir.groups import CONTEXT_GROUP, Group
from csc.ir.mesh import Mesh, on_fewer, on_more
from csc.ir.program import Box, Options, Parameter, Program, Region, Template

Use = tuple[str, str]  # a template and the name of a parameter in it
GROUP = ("tensor", "number")  # the role of the number of a rank's group


def group_number(axis: str) -> tuple[str, tuple[str, str]]:
    """The name and the role of a placeholder for the number of a group along an axis (csc.ir.groups.group_over)."""
    known = {"tp": ("tp_group", GROUP), "cp": ("cp_group", CONTEXT_GROUP)}
    if axis in known:
        return known[axis]
    name, within = axis.replace(" ", "_"), axis.startswith("sequences")
    return (f"cp_{name}", (CONTEXT_GROUP[0], axis)) if within else (f"tp_{name}", ("tensor", axis))


def tensor(program: Program, options: Options) -> Program:
    """Give every template the graph of one of `tp` ranks, where its heads or hidden features can be divided.

    Requires  pass `regions`.
    Ensures   with tp = 1 nothing changes. Else parameters say which boxes of them a rank holds; templates are in local
              sizes, the same on all ranks of a group, with their sums between ranks as calls; what regions hand each
              other is whole and equal on all of these ranks. A template that has no such axis is as it was.
    Before    %up = linear(%x, %w_up[80, 48]);  %y = linear(%up, %w_down[48, 80])
    After     %up = linear(csc.share(%x), %w_up[40, 48]);  %y = csc.all_reduce(linear(%up, %w_down[48, 40]))
    """
    mesh = options.mesh
    if mesh.tp == 1:
        return program
    with program.fake_mode:
        number = torch.empty((), dtype=torch.int64)
    fewer = {component: mesh.dividing(component) for component in mesh.held_in_copies}
    fewer = on_fewer(mesh) | dict.fromkeys(on_more(mesh), 1) | fewer  # more have whole ones
    program = _templates_apart(program, fewer)
    ranks = {region.template: fewer.get(region.component, mesh.tp) for region in program.regions}
    whole = _of_shards(program) | _uses(program, lambda region, _: fewer.get(region.component) == 1)
    copied = {one.name for one in program.parameters if one.copied}
    alike = _uses(program, lambda region, name: region.component in mesh.held_in_copies and name not in copied)
    # copies compute alike what they do not share out: REDUCE adds up over all of tp or none, so graphs add up
    found = _Agreement(program, ranks, number, whole, alike, options.replicate).choices()
    for size in sorted({mesh.tp, *(tp for _, tp in mesh.components if tp > 1)} & set(ranks.values())):
        choices = {name: one for name, one in found.items() if ranks[name] == size}
        _check(program, choices, size, mesh)
    return _applied(program, found, number, ranks, mesh)


def _templates_apart(program: Program, ranks: Mapping[str, int]) -> Program:
    """The same; components that another number of ranks divides have no template in common. ranks: by component, of
    those that fewer divide than the rest.
    """
    first = {region.template: ranks.get(region.component, 0) for region in reversed(program.regions)}
    first |= {region.template: 0 for region in program.regions if region.component not in ranks}
    templates, regions, names = dict(program.templates), [], dict[tuple[str, int], str]()
    for region in program.regions:
        name, own = region.template, ranks.get(region.component, 0)
        if own != first[name]:
            if (name, own) not in names:
                names[name, own] = unique(name, templates)
                templates[names[name, own]] = replace(templates[name], name=names[name, own])
            region = replace(region, template=names[name, own])
        regions.append(region)
    return replace(program, templates=templates, regions=tuple(regions)) if names else program


@dataclass
class _Agreement:
    """Choices for all templates, such that regions which use one parameter hold the same of it. ranks: by template.

    whole: uses in which a parameter is not to be divided. operators: those whose gradient calls in the graph add up,
    since another use of the parameter gives the whole gradient on each rank. replicated: see Options.replicate.
    """

    program: Program
    ranks: Mapping[str, int]
    number: torch.Tensor
    whole: set[Use] = field(default_factory=set)
    operators: set[Use] = field(default_factory=set)
    replicated: Collection[str] = ()

    def choices(self) -> dict[str, ShardChoice]:
        found: dict[str, ShardChoice] = {}
        ids = _made_of_the_batch(self.program)
        changed = set(self.ranks)
        while changed:
            for name in sorted(changed):
                template = self.program.templates[name]
                found[name] = chosen(
                    template, self.program.fake_mode, self.number, self.ranks[name], self._of(name, self.whole),
                    self._of(name, self.operators), ids, self.replicated,
                )  # fmt: skip
            changed = self._apart(found)
        return found

    @staticmethod
    def _of(template: str, uses: Collection[Use]) -> set[str]:
        return {parameter for name, parameter in uses if name == template}

    def _apart(self, found: Mapping[str, ShardChoice]) -> set[str]:
        """The templates to choose for again, since uses of one parameter do not agree."""
        uses: dict[str, set[Use]] = {}
        for region in self.program.regions:
            own = self.program.templates[region.template].parameters
            for name, local in zip(region.parameters, own, strict=True):
                uses.setdefault(name, set()).add((region.template, local))
        changed: set[Use] = set()
        for same in uses.values():
            if len({found[template].boxes.get(local, ()) for template, local in same}) > 1:
                changed |= same - self.whole
                self.whole |= same
                continue
            shared = {(one, local) for one, local in same if local in found[one].shared_reads} - self.operators
            apart = len({self.ranks[template] for template, _ in same}) > 1
            if shared and (
                apart or any(local in found[one].equal_reads or (one, local) not in shared for one, local in same)
            ):
                changed |= shared
                self.operators |= shared
        return {template for template, _ in changed}


def _of_shards(program: Program) -> set[Use]:
    """Uses of parameters whose gradients are parts since ranks share out samples: those stay whole."""
    parts = {one.name for one in program.parameters if one.parts}
    return _uses(program, lambda _, name: name in parts)


def _uses(program: Program, wanted: Callable[[Region, str], bool]) -> set[Use]:
    """Of parameters by their names, in regions."""
    return {
        (region.template, local)
        for region in program.regions
        for name, local in zip(region.parameters, program.templates[region.template].parameters, strict=True)
        if wanted(region, name)
    }


def _made_of_the_batch(program: Program) -> set[str]:
    """The tables that are."""
    assert program.shared is not None
    tables = zip(program.shared.output_node().meta["names"], g.outputs(program.shared), strict=True)
    return {
        name for name, node in tables if any(one.meta.get("role", ("",))[0] == "input" for one in g.ancestors([node]))
    }


class Indivisible(InputError):
    """Some axes of layers cannot be divided by a number of ranks. axes: by the component that has them; none of an
    error that was copied from another process by its words.
    """

    def __init__(
        self, what: str, where: str = "", remedy: str = "", axes: Mapping[str, tuple[OddAxis, ...]] | None = None
    ) -> None:
        super().__init__(what, where, remedy)
        self.axes = axes or {}


def _check(program: Program, found: Mapping[str, ShardChoice], ranks: int, mesh: Mesh) -> None:
    """Indivisible if an axis does not divide, InputError if none was found. ranks: tp, or that of the components with
    so many of their own.
    """
    asked, what = f"tp={ranks}", "this model"
    if ranks < mesh.tp:
        asked, what = ", ".join(f"{component}.tp={tp}" for component, tp in mesh.components if tp == ranks), "it"
    _refuse_unknown(program, found, asked)
    odd = [odd for choice in found.values() for odd in choice.odd]
    if odd:
        sizes = {(axis.size, axis.groups) for choice in found.values() for axis in choice.axes}
        largest = next(
            n for n in range(ranks - 1, 0, -1)
            if (ranks == mesh.tp or mesh.tp % n == 0) and all(one.divides(n) for one in odd)
            and all(fits(size, groups, n) for size, groups in sizes)
        )  # fmt: skip
        first = odd[0]
        used = dict.fromkeys((region.component, region.template) for region in program.regions)
        raise Indivisible(
            f"{first.size} {first.what} of {first.parameter} cannot be divided by {asked}{_readers(first, ranks)}",
            "mesh", f"the largest tp below it that divides {what} is {largest}",
            {component: found[name].odd for component, name in used if name in found and found[name].odd},
        )  # fmt: skip
    if not any(choice.graph is not None for choice in found.values()):
        reasons = list(dict.fromkeys(reason for choice in found.values() for reason in choice.reasons))
        less = max(n for n in (1, *mesh.divisions, *dict(mesh.components).values()) if n < ranks)
        raise InputError(
            f"{asked} divides nothing of {what}: csc found neither heads nor hidden features in a layer", "mesh",
            "; ".join([f"make tp {less}" if less > 1 else "leave tp at 1", *reasons[:3]]),
        )  # fmt: skip


def _refuse_unknown(program: Program, found: Mapping[str, ShardChoice], asked: str) -> None:
    """InputError where layers could be divided but for a call that csc has no rule for."""
    several = len({region.component for region in program.regions}) > 1
    for region in program.regions:
        for what, why in found[region.template].unknown if region.template in found else ():
            name = why.split(" at ")[0]
            alone = f"{region.component}.tp=1" if several else "tp=1"
            tag = f"if {name} works entry by entry, register it with tags=(torch.Tag.pointwise,); "
            raise InputError(
                f"{asked} cannot divide {what} in {region.name}: {why}", "mesh",
                f"{tag * (name.split('::')[0] != 'aten')}replicate=['{name}'] lets every rank make it of whole "
                f"operands, with whole weights around it; {alone} leaves all of {region.component} whole",
            )  # fmt: skip


def _readers(odd: OddAxis, ranks: int) -> str:
    """Why several ranks cannot have one key head together."""
    if odd.why:
        return f", and several ranks cannot have one of them: {odd.why}"
    if ranks > odd.size and odd.groups > 1:
        return f", nor can the {odd.groups} query heads that read each of them"
    return ""


def _applied(
    program: Program, found: Mapping[str, ShardChoice], number: torch.Tensor, ranks: Mapping[str, int], mesh: Mesh
) -> Program:
    """The program with these choices."""
    assert program.shared is not None
    shared, tables, held = program.shared, dict[str, str](), mesh.held_in_copies
    within = {
        region.name: str(Group.division(ranks[region.template]))
        if ranks[region.template] < mesh.tp or region.component in held else "tp" for region in program.regions
    }  # fmt: skip
    met = {within[region.name] for region in program.regions if found[region.template].meets}
    for axis in sorted(met):
        name, role = ("tp", GROUP) if axis == "tp" else group_number(axis)
        tables[axis] = unique(name, set(shared.output_node().meta["names"]))
        shared = _with_group(shared, tables[axis], number, role)
    templates = {name: _template(one, found[name]) for name, one in program.templates.items()}
    regions = tuple(
        replace(region, shared=(*region.shared, tables[within[region.name]])) if found[region.template].meets
        else region for region in program.regions
    )  # fmt: skip
    reasons = dict.fromkeys(reason for name, one in found.items() if ranks[name] > 1 for reason in one.reasons)
    return replace(
        program,
        templates=templates,
        regions=regions,
        parameters=_parameters(program, found, mesh),
        shared=shared,
        notes=(*program.notes, *(f"on each tp rank whole: {reason}" for reason in reasons)),
    )


def _template(template: Template, choice: ShardChoice) -> Template:
    if choice.graph is None:
        return template
    shared = [node.name for node in g.placeholders(choice.graph) if node.meta["role"][0] == "shared"]
    return replace(template, graph=choice.graph, shared=tuple(shared), divided=choice.axes)


def _parameters(program: Program, found: Mapping[str, ShardChoice], mesh: Mesh) -> tuple[Parameter, ...]:
    """Where fewer of all ranks divide one, each group of these holds the same."""
    boxes: dict[str, tuple[Box, ...]] = {}
    parts: set[str] = set()
    for region in program.regions:
        choice, template = found[region.template], program.templates[region.template]
        for name, local in zip(region.parameters, template.parameters, strict=True):
            held = choice.boxes.get(local, ())
            ranks = max(mesh.tp, mesh.tp_ranks(region.component))
            boxes[name] = held * (ranks // len(held)) if held else ()
            parts |= {name} if local in choice.shared_reads - choice.operators else set()
    return tuple(replace(p, boxes=boxes.get(p.name, ()), parts=p.parts or p.name in parts) for p in program.parameters)


def _with_group(shared: fx.Graph, table: str, number: torch.Tensor, role: tuple[str, str]) -> fx.Graph:
    """The graph of the tables with one more: the number of the rank's group."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    group = g.add_placeholder(graph, unique(table, {node.name for node in shared.nodes}), number, role)
    for node in shared.nodes:
        if node.op == "placeholder":
            mapping[node] = g.add_placeholder(graph, node.name, node.meta["val"], node.meta["role"])
        elif node.op != "output":
            g.copy_node(graph, node, mapping)
    graph.output((*(mapping[node] for node in g.outputs(shared)), group))
    graph.output_node().meta["names"] = (*shared.output_node().meta["names"], table)
    return graph
