"""What of a parameter each tensor-parallel rank holds, and how it is taken out and put back.

Terms: a *box* lists for each dimension the stretches, from start to stop, that a rank holds; its entries lie in the
rank's tensor as they do in the whole. Boxes of those that divide a tensor have no entry in common, and together all;
where these are fewer than all ranks, the next so many have the same boxes again.

    read(value, shape, ranks, divisions) -> (Box, ...)    of program.json; ValueError with a phrase for what is none
    cut(whole, box) -> tensor                     a dense copy of what is in the box
    put(whole, box, shard)                        the inverse, into the whole
    whole_box(shape) -> Box                       all of it
    sizes(box) -> (size, ...)                     of a rank's tensor
    part(box, dimension, start, stop) -> Box      of these entries of the shard
    overlap(one, other) -> (slices of one's shard, slices of the other's)...      where boxes have entries in common
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from typing import Any

import torch

from csc.runtime.specs import Box


def read(value: Any, shape: Sequence[int], ranks: int, divisions: Sequence[int]) -> tuple[Box, ...]:
    """As many as there are ranks, all in the same sizes; they divide one dimension, all of them or each so many of
    `divisions`.
    """
    try:
        found = tuple(
            tuple(tuple((int(start), int(stop)) for start, stop in dim) for dim in box) for box in value
        )  # fmt: skip
    except (TypeError, ValueError):
        raise ValueError("lists no boxes") from None
    if len(found) != ranks or any(len(box) != len(shape) for box in found):
        raise ValueError(f"should list {ranks} boxes in {len(shape)} dimensions")
    if len({sizes(box) for box in found}) > 1:
        raise ValueError("has boxes of different sizes")
    apart = next((found[:size] for size in divisions if found[:size] * (ranks // size) == found), found)
    for dim, size in enumerate(shape):
        held = [box[dim] for box in apart]
        stretches = sorted(stretch for one in held for stretch in one) if len(set(held)) > 1 else held[0]
        if [0, *(stop for _, stop in stretches)] != [*(start for start, _ in stretches), size]:
            raise ValueError(f"has boxes that are not together all of dimension {dim}")
    if sum(len({box[dim] for box in apart}) > 1 for dim in range(len(shape))) != 1:
        raise ValueError("has boxes that differ in more than one dimension, or in none")
    return found


def sizes(box: Box) -> tuple[int, ...]:
    """Along each dimension."""
    return tuple(sum(stop - start for start, stop in dim) for dim in box)


def cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """Contiguous, with memory of its own."""
    shard = whole.new_empty(sizes(box))
    for there, here in _places(box):
        shard[here] = whole[there]
    return shard


def put(whole: torch.Tensor, box: Box, shard: torch.Tensor) -> None:
    """Write a shard to its box."""
    for there, here in _places(box):
        whole[there] = shard[here]


def whole_box(shape: Sequence[int]) -> Box:
    """One stretch for each dimension."""
    return tuple(((0, size),) for size in shape)


def part(box: Box, dimension: int, start: int, stop: int) -> Box:
    """What the entries from start to stop of a dimension of a box' shard are in the whole."""
    kept, at = [], 0
    for low, high in box[dimension]:
        first, last = max(start - at, 0), min(stop - at, high - low)
        if first < last:
            kept.append((low + first, low + last))
        at += high - low
    return (*box[:dimension], tuple(kept), *box[dimension + 1 :])


def overlap(one: Box, other: Box) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Each block of entries that two boxes have in common, in the shard of either."""
    common = [list(_common(ours, theirs)) for ours, theirs in zip(one, other, strict=True)]
    for block in product(*common):
        yield tuple(here for here, _ in block), tuple(there for _, there in block)


def _common(ours: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]]) -> Iterator[tuple[slice, slice]]:
    at = 0
    for low, high in ours:
        there = 0
        for start, stop in theirs:
            first, last = max(low, start), min(high, stop)
            if first < last:
                here = at + first - low
                yield slice(here, here + last - first), slice(there + first - start, there + last - start)
            there += stop - start
        at += high - low


def _places(box: Box) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Each stretch of a box: where it is in the whole, and where in the shard."""
    of_dim = []
    for dim in box:
        starts = accumulate((stop - start for start, stop in dim), initial=0)
        of_dim.append([(slice(a, b), slice(start, start + b - a)) for (a, b), start in zip(dim, starts)])
    for one in product(*of_dim):
        yield tuple(there for there, _ in one), tuple(here for _, here in one)
