"""What tensor-parallel ranks hold of a parameter: together all of it, each entry once; damaged lists are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from csc.analysis.tensor_axes import Dim, divides_all, leaf, product, ranges, shard_index, shard_size
from csc.runtime.specs import cut, put, read


@st.composite
def fused(draw: st.DrawFn) -> tuple[Dim, Dim, int]:
    """A dimension made of stretches `axis * width` or `times * axis * width`, its axis, and a number of ranks."""
    ranks = draw(st.sampled_from([2, 3, 4]))
    axis = leaf(ranks * draw(st.integers(1, 3)))
    stretches = []
    for _ in range(draw(st.integers(1, 3))):
        inner, outer = leaf(draw(st.integers(1, 4))), leaf(draw(st.sampled_from([1, 1, 2])))
        stretches.append(product([outer, axis, inner]))
    if len(stretches) == 1:
        return stretches[0], axis, ranks
    return Dim(sum(one.size for one in stretches), "sum", stretches), axis, ranks


@given(fused(), st.sampled_from([0, 1]))
def test_boxes_are_a_partition(case: tuple[Dim, Dim, int], place: int) -> None:
    dim, axis, ranks = case
    shape = [dim.size, 3] if place == 0 else [3, dim.size]
    other = ((0, 3),)
    own = [tuple(ranges(dim, axis, rank, ranks)) for rank in range(ranks)]
    boxes = read([[one, other] if place == 0 else [other, one] for one in own], shape, ranks, ())
    whole = torch.arange(dim.size * 3).view(shape)
    shards = [cut(whole, box) for box in boxes]
    assert sorted(torch.cat([shard.flatten() for shard in shards]).tolist()) == whole.flatten().tolist()
    assert all(shard.is_contiguous() and shard.shape[place] == shard_size(dim, {axis: ranks}) for shard in shards)
    again = torch.full_like(whole, -1)
    for box, shard in zip(boxes, shards):
        put(again, box, shard)
    assert torch.equal(again, whole)
    assert divides_all(dim, axis)


@given(fused())
def test_places_between_stretches(case: tuple[Dim, Dim, int]) -> None:
    """A place on a rank is how much of what is before it the rank holds, where it lies between stretches."""
    dim, axis, ranks = case
    held = [i for start, stop in ranges(dim, axis, 0, ranks) for i in range(start, stop)]
    bounds = [0]
    for part in dim.parts if dim.kind == "sum" else [dim]:
        bounds.append(bounds[-1] + part.size)
    for bound in bounds:
        assert shard_index(dim, bound, {axis: ranks}) == sum(i < bound for i in held)
    if dim.kind == "leaf":
        with pytest.raises(ValueError, match="lies within what is divided"):
            shard_index(dim, 1, {axis: ranks})


def test_a_stretch_without_the_axis_is_not_divided() -> None:
    axis, other = leaf(4), leaf(6)
    mixed = Dim(10, "sum", [axis, other])
    assert not divides_all(mixed, axis) and divides_all(product([other, axis]), axis)
    assert shard_size(mixed, {axis: 2}) == 8
    assert [shard_index(mixed, i, {axis: 2}) for i in (0, 4, 7, 10)] == [0, 2, 5, 8]


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        (7, "lists no boxes"),
        ([[[[0, 2]], [[0, 3]]]], "should list 2 boxes"),
        ([[[[0, 2]], [[0, 3]]], [[[2, 4]]]], "should list 2 boxes in 2 dimensions"),
        ([[[[0, 2]], [[0, 3]]], [[[1, 4]], [[0, 3]]]], "different sizes"),
        ([[[[0, 2]], [[0, 3]]], [[[1, 3]], [[0, 3]]]], "not together all of dimension 0"),
        ([[[[0, 2]], [[0, 2]]], [[[2, 4]], [[0, 2]]]], "not together all of dimension 1"),
        ([[[[0, 4]], [[0, 3]]], [[[0, 4]], [[0, 3]]]], "more than one dimension, or in none"),
    ],
)
def test_damaged_boxes(boxes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(boxes, [4, 3], 2, ())


def test_boxes_that_several_ranks_hold() -> None:
    """Each `division` ranks together all of it; none of them something else than those before."""
    first, second = [[[0, 2]], [[0, 3]]], [[[2, 4]], [[0, 3]]]
    found = read([first, second] * 2, [4, 3], 4, (2,))
    assert found[:2] == found[2:] and found[0] != found[1]
    for boxes in ([first, second, second, first], [first, first, second, second]):
        with pytest.raises(ValueError, match="not together all of dimension 0"):
            read(boxes, [4, 3], 4, (2,))
    with pytest.raises(ValueError, match="not together all of dimension 0"):
        read([first, second] * 2, [4, 3], 4, ())
