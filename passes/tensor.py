"""Pass `tensor`: the layers of a model divided over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from csc.passes.tensor_graph import ShardedGraph, Undivided
from torch import fx

from csc.analysis.tensor_axes import Dim, Division, Trees, block, contains, dimensions, fits, sharded
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.graph import Evaluation, unique
from csc.ir.groups import CONTEXT_GROUP, Group
from csc.ir.mesh import Mesh
from csc.ir.program import Box, DividedAxis, Options, Parameter, Pass, Program, Region, Template
from csc.torch_private.traces import FakeTensorMode

# --- Which axes of a template tensor-parallel ranks divide -----------------------------------------------------------
#
# Terms: see csc.passes.tensor_graph. An axis is a *candidate* if it is in a parameter and nothing blocks it: neither a
# call that needs it whole, nor the region's edge, where values are equal on all ranks. One that would be a candidate
# but for a call without a rule is *unknown*, and an error of pass `tensor`. A candidate's *worth* is the FLOPs that
# are divided with it for each element that ranks then have to sum. Candidates of more worth come first; one that
# shares a parameter with those before it is left out.


EDGE = "it is part of what regions hand each other"
LEAST_WORTH = 64  # below, a sum takes longer than it saves
VOCABULARY = "vocabulary"  # divided for the memory it takes, whatever its sums cost; it may stay whole
POSITIONS = "positions"
# A function's own backward stands in its template as calls of its own.
OWN_BACKWARD = {"csc::incoming", "csc::own_gradient", "csc::checkpointed", "csc::with_hooks"}


@dataclass(frozen=True)
class OddAxis:
    """size: how many entries. groups: see DividedAxis. why: what does not allow that several ranks have one entry, and
    allowed: numbers of ranks with which it is allowed.
    """

    what: str
    size: int
    groups: int
    parameter: str
    why: str = ""
    allowed: tuple[int, ...] = ()

    def divides(self, ranks: int) -> bool:
        """Whether so many ranks can have it."""
        return ranks in self.allowed if self.why else fits(self.size, self.groups, ranks)


@dataclass(frozen=True)
class ShardChoice:
    """graph: of one rank; None: the template stays as it is. boxes: of parameters that are divided, for each rank.

    shared_reads, equal_reads: whole parameters that calls on shards, and others, read. operators: of the former those
    whose gradient is summed in the graph. odd: axes that do not divide. reasons: why
    something stays whole. unknown: what could be divided but for a call without a rule, and that call.
    """

    graph: fx.Graph | None = None
    meets: bool = False
    axes: tuple[DividedAxis, ...] = ()
    boxes: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)
    shared_reads: frozenset[str] = frozenset()
    equal_reads: frozenset[str] = frozenset()
    operators: frozenset[str] = frozenset()
    odd: tuple[OddAxis, ...] = ()
    reasons: tuple[str, ...] = ()
    unknown: tuple[tuple[str, str], ...] = ()


def chosen(
    template: Template, mode: FakeTensorMode, number: torch.Tensor, ranks: int, whole: Collection[str],
    operators: Collection[str], ids: Collection[str], replicated: Collection[str],
) -> ShardChoice:  # fmt: skip
    """whole: parameters that are not to be divided. operators: those whose gradient calls in the graph add up. ids:
    tables that are made of the batch. replicated: calls that all ranks are to make of whole operands.
    """
    reads = frozenset(template.parameters)
    if any(g.op_name(node) in OWN_BACKWARD for node in g.calls(template.graph)):
        return ShardChoice(equal_reads=reads, reasons=(f"{template.name}, which has a backward of its own",))
    return _TemplateSearch(template, mode, number, ranks, operators, ids, replicated).choice(whole)


@dataclass(frozen=True)
class _Axis:
    name: str
    dim: Dim
    parameters: tuple[str, ...]
    groups: Dim | None = None  # of key heads: of the query heads that read one

    @property
    def readers(self) -> int:
        """Query heads for each key head; 1 of another axis."""
        return 1 if self.groups is None else self.groups.size

    def division(self, ranks: int) -> Division | None:
        """By so many ranks, if they can."""
        if not fits(self.dim.size, self.readers, ranks):
            return None
        return Division(self.dim, ranks, self.groups if self.dim.size % ranks else None)

    @property
    def what(self) -> str:
        """`heads`, `vocabulary`; of an axis that is called after a parameter `features`."""
        return "features" if "." in self.name else self.name.split("#")[0]


class _TemplateSearch:
    """For one template."""

    def __init__(
        self,
        template: Template,
        mode: FakeTensorMode,
        number: torch.Tensor,
        ranks: int,
        operators: Collection[str],
        ids: Collection[str],
        replicated: Collection[str],
    ) -> None:
        self.template, self.mode, self.number, self.ranks, self.operators = template, mode, number, ranks, operators
        self.trees = dimensions(template.graph, ids, replicated)
        self.evaluate = Evaluation(mode)
        self.inexact = {g.placeholders(template.graph)[i] for i in template.inexact}
        self.odd: list[OddAxis] = []
        self.whole: list[tuple[_Axis, object]] = []  # what stays so, and why
        self.unknown: list[tuple[_Axis, str]] = []

    def choice(self, whole: Collection[str]) -> ShardChoice:
        axes: list[_Axis] = []
        sharded: ShardedGraph | None = None
        for axis in self._by_worth(
            [candidate for candidate in self._candidates() if not set(candidate.parameters) & set(whole)]
        ):
            if self._meets(axis, axes):
                continue
            if axis.division(self.ranks) is None:
                if axis.what == VOCABULARY:
                    self.whole.append((axis, f"{axis.dim.size} words cannot be divided by {self.ranks}"))
                else:
                    self.odd.append(OddAxis(axis.what, axis.dim.size, axis.readers, axis.parameters[0]))
                continue
            try:
                sharded = self._divided([*axes, axis], self.ranks)
            except Undivided as error:
                self._refuse(axis, error)
                continue
            axes.append(axis)
        if sharded is None:
            reads = frozenset(self.template.parameters)
            return ShardChoice(
                equal_reads=reads, odd=tuple(self.odd), reasons=self._reasons({}), unknown=self._unknown({}, whole)
            )  # fmt: skip
        boxes = self._boxes(axes)
        return ShardChoice(
            graph=sharded.graph,
            meets=sharded.meets,
            axes=tuple(
                DividedAxis(axis.what, axis.dim.size, self.ranks, axis.parameters, axis.readers) for axis in axes
            ),
            boxes=boxes,
            shared_reads=frozenset(sharded.shared_reads),
            equal_reads=frozenset(sharded.equal_reads),
            operators=frozenset(self.operators),
            odd=tuple(self.odd),
            reasons=self._reasons(boxes),
            unknown=self._unknown(boxes, whole),
        )

    def _refuse(self, axis: _Axis, error: Undivided) -> None:
        """Of an axis that a call does not allow to be divided, by more ranks than it has entries or by any."""
        shared = axis.division(self.ranks) is not None and axis.dim.size < self.ranks
        allowed = tuple(ranks for ranks in range(2, self.ranks) if shared and self._allows(axis, ranks))
        if not allowed:
            self.whole.append((axis, error))
            return
        odd_axis = OddAxis(axis.what, axis.dim.size, axis.readers, axis.parameters[0], str(error), (1, *allowed))
        self.odd.append(odd_axis)

    def _allows(self, axis: _Axis, ranks: int) -> bool:
        """Whether so many ranks can divide an axis."""
        if axis.division(ranks) is None:
            return False
        try:
            self._divided([axis], ranks)
        except Undivided:
            return False
        return True

    def _divided(self, axes: Sequence[_Axis], ranks: int) -> ShardedGraph:
        divisions = [division for axis in axes if (division := axis.division(ranks)) is not None]
        return ShardedGraph(
            self.template.graph, self.inexact, self.trees, divisions, self.mode, self.evaluate, self.number,
            self.operators,
        ).run()  # fmt: skip

    def _boxes(self, axes: Sequence[_Axis]) -> dict[str, tuple[Box, ...]]:
        return {
            name: tuple(self.trees.boxes(name, division, rank) for rank in range(self.ranks))
            for axis in axes if (division := axis.division(self.ranks)) is not None for name in axis.parameters
        }  # fmt: skip

    def _reasons(self, divided: Mapping[str, object]) -> tuple[str, ...]:
        """Of parameters that could have been divided and are not."""
        return tuple(
            f"{axis.what} of {axis.parameters[0]} in {self.template.name}: {why}"
            for axis, why in self.whole if not set(axis.parameters) & divided.keys()
        )  # fmt: skip

    def _unknown(self, divided: Mapping[str, object], whole: Collection[str]) -> tuple[tuple[str, str], ...]:
        """Of parameters that nothing else divides, nor is asked to leave whole."""
        left = [(axis, why) for axis, why in self.unknown if not set(axis.parameters) & {*divided, *whole}]
        return tuple((f"{axis.what} of {axis.parameters[0]}", why) for axis, why in left)

    def _candidates(self) -> Iterator[_Axis]:
        for node in g.placeholders(self.template.graph):
            if node.meta["role"][0] != "parameter":
                _block(self.trees, node)
        for node in g.outputs(self.template.graph):
            _block(self.trees, node)
        for name, dim in self.trees.axes().items():
            held = sharded(self.trees, dim)
            if name.startswith(POSITIONS):
                continue
            of_matrices = any(len(self.trees.parameters[parameter]) > 1 for parameter in held)
            if held and not dim.whole:
                yield _Axis(name, dim, tuple(held), self.trees.groups(dim))
            elif of_matrices and not dim.blocked:
                self.unknown.append((_Axis(name, dim, tuple(held)), f"{dim.unknown} has no rule"))
            elif of_matrices and dim.blocked != EDGE:
                self.whole.append((_Axis(name, dim, tuple(held)), f"{dim.blocked} needs them together"))

    def _by_worth(self, candidates: Sequence[_Axis]) -> list[_Axis]:
        """Those that can be divided, by what it saves; each alone, by as many ranks as it has entries if they do not
        divide. Query heads are divided with their key heads, if these can be.
        """
        ranked: list[tuple[float, _Axis]] = []
        for axis in candidates:
            try:
                tried = self._divided([axis], self.ranks if axis.division(self.ranks) is not None else axis.dim.size)
            except Undivided as error:
                self._refuse(axis, error)
                continue
            if tried.flops >= LEAST_WORTH * tried.summed or axis.what == VOCABULARY:
                ranked.append((tried.flops / max(tried.summed, 1), axis))
        read = [axis.groups for _, axis in ranked]
        return [axis for _, axis in sorted(ranked, key=lambda pair: -pair[0]) if axis.dim not in read]

    def _meets(self, axis: _Axis, others: Sequence[_Axis]) -> bool:
        """Whether a parameter has the axis and another one."""
        having = [dims for dims in self.trees.parameters.values() if any(contains(dim, axis.dim) for dim in dims)]
        return any(contains(dim, other.dim) for dims in having for dim in dims for other in others)


def _block(trees: Trees, node: fx.Node) -> None:
    for dim in trees.of[node][0]:
        block(dim, EDGE)


# --- Pass `tensor`: the layers of a model divided over tensor-parallel ranks -----------------------------------------


Use = tuple[str, str]  # a template and the name of a parameter in it
GROUP = ("tensor", "number")  # the role of the number of a rank's group


def group_number(axis: str) -> tuple[str, tuple[str, str]]:
    """The name and the role of a placeholder for the number of a group along an axis (csc.ir.groups.group_over)."""
    known = {"tp": ("tp_group", GROUP), "cp": ("cp_group", CONTEXT_GROUP)}
    if axis in known:
        return known[axis]
    name, within = axis.replace(" ", "_"), axis.startswith("sequences")
    return (f"cp_{name}", (CONTEXT_GROUP[0], axis)) if within else (f"tp_{name}", ("tensor", axis))


@dataclass(frozen=True)
class TensorPass(Pass):
    """Give every template the graph of one of `tp` ranks, where its heads or hidden features can be divided.

    Ensures   with tp = 1 nothing changes. Else parameters say which boxes of them a rank holds; templates are in local
              sizes, the same on all ranks of a group, with their sums between ranks as calls; what regions hand each
              other is whole and equal on all of these ranks. A template that has no such axis is as it was.
    Before    %up = linear(%x, %w_up[80, 48]);  %y = linear(%up, %w_down[48, 80])
    After     %up = linear(csc.share(%x), %w_up[40, 48]);  %y = csc.all_reduce(linear(%up, %w_down[48, 40]))
    """

    requires: ClassVar = ("regions", "forward")
    establishes: ClassVar = ("tensor",)

    replicate: tuple[str, ...] = ()

    def __call__(self, program: Program, options: Options) -> Program:
        options = self.over(options)
        mesh = options.mesh
        if mesh.tp == 1:
            return program
        with program.fake_mode:
            number = torch.empty((), dtype=torch.int64)
        fewer = {component: mesh.dividing(component) for component in mesh.held_in_copies}
        fewer = mesh.narrow | dict.fromkeys(mesh.wide, 1) | fewer  # more have whole ones
        program = _templates_apart(program, fewer)
        ranks = {region.template: fewer.get(region.component, mesh.tp) for region in program.regions}
        whole = _of_shards(program) | _uses(program, lambda region, _: fewer.get(region.component) == 1)
        copied = {parameter.name for parameter in program.parameters if parameter.copied}
        alike = _uses(program, lambda region, name: region.component in mesh.held_in_copies and name not in copied)
        # copies compute alike what they do not share out: REDUCE adds up over all of tp or none, so graphs add up
        choices_found = _Agreement(program, ranks, number, whole, alike, options.replicate).choices()
        for size in sorted({mesh.tp, *(tp for tp in mesh.own("tp").values() if tp > 1)} & set(ranks.values())):
            choices = {name: choice for name, choice in choices_found.items() if ranks[name] == size}
            _check(program, choices, size, mesh)
        return _applied(program, choices_found, number, ranks, mesh)


def _templates_apart(program: Program, ranks: Mapping[str, int]) -> Program:
    """The same; components that another number of ranks divides have no template in common. ranks: by component, of
    those that fewer divide than the rest.
    """
    first = {region.template: ranks.get(region.component, 0) for region in reversed(program.regions)}
    first |= {region.template: 0 for region in program.regions if region.component not in ranks}
    templates, regions, names = dict(program.templates), [], dict[tuple[str, int], str]()
    for region in program.regions:
        name, size = region.template, ranks.get(region.component, 0)
        if size != first[name]:
            if (name, size) not in names:
                names[name, size] = unique(name, templates)
                templates[names[name, size]] = replace(templates[name], name=names[name, size])
            region = replace(region, template=names[name, size])
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
        choices: dict[str, ShardChoice] = {}
        ids = _made_of_the_batch(self.program)
        changed = set(self.ranks)
        while changed:
            for name in sorted(changed):
                template = self.program.templates[name]
                choices[name] = chosen(
                    template, self.program.fake_mode, self.number, self.ranks[name], self._of(name, self.whole),
                    self._of(name, self.operators), ids, self.replicated,
                )  # fmt: skip
            changed = self._apart(choices)
        return choices

    @staticmethod
    def _of(template: str, uses: Collection[Use]) -> set[str]:
        return {parameter for name, parameter in uses if name == template}

    def _apart(self, choices: Mapping[str, ShardChoice]) -> set[str]:
        """The templates to choose for again, since uses of one parameter do not agree."""
        uses: dict[str, set[Use]] = {}
        for region in self.program.regions:
            own = self.program.templates[region.template].parameters
            for name, local in zip(region.parameters, own, strict=True):
                uses.setdefault(name, set()).add((region.template, local))
        changed: set[Use] = set()
        for same in uses.values():
            if len({choices[template].boxes.get(local, ()) for template, local in same}) > 1:
                changed |= same - self.whole
                self.whole |= same
                continue
            shared = {
                (template, local) for template, local in same if local in choices[template].shared_reads
            } - self.operators
            apart = len({self.ranks[template] for template, _ in same}) > 1
            if shared and (
                apart
                or any(
                    local in choices[template].equal_reads or (template, local) not in shared
                    for template, local in same
                )
            ):
                changed |= shared
                self.operators |= shared
        return {template for template, _ in changed}


def _of_shards(program: Program) -> set[Use]:
    """Uses of parameters whose gradients are parts since ranks share out samples: those stay whole."""
    parts = {parameter.name for parameter in program.parameters if parameter.parts}
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
        name
        for name, node in tables
        if any(ancestor.meta.get("role", ("",))[0] == "input" for ancestor in g.ancestors([node]))
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


def _check(program: Program, choices: Mapping[str, ShardChoice], ranks: int, mesh: Mesh) -> None:
    """Indivisible if an axis does not divide, InputError if none was found. ranks: tp, or that of the components with
    so many of their own.
    """
    request, parts = f"tp={ranks}", "this model"
    if ranks < mesh.tp:
        request, parts = (
            ", ".join(f"{component}.tp={tp}" for component, tp in mesh.own("tp").items() if tp == ranks),
            "it",
        )
    _refuse_unknown(program, choices, request)
    odd = [odd for choice in choices.values() for odd in choice.odd]
    if odd:
        sizes = {(axis.size, axis.groups) for choice in choices.values() for axis in choice.axes}
        largest = next(
            n for n in range(ranks - 1, 0, -1)
            if (ranks == mesh.tp or mesh.tp % n == 0) and all(axis.divides(n) for axis in odd)
            and all(fits(size, groups, n) for size, groups in sizes)
        )  # fmt: skip
        first = odd[0]
        used = dict.fromkeys((region.component, region.template) for region in program.regions)
        raise Indivisible(
            f"{first.size} {first.what} of {first.parameter} cannot be divided by {request}{_readers(first, ranks)}",
            "mesh", f"the largest tp below it that divides {parts} is {largest}",
            {component: choices[name].odd for component, name in used if name in choices and choices[name].odd},
        )  # fmt: skip
    if not any(choice.graph is not None for choice in choices.values()):
        reasons = list(dict.fromkeys(reason for choice in choices.values() for reason in choice.reasons))
        less = max(n for n in (1, *mesh.divisions, *mesh.own("tp").values()) if n < ranks)
        raise InputError(
            f"{request} divides nothing of {parts}: csc found neither heads nor hidden features in a layer", "mesh",
            "; ".join([f"make tp {less}" if less > 1 else "leave tp at 1", *reasons[:3]]),
        )  # fmt: skip


def _refuse_unknown(program: Program, choices: Mapping[str, ShardChoice], request: str) -> None:
    """InputError where layers could be divided but for a call that csc has no rule for."""
    several = len({region.component for region in program.regions}) > 1
    for region in program.regions:
        for axis, why in choices[region.template].unknown if region.template in choices else ():
            name = why.split(" at ")[0]
            alone = f"{region.component}.tp=1" if several else "tp=1"
            tag = f"if {name} works entry by entry, register it with tags=(torch.Tag.pointwise,); "
            raise InputError(
                f"{request} cannot divide {axis} in {region.name}: {why}", "mesh",
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
    program: Program, choices: Mapping[str, ShardChoice], number: torch.Tensor, ranks: Mapping[str, int], mesh: Mesh
) -> Program:
    """The program with these choices."""
    assert program.shared is not None
    shared, tables, held = program.shared, dict[str, str](), mesh.held_in_copies
    within = {
        region.name: str(Group.division(ranks[region.template]))
        if ranks[region.template] < mesh.tp or region.component in held else "tp" for region in program.regions
    }  # fmt: skip
    met = {within[region.name] for region in program.regions if choices[region.template].meets}
    for axis in sorted(met):
        name, role = ("tp", GROUP) if axis == "tp" else group_number(axis)
        tables[axis] = unique(name, set(shared.output_node().meta["names"]))
        placeholder = unique(tables[axis], {node.name for node in shared.nodes})
        shared = g.with_tables(shared, [tables[axis]], [(placeholder, number, role)])
    templates = {name: _template(template, choices[name]) for name, template in program.templates.items()}
    regions = tuple(
        replace(region, shared=(*region.shared, tables[within[region.name]])) if choices[region.template].meets
        else region for region in program.regions
    )  # fmt: skip
    reasons = dict.fromkeys(reason for name, choice in choices.items() if ranks[name] > 1 for reason in choice.reasons)
    return replace(
        program,
        templates=templates,
        regions=regions,
        parameters=_parameters(program, choices, mesh),
        shared=shared,
        notes=(*program.notes, *(f"on each tp rank whole: {reason}" for reason in reasons)),
    )


def _template(template: Template, choice: ShardChoice) -> Template:
    if choice.graph is None:
        return template
    shared = [node.name for node in g.placeholders(choice.graph) if node.meta["role"][0] == "shared"]
    return replace(template, graph=choice.graph, shared=tuple(shared), divided=choice.axes)


def _parameters(program: Program, choices: Mapping[str, ShardChoice], mesh: Mesh) -> tuple[Parameter, ...]:
    """Where fewer of all ranks divide one, each group of these holds the same."""
    boxes: dict[str, tuple[Box, ...]] = {}
    parts: set[str] = set()
    for region in program.regions:
        choice, template = choices[region.template], program.templates[region.template]
        for name, local in zip(region.parameters, template.parameters, strict=True):
            held = choice.boxes.get(local, ())
            ranks = max(mesh.tp, mesh.extent_of(region.component).width)
            boxes[name] = held * (ranks // len(held)) if held else ()
            parts |= {name} if local in choice.shared_reads - choice.operators else set()
    return tuple(replace(p, boxes=boxes.get(p.name, ()), parts=p.parts or p.name in parts) for p in program.parameters)
