"""Unions, intersections and facts equal those of dense masks."""

from __future__ import annotations

import pytest
import torch
from csc.kernels.mask import Mask, counts
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from csc import masks
from csc.errors import InputError
from tests.kernels.masks import masks as any_mask


def fitted(mask: Mask, like: Mask) -> Mask:
    """The mask over the sizes of another one, by repeating queries and keys."""
    rows, columns = torch.arange(like.queries) % mask.queries, torch.arange(like.keys) % mask.keys
    ranges = mask.ranges[:1, :, rows].clamp(max=like.keys)
    admits = None if mask.admits is None else mask.admits[:1, :, rows]
    kinds = None if mask.kinds is None else mask.kinds[:1, columns]
    return Mask(ranges, admits, kinds, like.keys)


@settings(max_examples=150, deadline=None)
@given(any_mask(most=16, rules=3), any_mask(most=16, rules=2))
def test_union_and_intersection(one: Mask, two: Mask) -> None:
    other = fitted(two, one)
    joined = masks.union(one, other)
    assert torch.equal(joined.dense(), one.dense() | other.dense())
    assert joined.rules <= one.rules + other.rules
    assert torch.equal(masks.intersection(one, other).dense(), one.dense() & other.dense())
    assert torch.equal(masks.intersection(other, one).dense(), one.dense() & other.dense())
    assert torch.equal(masks.union(one).dense(), one.dense())
    assert torch.equal(masks.intersection(one, one).dense(), one.dense())


def test_combinations_are_compact() -> None:
    assert masks.union(masks.causal(9), masks.prefix(9, 4)).rules == 1
    assert masks.union(masks.causal(9), masks.window(9, 3, symmetric=True)).rules == 1
    assert masks.intersection(masks.causal(9), masks.window(9, 3, symmetric=True)).rules == 1
    seen = masks.union(masks.causal(5), masks.bitfields([[2, 2, 1, 1, 0]]))
    assert seen.dense()[0, 4].tolist() == [True] * 5  # one mask's padding is the other one's key


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(any_mask(most=30), st.integers(1, 7), st.integers(1, 4), st.integers(0, 2**32))
def test_facts(mask: Mask, block: int, ranks: int, seed: int) -> None:
    dense = mask.dense()
    assert masks.area(mask) == int(dense.sum())
    assert masks.share(mask) == float(dense.double().mean())
    assert torch.equal(masks.loads(mask), dense.sum(-1))
    blocks = [dense[:, i : i + block].sum((1, 2)) for i in range(0, mask.queries, block)]
    assert torch.equal(masks.block_loads(mask, block), torch.stack(blocks, 1))
    owner = torch.randint(-1, ranks, (mask.batch, mask.queries), generator=torch.Generator().manual_seed(seed))
    found = masks.needed_keys(mask, owner, ranks)
    for rank in range(ranks):
        assert torch.equal(found[:, rank], (dense & (owner == rank)[..., None]).any(1))
    pairs = counts(mask, block, 3)
    owner = owner[:, : pairs.shape[1]]
    found = masks.needed_blocks(pairs, owner, ranks)
    for rank in range(ranks):
        assert torch.equal(found[:, rank], ((pairs > 0) & (owner == rank)[..., None]).any(1))


def test_what_does_not_fit() -> None:
    with pytest.raises(InputError, match="1 x 4 x 4 and 1 x 5 x 5"):
        masks.union(masks.causal(4), masks.causal(5))
    every_other = [
        Mask(torch.tensor([[[[i, i + 1]]]], dtype=torch.int32).expand(1, 1, 20, 2), None, None, 20)
        for i in range(0, 20, 2)
    ]
    with pytest.raises(InputError, match="needs 10 ranges of keys, and 8 is the limit"):
        masks.union(*every_other)
    rows = [masks.bitfields([[2 * f(i) + 2 for i in range(64)]]) for f in (lambda i: i // 8, lambda i: i % 8)]
    with pytest.raises(InputError, match="64 classes of keys"):
        masks.intersection(*rows)
    with pytest.raises(InputError, match="a rank outside of 0"):
        masks.needed_keys(masks.causal(3), torch.tensor([0, 1, 2]), 2)
    with pytest.raises(InputError, match="owner is"):
        masks.needed_keys(masks.causal(3), torch.tensor([0, 1]), 2)


@settings(max_examples=50, deadline=None)
@given(any_mask(most=12, rules=2), any_mask(most=12, rules=2), any_mask(most=12, rules=2))
def test_three_at_once(one: Mask, two: Mask, three: Mask) -> None:
    others = fitted(two, one), fitted(three, one)
    assume(one.rules * two.rules * three.rules <= 8)
    expected = one.dense() & others[0].dense() & others[1].dense()
    assert torch.equal(masks.intersection(one, *others).dense(), expected)
