"""The axes that a forward graph can be sharded along, and what of each parameter a shard is.

Terms
  axis   a leaf of the trees of dimensions (csc.analysis.dimension_trees): whatever contains it is sharded with it.
         "heads" counts heads of keys, "tokens" and "samples" are those of attention, "vocabulary" is what is looked up
         by ids of the batch ("positions": by other numbers) or told apart by the loss; any other is called by the
         first parameter that has it: "mlp.up.weight.0"
  box    of a parameter, for each dimension the stretches that one rank holds

    trees = dimensions(graph)
    trees.axes() -> {name: Dim}                       of the leaves in parameters, and of tokens and samples
    trees.boxes(parameter, division, rank)            trees.text(parameter, dim): `heads * 4 + heads * 4`

Dimensions come from the table of operator rules, one walk over the graph: what an operation carries along is one leaf,
a reshape makes products, parts and joins make sums. An operation that needs a dimension whole blocks it, as does one
that is to be replicated; `Dim.blocked` says which, with its line, and `Dim.unknown` says it of one that the table does
not know.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from csc.analysis.dimension_trees import (
    Dim,
    block,
    contains,
    factors,
    flat,
    found,
    leaf,
    leaves,
    product,
    stretches,
    unify,
)  # fmt: skip
from csc.analysis.divisions import Division
from csc.analysis.operators.table import (
    ATTENTION,
    CLASSES,
    CONTEXT_ATTENTION,
    EMBEDDING,
    EXPAND,
    HEAD,
    LABELS,
    SDPA,
    End,
    Relation,
    Use,
    relation_of_features,
)
from csc.ir import graph as g
from csc.ir.program import Box

_WHOLE = ("normalised", "blocked", "repeated", "padded")


def dimensions(graph: fx.Graph, ids: Collection[str] = (), replicated: Collection[str] = ()) -> Trees:
    """Of a graph in plain sizes, as pass `attention` leaves it: a whole model's, or a template's. ids: tables of the
    latter that are made of the batch. replicated: operations that all ranks are to make of whole operands.
    """
    trees = Trees(ids, replicated)
    for node in graph.nodes:
        if node.op == "placeholder":
            trees.enter(node)
        elif node.op == "call_function":
            trees.call(node)
    return trees


class Trees:
    """of: the dimensions of each value; of several results those of each."""

    def __init__(self, ids: Collection[str] = (), replicated: Collection[str] = ()) -> None:
        self._ids, self._replicated = ids, replicated
        self.of: dict[fx.Node, list[list[Dim]]] = {}
        self.parameters: dict[str, list[Dim]] = {}
        self.named: list[tuple[str, Dim]] = []
        self.queries: list[Dim] = []  # heads of queries
        self.expanded: list[tuple[Dim, Dim]] = []  # a dimension, and one behind it in which its entries are repeated

    def axes(self) -> dict[str, Dim]:
        """By name, in the order of the graph; those of one name that are different leaves are numbered."""
        result: dict[str, Dim] = {}
        seen: set[int] = set()
        others = [(f"{name}.{place}", one) for name, dims in self.parameters.items()
                  for place, dim in enumerate(dims) for one in leaves(dim)]  # fmt: skip
        roots = [(name, next(leaves(part))) for name, dim in self.named for part in flat(dim, "sum")]
        for name, axis in (*roots, *others):
            if id(axis) not in seen and axis.size > 1:
                seen.add(id(axis))
                again = sum(key.split("#")[0] == name for key in result)
                result[f"{name}#{again}" if again else name] = axis
        return result

    def groups(self, heads: Dim) -> Dim | None:
        """The leaf of the query heads that read one of these key heads; None if each reads its own."""
        for dim in self.queries:
            outer, *inner = flat(dim, "product")
            if inner and outer is found(heads) and all(one.kind == "leaf" for one in inner):
                return inner[0] if len(inner) == 1 else None
        repeated = (found(times) for dim, times in self.expanded if found(dim) is found(heads))
        return next((times for times in repeated if times.kind == "leaf"), None)

    def boxes(self, parameter: str, division: Division, rank: int) -> Box:
        """ValueError if the axis is blocked, or does not divide."""
        axis, ranks = found(division.axis), division.ranks
        if axis.whole or (axis.size % ranks and division.groups is None):
            raise ValueError(axis.whole or f"{axis.size} entries cannot be divided by {ranks}")
        return tuple(tuple(division.ranges(dim, rank)) for dim in self.parameters[parameter])

    def text(self, parameter: str, dim: int) -> str:
        """A dimension's tree in names of axes, those without a name of their own as sizes."""
        names = {id(axis): name for name, axis in self.axes().items() if "." not in name}
        return _text(self.parameters[parameter][dim], names)

    def enter(self, node: fx.Node) -> None:
        dims = [leaf(size) for size in node.meta["val"].shape]
        self.of[node] = [dims]
        kind, name = node.meta["role"]
        if kind == "parameter":
            self.parameters[name] = dims

    def call(self, node: fx.Node) -> None:
        """The dimensions of a call's results, unified with those of its operands."""
        if node.target is operator.getitem:
            several = self.of[node.args[0]]  # type: ignore[index]
            self.of[node] = [several[node.args[1]]]  # type: ignore[index]
            return
        val: Any = node.meta["val"]
        values = list(val) if isinstance(val, (tuple, list)) else [val]
        out = [leaf(size) for size in getattr(values[0], "shape", ())]
        known, reason = self._relation(node), f"{g.op_name(node)} at {g.place(node)}"
        uses = () if known is None else known.uses
        own = g.op_name(node) in self._replicated or g.op_name(node).split("::")[0] == "csc"
        unknown = reason if known is None and not own else ""
        for used in {*node.all_input_nodes} - {use.node for use in uses}:
            self._block(self.of[used][0], "" if unknown else reason, unknown)
        if known is None:
            self._block(out, "" if unknown else reason, unknown)
        for use in uses:
            self._use(node, use, out, reason)
        if any(end.how in _WHOLE for use in uses for end in (use.rest, *use.ends.values())):
            linked = {place for use in uses for place, along in enumerate(use.link) if along is not None}
            self._block([dim for place, dim in enumerate(out) if place not in linked], reason)
        self._walk(uses)
        self._name(node, uses)
        if g.op_name(node) == EXPAND and uses:
            before = self.of[uses[0].node][0]
            new = [
                place
                for place in range(1, len(out))
                if len(before) == len(out) and before[place].size < out[place].size
            ]
            self.expanded += [(out[place - 1], out[place]) for place in new]
        self.of[node] = [out, *(self._other(one, out, "" if unknown else reason, unknown) for one in values[1:])]
        for use in uses:
            for dim, end in use.ends.items():
                if len(values) > 1 and end.how == "cut" and end.dim is not None and use.end(dim) is not None:
                    sizes = [one.shape[end.dim] for one in values]
                    for dims, part in zip(self.of[node], stretches(self.of[use.node][0][dim], sizes)):
                        dims[end.dim] = part

    def _relation(self, node: fx.Node) -> Relation | None:
        return None if g.op_name(node) in self._replicated else relation_of_features(node)

    @staticmethod
    def _block(dims: Sequence[Dim], reason: str, unknown: str = "") -> None:
        for dim in dims:
            block(dim, reason, unknown)

    @staticmethod
    def _other(value: Any, out: Sequence[Dim], reason: str, unknown: str) -> list[Dim]:
        """The dimensions of a second result: those of the first, as far as they have the same sizes."""
        shape = value.shape if isinstance(value, torch.Tensor) else ()
        return [out[d] if d < len(out) and out[d].size == size else Dim(size, blocked=reason, unknown=unknown)
                for d, size in enumerate(shape)]  # fmt: skip

    def _use(self, node: fx.Node, use: Use, out: list[Dim], reason: str) -> None:
        dims = self.of[use.node][0]
        for place, along in enumerate(use.link):
            if along is not None and dims[along].size > 1:
                unify(dims[along], out[place])
        ends = {d: end for d in range(len(dims)) if dims[d].size > 1 and (end := use.end(d)) is not None}
        if any(end.how == "regrouped" for end in ends.values()):
            _regroup(dims, out)
            return
        several = isinstance(node.meta["val"], (tuple, list))
        for d, end in ends.items():
            if not (several and end.how == "cut" and end.dim is not None):
                self._end(node, dims[d], end, out, reason)

    @staticmethod
    def _end(node: fx.Node, dim: Dim, end: End, out: list[Dim], reason: str) -> None:
        """A dimension of an operand that none of the result walks along with as a whole."""
        if end.how == "cut" and end.dim is not None and not out[end.dim].size:
            return  # nothing is taken
        if end.how == "cut" and end.dim is not None:
            size, rest = out[end.dim].size, dim.size - end.start - out[end.dim].size
            sizes = [one for one in (end.start, size, rest) if one]
            unify(stretches(dim, sizes)[1 if end.start else 0], out[end.dim])
        elif end.how == "joined" and end.dim is not None:
            rest = out[end.dim].size - end.start - dim.size
            sizes = [one for one in (end.start, dim.size, rest) if one]
            unify(stretches(out[end.dim], sizes)[1 if end.start else 0], dim)
        elif end.how == "grouped" and end.dim is not None:
            times = out[end.dim].size // dim.size
            unify(factors(out[end.dim], [dim.size, times])[0] if times > 1 else out[end.dim], dim)
        elif end.how == "cut" or end.how in _WHOLE or (end.how == "picked" and g.op_name(node) != EMBEDDING):
            block(dim, reason)
            if end.dim is not None and end.how in _WHOLE:
                block(out[end.dim], reason)

    def _walk(self, uses: Sequence[Use]) -> None:
        """Dimensions of operands that are walked together."""
        walks: dict[int, Dim] = {}
        for use in uses:
            for d, end in use.ends.items():
                dim = self.of[use.node][0][d]
                if end.walk is not None and use.end(d) is not None and dim.size > 1:
                    unify(walks.setdefault(end.walk, dim), dim)

    def _name(self, node: fx.Node, uses: Sequence[Use]) -> None:
        name = g.op_name(node)
        if name in (ATTENTION, CONTEXT_ATTENTION, SDPA) and len(self.of[uses[0].node][0]) == 4:
            query, key = (self.of[use.node][0] for use in uses[:2])
            heads = key[1] if key[1].size > 1 else query[1]  # one that all queries read is nobody's shard
            self.named += [("samples", query[0]), ("heads", heads), ("tokens", query[2])]
            self.queries.append(query[1])
        for use in uses:
            for d, end in use.ends.items():
                looked_up = name == EMBEDDING and end.how == "picked"
                if looked_up or (name in (*LABELS, HEAD) and end.walk == CLASSES):
                    ids = not looked_up or any(map(self._is_batch, g.ancestors([node])))
                    self.named.append(("vocabulary" if ids else "positions", self.of[use.node][0][d]))

    def _is_batch(self, node: fx.Node) -> bool:
        kind, name = node.meta.get("role", ("", ""))
        return kind == "input" or (kind == "shared" and name in self._ids)


def _regroup(before: Sequence[Dim], after: Sequence[Dim]) -> None:
    """A reshape: stretches of dimensions with as many entries before as after are one product."""
    mine, its = [dim for dim in before if dim.size != 1], [dim for dim in after if dim.size != 1]
    while mine and its:
        left, right = [mine.pop(0)], [its.pop(0)]
        while (one := prod(dim.size for dim in left)) != (other := prod(dim.size for dim in right)):
            (left if one < other else right).append((mine if one < other else its).pop(0))
        for part, dim in zip(factors(product(left), [dim.size for dim in right]), right):
            unify(part, dim)


def _text(dim: Dim, names: dict[int, str]) -> str:
    dim = found(dim)
    if dim.kind == "leaf":
        return names.get(id(dim), str(dim.size))
    parts = [_text(part, names) for part in dim.parts]
    if dim.kind == "sum":
        return " + ".join(parts)
    return " * ".join(f"({text})" if found(part).kind == "sum" else text for part, text in zip(dim.parts, parts))


def sharded(trees: Trees, axis: Dim) -> list[str]:
    """The parameters that an axis would shard."""
    return [name for name, dims in trees.parameters.items() if any(contains(dim, axis) for dim in dims)]
