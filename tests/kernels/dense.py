"""Attention by the book: dense scores in float64, gradients by autograd."""

from __future__ import annotations

import torch
from csc.kernels.mask import Mask

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | None, scale: float, softcap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in float64; rows that see nothing give 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ keys.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.dense()[:, None].expand_as(scores)
    some = seen.any(-1, keepdim=True)
    safe = torch.where(some, scores.masked_fill(~seen, -float("inf")), 0.0)
    weights = torch.softmax(safe, -1) * some
    lse = torch.where(some[..., 0], torch.logsumexp(safe, -1), -float("inf"))
    return weights @ values, lse


def results(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask | None,
    scale: float,
    softcap: float,
    d_out: torch.Tensor,
) -> Results:
    """(out, lse, dq, dk, dv)."""
    leaves = [x.detach().double().requires_grad_(True) for x in (q, k, v)]
    out, lse = attention(*leaves, mask, scale, softcap)
    gradients = torch.autograd.grad(out, leaves, d_out.double())
    return (out.detach(), lse.detach(), *gradients)
