"""The forward graph of a template of which tensor-parallel ranks share out the tokens between their products.

Terms: see csc.passes.token_rows.

    TokenShards(graph, arriving, leaving, ranks, number, groups, evaluate, inexact, whole).run()
    .graph, .rows, .leaves, .taken, .parts

A call that does not work row by row reads the whole of its operands, which are gathered once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from csc.kernels.collectives import ALL_GATHER, ALL_REDUCE, GATHER_SHARED, OWN_PART, REDUCE_SCATTER, SHARE, slots
from csc.kernels.dropout import DROPOUT
from csc.passes.token_rows import RowShards, TokenRows, rows_of
from torch import fx

from csc.analysis.gradient_flow import carrying_calls
from csc.analysis.operators.table import SIZED_VIEWS, relation, resized
from csc.ir import graph as g
from csc.ir.graph import Evaluation, Writer

aten = torch.ops.aten


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
        self.tokens = TokenRows(graph, {node: one.rows for node, one in arriving.items()}, may)
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
                whole = {used: self._whole(used) for used in node.all_input_nodes}
                g.copy_node(self.graph, node, whole)
                self.mapping[node] = whole[node]
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
                group = self._new_group()
            val = self.arriving[node].val if node in self.arriving else node.meta["val"]
            self.mapping[node] = g.add_placeholder(self.graph, node.name, val, role)
            if node.name in self.groups:
                group = self.mapping[node]
        self.group = group or self._new_group()

    def _new_group(self) -> fx.Node:
        names = {node.name for node in self.old.nodes}
        name = next(name for name in ("tp", "tp_group", "_tp_group") if name not in names)
        return g.add_placeholder(self.graph, name, self.number, ("shared", name))

    # calls on shards

    def _scatter(self, node: fx.Node, part: fx.Node) -> None:
        """A sum of which each rank gets its rows."""
        given = self.mapping[part]
        if node in self.flat:
            sizes = list(self.flat[node].meta["val"].shape)
            given = self.writer.named(f"{given.name}_rows", node, aten.view.default, given, sizes)
        rest = (*self.rows[node], self.ranks, True, self.group)
        self.mapping[node] = self.writer.named(node.name, node, REDUCE_SCATTER, given, *rest)

    def _on_shards(self, node: fx.Node) -> None:
        rows = self.rows[node]
        if node.all_input_nodes[0] in self.flat and node not in self.flat:
            self.mapping[node] = self.mapping[node.all_input_nodes[0]]  # the view that its operand has become
            return
        if g.op_name(node) == "csc::dropout":
            self._dropout(node, rows)
            return
        given = {used: self._operand(node, used, rows) for used in node.all_input_nodes}
        args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
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
        whole = self._whole(used)
        if used not in self.carrying or used in self.unsummed:
            return whole
        return self._once((used, SHARE), f"{used.name}_shared", used, SHARE, whole, self.group)

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
        own = self._once(
            (node, "own"), f"{node.name}_own", node, OWN_PART, every, 0, rows.length, self.ranks, True, self.group
        )  # fmt: skip
        rest = (chance, self.mapping[seed], index, own, dim, whole)
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
