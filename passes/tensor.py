"""Pass `tensor`: the layers of a model divided over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from csc.passes.dropout import WRITTEN_OUT
from csc.passes.tensor_choice import OddAxis, ShardChoice, chosen
from torch import fx

from csc.analysis.divisions import fits
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.naming import unique
from csc.ir.program import Box, Options, Parameter, Program, Template

Use = tuple[str, str]  # a template and the name of a parameter in it
DROPPED = (
    "; attention is written out for the dropout of its weights, and there ranks cannot have a key head together: "
    "without that dropout tp may be larger than the number of key heads"
)
GROUP = ("tensor", "number")  # the role of the number of a rank's group


def tensor(program: Program, options: Options) -> Program:
    """Give every template the graph of one of `tp` ranks, where its heads or hidden features can be divided.

    Requires  pass `regions`.
    Ensures   with tp = 1 nothing changes. Else parameters say which boxes of them a rank holds; templates are in local
              sizes, the same on all ranks of a group, with their sums between ranks as calls; what regions hand each
              other is whole and equal on all of these ranks. A template that has no such axis is as it was.
    Before    %up = linear(%x, %w_up[80, 48]);  %y = linear(%up, %w_down[48, 80])
    After     %up = linear(csc.share(%x), %w_up[40, 48]);  %y = csc.all_reduce(linear(%up, %w_down[48, 40]))
    """
    ranks = options.mesh.tp
    if ranks == 1:
        return program
    with program.fake_mode:
        number = torch.empty((), dtype=torch.int64)
    found = _Agreement(program, ranks, number, _of_shards(program)).choices()
    _check(found, ranks, any(WRITTEN_OUT in note for note in program.notes))
    return _applied(program, found, number)


@dataclass
class _Agreement:
    """Choices for all templates, such that regions which use one parameter hold the same of it.

    whole: uses in which a parameter is not to be divided. operators: those whose gradient calls in the graph add up,
    since another use of the parameter gives the whole gradient on each rank.
    """

    program: Program
    ranks: int
    number: torch.Tensor
    whole: set[Use] = field(default_factory=set)
    operators: set[Use] = field(default_factory=set)

    def choices(self) -> dict[str, ShardChoice]:
        found: dict[str, ShardChoice] = {}
        ids = _made_of_the_batch(self.program)
        changed = set(self.program.templates)
        while changed:
            for name in sorted(changed):
                template = self.program.templates[name]
                found[name] = chosen(
                    template, self.program.fake_mode, self.number, self.ranks, self._of(name, self.whole),
                    self._of(name, self.operators), ids,
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
            if shared and any(local in found[one].equal_reads or (one, local) not in shared for one, local in same):
                changed |= shared
                self.operators |= shared
        return {template for template, _ in changed}


def _of_shards(program: Program) -> set[Use]:
    """Uses of parameters whose gradients are parts since ranks share out samples: those stay whole."""
    parts = {one.name for one in program.parameters if one.parts}
    return {
        (region.template, local)
        for region in program.regions
        for name, local in zip(region.parameters, program.templates[region.template].parameters, strict=True)
        if name in parts
    }


def _made_of_the_batch(program: Program) -> set[str]:
    """The tables that are."""
    assert program.shared is not None
    tables = zip(program.shared.output_node().meta["names"], g.outputs(program.shared), strict=True)
    return {
        name for name, node in tables if any(one.meta.get("role", ("",))[0] == "input" for one in g.ancestors([node]))
    }


def _check(found: Mapping[str, ShardChoice], ranks: int, written_out: bool) -> None:
    """InputError if an axis does not divide, or none was found. written_out: whether attention is."""
    odd = [odd for choice in found.values() for odd in choice.odd]
    if odd:
        sizes = {(axis.size, axis.groups) for choice in found.values() for axis in choice.axes}
        largest = next(
            n for n in range(ranks - 1, 0, -1)
            if all(one.divides(n) for one in odd) and all(fits(size, groups, n) for size, groups in sizes)
        )  # fmt: skip
        first = odd[0]
        raise InputError(
            f"{first.size} {first.what} of {first.parameter} cannot be divided by tp={ranks}{_readers(first, ranks)}",
            "mesh", f"the largest tp below it that divides this model is {largest}{DROPPED if written_out else ''}",
        )  # fmt: skip
    if not any(choice.graph is not None for choice in found.values()):
        reasons = list(dict.fromkeys(reason for choice in found.values() for reason in choice.reasons))
        raise InputError(
            f"tp={ranks} divides nothing of this model: csc found neither heads nor hidden features in a layer", "mesh",
            "leave tp at 1" + "".join(f"; {reason}" for reason in reasons[:3]),
        )  # fmt: skip


def _readers(odd: OddAxis, ranks: int) -> str:
    """Why several ranks cannot have one key head together."""
    if odd.why:
        return f", and several ranks cannot have one of them: {odd.why}"
    if ranks > odd.size and odd.groups > 1:
        return f", nor can the {odd.groups} query heads that read each of them"
    return ""


def _applied(program: Program, found: Mapping[str, ShardChoice], number: torch.Tensor) -> Program:
    """The program with these choices."""
    assert program.shared is not None
    names = program.shared.output_node().meta["names"]
    table = unique("tp", set(names))
    templates = {name: _template(one, found[name]) for name, one in program.templates.items()}
    regions = tuple(
        replace(region, shared=(*region.shared, table)) if found[region.template].meets else region
        for region in program.regions
    )
    met = any(found[region.template].meets for region in program.regions)
    reasons = dict.fromkeys(reason for choice in found.values() for reason in choice.reasons)
    return replace(
        program,
        templates=templates,
        regions=regions,
        parameters=_parameters(program, found),
        shared=_with_group(program.shared, table, number) if met else program.shared,
        notes=(*program.notes, *(f"on each tp rank whole: {reason}" for reason in reasons)),
    )


def _template(template: Template, choice: ShardChoice) -> Template:
    if choice.graph is None:
        return template
    shared = [node.name for node in g.placeholders(choice.graph) if node.meta["role"][0] == "shared"]
    return replace(template, graph=choice.graph, shared=tuple(shared), divided=choice.axes)


def _parameters(program: Program, found: Mapping[str, ShardChoice]) -> tuple[Parameter, ...]:
    boxes: dict[str, tuple[Box, ...]] = {}
    parts: set[str] = set()
    for region in program.regions:
        choice, template = found[region.template], program.templates[region.template]
        for name, local in zip(region.parameters, template.parameters, strict=True):
            boxes[name] = choice.boxes.get(local, ())
            parts |= {name} if local in choice.shared_reads - choice.operators else set()
    return tuple(replace(p, boxes=boxes.get(p.name, ()), parts=p.parts or p.name in parts) for p in program.parameters)


def _with_group(shared: fx.Graph, table: str, number: torch.Tensor) -> fx.Graph:
    """The graph of the tables with one more: the number of the rank's group."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    group = g.add_placeholder(graph, unique("tp", {node.name for node in shared.nodes}), number, GROUP)
    for node in shared.nodes:
        if node.op == "placeholder":
            mapping[node] = g.add_placeholder(graph, node.name, node.meta["val"], node.meta["role"])
        elif node.op != "output":
            g.copy_node(graph, node, mapping)
    graph.output((*(mapping[node] for node in g.outputs(shared)), group))
    graph.output_node().meta["names"] = (*shared.output_node().meta["names"], table)
    return graph
