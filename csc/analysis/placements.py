"""What the ranks of a tensor-parallel group hold of each value of a graph, followed through its calls, and the check
of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from torch import fx

from csc.analysis.operators.table import (
    ATTENTION,
    CASTS,
    CONTEXT_ATTENTION,
    GROUPED_BACKWARD,
    LOOK_UPS,
    NEW,
    PRODUCTS,
    RESHAPES,
    RULES,
    SIZED_VIEWS,
    SIZES_READ,
    Use,
    filled_with,
    is_linear,
    is_pointwise,
    reduction,
    relation_of_features,
)
from csc.ir import graph as g
from csc.ir.groups import CONTEXT_GROUP, Group
from csc.ir.mesh import Mesh
from csc.ir.program import Box, Parameter, Program, Region, Template, Variant
from csc.ir.verifier import VerificationError

# --- What the ranks of a tensor-parallel group hold of each value of a graph, followed through its calls -------------
#
# Terms
#   equal    all ranks have the same                     shard    of one dimension, each its own entries
#   part     terms of a sum, which nothing has added up  unknown  what is not known for sure: no error comes of it
#
# A sum that is lost leaves a part where a whole is needed, one that is doubled adds up what is equal. Which dimension
# a shard has is taken from the table of operators; where that does not tell, the value is unknown.


Placement = str | int  # a shard's dimension
EQUAL, PART, UNKNOWN = "equal", "part", "unknown"
ELSEWHERE = "elsewhere"  # of a group's number, or a plan: its ranks are not those that are asked about
SUMS = ("csc::all_reduce", "csc::reduce_scatter")
GATHERS = ("csc::all_gather", "csc::gather_shared", "csc::context_whole")
TAKES = ("csc::own_part", "csc::context_own")  # a rank's own entries of what is equal
PIECES = ("csc::gather_pieces", "csc::scatter_pieces")
MEETS = (*SUMS, *GATHERS, *TAKES, *PIECES, "csc::share")
DIVIDED_HEAD = "csc::divided_linear_cross_entropy"
VOCABULARY = ("csc::rows", "csc::rows_backward", "csc::divided_loss", "csc::divided_loss_backward", DIVIDED_HEAD)
BACKWARDS = (f"{ATTENTION}_backward", f"{CONTEXT_ATTENTION}_backward")
OVER_ROWS = ("aten::native_layer_norm_backward", "aten::convolution_backward")  # d_x, then sums over all rows
SCATTERS = ("aten::embedding_dense_backward", "aten::slice_backward", "aten::select_backward")
NORMS = ("aten::native_layer_norm",)  # and numbers of each row
TERMS = ("aten::add", "aten::sub")
FACTORS = ("aten::mul", "aten::div")
Held = dict[fx.Node, Placement]


@dataclass(frozen=True)
class Types:
    """What ranks hold of every value of a graph, and what is wrong with its calls."""

    held: Held
    problems: Sequence[str]


class Followed:
    """Through the graphs of a run of passes, most of which hand most graphs on as they are."""

    def __init__(self) -> None:
        self._known: dict[tuple[fx.Graph, int, tuple[Placement, ...]], Types] = {}

    def of(self, graph: fx.Graph, given: Mapping[fx.Node, Placement]) -> Types:
        """Returns what ranks hold of every value of a graph. given: what they hold of placeholders."""
        key = graph, len(graph.nodes), tuple(given.values())
        if key not in self._known:
            self._known[key] = _followed(graph, given)
        return self._known[key]


def _followed(graph: fx.Graph, given: Mapping[fx.Node, Placement]) -> Types:
    types: Held = {}
    problems: list[str] = []

    def tell(node: fx.Node, said: str) -> None:
        problems.append(f"%{node.name} ({g.op_name(node)} at {g.place(node)}) {said}")

    for node in graph.nodes:
        if node.op == "placeholder":
            types[node] = given.get(node, UNKNOWN)
        elif node.op == "call_function":
            met = _collective(node, types, tell)
            types[node] = _call(node, types, tell) if met is None else met
    return Types(types, problems)


def _collective(node: fx.Node, types: Held, tell: Callable[[fx.Node, str], None]) -> Placement | None:
    """None of a call that is none."""
    name = g.op_name(node).replace("csc::finish_", "csc::")
    if not name.startswith("csc::") or not node.all_input_nodes:
        return None
    if name.startswith("csc::start_"):
        return EQUAL  # a ticket; what it is for is asked where it is waited for
    held = types[node.all_input_nodes[0]]
    if name in MEETS and any(types[used] == ELSEWHERE for used in node.all_input_nodes):
        return held  # with others, each of these ranks in the same way
    if name in VOCABULARY and any(types[used] == ELSEWHERE for used in node.all_input_nodes):
        return EQUAL if all(types[used] in (EQUAL, ELSEWHERE) for used in node.all_input_nodes) else UNKNOWN
    if name in SUMS:
        if held == EQUAL or isinstance(held, int):
            tell(node, f"adds up %{node.all_input_nodes[0].name}, which is {said(held)}")
        return EQUAL if name == "csc::all_reduce" else g.bind(node)["dim"]
    if name in GATHERS:
        if held == PART:
            tell(node, f"gathers %{node.all_input_nodes[0].name}, which is {said(held)}")
        return EQUAL
    if name in (*TAKES, "csc::share"):
        if held == PART or (isinstance(held, int) and name in TAKES):
            tell(node, f"takes %{node.all_input_nodes[0].name} as equal on all ranks, which is {said(held)}")
        if name == "csc::own_part" and g.bind(node)["samples"] == 1:
            return PART  # the first rank has it, the others zeros
        return g.bind(node)["dim"] if name in TAKES else held
    if name in PIECES:
        return held if isinstance(held, int) else UNKNOWN
    if name == "csc::divided_loss_backward":
        return types[g.bind(node)["logits"]]
    return PART if name == "csc::rows" else EQUAL if name in ("csc::divided_loss", DIVIDED_HEAD) else None


def said(held: Placement) -> str:
    """In words."""
    return {EQUAL: "equal on all ranks", PART: "a part of a sum that nothing has added up"}.get(str(held), "a shard")


def _call(node: fx.Node, types: Held, tell: Callable[[fx.Node, str], None]) -> Placement:
    used = node.all_input_nodes
    if any(types[operand] == ELSEWHERE for operand in used):  # a plan of other ranks
        types = types | {operand: EQUAL for operand in used if types[operand] == ELSEWHERE}
    held = [types[operand] for operand in used]
    name = g.op_name(node)
    if node.target is operator.getitem:
        return _item(node, types)
    if all(placement == EQUAL for placement in held):
        return EQUAL
    if UNKNOWN in held:
        return UNKNOWN
    if name == "csc::dropout" and types[used[0]] != PART:
        return _dropped(node, types, tell)
    if PART in held:
        return _of_parts(node, name, held, tell)
    if name == "aten::index_select" and held == [EQUAL, 0]:  # of the whole, by the numbers of a rank's own entries
        return g.bind(node)["dim"]
    if name in OVER_ROWS:
        return _rows(node, types)
    if name == "aten::slice_backward":
        return held[0] if g.bind(node)["dim"] != held[0] else UNKNOWN
    known = relation_of_features(node)
    related = {use.node for use in known.uses} if known is not None else set()
    if name == CONTEXT_ATTENTION and {types[g.bind(node)[argument]] for argument in ("q", "k", "v")} in ({0}, {1}, {2}):
        return held[0]  # of samples, heads, or tokens: keys and values of others come to a rank's own queries
    if name in (ATTENTION, CONTEXT_ATTENTION) and related != set(used):
        return held[0]
    if known is None or any(
        types[operand] != EQUAL for operand in set(used) - related
    ):  # a kernel of weights has no rows
        return UNKNOWN
    if name in RESHAPES:
        return _reshaped(used[0].meta["val"].shape, node.meta["val"].shape, held[0])
    return _linked(known.uses, types)


def _dropped(node: fx.Node, types: Held, tell: Callable[[fx.Node, str], None]) -> Placement:
    """A shard takes its own entries of the whole's mask."""
    bound = g.bind(node)
    dims = [
        dim for which, dim in ((bound["tokens"], bound["dim"]), (bound["entries"], bound["along"]))
        if which is not None and types[which] != EQUAL
    ]  # fmt: skip
    x = types[bound["x"]]
    if dims != ([x] if isinstance(x, int) else []):
        tell(node, f"takes entries of a mask along dimensions {dims} for %{bound['x'].name}, which is {said(x)}")
    return x


def _item(node: fx.Node, types: Held) -> Placement:
    """One of several results: of attention that of queries, of its backward those of what it was given."""
    several, which = node.args
    assert isinstance(several, fx.Node) and isinstance(which, int)
    name = g.op_name(several)
    if name == DIVIDED_HEAD and not any(types[used] == ELSEWHERE for used in several.all_input_nodes):
        return (EQUAL, PART, 0, 0)[which]  # the loss, gradients of x, weight and bias
    if name in BACKWARDS and which < 3:
        bound = g.bind(several)
        of = types.get(bound[("q", "k", "v")[which]], UNKNOWN)
        return of if isinstance(of, int) else UNKNOWN
    if name == GROUPED_BACKWARD:
        return _grouped_backward(several, types)[which] if which < 2 else UNKNOWN
    if name in OVER_ROWS and isinstance(types[several], int):
        return types[several] if which == 0 else PART
    if name in (ATTENTION, CONTEXT_ATTENTION) and which == 1 and types[several] in (0, 1, 2):
        return types[several]  # a number for each query of each head
    first = which == 0 or name in (*NORMS, "aten::split", "aten::split_with_sizes", "aten::chunk", "aten::unbind")
    return types[several] if first or types[several] in (EQUAL, PART) else UNKNOWN


def _rows(node: fx.Node, types: Held) -> Placement:
    """Of the gradient that a norm or a convolution hands on, whose ranks have some of the rows."""
    gradient, x, *rest = node.all_input_nodes
    dim = types[gradient]
    apart = 1 if g.op_name(node) == "aten::convolution_backward" else x.meta["val"].dim() - len(node.args[2])  # type: ignore[arg-type]
    rows = isinstance(dim, int) and dim < apart and types[x] == dim
    return dim if rows and all(types[operand] in (EQUAL, dim) for operand in rest) else UNKNOWN


def _of_parts(node: fx.Node, name: str, held: Sequence[Placement], tell: Callable[[fx.Node, str], None]) -> Placement:
    """A sum's terms stay terms where a call is linear in them."""
    if name in TERMS and len(node.all_input_nodes) > 1:
        if set(held) == {PART}:
            return PART
        tell(
            node, f"adds a part of a sum to what is {said(next(placement for placement in held if placement != PART))}"
        )
        return UNKNOWN
    backward = "_backward" in name and set(held[1:]) <= {EQUAL}  # linear in the gradient, the first that it reads
    if (backward or name.endswith("norm_backward") or name in SCATTERS or name in LOOK_UPS) and held[0] == PART:
        return PART
    if name in NEW or name in SIZES_READ:
        return EQUAL
    if name in ("aten::index_put", "aten::scatter"):  # what was looked up, put back into zeros
        into, values = node.args[0], node.args[2 if name == "aten::index_put" else 3]
        plain = isinstance(into, fx.Node) and filled_with(into) == 0 and held.count(PART) == 1
        return PART if plain and node.all_input_nodes[held.index(PART)] is values else UNKNOWN
    linear = is_linear(node) or name in CASTS or name in SIZED_VIEWS or RULES.get(name) is reduction
    if linear or name in PRODUCTS or (name in FACTORS and (held[0] == PART or name == FACTORS[0])):
        return PART if held.count(PART) == 1 and not any(isinstance(placement, int) for placement in held) else UNKNOWN
    if is_pointwise(node) and name not in (*TERMS, *FACTORS, "aten::where", "aten::neg") and len(held) == 1:
        tell(node, f"reads %{node.all_input_nodes[0].name}, a part of a sum that nothing has added up")
    return UNKNOWN


def _grouped_backward(node: fx.Node, types: Held) -> tuple[Placement, Placement]:
    """Gradients of rows and of matrices: along what either is divided by."""
    bound = g.bind(node)
    held = tuple(types[bound[name]] for name in ("input", "weight", "grad_output"))
    if held == (EQUAL, 2, 1):
        return PART, 2
    return (1, 1) if held == (1, 1, EQUAL) else (UNKNOWN, UNKNOWN)


def _linked(uses: Sequence[Use], types: Held) -> Placement:
    """Of a result: a shard along the dimension that shards of operands walk along, a part where they are added up."""
    placements: set[Placement] = set()
    walks: list[int | None] = []
    for use in uses:
        dim = types[use.node]
        if not isinstance(dim, int):
            continue
        end = use.end(dim)
        if end is None:
            placements |= {place for place, along in enumerate(use.link) if along == dim}
        elif end.how in ("contracted", "summed"):
            placements.add(PART)
            walks.append(end.walk)
        elif end.how in ("grouped", "cut", "joined") and end.dim is not None:
            placements.add(end.dim)
        elif end.how != "unread":
            return UNKNOWN
    contracted = [use for use in uses if any(end.how == "contracted" for end in use.ends.values())]
    if PART in placements and (len(set(walks)) > 1 or (contracted and len(walks) != 2)):
        return UNKNOWN
    return placements.pop() if len(placements) == 1 else UNKNOWN


def _reshaped(before: Sequence[int], after: Sequence[int], held: Placement) -> Placement:
    """A shard's dimension in other sizes: the outermost of what it becomes, if that is one for sure."""
    if not isinstance(held, int):
        return held
    ahead = prod(before[:held])
    places = [place for place in range(len(after)) if prod(after[:place]) == ahead]
    return places[0] if len(places) == 1 else UNKNOWN


# --- The verifier's question of a Program that is divided over tensor-parallel ranks ---------------------------------
#
# It is whether every sum is there, and there once.
#
# With components whose layers fewer ranks divide than others', it is asked twice for each number of these: over the
# ranks that hold the same, and over those that divide it. What meets ranks along the other of these axes does the same
# on each along the one. What another number of ranks divides is asked for itself, and taken for equal on all.
#
# Terms: see csc.analysis.placements.


HeldByRole = Mapping[tuple[str, str], Placement]  # by the role of a placeholder


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
        elsewhere = {context.component for context in program.contexts if context.axis not in ("cp", "tp", self.axis)}
        plans = {("context", f"{component}.plan") for component in elsewhere}
        return {*over_cp, *groups, *plans, *[("tensor", "number")] * self.within}


ALL = Over()


def verify_on(mesh: Mesh, program: Program, after: str, checked: dict[str, CheckedGraphs]) -> None:
    """checked: by axis; grows."""
    for over, loose in _asked(mesh, {region.component for region in program.regions}).items():
        verify_placements(program, after, checked.setdefault(over.axis, CheckedGraphs()), loose, over)


def _asked(mesh: Mesh, components: Collection[str]) -> Mapping[Over, Collection[str]]:
    """With the components of which each rank computes other samples or tokens."""
    fewer, more, own_tp = {*mesh.narrow}, {*mesh.wide}, mesh.own("tp")
    whole = {component for component, tp in own_tp.items() if tp == 1} | more
    apart = {component for component, tp in own_tp.items() if tp < mesh.extent_of(component).width} - fewer | more
    if not mesh.divisions:
        return {ALL: apart}
    own = mesh.narrow | {component: mesh.dividing(component) for component in mesh.held_in_copies}
    checks = dict[Over, Collection[str]]()
    for size in mesh.divisions:
        alone = size == mesh.tp  # groups of which there are several at positions with more ranks alone
        single = frozenset(set(components) - set(mesh.held_in_copies) if alone else fewer)
        others_here = frozenset(component for component, ranks in own.items() if ranks != size)
        checks[Over(Group.copies(size), single, alone, others_here)] = apart
        checks[Over(Group.division(size), others=others_here)] = whole
    return checks


def verify_placements(
    program: Program, after: str, checked: CheckedGraphs, apart: Collection[str] = (), over: Over = ALL
) -> None:
    """Raise VerificationError unless what regions hand on and gradients are whole where they have to be.

    checked: grows. apart: components of which each rank computes other samples or tokens: of what is equal among their
    calls a gradient may be a part up to the parameters.
    """
    if not any(parameter.boxes or parameter.parts or parameter.copied for parameter in program.parameters):
        return
    parameters = {parameter.name: parameter for parameter in program.parameters}
    activations: dict[str, Placement] = {}
    loose = {
        value for region in program.regions
        for value, node in zip(region.outputs, g.outputs(program.templates[region.template].graph))
        if region.component in apart or (isinstance(node, fx.Node) and g.op_name(node) == "csc::share")
    }  # fmt: skip
    tables = _tables(program, over, checked.followed)
    left: dict[object, list[Placement]] = {}  # what equal regions hand on
    entering: dict[str, dict[tuple[str, str], Placement]] = {}
    regions = [region for region in program.regions if region.component not in over.others]
    activations.update(
        {v: EQUAL for region in program.regions if region.component in over.others for v in region.outputs}
    )
    for region in regions:
        template = program.templates[region.template]
        held = _held(region, template, activations, tables, [_of(parameters[name], over) for name in region.parameters])
        like = (region.template, tuple(held.items()))
        if like not in left:
            left[like] = _outputs(checked.followed, template.graph, held)
        activations.update(zip(region.outputs, left[like]))
        entering[region.name] = held
    _gradients_enter(program, regions, activations, loose, entering, checked.followed)
    seen: set[object] = set()
    for region in regions:  # in this order: what is amiss in one makes those behind it unknown
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


def _parts_back(followed: Followed, template: Template, held: HeldByRole, free: Sequence[bool]) -> dict[str, Placement]:
    """What leaves for the activations of whose gradients it may be a part, where it is one or nobody knows."""
    if template.joint is None or not any(free):
        return {}
    types = _outputs(followed, template.joint, held)[len(template.outputs) :]
    return {
        name: placement
        for name, placement, may in zip(template.activations, types, free)
        if may and placement in (PART, UNKNOWN)
    }


def _tables(program: Program, over: Over, followed: Followed) -> dict[str, Placement]:
    """Of what is made of the batch, which all ranks have; some of it may be a rank's own samples."""
    if program.shared is None:
        return {}
    names = program.shared.output_node().meta["names"]
    placements: dict[tuple[str, str], Placement] = {n.meta["role"]: EQUAL for n in g.placeholders(program.shared)}
    placements |= {
        ("context", f"{context.component}.tokens"): 0
        for context in program.contexts
        if context.axis in ("tp", over.axis)
    }
    placements |= dict.fromkeys(over.elsewhere(program) & placements.keys(), ELSEWHERE)
    return dict(zip(names, _outputs(followed, program.shared, placements)))


def _held(
    region: Region,
    template: Template,
    made: Mapping[str, Placement],
    tables: Mapping[str, Placement],
    own: Sequence[Placement],
) -> dict[tuple[str, str], Placement]:
    types = [*(made[name] for name in region.activations), *(tables[name] for name in region.shared), *own]
    return {node.meta["role"]: placement for node, placement in zip(g.placeholders(template.graph), types, strict=True)}


def _of(parameter: Parameter, over: Over) -> Placement:
    """Equal on all ranks, or divided along a dimension."""
    boxes = over.boxes(parameter)
    dims = {dim for box in boxes for dim, ranges in enumerate(box) if tuple(ranges) != tuple(boxes[0][dim])}
    return EQUAL if not dims else dims.pop() if len(dims) == 1 else UNKNOWN


def _given(graph: fx.Graph, held: HeldByRole) -> dict[fx.Node, Placement]:
    return {node: held.get(node.meta["role"], UNKNOWN) for node in g.placeholders(graph)}


def _outputs(followed: Followed, graph: fx.Graph, held: HeldByRole) -> list[Placement]:
    types = followed.of(graph, _given(graph, held)).held
    return [types[node] if isinstance(node, fx.Node) else EQUAL for node in g.outputs(graph)]


def _problems(
    program: Program, region: Region, template: Template, held: HeldByRole, parts: Sequence[bool], free: Sequence[bool],
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
        for name, placement in zip(template.outputs, types):
            if placement == PART:
                yield f"{name} leaves as a part of a sum that nothing has added up"
        yield from _gradients(template, types[len(template.outputs) :], free, parts, g.outputs(graph))
        checked.sound.add((graph, mark))
    if variant is not None and variant.forward is not None and (variant.forward, 0) not in checked.sound:
        yield from _of_functions(checked.followed, variant, template, held)
        checked.sound.add((variant.forward, 0))


def _of_functions(followed: Followed, variant: Variant, template: Template, held: HeldByRole) -> Iterator[str]:
    """What is wrong with F, B, W and BW: each value has to be what it is in the graph that they were divided from."""
    pruned = followed.of(variant.pruned, _given(variant.pruned, held))
    joint = {node.name: placement for node, placement in pruned.held.items()}
    results = [joint[node.name] for node in g.outputs(variant.pruned) if node is not None]
    ahead = len(template.outputs)
    back = ahead + sum(variant.dx)
    parts = {
        "F": (variant.forward, results[:ahead]), "B": (variant.backward_input, results[ahead:back]),
        "W": (variant.backward_weight, results[back:]), "BW": (variant.backward, results[ahead:]),
    }  # fmt: skip
    for letter, (graph, wanted) in parts.items():
        if graph is None:
            continue
        inputs = {
            node: joint.get(node.name, UNKNOWN) if node.meta["role"][0] == "saved"
            else held.get(node.meta["role"], UNKNOWN) for node in g.placeholders(graph)
        }  # fmt: skip
        followed_types = followed.of(graph, inputs)
        types = followed_types.held
        yield from (f"{letter}: {problem}" for problem in followed_types.problems)
        leaving = _leaving(graph) if letter != "BW" else [result for some in g.outputs(graph) for result in some]
        for node, expected in zip(leaving, wanted) if len(leaving) == len(wanted) else ():
            if UNKNOWN not in (types[node], expected) and types[node] != expected:
                yield f"{letter} gives %{node.name}, which is {said(types[node])}, where {said(expected)} is to come"
        for node, placement in types.items():
            if UNKNOWN not in (placement, joint.get(node.name, UNKNOWN)) and placement != joint[node.name]:
                yield f"{letter}: %{node.name} is {said(placement)}, and was {said(joint[node.name])} before pass split"


def _gradients(
    template: Template,
    types: Sequence[Placement],
    free: Sequence[bool],
    parts: Sequence[bool],
    outputs: Sequence[object],
) -> Iterator[str]:
    """What is wrong with those of activations and of parameters, in their order."""
    gradients = outputs[len(template.outputs) :]
    for name, placement, may in zip(template.activations, types, free):
        if placement == PART and not may:
            yield f"the gradient of {name} is a part of a sum that nothing has added up"
    first = len(template.activations)
    for name, summed, placement, node in zip(template.parameters, parts, types[first:], gradients[first:]):
        if placement == PART and not summed:
            yield f"the gradient of {name} is a part of a sum that nothing adds up"
        if placement == EQUAL and summed and node is not None:
            yield f"the gradient of {name} is whole on each rank, and REDUCE would add it up over tp"


def _leaving(graph: fx.Graph) -> list[fx.Node]:
    """What a function gives, without what it keeps for the next."""
    results = g.outputs(graph)
    first = results[0] if len(results) == 2 and isinstance(results[0], (tuple, list)) else results
    return [value for value in first if isinstance(value, fx.Node)]
