"""Comparisons of the Triton kernels with dense attention in float64, for the interpreter and for GPUs alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from csc.kernels import triton_launch
from csc.kernels.mask import Mask, tiles

from tests.kernels import dense

NAMES = ("out", "lse", "dq", "dk", "dv")
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
IMAGE, NOISED = 2, 1 << 62


@dataclass(frozen=True)
class Sizes:
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int


def inputs(sizes: Sizes, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v, d_out as head-transposed views."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sizes.queries, sizes.heads), (sizes.keys, sizes.kv_heads)]
    made = [
        torch.randn(sizes.batch, *shapes[i], sizes.width, generator=generator).to(device, dtype).transpose(1, 2)
        for i in (0, 1, 1, 0)
    ]
    return tuple(made)


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, mask: Mask | None, softcap: float = 0.0,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """out, lse, dq, dk, dv by the kernels."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    lists = None if mask is None else tiles(mask, *triton_launch.blocks(q.shape[-1], q.dtype, q.device))
    out, lse = triton_launch.forward(q, k, v, mask, lists, scale, softcap)
    return out, lse, *triton_launch.backward(d_out, q, k, v, out, lse, mask, lists, scale, softcap)


def check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, mask: Mask | None, softcap: float = 0.0,
    scale: float | None = None, slack: float = 1.0,
) -> None:  # fmt: skip
    """The kernels' results equal the dense ones."""
    found = run(q, k, v, d_out, mask, softcap, scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    assert_close(found, dense.results(q, k, v, mask, scale, softcap, d_out), q.dtype, slack)


def assert_close(
    found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], dtype: torch.dtype, slack: float = 1.0
) -> None:
    """Each against its own largest entry, or against 1 where it is smaller; -inf only where it belongs."""
    for name, one, other in zip(NAMES, found, wanted, strict=True):
        assert one.shape == other.shape, name
        assert torch.equal(one.isinf(), other.isinf()), name
        other = other.nan_to_num(neginf=0)
        size = max(1.0, float(other.abs().max())) if other.numel() else 1.0
        error = (one.double().nan_to_num(nan=1e9, neginf=0) - other).abs().max() if other.numel() else torch.zeros(())
        assert float(error) / size <= slack * TOLERANCE[dtype], f"{name}: {float(error) / size:.2e}"


def ranges(lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
    """int32 [1, 1, T, 2]."""
    return torch.stack([lo, hi], -1).to(torch.int32)[None, None]


def causal(length: int) -> Mask:
    position = torch.arange(length)
    return Mask(ranges(position * 0, position + 1), None, None, length)


def window(length: int, width: int) -> Mask:
    position = torch.arange(length)
    return Mask(ranges((position + 1 - width).clamp(min=0), position + 1), None, None, length)


def documents(length: int, each: int) -> Mask:
    """Causal documents of `each` tokens; the last third is padding that sees nothing and is not seen."""
    position = torch.arange(length)
    hi = torch.where(position < length - length // 3, position + 1, 0)
    return Mask(ranges(position // each * each, hi), None, None, length)


def generation(length: int, span: int) -> Mask:
    """Text is causal over clean tokens; every other span is noised and sees the clean past and itself: two rules."""
    position = torch.arange(length)
    noised = position // span % 2 == 1
    first = position // span * span
    kinds = torch.where(noised, NOISED, 1)[None]
    past = ranges(position * 0, torch.where(noised, first, position + 1))
    own = ranges(first, torch.where(noised, (first + span).clamp(max=length), first))
    admits = torch.stack([torch.ones_like(position), torch.full_like(position, NOISED)])[None]
    return Mask(torch.cat([past, own], 1), admits, kinds, length)


def modality(length: int, span: int) -> Mask:
    """Images see all images, text is causal; the first tokens are padding."""
    position = torch.arange(length)
    image = position // span % 2 == 1
    kinds = torch.where(image, IMAGE, 1)
    kinds[:3] = 0
    admits = torch.where(image, IMAGE, IMAGE | 1)[None, None]
    return Mask(ranges(position * 0, torch.where(image, length, position + 1)), admits, kinds[None], length)
