"""How attention lays out what it returns, on every device and in fake kernels alike.

heads_last(x) -> empty [B, H, T, D], in memory (B, T, H, D)       out, and the gradients of q, k and v
as_heads_last(x) -> x, or a copy                                  laid out so
dense(x) -> x, or a copy                                          its head dim is what every kernel walks along
statistics(q) -> empty [B, H, T]                                  log-sum-exp, in `exact(q.dtype)`
"""

from __future__ import annotations

import torch


def exact(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def heads_last(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What a projection's view leads to and back from."""
    batch, heads, tokens, width = x.shape
    return x.new_empty((batch, tokens, heads, width), dtype=dtype or x.dtype).transpose(1, 2)


def as_heads_last(x: torch.Tensor) -> torch.Tensor:
    """What fake kernels promise, of what a kernel of ATen's has laid out."""
    return x if x.transpose(1, 2).is_contiguous() else heads_last(x).copy_(x)


def dense(x: torch.Tensor) -> torch.Tensor:
    """With neighbours along the last dimension side by side: kernels, ATen's for CPUs too, read nothing else right."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def statistics(q: torch.Tensor) -> torch.Tensor:
    """One number for each query and head."""
    return q.new_empty(q.shape[:3], dtype=exact(q.dtype))
