"""Attention as torch computes it where no kernel is of one piece."""

from __future__ import annotations

import torch


def attention_that_drops(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kept: torch.Tensor,
    p: float,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` with dropout of probability p whose mask is given. kept: bool, [..., queries,
    keys], what it leaves. value is [..., heads, keys, width].
    """
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    _, weights = torch.ops.aten._scaled_dot_product_attention_math.default(
        query, key, value[..., :0], mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if enable_gqa:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return torch.matmul(weights * kept.to(weights.dtype).div_(1 - p), value)
