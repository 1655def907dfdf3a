"""FlexAttention on a csc mask: the same tile lists, and a mask_mod that reads the same rules.

    Flex(mask).forward(q, k, v) -> out

The causal mask is written as one would by hand; other masks read only the tensors that they need.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from csc.kernels.mask import Mask, counts

BLOCK = 128


class Flex:
    """One mask, ready to run. Only for lengths that are multiples of 128 and masks of batch 1."""

    def __init__(self, mask: Mask) -> None:
        self.blocks = _block_mask(mask)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _compiled()(q, k, v, block_mask=self.blocks, enable_gqa=q.shape[1] != k.shape[1])


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., torch.Tensor]:
    import torch._dynamo
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 1000  # every mask_mod and length is compiled for itself
    return torch.compile(flex_attention, dynamic=False)


def _block_mask(mask: Mask) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    pairs = counts(mask, BLOCK, BLOCK)[:, None]
    full, partial = pairs == BLOCK * BLOCK, (pairs > 0) & (pairs < BLOCK * BLOCK)
    lists = (*_ordered(partial), *_ordered(full))
    lengths = (mask.queries, mask.keys)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=mask_mod(mask), seq_lengths=lengths)


def _ordered(there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(how many, which first) of every row."""
    count = there.sum(-1, dtype=torch.int32)
    return count, there.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)


def mask_mod(mask: Mask) -> Callable[..., torch.Tensor]:
    """(b, h, q, k) -> bool, for batch 1."""
    lo, hi = (mask.ranges[0, ..., i].contiguous() for i in (0, 1))
    position = torch.arange(mask.queries, device=lo.device)
    if mask.kinds is None and mask.rules == 1 and not bool(lo.any()) and bool((hi[0] == position + 1).all()):
        return lambda b, h, q, k: q >= k
    rules = mask.rules
    if mask.kinds is None or mask.admits is None:

        def by_ranges(b: Any, h: Any, q: Any, k: Any) -> Any:
            found = (k >= lo[0, q]) & (k < hi[0, q])
            for rule in range(1, rules):
                found = found | ((k >= lo[rule, q]) & (k < hi[rule, q]))
            return found

        return by_ranges
    admits, kinds = mask.admits[0].contiguous(), mask.kinds[0].contiguous()

    def by_kinds(b: Any, h: Any, q: Any, k: Any) -> Any:
        found = (k >= lo[0, q]) & (k < hi[0, q]) & ((admits[0, q] & kinds[k]) != 0)
        for rule in range(1, rules):
            found = found | ((k >= lo[rule, q]) & (k < hi[rule, q]) & ((admits[rule, q] & kinds[k]) != 0))
        return found

    return by_kinds
