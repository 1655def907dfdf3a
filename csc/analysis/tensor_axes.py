"""The axes that a forward graph can be sharded along, and what of each parameter a shard is."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Literal

import torch
from torch import fx

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

# --- Dimensions as trees: what a dimension of a tensor is made of, as far as a graph tells ---------------------------
#
# Terms
#   leaf      a dimension of which nothing more is known; an axis that tensors can be sharded along
#   product   factors, the outermost first: index = outer * size of the inner ones + inner (heads * width)
#   sum       stretches behind each other (queries + keys + values)
#   blocked   never to be sharded; the reason is the operation that needs it whole
#   unknown   not to be sharded either: an operation works with it of which nothing is known
#
# Dims are refined in place: a leaf that turns out to be a product is one wherever it stands. What does not fit (sizes
# that do not divide, a sum that is a product elsewhere) is blocked, not guessed.


MISFIT = "its parts do not fit together"


@dataclass(eq=False)
class Dim:
    size: int
    kind: Literal["leaf", "product", "sum"] = "leaf"
    parts: list[Dim] = field(default_factory=list)
    same: Dim | None = None  # what it has been unified with
    blocked: str = ""
    unknown: str = ""

    @property
    def whole(self) -> str:
        """Why it is not to be sharded; "": it may be."""
        return self.blocked or self.unknown


def leaf(size: int) -> Dim:
    return Dim(size)


def product(dims: Sequence[Dim]) -> Dim:
    real = [dim for dim in dims if dim.size != 1]
    if len(real) == 1:
        return found(real[0])
    return Dim(prod(dim.size for dim in real), "product", real) if real else leaf(1)


def found(dim: Dim) -> Dim:
    """The Dim that stands for this one by now."""
    while dim.same is not None:
        dim = dim.same
    return dim


def block(dim: Dim, reason: str = "", unknown: str = "") -> None:
    dim = found(dim)
    dim.blocked, dim.unknown = dim.blocked or reason, dim.unknown or unknown
    for part in dim.parts:
        block(part, reason, unknown)


def flat(dim: Dim, kind: str) -> list[Dim]:
    """The factors, or the stretches, of a dim with those of its parts."""
    dim = found(dim)
    return [one for part in dim.parts for one in flat(part, kind)] if dim.kind == kind else [dim]


def _refine(dim: Dim, kind: Literal["product", "sum"], sizes: Sequence[int]) -> list[Dim]:
    """A leaf made a product or a sum of new leaves."""
    dim.kind, dim.parts = kind, [leaf(size) for size in sizes]
    if dim.whole:
        block(dim, dim.blocked, dim.unknown)
    return dim.parts


def factors(dim: Dim, sizes: Sequence[int]) -> list[Dim]:
    """New, blocked dims if it cannot be a product of these."""
    dim = found(dim)
    if len(sizes) == 1:
        return [dim]
    if dim.kind == "leaf":
        return _refine(dim, "product", sizes)
    left = flat(dim, "product") if dim.kind == "product" else [dim]
    result = []
    for size in sizes:
        taken: list[Dim] = []
        while left and prod(dim.size for dim in taken) < size:
            missing = size // prod(dim.size for dim in taken)
            one = left.pop(0)
            if one.size > missing and one.size % missing == 0 and found(one).kind != "sum":
                one, rest = factors(one, [missing, one.size // missing])
                left.insert(0, rest)
            taken.append(one)
        if prod(dim.size for dim in taken) != size:
            return _misfit(dim, sizes)
        result.append(product(taken))
    return result


def stretches(dim: Dim, sizes: Sequence[int]) -> list[Dim]:
    """New, blocked dims if it cannot be a sum of these."""
    dim = found(dim)
    if len(sizes) == 1:
        return [dim]
    if dim.kind == "leaf":
        return _refine(dim, "sum", sizes)
    if dim.kind == "product":
        outer, *inner = flat(dim, "product")
        if {dim.size // outer.size} == set(sizes):  # as many equal stretches as the outermost factor counts
            block(outer, "it counts stretches")
            return [product(inner) for _ in sizes]
        return _misfit(dim, sizes)
    result, left = [], flat(dim, "sum")
    for size in sizes:
        taken: list[Dim] = []
        while left and sum(dim.size for dim in taken) < size:
            missing = size - sum(dim.size for dim in taken)
            one = left.pop(0)
            if one.size > missing and found(one).kind == "leaf":
                one, rest = _refine(found(one), "sum", [missing, one.size - missing])
                left.insert(0, rest)
            taken.append(one)
        if sum(dim.size for dim in taken) != size:
            return _misfit(dim, sizes)
        result.append(taken[0] if len(taken) == 1 else Dim(size, "sum", taken))
    return result


def _misfit(dim: Dim, sizes: Sequence[int]) -> list[Dim]:
    block(dim, MISFIT)
    return [Dim(size, blocked=MISFIT) for size in sizes]


def unify(one: Dim, other: Dim) -> None:
    one, other = found(one), found(other)
    if one is other:
        return
    if one.size != other.size:
        block(one, MISFIT)
        block(other, MISFIT)
    elif "leaf" in (one.kind, other.kind):
        leaf_, rest = (one, other) if one.kind == "leaf" else (other, one)
        if any(part is leaf_ for part in leaves(rest)):  # of itself: only by factors of one
            return
        leaf_.same = rest
        if leaf_.whole:
            block(rest, leaf_.blocked, leaf_.unknown)
    elif one.kind == other.kind:
        apart = factors if one.kind == "product" else stretches
        sizes = _common([part.size for part in flat(one, one.kind)], [part.size for part in flat(other, one.kind)],
                        one.kind == "product")  # fmt: skip
        if not sizes:
            block(one, MISFIT)
            block(other, MISFIT)
            return
        for mine, its in zip(apart(one, sizes), apart(other, sizes)):
            unify(mine, its)
    else:
        whole, parts = (one, other) if one.kind == "product" else (other, one)
        for mine, its in zip(stretches(whole, [part.size for part in flat(parts, "sum")]), flat(parts, "sum")):
            unify(mine, its)


def _common(one: Sequence[int], other: Sequence[int], factored: bool) -> list[int]:
    """The sizes that both can be cut into; [] if there are none."""
    if not factored:
        cuts = sorted({*accumulate(one), *accumulate(other)})
        return [stop - start for start, stop in zip([0, *cuts], cuts)]
    behind = sorted({prod(sizes[i:]) for sizes in (one, other) for i in range(len(sizes))} | {1}, reverse=True)
    if any(outer % inner for outer, inner in pairwise(behind)):
        return []
    return [outer // inner for outer, inner in pairwise(behind)]


def leaves(dim: Dim) -> Iterator[Dim]:
    dim = found(dim)
    if dim.kind == "leaf":
        yield dim
    for part in dim.parts:
        yield from leaves(part)


def contains(dim: Dim, axis: Dim) -> bool:
    return any(leaf is found(axis) for leaf in leaves(dim))


def ranges(dim: Dim, axis: Dim, rank: int, ranks: int) -> list[tuple[int, int]]:
    """The stretches of a dim, from start to stop, that belong to one rank's shard of a leaf; all of it if the leaf is
    not in it.
    """
    dim = found(dim)
    if dim is found(axis):
        share = dim.size // ranks
        return [(rank * share, (rank + 1) * share)]
    if not contains(dim, axis):
        return [(0, dim.size)]
    every: list[tuple[int, int]] = []
    if dim.kind == "sum":
        starts = accumulate((part.size for part in dim.parts), initial=0)
        every = [(start + a, start + b) for part, start in zip(dim.parts, starts)
                 for a, b in ranges(part, axis, rank, ranks)]  # fmt: skip
    else:
        outer, inner = dim.parts[0], product(dim.parts[1:])
        within = ranges(inner, axis, rank, ranks)
        for a, b in ranges(outer, axis, rank, ranks):
            if within == [(0, inner.size)]:
                every.append((a * inner.size, b * inner.size))
            else:
                every += [(i * inner.size + c, i * inner.size + d) for i in range(a, b) for c, d in within]
    joined: list[tuple[int, int]] = []
    for a, b in every:
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        else:
            joined.append((a, b))
    return joined


def shard_size(dim: Dim, parts: Mapping[Dim, int]) -> int:
    """How long a dim is on each rank, where these leaves are divided into so many parts."""
    dim = found(dim)
    if not dim.parts:
        return dim.size // next((number for axis, number in parts.items() if dim is found(axis)), 1)
    sizes = [shard_size(part, parts) for part in dim.parts]
    return sum(sizes) if dim.kind == "sum" else prod(sizes)


def shard_index(dim: Dim, index: int, parts: Mapping[Dim, int]) -> int:
    """Where a place between two stretches of a dim is on a rank. ValueError for a place that a shard does not have."""
    dim = found(dim)
    if not any(contains(dim, axis) for axis in parts):
        return index
    if index in (0, dim.size):
        return shard_size(dim, parts) if index else 0
    if dim.kind == "sum":
        before = 0
        for part in dim.parts:
            if index <= part.size:
                return before + shard_index(part, index, parts)
            index, before = index - part.size, before + shard_size(part, parts)
    elif dim.kind == "product":
        inner = product(dim.parts[1:])
        if index % inner.size == 0:
            outer = shard_index(dim.parts[0], index // inner.size, parts)
            return outer * shard_size(inner, parts)
    raise ValueError(f"index {index} of {dim.size} lies within what is divided")


def divides_all(dim: Dim, axis: Dim) -> bool:
    """Whether every entry of a dim that has the leaf belongs to one rank: no stretch of it lacks the leaf."""
    dim = found(dim)
    if dim is found(axis):
        return True
    have = (divides_all(part, axis) for part in dim.parts)
    return (dim.kind == "sum" and all(have)) or (dim.kind == "product" and any(have))


# --- An axis and the ranks that divide it, which may be more than it has entries -------------------------------------
#
# Terms
#   groups   of key heads: the query heads that read one of them. With more ranks than key heads those that have the
#            same key head divide its groups
#   each     how many ranks have one entry of the axis; they are neighbours, and a *sub-group*
#   piece    what one of these has of a stretch that knows key heads and no groups (the columns of a key projection): as
#            many entries as each other rank. A sub-group's pieces behind each other are one head


def fits(entries: int, groups: int, ranks: int) -> bool:
    """groups: of query heads for each key head; 1 of any other axis."""
    return entries % ranks == 0 or (ranks % entries == 0 and groups > 1 and groups % (ranks // entries) == 0)


@dataclass(frozen=True)
class Division:
    """groups: the leaf, where there are more ranks than entries; None else."""

    axis: Dim
    ranks: int
    groups: Dim | None = None

    @property
    def each(self) -> int:
        """How many ranks have one entry together."""
        return 1 if self.groups is None else self.ranks // self.axis.size

    @property
    def parts(self) -> Mapping[Dim, int]:
        """Into how many each leaf is cut."""
        return {self.axis: self.ranks // self.each} | ({} if self.groups is None else {self.groups: self.each})

    def takes(self, dim: Dim) -> bool:
        """Whether it divides a dimension."""
        return any(contains(dim, leaf) for leaf in self.parts)

    def in_pieces(self, dim: Dim) -> bool:
        return self.groups is not None and any(self._is_piece(stretch) for stretch in flat(dim, "sum"))

    def _is_piece(self, stretch: Dim) -> bool:
        return self.groups is not None and contains(stretch, self.axis) and not contains(stretch, self.groups)

    def misfit(self, dim: Dim) -> str:
        """Why ranks cannot each have a stretch of a parameter's dimension, as a phrase behind its name; "" if not."""
        for stretch in flat(dim, "sum") if self.groups is not None and self.takes(dim) else []:
            outer = flat(stretch, "product")[: 1 if self._is_piece(stretch) else 2]
            if [id(axis) for axis in outer] != [id(found(leaf)) for leaf in self.parts][: len(outer)]:
                return "does not have key heads, and in these its query heads, as outermost entries"
            if stretch.size % self.ranks:
                return f"has {stretch.size} entries of key heads for {self.ranks} ranks"
        return ""

    def size(self, dim: Dim, pieces: bool = False) -> int:
        if not pieces:
            return shard_size(dim, self.parts)
        return sum(self._stretch(stretch, pieces) for stretch in flat(dim, "sum"))

    def _stretch(self, stretch: Dim, pieces: bool) -> int:
        return stretch.size // self.ranks if pieces and self._is_piece(stretch) else shard_size(stretch, self.parts)

    def index(self, dim: Dim, index: int, pieces: bool = False) -> int:
        """Where a place between two stretches is on a rank. ValueError for a place that a shard does not have."""
        if not pieces:
            return shard_index(dim, index, self.parts)
        before, local = 0, 0
        for stretch in flat(dim, "sum"):
            if before < index < before + stretch.size and self._is_piece(stretch):
                raise ValueError(f"index {index} of {dim.size} lies within what is divided")
            if index < before + stretch.size:
                return local + shard_index(stretch, index - before, self.parts)
            before, local = before + stretch.size, local + self._stretch(stretch, pieces)
        return local

    def ranges(self, dim: Dim, rank: int) -> list[tuple[int, int]]:
        """From start to stop. Of a dimension that it divides and that has no `misfit`."""
        if self.groups is None or not self.takes(dim):
            return ranges(dim, self.axis, rank, self.ranks)
        stretches = flat(dim, "sum")
        starts = accumulate((stretch.size for stretch in stretches), initial=0)
        owned = [(start, stretch.size // self.ranks) for stretch, start in zip(stretches, starts)]
        return [(start + rank * size, start + (rank + 1) * size) for start, size in owned]


# --- The axes that a forward graph can be sharded along, and what of each parameter a shard is -----------------------
#
# Terms
#   axis   a leaf of the trees of dimensions: whatever contains it is sharded with it.
#          "heads" counts heads of keys, "tokens" and "samples" are those of attention, "vocabulary" is what is looked
#          up by ids of the batch ("positions": by other numbers) or told apart by the loss; any other is called by the
#          first parameter that has it: "mlp.up.weight.0"
#   box    of a parameter, for each dimension the stretches that one rank holds
#
# Dimensions come from the table of operator rules, one walk over the graph: what an operation carries along is one
# leaf, a reshape makes products, parts and joins make sums. An operation that needs a dimension whole blocks it, as
# does one that is to be replicated; `Dim.blocked` says which, with its line, and `Dim.unknown` says it of one that the
# table does not know.


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
        in_parameters = [(f"{name}.{place}", axis) for name, dims in self.parameters.items()
                  for place, dim in enumerate(dims) for axis in leaves(dim)]  # fmt: skip
        roots = [(name, next(leaves(part))) for name, dim in self.named for part in flat(dim, "sum")]
        for name, axis in (*roots, *in_parameters):
            if id(axis) not in seen and axis.size > 1:
                seen.add(id(axis))
                again = sum(key.split("#")[0] == name for key in result)
                result[f"{name}#{again}" if again else name] = axis
        return result

    def groups(self, heads: Dim) -> Dim | None:
        """The leaf of the query heads that read one of these key heads; None if each reads its own."""
        for dim in self.queries:
            outer, *inner = flat(dim, "product")
            if inner and outer is found(heads) and all(dim.kind == "leaf" for dim in inner):
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
        is_known = g.op_name(node) in self._replicated or g.op_name(node).split("::")[0] == "csc"
        unknown = reason if known is None and not is_known else ""
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
        self.of[node] = [
            out,
            *(self._other(operand, out, "" if unknown else reason, unknown) for operand in values[1:]),
        ]
        for use in uses:
            for dim, end in use.ends.items():
                if len(values) > 1 and end.how == "cut" and end.dim is not None and use.end(dim) is not None:
                    sizes = [value.shape[end.dim] for value in values]
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
            sizes = [size for size in (end.start, size, rest) if size]
            unify(stretches(dim, sizes)[1 if end.start else 0], out[end.dim])
        elif end.how == "joined" and end.dim is not None:
            rest = out[end.dim].size - end.start - dim.size
            sizes = [size for size in (end.start, dim.size, rest) if size]
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
