"""csc's attention on a CPU against SDPA with the dense mask, float32.

measure(names, lengths, runs, progress) -> list[Row]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from csc.kernels.attention import attention
from csc.kernels.mask import visible

from benchmarks.attention.masks import mask
from benchmarks.attention.timing import seconds_on_cpu

HEADS, WIDTH = 8, 64


@dataclass(frozen=True)
class Row:
    """Seconds; backward is that of forward and backward less that of forward. density: visible pairs over all."""

    mask: str
    tokens: int
    density: float
    csc_forward: float
    csc_backward: float
    sdpa_forward: float
    sdpa_backward: float
    difference: float  # largest, of the two outputs


def measure(
    names: Sequence[str], lengths: Sequence[int], runs: int, progress: Callable[[str, int, int], None]
) -> list[Row]:
    rows = []
    for tokens in lengths:
        for name in names:
            rows.append(_row(name, tokens, runs))
            progress("CPU", len(rows), len(names) * len(lengths))
    return rows


def _row(name: str, tokens: int, runs: int) -> Row:
    given = mask(name, tokens)
    dense = given.dense()[:, None]
    generator = torch.Generator().manual_seed(0)
    shape = (1, tokens, HEADS, WIDTH)
    q, k, v, d_out = (torch.randn(shape, generator=generator).transpose(1, 2) for _ in range(4))
    leaves = [x.detach().requires_grad_(True) for x in (q, k, v)]

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, given)

    def theirs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)

    def times(function: Callable[..., torch.Tensor]) -> tuple[float, float]:
        forward = seconds_on_cpu(lambda: function(q, k, v), runs)
        both = seconds_on_cpu(lambda: torch.autograd.grad(function(*leaves), leaves, d_out), runs)
        return forward, max(both - forward, 0.0)

    density = float(visible(given).sum()) / tokens**2
    difference = float((ours(q, k, v) - theirs(q, k, v)).abs().max())
    return Row(name, tokens, density, *times(ours), *times(theirs), difference)
