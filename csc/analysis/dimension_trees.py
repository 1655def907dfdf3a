"""Dimensions as trees: what a dimension of a tensor is made of, as far as a graph tells.

Terms
  leaf      a dimension of which nothing more is known; an axis that tensors can be sharded along
  product   factors, the outermost first: index = outer * size of the inner ones + inner (heads * width)
  sum       stretches behind each other (queries + keys + values)
  blocked   never to be sharded; the reason is the operation that needs it whole
  unknown   not to be sharded either: an operation works with it of which nothing is known

    leaf(size) -> Dim                      product(dims) -> Dim
    unify(one, other)                      the two are walked along together
    factors(dim, sizes) -> [Dim]           dim as a product of these sizes
    stretches(dim, sizes) -> [Dim]         dim as a sum of these sizes
    block(dim, reason), block(dim, unknown=reason)
    ranges(dim, axis, rank, ranks) -> [(start, stop)]       what of dim belongs to a rank's shard of a leaf
    shard_size(dim, parts), shard_index(dim, index, parts)  sizes and places as a rank has them, of leaves cut in parts

Dims are refined in place: a leaf that turns out to be a product is one wherever it stands. What does not fit (sizes
that do not divide, a sum that is a product elsewhere) is blocked, not guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from typing import Literal

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
        while left and prod(one.size for one in taken) < size:
            missing = size // prod(one.size for one in taken)
            one = left.pop(0)
            if one.size > missing and one.size % missing == 0 and found(one).kind != "sum":
                one, rest = factors(one, [missing, one.size // missing])
                left.insert(0, rest)
            taken.append(one)
        if prod(one.size for one in taken) != size:
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
        while left and sum(one.size for one in taken) < size:
            missing = size - sum(one.size for one in taken)
            one = left.pop(0)
            if one.size > missing and found(one).kind == "leaf":
                one, rest = _refine(found(one), "sum", [missing, one.size - missing])
                left.insert(0, rest)
            taken.append(one)
        if sum(one.size for one in taken) != size:
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
    return any(one is found(axis) for one in leaves(dim))


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
