"""Attention with a soft cap on its scores, written out for one block: what ATen's flash kernel has no form of.

    score = softcap * tanh(scale * q.k / softcap);  p = softmax(score + bias);  out = p v

    forward(q, k, v, bias, scale, softcap) -> (out, lse)
    backward(d_out, q, k, v, out, lse, bias, scale, softcap) -> (dq, dk, dv)

q: [b, H, rows, D]; k, v: [b, H, keys, D]; bias: [b, 1, rows, keys] of 0 and -inf, or None; lse: [b, H, rows], finite
in backward. Products are taken in float32 (float64 for float64). Holds rows x keys scores, so blocks are kept short.
"""

from __future__ import annotations

import torch
from csc.kernels.memory_layout import exact


def _scores(
    q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(masked scores, tanh), both [b, H, rows, keys]."""
    bent = torch.tanh(q @ k.transpose(-1, -2) * (scale / softcap))
    scores = bent * softcap
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    return scores, bent


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the module's text."""
    wide = exact(q.dtype)
    scores, _ = _scores(q.to(wide), k.to(wide), bias, scale, softcap)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
    return (weights @ v.to(wide)).to(q.dtype), lse


def backward(
    d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    bias: torch.Tensor | None, scale: float, softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """See the module's text."""
    q_, k_, v_, o_, d_ = (x.to(lse.dtype) for x in (q, k, v, out, d_out))
    scores, bent = _scores(q_, k_, bias, scale, softcap)
    weights = torch.exp(scores - lse[..., None])
    dv = weights.transpose(-1, -2) @ d_
    d_weights = d_ @ v_.transpose(-1, -2)
    d_scores = weights * (d_weights - (d_ * o_).sum(-1, keepdim=True))
    d_products = d_scores * (1 - bent * bent) * scale
    dq, dk = d_products @ k_, d_products.transpose(-1, -2) @ q_
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
