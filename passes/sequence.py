"""Pass `sequence`: what stands between the divided products of a layer as shards of tokens ("sequence parallelism")."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from csc.kernels.collectives import ALL_GATHER, ALL_REDUCE, GATHER_SHARED, OWN_PART, REDUCE_SCATTER, SHARE, slots
from csc.kernels.dropout import DROPOUT
from csc.passes.tensor import GROUP
from csc.passes.tensor_graph import DIVIDED, ENTRY_BY_ENTRY, add_group
from torch import fx

from csc.analysis.gradient_flow import carrying_calls
from csc.analysis.operators import table
from csc.analysis.operators.execution import draws, is_view
from csc.analysis.operators.table import (
    EXPAND,
    PRODUCTS,
    RESHAPES,
    RULES,
    SAME_ON_SHARDS,
    SIZED_VIEWS,
    SLICE,
    Use,
    reduction,
    relation,
    resized,
)
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.graph import Evaluation, Writer, unique
from csc.ir.program import LOSS, DividedAxis, Options, Pass, Program, Region, Template

# --- Which values of a template's graph tensor-parallel ranks can have as shards of tokens ---------------------------
#
# Terms
#   rows     the dimension of a value that ranks share out, of `length` entries: tokens, the longest but the last one
#   shard    a value of which a rank has its rows; what is computed row by row from shards is one
#   divided  of a call: pass `tensor` gave it heads, features or words of a rank, or a part of a sum
#            (`meta["divided"]`)
#   view     of a shard that is none itself, since it joins rows with others: whoever reads it reads it whole
#   flat     a sum over [samples * tokens, features], and its bias: a rank has the rows of the view behind them
#
# A sum over ranks is a shard if a call reads it row by row, or it leaves as one.


aten = torch.ops.aten


class RowShards(NamedTuple):
    """Dimension `dim` of a value, of `length` rows in the whole."""

    dim: int
    length: int


def rows_of(val: Any) -> RowShards | None:
    """The rows of a value that ranks could share out; None if it has none: ids, masks, numbers."""
    if not isinstance(val, torch.Tensor) or val.dim() < 2 or not val.dtype.is_floating_point or val.shape[-1] < 2:
        return None
    dim = max(range(val.dim() - 1), key=lambda place: (val.shape[place], place))
    return RowShards(dim, val.shape[dim]) if val.shape[dim] > 1 and val.is_contiguous() else None


class TokenRows:
    """rows: of each shard. arriving: of the placeholders that are some. leaving: values that may leave as shards."""

    def __init__(self, graph: fx.Graph, arriving: Mapping[fx.Node, RowShards], leaving: Collection[fx.Node]) -> None:
        self._graph, self._leaving = graph, leaving
        self.rows: dict[fx.Node, RowShards] = dict(arriving)
        self.views: set[fx.Node] = set()
        self.flat: dict[fx.Node, fx.Node] = {}
        self._follow(set())
        larger = self._larger()
        if larger:
            self.rows = dict(arriving)
            self._follow(larger)
        self._keep_sums()

    def _follow(self, larger: Collection[fx.Node]) -> None:
        for node in g.calls(self._graph):
            if node.target is ALL_REDUCE:
                chain = _until_view(node)
                self.flat |= dict.fromkeys(chain[:-1], chain[-1])
            if node.target is ALL_REDUCE or node in self.flat:
                rows = rows_of(self.flat.get(node, node).meta["val"])
            else:
                rows = None if DIVIDED in node.meta or node in larger else self._along(node)
            if rows is not None:
                self.rows[node] = rows

    def _larger(self) -> set[fx.Node]:
        """Products that would be gathered in the end and are larger than what they are made of: whole logits."""
        ends: set[fx.Node] = set()
        larger: set[fx.Node] = set()
        for node in reversed(g.calls(self._graph)):
            users = [user for user in node.users if user.op == "call_function"]
            if node not in self.rows or node in self._leaving or any(user.target is SHARE for user in users):
                continue
            if all(user in ends or user not in self.rows for user in users):
                ends.add(node)
                operands = [used.meta["val"].numel() for used in node.all_input_nodes if used in self.rows]
                if g.op_name(node) in PRODUCTS and node.meta["val"].numel() > sum(operands):
                    larger.add(node)
        return larger

    def _keep_sums(self) -> None:
        """Sums that nothing reads row by row are what they were; then the views of what is left."""
        for node in g.calls(self._graph):
            if node.target is ALL_REDUCE:
                chain = _until_view(node)
                if chain[-1] not in self._leaving and not any(user in self.rows for user in chain[-1].users):
                    for node_of_chain in chain:
                        self.rows.pop(node_of_chain, None)
                        self.flat.pop(node_of_chain, None)
            elif (
                node not in self.rows and DIVIDED not in node.meta and (is_view(node) or g.op_name(node) in SIZED_VIEWS)
            ):
                used = node.all_input_nodes[0]
                self.views |= {node} if used in self.rows or used in self.views else set()

    def _along(self, node: fx.Node) -> RowShards | None:
        """The rows of a call's result, if it works on them one by one."""
        shards = [used for used in node.all_input_nodes if used in self.rows]
        if shards and shards[0] in self.flat:
            return self.rows[shards[0]]
        name, val = g.op_name(node), node.meta["val"]
        if not shards or not isinstance(val, torch.Tensor):
            return None
        if name == "csc::dropout":
            return self.rows[shards[0]] if node.args[0] is shards[0] else None
        if name in RESHAPES:
            return _reshaped(self.rows[shards[0]], shards[0].meta["val"].shape, val.shape)
        by_entry = RULES.get(name, table.broadcasting) in ENTRY_BY_ENTRY
        reduced = RULES.get(name) is reduction
        allowed = by_entry or reduced or name in SAME_ON_SHARDS or name in PRODUCTS or name in (EXPAND, SLICE)
        known = relation(node)
        if known is None or draws(node) or not allowed or {use.node for use in known.uses} != set(node.all_input_nodes):
            return None
        return self._linked(known.uses, val)

    def _linked(self, uses: Sequence[Use], val: torch.Tensor) -> RowShards | None:
        """The rows of a result that walks along with those of all its operands."""
        shards: set[RowShards] = set()
        for use in uses:
            if use.node in self.rows:
                dim, length = self.rows[use.node]
                end = use.end(dim)
                if end is not None and end.how == "unread":
                    continue
                if use.link.count(dim) != 1:
                    return None
                shards.add(RowShards(use.link.index(dim), length))
        if len(shards) != 1 or val.shape[(rows := shards.pop()).dim] != rows.length:
            return None
        beside = [use.node.meta["val"].shape[along] for use in uses if (along := use.link[rows.dim]) is not None]
        return rows if all(size == rows.length for size in beside) else None

    def unsummed(self, whole: Collection[str]) -> set[fx.Node]:
        """Parameters, and what is made of these alone, that calls on shards read and no other: their gradients are
        parts, which nothing adds up in the graph. whole: names of parameters of which none may be.
        """
        unsummed: set[fx.Node] = set()
        for node in self._graph.nodes:
            if node.op == "placeholder":
                kind, name = node.meta["role"]
                unsummed |= {node} if kind == "parameter" and name not in whole else set()
            elif node.op == "call_function" and DIVIDED not in node.meta and node.all_input_nodes:
                unsummed |= {node} if all(used in unsummed for used in node.all_input_nodes) else set()
        left: set[fx.Node] = set()
        while left != unsummed:
            left = unsummed
            unsummed = {
                node for node in left
                if node.users and all(self._reads_parts(user, left) for user in node.users)
                and all(used in left for used in node.all_input_nodes)
            }  # fmt: skip
        return unsummed

    def _reads_parts(self, user: fx.Node, unsummed: Collection[fx.Node]) -> bool:
        return user in self.rows or user in unsummed or (DIVIDED in user.meta and user.target is not SHARE)

    def takes(self, node: fx.Node) -> bool:
        """Whether a call reads a shard as such, or divided calls do, whose gradient is then scattered."""
        return any(
            user in self.rows or user.target is SHARE or (user in self.views and self.takes(user))
            for user in node.users
        )  # fmt: skip


def _reshaped(rows: RowShards, before: Sequence[int], after: Sequence[int]) -> RowShards | None:
    """Where a reshape leaves the rows whole, in one dimension of their own."""
    ahead = prod(before[: rows.dim])
    places = (p for p, size in enumerate(after) if size == rows.length and prod(after[:p]) == ahead)
    return next((RowShards(place, rows.length) for place in places), None)


def _until_view(node: fx.Node) -> list[fx.Node]:
    """A sum over [samples * tokens, features], a bias that is added, and the view that has samples and tokens apart, if
    nothing else reads them; else the sum alone.
    """
    chain = [node]
    while node.meta["val"].dim() == 2 and len(chain) < 3 and len(node.users) == 1:
        (node,) = node.users
        if g.op_name(node) in RESHAPES and node.meta["val"].shape[-1] == chain[0].meta["val"].shape[-1]:
            return [*chain, node]
        beside = [used for used in node.all_input_nodes if used is not chain[-1]]
        if node.target is not aten.add.Tensor or any(used.meta["val"].dim() > 1 for used in beside):
            break
        chain.append(node)
    return chain[:1]


# --- The forward graph of a template of which tensor-parallel ranks share out the tokens between their products ------
#
# Terms: see csc.passes.sequence.
#
# A call that does not work row by row reads the whole of its operands, which are gathered once.


@dataclass(frozen=True)
class Arriving:
    """An activation that comes as a shard; val: a rank's."""

    rows: RowShards
    val: torch.Tensor


@dataclass(frozen=True)
class Leaving:
    """What an output is to be: a shard if it is one (`may`), or in any case (`must`)."""

    may: bool
    must: bool = False


class TokenShards:
    """Copies the graph for one of the ranks, which all run the same.

    number: that of their group, as its placeholder has it. groups: names of placeholders that are it. inexact:
    placeholders of activations that a gradient is asked for. whole: names of parameters whose gradient calls in the
    graph add up, since another use gives the whole. leaves: the rows of outputs that are shards. taken: activations
    that are read as the shards they come as. parts: names of parameters whose gradient nothing adds up.
    """

    def __init__(
        self, graph: fx.Graph, arriving: Mapping[fx.Node, Arriving], leaving: Sequence[Leaving], ranks: int,
        number: torch.Tensor, groups: Collection[str], evaluate: Evaluation, inexact: Collection[fx.Node],
        whole: Collection[str],
    ) -> None:  # fmt: skip
        self.old, self.arriving, self.leaving, self.ranks = graph, arriving, leaving, ranks
        self.number, self.groups = number, groups
        may = {node for node, how in zip(g.outputs(graph), leaving) if how.may}
        self.tokens = TokenRows(graph, {node: arrival.rows for node, arrival in arriving.items()}, may)
        self.rows, self.views, self.flat = self.tokens.rows, self.tokens.views, self.tokens.flat
        self.unsummed = self.tokens.unsummed(whole)
        self.parts = frozenset(node.meta["role"][1] for node in self.unsummed if node.op == "placeholder")
        self.taken = frozenset(filter(self.tokens.takes, arriving))
        self.carrying = carrying_calls(graph, inexact)
        self.graph = fx.Graph()
        self.writer = Writer(self.graph, evaluate)
        self.mapping: dict[fx.Node, fx.Node] = {}  # to values as they are: shards, or whole
        self.made: dict[object, fx.Node] = {}  # the other forms of a value, once each
        self.leaves: list[RowShards | None] = []

    def run(self) -> TokenShards:
        """Make the graph."""
        self._placeholders()
        for node in g.calls(self.old):
            if node in self.views:
                continue
            first = next(iter(node.all_input_nodes), node)
            if node.target is SHARE and (first in self.rows or first in self.views):
                self.mapping[node] = self._gathered(first, "shared", GATHER_SHARED)
            elif node.target is ALL_REDUCE and node in self.rows:
                self._scatter(node, first)
            elif node in self.rows:
                self._on_shards(node)
            else:
                wholes = {used: self._whole(used) for used in node.all_input_nodes}
                g.copy_node(self.graph, node, wholes)
                self.mapping[node] = wholes[node]
        results = []
        for node, how in zip(g.outputs(self.old), self.leaving):
            rows = self.rows.get(node) if how.may and self._is_dense(node) else None
            if rows is None and how.must:
                rows = rows_of(node.meta["val"])
            self.leaves.append(rows)
            results.append(self._whole(node) if rows is None else self._shard(node, rows))
        self.graph.output(tuple(results) if isinstance(self.old.output_node().args[0], (tuple, list)) else results[0])
        g.erase_dead(self.graph)
        return self

    def _is_dense(self, node: fx.Node) -> bool:
        return node in self.mapping and bool(self.mapping[node].meta["val"].is_contiguous())

    def _placeholders(self) -> None:
        """As they were, activations in their local sizes; the number of the group behind the tables."""
        group = None
        for node in g.placeholders(self.old):
            role = node.meta["role"]
            if role[0] == "parameter" and group is None:
                group = add_group(self.graph, self.old, self.number)
            val = self.arriving[node].val if node in self.arriving else node.meta["val"]
            self.mapping[node] = g.add_placeholder(self.graph, node.name, val, role)
            if node.name in self.groups:
                group = self.mapping[node]
        self.group = group or add_group(self.graph, self.old, self.number)

    # calls on shards

    def _scatter(self, node: fx.Node, part: fx.Node) -> None:
        """A sum of which each rank gets its rows."""
        rows_in = self.mapping[part]
        if node in self.flat:
            sizes = list(self.flat[node].meta["val"].shape)
            rows_in = self.writer.named(f"{rows_in.name}_rows", node, aten.view.default, rows_in, sizes)
        rest = (*self.rows[node], self.ranks, True, self.group)
        self.mapping[node] = self.writer.named(node.name, node, REDUCE_SCATTER, rows_in, *rest)

    def _on_shards(self, node: fx.Node) -> None:
        rows = self.rows[node]
        if node.all_input_nodes[0] in self.flat and node not in self.flat:
            self.mapping[node] = self.mapping[node.all_input_nodes[0]]  # the view that its operand has become
            return
        if g.op_name(node) == "csc::dropout":
            self._dropout(node, rows)
            return
        operands = {used: self._operand(node, used, rows) for used in node.all_input_nodes}
        args, kwargs = fx.map_arg((node.args, node.kwargs), operands.__getitem__)
        if g.op_name(node) in SIZED_VIEWS:
            sizes = list(node.meta["val"].shape)
            sizes[rows.dim] = slots(rows.length, self.ranks)
            args, kwargs = resized(node, args, kwargs, sizes)
        self.mapping[node] = self.writer.named(node.name, node, node.target, *args, **kwargs)

    def _operand(self, node: fx.Node, used: fx.Node, rows: RowShards) -> fx.Node:
        """As a call on shards reads it: its own rows of a value that has them; of another the gradient is parts."""
        if used in self.rows:
            return self.mapping[used]
        known = None if node in self.flat else relation(node)
        for use in known.uses if known is not None else ():
            along = use.link[rows.dim]
            if use.node is used and along is not None and used.meta["val"].shape[along] == rows.length:
                return self._shard(used, RowShards(along, rows.length))
        whole_value = self._whole(used)
        if used not in self.carrying or used in self.unsummed:
            return whole_value
        return self._once((used, SHARE), f"{used.name}_shared", used, SHARE, whole_value, self.group)

    def _dropout(self, node: fx.Node, rows: RowShards) -> None:
        """A rank's rows of the mask that the whole would have."""
        bound = g.bind(node)
        x, seed, tokens, dim, whole = (bound[name] for name in ("x", "seed", "tokens", "dim", "whole"))
        chance, index, device = bound["p"], bound["index"], node.meta["val"].device
        if tokens is None:
            dim, whole = rows.dim, rows.length
            every = self._once((node, "every"), f"{node.name}_every", node, aten.arange.default, whole, device=device)
        else:
            every = self.mapping[tokens]
        if dim != rows.dim:  # context-parallel ranks share out another dimension
            rest = (chance, self.mapping[seed], index, every, dim, whole)
            dropped = self.writer.named(node.name, node, DROPOUT, self._whole(x), *rest)
            self.mapping[node] = self._cut(dropped, node, rows)
            return
        own_numbers = self._once(
            (node, "own"), f"{node.name}_own", node, OWN_PART, every, 0, rows.length, self.ranks, True, self.group
        )  # fmt: skip
        rest = (chance, self.mapping[seed], index, own_numbers, dim, whole)
        self.mapping[node] = self.writer.named(node.name, node, DROPOUT, self.mapping[x], *rest)

    # forms of a value

    def _once(self, key: object, name: str, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if key not in self.made:
            self.made[key] = self.writer.named(name, like, target, *args, **kwargs)
        return self.made[key]

    def _whole(self, node: fx.Node) -> fx.Node:
        """The value that all ranks have alike."""
        return self._gathered(node, "whole", ALL_GATHER)

    def _gathered(self, node: fx.Node, form: str, gather: Any) -> fx.Node:
        """The whole of a shard, or of a view of one."""
        if node in self.rows:
            rest = (*self.rows[node], self.ranks, self.group)
            return self._once((node, form), f"{node.name}_{form}", node, gather, self.mapping[node], *rest)
        if node not in self.views:
            return self.mapping[node]
        operand = self._gathered(node.all_input_nodes[0], form, gather)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: operand)
        return self._once((node, form), f"{node.name}_{form}", node, node.target, *args, **kwargs)

    def _shard(self, node: fx.Node, rows: RowShards) -> fx.Node:
        return self.mapping[node] if self.rows.get(node) == rows else self._cut(self._whole(node), node, rows)

    def _cut(self, whole: fx.Node, node: fx.Node, rows: RowShards) -> fx.Node:
        return self._once((node, rows), f"own_{node.name}", node, OWN_PART, whole, *rows, self.ranks, True, self.group)


# --- Pass `sequence`: what stands between the divided products of a layer as shards of tokens ("sequence parallel") ---


@dataclass(frozen=True)
class SequencePass(Pass):
    """With `options.sequence_parallel`, let tensor-parallel ranks share out tokens where they computed them all alike.

    Ensures   without it, or with tp = 1, nothing changes. Else sums over ranks give each rank its tokens where calls
              that work token by token read them (norms, additions, dropout), and divided products read what is
              gathered; regions hand shards to each other; parameters that only such calls read have gradients that are
              parts. Where ranks do not divide the number of tokens, the last slots repeat the last token.
    Before    %y = csc.all_reduce(%part);  %z = norm(%y : f32[2, 12, 48]);  %up = linear(csc.share(%z), %w_up)
    After     %y = csc.reduce_scatter(%part, 1, 12);  %z = norm(%y : f32[2, 6, 48]);
              %up = linear(csc.gather_shared(%z, 1, 12), %w_up)
    """

    requires: ClassVar = ("forward", "tensor")
    establishes: ClassVar = ("sequence",)

    sequence_parallel: bool = False

    def __call__(self, program: Program, options: Options) -> Program:
        options = self.over(options)
        if not options.sequence_parallel:
            return program
        if options.mesh.tp == 1:
            raise InputError(
                "sequence_parallel=True shares tokens out among tensor-parallel ranks, and the mesh has tp=1",
                "sequence_parallel", "give the mesh a tp, or leave sequence_parallel out; cp divides tokens without tp",
            )  # fmt: skip
        assert program.shared is not None
        named = zip(g.outputs(program.shared), program.shared.output_node().meta["names"], strict=True)
        groups = {name: node.meta["val"] for node, name in named if node.meta.get("role") == GROUP}
        if not groups:
            return program
        fewer = (*options.mesh.held_in_copies, *options.mesh.narrow, *options.mesh.wide)
        return _Handing(program, options.mesh.tp, [*groups.values()][-1], tuple(groups), fewer).program()


@dataclass(frozen=True)
class _HandedOn:
    """A template as regions with such activations and outputs run it."""

    template: Template
    leaves: tuple[RowShards | None, ...]
    taken: frozenset[int]  # activations
    parts: frozenset[str]  # local names of parameters
    meets: bool  # others, where the template before did not


@dataclass
class _Handing:
    """What regions hand each other.

    tables: of the number of a rank's group, the last one for regions that have none. fewer: components that fewer ranks
    divide, whose regions stay as they are. whole: values that no reader takes as shards. cut: those that some reader of
    a kind gets whole, and others of it as shards: their region cuts them. summed: parameters whose gradient calls in
    graphs have to add up.
    """

    before: Program
    ranks: int
    number: torch.Tensor
    tables: tuple[str, ...]
    fewer: tuple[str, ...]
    whole: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    summed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.evaluate = Evaluation(self.before.fake_mode)
        self.made: dict[object, _HandedOn] = {}

    def program(self) -> Program:
        """With the values that settle."""
        while True:
            handed, shards = self._swept()
            if not (self._to_hand_on(handed, shards) or self._to_add_up(handed)):
                return self._applied(handed)

    def _swept(self) -> tuple[dict[str, _HandedOn], dict[str, Arriving]]:
        shards: dict[str, Arriving] = {}
        handed: dict[str, _HandedOn] = {}
        for region in self.before.regions:
            handed_on = handed[region.name] = self._region(region, shards)
            for value, rows, node in zip(region.outputs, handed_on.leaves, g.outputs(handed_on.template.graph)):
                if rows is not None:
                    shards[value] = Arriving(rows, node.meta["val"])
        return handed, shards

    def _region(self, region: Region, shards: Mapping[str, Arriving]) -> _HandedOn:
        template = self.before.templates[region.template]
        if region.component in self.fewer:
            return self.made.setdefault(
                region.template, _HandedOn(template, (None,) * len(region.outputs), frozenset(), frozenset(), False)
            )
        arriving = {place: shards[value] for place, value in enumerate(region.activations) if value in shards}
        leaving = tuple(
            Leaving(value not in self.whole and value != LOSS, value in self.cut) for value in region.outputs
        )
        local = zip(region.parameters, template.parameters, strict=True)
        summed = frozenset(own for name, own in local if name in self.summed)
        shapes = tuple(
            (place, arrival.rows, tuple(arrival.val.shape), arrival.val.stride()) for place, arrival in arriving.items()
        )
        groups = tuple(local for name, local in zip(region.shared, template.shared, strict=True) if name in self.tables)
        key = (region.template, shapes, leaving, summed, groups)
        if key not in self.made:
            self.made[key] = self._template(template, arriving, leaving, summed, groups)
        return self.made[key]

    def _template(
        self, template: Template, arriving: Mapping[int, Arriving], leaving: tuple[Leaving, ...],
        summed: frozenset[str], groups: tuple[str, ...],
    ) -> _HandedOn:  # fmt: skip
        inputs = g.placeholders(template.graph)
        inexact = [inputs[place] for place in template.inexact]
        tokens = TokenShards(
            template.graph, {inputs[place]: value for place, value in arriving.items()}, leaving, self.ranks,
            self.number, groups, self.evaluate, inexact, summed,
        ).run()  # fmt: skip
        if not tokens.rows and not any(tokens.leaves):
            return _HandedOn(template, tuple(tokens.leaves), frozenset(), frozenset(tokens.parts), False)
        shared = tuple(node.name for node in g.placeholders(tokens.graph) if node.meta["role"][0] == "shared")
        counts = dict.fromkeys(rows.length for rows in (*tokens.rows.values(), *filter(None, tokens.leaves)))
        axes = tuple(DividedAxis("tokens", count, self.ranks, ()) for count in counts)
        changed = replace(template, graph=tokens.graph, shared=shared, divided=(*template.divided, *axes))
        taken = frozenset(place for place in arriving if inputs[place] in tokens.taken)
        meets = len(shared) > len(template.shared)
        return _HandedOn(changed, tuple(tokens.leaves), taken, frozenset(tokens.parts), meets)

    def _to_hand_on(self, handed: Mapping[str, _HandedOn], shards: Mapping[str, Arriving]) -> bool:
        """Whether values are to be handed on in another way."""
        taken = {region.activations[place] for region in self.before.regions for place in handed[region.name].taken}
        undivided = shards.keys() - taken
        kinds: dict[tuple[str, int], RowShards] = {}
        for region in self.before.regions:
            for place in handed[region.name].taken:
                kinds[(region.template, place)] = shards[region.activations[place]].rows
        vals = {
            value: node.meta["val"] for region in self.before.regions
            for value, node in zip(region.outputs, g.outputs(self.before.templates[region.template].graph))
        }  # fmt: skip
        cut = {
            value for region in self.before.regions for place, value in enumerate(region.activations)
            if value not in shards and value not in self.whole
            and kinds.get((region.template, place), ()) == rows_of(vals[value])
        }  # fmt: skip
        changed = bool(undivided - self.whole or cut - self.cut)
        self.whole |= undivided
        self.cut = (self.cut | cut) - self.whole
        return changed

    def _to_add_up(self, handed: Mapping[str, _HandedOn]) -> bool:
        """Whether gradients of a parameter are parts in one region and whole in another."""
        parts: set[str] = set()
        elsewhere: set[str] = set()
        for region in self.before.regions:
            handed_on = handed[region.name]
            for name, local in zip(region.parameters, handed_on.template.parameters, strict=True):
                (parts if local in handed_on.parts else elsewhere).add(name)
        changed = bool((parts & elsewhere) - self.summed)
        self.summed |= parts & elsewhere
        return changed

    def _applied(self, handed: Mapping[str, _HandedOn]) -> Program:
        templates: dict[str, Template] = {}
        names: dict[int, str] = {}
        regions: list[Region] = []
        parts: set[str] = set()
        for region in self.before.regions:
            handed_on = handed[region.name]
            if id(handed_on) not in names:
                names[id(handed_on)] = unique(handed_on.template.name, templates)
                templates[names[id(handed_on)]] = replace(handed_on.template, name=names[id(handed_on)])
            tables = (*region.shared, self.tables[-1]) if handed_on.meets else region.shared
            regions.append(replace(region, template=names[id(handed_on)], shared=tables))
            local = zip(region.parameters, handed_on.template.parameters, strict=True)
            parts |= {name for name, own in local if own in handed_on.parts}
        held = tuple(replace(p, parts=p.parts or (p.name in parts and not p.boxes)) for p in self.before.parameters)
        return replace(self.before, templates=templates, regions=tuple(regions), parameters=held)
