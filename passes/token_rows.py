"""Which values of a template's graph tensor-parallel ranks can have as shards of tokens.

Terms
  rows     the dimension of a value that ranks share out, of `length` entries: tokens, the longest but the last one
  shard    a value of which a rank has its rows; what is computed row by row from shards is one
  divided  of a call: pass `tensor` gave it heads, features or words of a rank, or a part of a sum (`meta["divided"]`)
  view     of a shard that is none itself, since it joins rows with others: whoever reads it reads it whole
  flat     a sum over [samples * tokens, features], and its bias: a rank has the rows of the view behind them

    TokenRows(graph, arriving rows, values that may leave as shards)
    .rows, .views, .flat, .unsummed(whole)

A sum over ranks is a shard if a call reads it row by row, or it leaves as one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from csc.kernels.collectives import ALL_REDUCE, SHARE
from csc.passes.fewer_sums import DIVIDED
from csc.passes.tensor_graph import ENTRY_BY_ENTRY
from torch import fx

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
)
from csc.ir import graph as g

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
        found: set[fx.Node] = set()
        for node in reversed(g.calls(self._graph)):
            users = [user for user in node.users if user.op == "call_function"]
            if node not in self.rows or node in self._leaving or any(one.target is SHARE for one in users):
                continue
            if all(user in ends or user not in self.rows for user in users):
                ends.add(node)
                operands = [used.meta["val"].numel() for used in node.all_input_nodes if used in self.rows]
                if g.op_name(node) in PRODUCTS and node.meta["val"].numel() > sum(operands):
                    found.add(node)
        return found

    def _keep_sums(self) -> None:
        """Sums that nothing reads row by row are what they were; then the views of what is left."""
        for node in g.calls(self._graph):
            if node.target is ALL_REDUCE:
                chain = _until_view(node)
                if chain[-1] not in self._leaving and not any(user in self.rows for user in chain[-1].users):
                    for one in chain:
                        self.rows.pop(one, None)
                        self.flat.pop(one, None)
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
        found: set[RowShards] = set()
        for use in uses:
            if use.node in self.rows:
                dim, length = self.rows[use.node]
                end = use.end(dim)
                if end is not None and end.how == "unread":
                    continue
                if use.link.count(dim) != 1:
                    return None
                found.add(RowShards(use.link.index(dim), length))
        if len(found) != 1 or val.shape[(rows := found.pop()).dim] != rows.length:
            return None
        beside = [use.node.meta["val"].shape[along] for use in uses if (along := use.link[rows.dim]) is not None]
        return rows if all(size == rows.length for size in beside) else None

    def unsummed(self, whole: Collection[str]) -> set[fx.Node]:
        """Parameters, and what is made of these alone, that calls on shards read and no other: their gradients are
        parts, which nothing adds up in the graph. whole: names of parameters of which none may be.
        """
        found: set[fx.Node] = set()
        for node in self._graph.nodes:
            if node.op == "placeholder":
                kind, name = node.meta["role"]
                found |= {node} if kind == "parameter" and name not in whole else set()
            elif node.op == "call_function" and DIVIDED not in node.meta and node.all_input_nodes:
                found |= {node} if all(used in found for used in node.all_input_nodes) else set()
        left: set[fx.Node] = set()
        while left != found:
            left = found
            found = {
                node for node in left
                if node.users and all(self._reads_parts(user, left) for user in node.users)
                and all(used in left for used in node.all_input_nodes)
            }  # fmt: skip
        return found

    def _reads_parts(self, user: fx.Node, found: Collection[fx.Node]) -> bool:
        return user in self.rows or user in found or (DIVIDED in user.meta and user.target is not SHARE)

    def takes(self, node: fx.Node) -> bool:
        """Whether a call reads a shard as such, or divided calls do, whose gradient is then scattered."""
        return any(
            user in self.rows or user.target is SHARE or (user in self.views and self.takes(user))
            for user in node.users
        )  # fmt: skip


def _reshaped(rows: RowShards, before: Sequence[int], after: Sequence[int]) -> RowShards | None:
    """Where a reshape leaves the rows whole, in one dimension of their own."""
    ahead = prod(before[: rows.dim])
    found = (p for p, size in enumerate(after) if size == rows.length and prod(after[:p]) == ahead)
    return next((RowShards(place, rows.length) for place in found), None)


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
