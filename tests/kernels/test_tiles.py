"""Facts of masks in tiles equal those of the dense mask."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from csc.kernels import mask as t
from csc.kernels.mask import EVERYTHING, Mask
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.masks import masks


def in_tiles(dense: torch.Tensor, block_q: int, block_k: int) -> torch.Tensor:
    """Visible pairs by tile, one tile after the other."""
    _, queries, keys = dense.shape
    rows = [
        [dense[:, i : i + block_q, j : j + block_k].sum((1, 2)) for j in range(0, keys, block_k)]
        for i in range(0, queries, block_q)
    ]
    return torch.stack([torch.stack(row, -1) for row in rows], 1)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(masks(), st.integers(1, 9), st.integers(1, 9))
def test_counts_and_lists_equal_the_dense_mask(mask: Mask, block_q: int, block_k: int) -> None:
    dense = mask.dense()
    assert torch.equal(t.visible(mask), dense.sum(-1))
    pairs = in_tiles(dense, block_q, block_k)
    found = t.tiles(mask, block_q, block_k)
    with mock.patch.multiple(t, SHORT=0, FEW=0):  # as masks of many tiles are counted and listed
        assert torch.equal(t.counts(mask, block_q, block_k).long(), pairs)
        by_ranges = t.tiles(mask, block_q, block_k)
    for one, other in ((found.of_queries, by_ranges.of_queries), (found.of_keys, by_ranges.of_keys)):
        assert torch.equal(one.index, other.index) and torch.equal(one.counts, other.counts)
        assert one.index.dtype == other.index.dtype and one.counts.dtype == other.counts.dtype
    for b in range(mask.batch):
        for lists, table in ((found.of_queries, pairs[b]), (found.of_keys, pairs[b].T)):
            for i, row in enumerate(table):
                wholes, total = lists.counts[b, i].tolist()
                listed = lists.index[b, i, :total].tolist()
                assert sorted(listed) == row.nonzero().flatten().tolist()
                assert listed[:wholes] == sorted(listed[:wholes]) and listed[wholes:] == sorted(listed[wholes:])
                for position, j in enumerate(listed):
                    q, k = (i, j) if lists is found.of_queries else (j, i)
                    block = dense[b, q * block_q : (q + 1) * block_q, k * block_k : (k + 1) * block_k]
                    assert (position < wholes) == (bool(block.all()) and block.shape[1] == block_k)


@settings(max_examples=100, deadline=None)
@given(masks(), st.randoms(use_true_random=False))
def test_union_is_or(mask: Mask, random: object) -> None:
    shifted = Mask((mask.ranges + 1).clamp(max=mask.keys), mask.admits, mask.kinds, mask.keys)
    assert torch.equal(mask.union(shifted).dense(), mask.dense() | shifted.dense())


def test_union_with_a_mask_without_kinds() -> None:
    ranges = torch.tensor([[0, 1], [0, 2], [0, 3]], dtype=torch.int32)[None, None]
    causal = Mask(ranges, None, None, 3)
    kinds = torch.tensor([[1, 2, 2]])
    later = Mask(ranges * 0 + torch.tensor([0, 3], dtype=torch.int32), torch.full((1, 1, 3), 2), kinds, 3)
    assert torch.equal(causal.union(later).dense(), causal.dense() | later.dense())
    assert causal.union(later).admits[0, 0].tolist() == [EVERYTHING] * 3
