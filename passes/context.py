"""Pass `context`: the tokens of a sequence spread over context-parallel ranks."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil
from typing import ClassVar

import torch
from csc.passes.loss import labels_of
from csc.passes.sharding import EqualEdge, PartsEdge, Spreading, TokenSizes, remedy
from torch import fx

from csc.analysis.cutting import shared_nodes
from csc.analysis.operators.execution import is_view
from csc.analysis.operators.table import ATTENTION, LABELS, SDPA
from csc.analysis.tokens import Axis, apart, axes, counting
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.groups import group_over
from csc.ir.program import Options, Parameter, Pass, Program

# --- What pass `context` spreads of encoders, for those that the user names in `context` -----------------------------
#
# Which dimensions count its tokens is followed from its attentions (csc.analysis.tokens). On shards run the calls that
# make every token's result from that token alone; what they read is dispatched, what others read of them gathered. A
# call in between that sees all tokens is computed whole, by every rank: right, but not spread, and `notes` says so.


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
        fault = f"the {tokens} tokens of {component} cannot be spread over {axis}={ranks}"
        raise InputError(fault, "mesh", f"use fewer {axis} ranks")
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
    request = ASKED[axis.split()[0]].format(component=component)
    attentions = _attentions(program, request, remedy(axis, component), calls)
    tokens = _shape(attentions[0])[2]
    sizes = sizes_for(tokens, ranks, component, axis)
    axes_of = axes(calls, attentions, tokens)
    local = _local_to_encoder(calls, axes_of, tokens)
    for node in attentions:
        if node not in local:
            fault = "csc cannot tell which dimensions of its operands count tokens"
            raise InputError(
                f"{component} is to be spread over {ranks} ranks: {fault}", g.place(node), remedy(axis, component)
            )

    def dims(node: fx.Node) -> tuple[int, ...]:
        return (axes_of[node][0],) if node in axes_of else ()

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
        return tuple(
            replace(parameter, copied=group.size if parameter.name in parts else parameter.copied)
            for parameter in parameters
        )
    return tuple(replace(parameter, parts=parameter.parts or parameter.name in parts) for parameter in parameters)


def _attentions(program: Program, request: str, without: str, calls: Collection[fx.Node]) -> list[fx.Node]:
    """The attentions of a component along its own tokens. InputError if there is none, or one that csc cannot read."""
    every = [node for node in calls if g.op_name(node) in ATTENTIONS]
    attentions = [node for node in every if _shape(node)[2:3] == _shape(node, 1)[2:3]]
    notes = "".join(f"; {note}" for note in program.notes)
    for node in attentions:
        if g.op_name(node) != "csc::attention":
            raise InputError(f"{request}, and csc cannot read the mask of this attention", g.place(node),
                             without + notes)  # fmt: skip
    lengths = sorted({_shape(node)[2] for node in attentions})
    if len(lengths) != 1:
        fault = f"has attentions along {lengths} tokens" if lengths else "has no attention along tokens of its own"
        raise InputError(f"{request}, which {fault}: csc cannot tell what to spread", "mesh", without + notes)
    return attentions


def _local_to_encoder(calls: Collection[fx.Node], axes_of: Mapping[fx.Node, Axis], tokens: int) -> set[fx.Node]:
    """The calls that run on shards. None else reads a value with its tokens joined to something: no gather takes it."""
    local = {node for node in calls if apart(node, axes_of, tokens)}
    while True:
        torn = {
            node for node in local
            if any(user not in local for user in node.users)
            and (isinstance(node.meta["val"], (tuple, list)) or _shape(node, None)[axes_of[node][0]] != tokens)
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


# --- Pass `context`: the tokens of a sequence spread over context-parallel ranks -------------------------------------


@dataclass(frozen=True)
class ContextPass(Pass):
    """Let each cp rank compute the layers of the language model for its own tokens; those of encoders too, where
    options.context says over how many ranks.

    Ensures   with cp = 1 nothing changes. Else the layers whose attention runs along the labels' sequence, and all that
              follows them, work on a shard of the tokens; what enters them is computed for the whole sequence and
              dispatched: embeddings where encoders and text have merged, position tables, labels after their shift.
              A spread encoder works on shards of its own tokens and is made whole again where its values leave.
              Attention sees the keys of all ranks; no other operation on shards mixes tokens. A loss that is more
              than a mean over labels is summed over a rank's own tokens, and divided by what the microbatch has.
    Before    %x : f32[2, 1000, 48];  %o = csc.attention(%q, %k, %v, %mask);  cross_entropy_loss(%logits, %labels)
    After     %mine = aten.index_select(%x, 1, %tokens) : f32[2, 512, 48];  %o = csc.context_attention(.., %plan, 0)
    """

    requires: ClassVar = ("captured", "unweighed", "seeded", "attention")
    establishes: ClassVar = ("context",)

    context: tuple[tuple[str, int], ...] = ()

    def __call__(self, program: Program, options: Options) -> Program:
        options = self.over(options)
        if options.mesh.cp == 1:
            named(program, options, ())
            return program
        (loss,) = g.outputs(program.graph)
        averaged = labels_of(loss)
        labels = _labels(program) if averaged is None else _labels_of([averaged])
        sequence = labels[0][0] if labels else _token_ids(program)
        if sequence is None:
            raise InputError(
                "with cp > 1 the batch must have token ids or labels: they say which tokens are spread",
                loss.meta.get("source") or "model output",
                "leave cp at 1",
            )
        dims = _Dims(program, sequence)
        spread = dims.spread(program)
        if not spread:
            raise InputError(
                f"csc found no attention along the labels' tokens, so it cannot tell what cp={options.mesh.cp} spreads",
                "mesh",
                "leave cp at 1" + "".join(f"; {note}" for note in program.notes),
            )
        own = [component_of(program, node) for node in spread]
        encoders = named(program, options, own)
        sizes = sizes_for(_tokens(spread[0]), options.mesh.cp, own[-1], "cp")
        local = _local(program, spread)
        edge = PartsEdge()
        spreading = Spreading(
            program, own[-1], dims, sizes, local, options.mesh.cp, edge, labels, last=True, sums=averaged is None
        )
        language = replace(program, graph=spreading.graph())
        context = spreading.context(spread[0])
        for component, ranks in encoders.items():
            language = spread_encoder(language, component, ranks, "cp")
        return replace(language, contexts=(*language.contexts, context))


def _labels(program: Program) -> list[tuple[fx.Node, int]]:
    """What the losses of the graph are over."""
    return _labels_of([node for node in g.calls(program.graph) if g.op_name(node) in LABELS])


def _labels_of(losses: Sequence[fx.Node]) -> list[tuple[fx.Node, int]]:
    """Each with the number that stands for none."""
    labels = [(g.bind(node)["target"], int(g.bind(node)["ignore_index"])) for node in losses]
    return [(target, none) for target, none in labels if target.meta["val"].dtype is torch.int64]


def _token_ids(program: Program) -> fx.Node | None:
    """The first entry with a whole number for each token."""
    for node in g.placeholders(program.graph):
        val = node.meta["val"]
        if node.meta["role"][0] == "input" and val.dtype is torch.int64 and val.dim() > 1:
            return node
    return None


class _Dims:
    """Which dimensions of a value count tokens: those that lead to the sequence of labels, or of token ids."""

    def __init__(self, program: Program, sequence: fx.Node) -> None:
        entries = {item.name: item for item in program.inputs}
        sources = [node for node in g.ancestors([sequence]) if node.meta.get("role", ("",))[0] == "input"]
        seeds = [(node, dim) for node in sources for dim in entries[node.meta["role"][1]].dynamic]
        if not seeds:
            raise InputError(
                "the labels of the loss are none of tokens, and cp spreads tokens: samples of a loss over the batch "
                "(contrastive ones) meet where all tokens of a sample are one value",
                g.place(sequence), "leave cp at 1, and use dp, pp or tp",
            )  # fmt: skip
        if len({node.meta["val"].shape[dim] for node, dim in seeds}) != 1:
            raise InputError(
                f"the labels have {len(seeds)} dimensions whose size may change, one is needed to spread tokens",
                "labels",
                "leave cp at 1",
            )
        self._dims = counting(g.calls(program.graph), seeds)

    def __call__(self, node: fx.Node) -> tuple[int, ...]:
        return self._dims.get(node, ()) if g.tensor_value(node) is not None else ()

    def spread(self, program: Program) -> list[fx.Node]:
        """The attentions whose queries and keys are tokens of the sequence: as many as the last of them has. Others
        along some of the tokens are what an encoder makes a part of the sequence with.
        """
        attentions = [
            node for node in g.calls(program.graph)
            if g.op_name(node) == "csc::attention"
            and all(isinstance(operand, fx.Node) and self(operand) == (2,) for operand in node.args[:2])
        ]  # fmt: skip
        return [node for node in attentions if _tokens(node) == _tokens(attentions[-1])]


def _tokens(attention: fx.Node) -> int:
    return int(attention.args[0].meta["val"].shape[2])  # type: ignore[union-attr]


def _local(program: Program, spread: list[fx.Node]) -> set[fx.Node]:
    """The calls that run on a rank's own tokens: the layers around the attentions, and all that follows them; not what
    every stage makes from the batch by itself.
    """
    layers = {_layer(node.meta.get("module", ""), program) for node in spread}
    tables = shared_nodes(program.graph)
    inside_nodes: set[fx.Node] = set()
    for node in g.calls(program.graph):
        inside = any(path in layers for path in _around(node.meta.get("module", "")))
        if node not in tables and (inside or any(used in inside_nodes for used in node.all_input_nodes)):
            inside_nodes.add(node)
    return inside_nodes


def _around(module: str) -> list[str]:
    """All modules around a module and itself, the outermost first."""
    return list(accumulate(module.split("."), lambda outer, name: f"{outer}.{name}"))


def _layer(module: str, program: Program) -> str:
    """The outermost layer around a module; the module itself if it is in none."""
    for path in _around(module):
        if path in program.modules and program.modules[path].role == "layer":
            return path
    return module
