"""A packed mask that is kept with its ranges is taken again for equal ones alone."""

from __future__ import annotations

import pytest
import torch
from csc.kernels import packing
from csc.kernels.attention import CPU_BLOCKS
from csc.kernels.mask import SEEN, Mask

TOKENS = 12


def causal(padding: int = 0) -> Mask:
    ranges = torch.zeros(2, 1, TOKENS, 2, dtype=torch.int32)
    ranges[..., 1] = torch.arange(1, TOKENS + 1)
    kinds = torch.ones(2, TOKENS, dtype=torch.int64)
    kinds[1, TOKENS - padding :] = 0
    return Mask(ranges, torch.ones(2, 1, TOKENS, dtype=torch.int64), kinds, TOKENS)


def seen(packed: torch.Tensor) -> torch.Tensor:
    """As attention sees it."""
    return packing.unpack_once(packed, packing.Form(1, True, TOKENS, TOKENS, *CPU_BLOCKS))[0].dense()


def test_equal_masks_are_packed_once() -> None:
    mask = causal(3)
    first = packing.pack_once(mask, *CPU_BLOCKS)
    equal = Mask(mask.ranges, mask.admits, causal(3).kinds, TOKENS)
    assert packing.pack_once(equal, *CPU_BLOCKS) is first
    assert torch.equal(first, packing.pack(mask, *CPU_BLOCKS)) and torch.equal(seen(first), mask.dense())


@pytest.mark.parametrize("what", ["kinds", "kinds in place", "admits", "ranges in place", "packed in place", "blocks"])
def test_other_masks_are_packed_anew(what: str) -> None:
    mask = causal(3)
    assert mask.kinds is not None and mask.admits is not None
    first, blocks = packing.pack_once(mask, *CPU_BLOCKS), CPU_BLOCKS
    if what == "kinds":
        mask = Mask(mask.ranges, mask.admits, causal(4).kinds, TOKENS)
    elif what == "kinds in place":
        mask.kinds[0, 0] = 0
    elif what == "admits":
        mask = Mask(mask.ranges, mask.admits * 2, mask.kinds, TOKENS)
    elif what == "ranges in place":
        mask.ranges[0, 0, 5, 1] = 2
    elif what == "packed in place":
        first.zero_()
    else:
        blocks = (8, 4)
    again = packing.pack_once(mask, *blocks)
    assert again is not first and torch.equal(again, packing.pack(mask, *blocks))
    assert what == "blocks" or torch.equal(seen(again), mask.dense())


def test_what_is_written_to_after_packing_changes_nothing_of_it() -> None:
    mask = causal(3)
    before, packed = mask.dense(), packing.pack_once(mask, *CPU_BLOCKS)
    mask.ranges.zero_()
    assert torch.equal(seen(packed), before)


def test_what_was_written_out_is_what_the_mask_says() -> None:
    for padding in (0, 5):
        mask = causal(padding)
        packed = packing.pack(mask, *CPU_BLOCKS)
        own, _ = packing.unpack_once(packed, packing.Form(1, True, TOKENS, TOKENS, *CPU_BLOCKS))
        assert torch.equal(own.known[SEEN], mask.dense()) and SEEN not in mask.known
