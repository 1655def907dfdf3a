"""Every token is on one rank, and every visible pair of a query and a key is computed once, by one part of one rank."""

from __future__ import annotations

import pytest
import torch
from context_cases import spec_of, spreads
from csc.kernels import packing
from csc.kernels.mask import Mask
from hypothesis import given, settings

from csc.runtime.specs import ContextSpec
from csc.runtime.transport import AttentionPart, Recent, parts, spread

BLOCKS = (8, 4)
CPU = torch.device("cpu")


def pairs(one: AttentionPart, spec: ContextSpec, own: torch.Tensor) -> torch.Tensor:
    """int [B, tokens, tokens]: 1 where the part computes a pair; slots without a token see nothing."""
    local, _ = packing.unpack(one.packed, one.form)
    assert local.queries == spec.shard
    seen, count = local.dense(), len(one.keys)
    assert not seen[:, len(own) :].any() and not seen[:, :, count:].any()
    table = torch.zeros(len(seen), spec.tokens, spec.tokens, dtype=torch.int64)
    table[:, own[:, None], one.keys[None, :]] = seen[:, : len(own), :count].long()
    return table


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(spreads())
def test_every_visible_pair_is_computed_once(drawn: tuple[ContextSpec, list[Mask]]) -> None:
    spec, masks = drawn
    where = spread(spec, masks)
    assert torch.cat(where.tokens).sort().values.tolist() == list(range(spec.tokens))
    assert all(0 < len(own) <= spec.shard and bool((own.diff() > 0).all()) for own in where.tokens)
    for number, mask in enumerate(masks):
        total = torch.zeros(mask.batch, spec.tokens, spec.tokens, dtype=torch.int64)
        for rank, own in enumerate(where.tokens):
            mine, foreign = parts(mask, where, number, rank, spec.shard, BLOCKS, CPU)
            if mine is not None:
                assert torch.isin(mine.keys, own).all()
                total += pairs(mine, spec, own)
            if foreign is not None:
                assert not torch.isin(foreign.keys, own).any()
                total += pairs(foreign, spec, own)
        assert torch.equal(total, mask.dense().long())


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(spreads())
def test_a_rank_gets_the_blocks_that_it_sees_and_no_other(drawn: tuple[ContextSpec, list[Mask]]) -> None:
    spec, masks = drawn
    where = spread(spec, masks)
    for number, mask in enumerate(masks):
        seen = mask.dense().any(0)
        for rank, own in enumerate(where.tokens):
            assert torch.equal(where.blocks(rank), (own // spec.block).unique())
            held = [where.held(number, rank, owner) for owner in range(spec.ranks)]
            for owner, blocks in enumerate(held):
                assert torch.isin(blocks, where.blocks(owner)).all() and bool((blocks.diff() > 0).all())
            wanted = (seen[own].any(0).nonzero().flatten() // spec.block).unique()
            assert torch.equal(torch.cat(held).sort().values, wanted)


def test_ranks_without_foreign_keys() -> None:
    """Two documents on two ranks: nothing has to move, and links that cost make the plan see it."""
    start = torch.arange(32) // 16 * 16
    ranges = torch.stack([start, start + 16], -1).to(torch.int32)[None, None]
    spec = spec_of(32, 2, 4, block_seconds=1e-3)
    mask = Mask(ranges, None, None, 32)
    where = spread(spec, [mask])
    assert len(where.held(0, 0, 1)) == len(where.held(0, 1, 0)) == 0
    assert all(parts(mask, where, 0, rank, spec.shard, BLOCKS, CPU)[1] is None for rank in range(2))


def windows(tokens: int, width: int) -> Mask:
    hi = torch.arange(1, tokens + 1)
    return Mask(torch.stack([(hi - width).clamp(min=0), hi], -1).to(torch.int32)[None, None], None, None, tokens)


def test_equal_masks_are_spread_once() -> None:
    spec, recent = spec_of(32, 2, 4), Recent()
    first = recent.of(spec, [windows(32, 5)])
    assert recent.of(spec, [windows(32, 5)]) is first
    assert recent.of(spec, [windows(32, 6)]) is not first
    assert recent.of(spec_of(32, 2, 2), [windows(32, 5)]) is not first
    kinds = Mask(
        windows(32, 5).ranges, torch.ones(1, 1, 32, dtype=torch.int64), torch.ones(1, 32, dtype=torch.int64), 32
    )
    assert recent.of(spec, [kinds]) is not first
    hidden = Mask(kinds.ranges, kinds.admits, kinds.all_kinds().clone().index_fill_(1, torch.tensor([3]), 0), 32)
    assert recent.of(spec, [hidden]) is not recent.of(spec, [kinds])
    assert recent.of(spec, [windows(32, 5)]) is first


def test_a_batch_written_into_the_memory_of_the_last_one_is_seen() -> None:
    spec, recent, mask = spec_of(32, 2, 4), Recent(), windows(32, 5)
    first = recent.of(spec, [mask])
    mask.ranges.copy_(windows(32, 9).ranges)
    second = recent.of(spec, [mask])
    assert second is not first and torch.equal(first.masks[0].ranges, windows(32, 5).ranges)
    assert torch.equal(second.masks[0].ranges, windows(32, 9).ranges)


def test_only_the_last_spreads_are_kept() -> None:
    spec, recent = spec_of(32, 2, 4), Recent(most=2)
    first, second = (recent.of(spec, [windows(32, width)]) for width in (1, 2))
    assert recent.of(spec, [windows(32, 1)]) is first
    third = recent.of(spec, [windows(32, 3)])  # the second one was used least lately
    assert recent.known == [first, third] and recent.of(spec, [windows(32, 2)]) is not second
