"""What pass `context` spreads of encoders, for those that the user names in `context`.

    named(program, options, spread) -> {component: ranks}      InputError for what cannot be
    spread_encoder(program, component, ranks, axis) -> Program       its tokens on shards, whole again where they leave

Which dimensions count its tokens is followed from its attentions (csc.analysis.tokens). On shards run the calls
that make every token's result from that token alone; what they read is dispatched, what others read of them gathered.
A call in between that sees all tokens is computed whole, by every rank: right, but not spread, and `notes` says so.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import ceil

from csc.passes.shard_edges import EqualEdge, PartsEdge, remedy
from csc.passes.sharding import Spreading
from csc.passes.spread_masks import TokenSizes
from torch import fx

from csc.analysis.cutting import shared_nodes
from csc.analysis.operators.execution import is_view
from csc.analysis.operators.table import ATTENTION, SDPA
from csc.analysis.tokens import Axis, apart, axes
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.groups import group_over
from csc.ir.program import Options, Parameter, Program

BLOCKS_PER_RANK = 8  # fewer leave the dispatch nothing to choose from
LARGEST_BLOCK = 128
ATTENTIONS = (ATTENTION, SDPA)
ASKED = {
    "cp": "context asks to spread {component}",
    **dict.fromkeys(("tp", "division"), "the mesh has tp ranks share out the tokens of {component}"),
    "copies": "the mesh has groups of tp ranks share out the tokens of {component}",
}  # fmt: skip
"""By the kind of an axis."""


def sizes_for(tokens: int, ranks: int, component: str, axis: str) -> TokenSizes:
    """Blocks and shards of a sequence. InputError for one that is too short."""
    block = max(1, min(LARGEST_BLOCK, ceil(tokens / (BLOCKS_PER_RANK * ranks))))
    blocks = ceil(tokens / block)
    if blocks < ranks:
        what = f"the {tokens} tokens of {component} cannot be spread over {axis}={ranks}"
        raise InputError(what, "mesh", f"use fewer {axis} ranks")
    return TokenSizes(tokens, block, ceil(blocks / ranks) * block)


def component_of(program: Program, node: fx.Node) -> str:
    """The component whose module, or the nearest one around it, a call belongs to."""
    path = node.meta.get("module", "")
    while path and path not in program.modules:
        path = path.rpartition(".")[0]
    return program.modules[path].component


def named(program: Program, options: Options, own: Collection[str]) -> dict[str, int]:
    """The encoders that are spread over more than one rank. own: components that the language model's layers are of."""
    components = sorted({info.component for info in program.modules.values()})
    for component, ranks in options.context:
        if component not in components:
            raise InputError(
                f"context names {component!r}, which is no component of the model", "context",
                f"components: {', '.join(components)}",
            )  # fmt: skip
        if component in own and ranks != options.mesh.cp:
            raise InputError(
                f"context asks for {ranks} ranks of {component}, which is spread over all of cp={options.mesh.cp}",
                "context", f"leave {component} out, or make it {options.mesh.cp}",
            )  # fmt: skip
        if options.mesh.cp % ranks:
            raise InputError(
                f"context asks for {ranks} ranks of {component}, which do not divide cp={options.mesh.cp}", "context",
                "groups of consecutive cp ranks share an encoder's tokens: take a divisor, or another cp",
            )  # fmt: skip
    return {component: ranks for component, ranks in options.context if ranks > 1 and component not in own}


def spread_encoder(program: Program, component: str, ranks: int, axis: str, gathers: bool = False) -> Program:
    """The layers of an encoder on shards of its tokens, each over `ranks` consecutive ranks of an axis: cp, tp, or that
    of the ranks of tp which hold the same. gathers: what leaves the component is made whole by itself.
    """
    tables = shared_nodes(program.graph)
    calls = [n for n in g.calls(program.graph) if n not in tables and component_of(program, n) == component]
    asked = ASKED[axis.split()[0]].format(component=component)
    attentions = _attentions(program, asked, remedy(axis, component), calls)
    tokens = _shape(attentions[0])[2]
    sizes = sizes_for(tokens, ranks, component, axis)
    found = axes(calls, attentions, tokens)
    local = _local(calls, found, tokens)
    for node in attentions:
        if node not in local:
            what = "csc cannot tell which dimensions of its operands count tokens"
            raise InputError(
                f"{component} is to be spread over {ranks} ranks: {what}", g.place(node), remedy(axis, component)
            )

    def dims(node: fx.Node) -> tuple[int, ...]:
        return (found[node][0],) if node in found else ()

    edge = PartsEdge() if axis == "cp" else EqualEdge(program.graph, local, dims, program.fake_mode, axis)
    inside = set(calls)
    leaving = {node for node in local if gathers and any(user not in inside for user in node.users)}
    spreading = Spreading(program, component, dims, sizes, local, ranks, edge, leaving=leaving)
    graph = spreading.graph()
    between = _between(program.graph, local)
    notes = tuple(
        f"{g.place(node)}: {g.op_name(node)} runs on all tokens of {component}, on every rank: not spread"
        for node in calls
        if node in between and not is_view(node) and node.target is not operator.getitem
    )
    contexts = (*program.contexts, spreading.context(attentions[0]))
    parameters = summed_over(program.parameters, edge.parts, axis)
    return replace(
        program, graph=graph, contexts=contexts, parameters=parameters, notes=(*program.notes, *notes)
    )  # fmt: skip


def summed_over(parameters: Collection[Parameter], parts: Collection[str], axis: str) -> tuple[Parameter, ...]:
    """The same; gradients of those of these names are parts over the axis."""
    group = group_over(axis)
    if group.along == ("copies",):
        return tuple(replace(one, copied=group.size if one.name in parts else one.copied) for one in parameters)
    return tuple(replace(one, parts=one.parts or one.name in parts) for one in parameters)


def _attentions(program: Program, asked: str, without: str, calls: Collection[fx.Node]) -> list[fx.Node]:
    """The attentions of a component along its own tokens. InputError if there is none, or one that csc cannot read."""
    every = [node for node in calls if g.op_name(node) in ATTENTIONS]
    own = [node for node in every if _shape(node)[2:3] == _shape(node, 1)[2:3]]
    notes = "".join(f"; {note}" for note in program.notes)
    for node in own:
        if g.op_name(node) != "csc::attention":
            raise InputError(f"{asked}, and csc cannot read the mask of this attention", g.place(node),
                             without + notes)  # fmt: skip
    lengths = sorted({_shape(node)[2] for node in own})
    if len(lengths) != 1:
        what = f"has attentions along {lengths} tokens" if lengths else "has no attention along tokens of its own"
        raise InputError(f"{asked}, which {what}: csc cannot tell what to spread", "mesh", without + notes)
    return own


def _local(calls: Collection[fx.Node], found: Mapping[fx.Node, Axis], tokens: int) -> set[fx.Node]:
    """The calls that run on shards. None else reads a value with its tokens joined to something: no gather takes it."""
    local = {node for node in calls if apart(node, found, tokens)}
    while True:
        torn = {
            node for node in local
            if any(user not in local for user in node.users)
            and (isinstance(node.meta["val"], (tuple, list)) or _shape(node, None)[found[node][0]] != tokens)
        }  # fmt: skip
        if not torn:
            return local
        local -= torn


def _between(graph: fx.Graph, local: set[fx.Node]) -> set[fx.Node]:
    """The nodes that stand between others that run on shards: behind one of them, and in front of one."""
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        if any(used in local or used in behind for used in node.all_input_nodes):
            behind.add(node)
    return (behind & g.ancestors(local)) - local


def _shape(node: fx.Node, argument: int | None = 0) -> tuple[int, ...]:
    """Of an argument, or of the node itself."""
    value = node if argument is None else node.args[argument]
    return tuple(value.meta["val"].shape)  # type: ignore[union-attr]
