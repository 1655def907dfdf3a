"""csc's kernels on a GPU against FlexAttention, and against SDPA with the dense mask where that fits.

    measure(cases, seconds, progress) -> Found        cases that the time does not suffice for are named, not run
    cases(quick) -> list[(mask, tokens)]              the most telling first

bfloat16, batch 1, 32 query heads on 8 heads of K and V of width 128. FLOPs are those of the visible pairs: 4 D a pair
and head forward, 10 D backward (the usual count; what a kernel computes twice is not counted twice).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from csc.kernels.attention import blocks
from csc.kernels.mask import Mask, visible

from benchmarks.attention.flex import Flex
from benchmarks.attention.masks import NAMES, mask
from benchmarks.attention.timing import matmul_peak, seconds_on_gpu

HEADS, KV_HEADS, WIDTH = 32, 8, 128
DENSE_TOKENS = 16384  # beyond, the dense mask and SDPA's copies of it take tens of GiB
FORWARD, BACKWARD = 4 * WIDTH * HEADS, 10 * WIDTH * HEADS  # FLOPs of a visible pair
TELLING = ("causal", "packed", "interleaved_span", "generation")
Operator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """Seconds of forward and of backward alone; None where it was not run. difference: of the outputs, the largest."""

    mask: str
    tokens: int
    pairs: int
    csc: tuple[float, float]
    flex: tuple[float, float]
    sdpa: tuple[float, float] | None
    flash: tuple[float, float] | None  # SDPA without a dense mask, which only the causal mask can do
    difference: float
    pack: float  # counting the tiles and packing the mask, once a batch

    def tflops(self, engine: tuple[float, float]) -> tuple[float, float]:
        return self.pairs * FORWARD / engine[0] / 1e12, self.pairs * BACKWARD / engine[1] / 1e12


@dataclass(frozen=True)
class Found:
    device: str
    peak: float  # TFLOP/s of a large bfloat16 matrix product
    rows: list[Row]
    not_run: list[tuple[str, int]]


def cases(quick: bool) -> list[tuple[str, int]]:
    if quick:
        return [(name, 8192) for name in TELLING]
    others = [name for name in NAMES if name not in TELLING]
    wide = [(name, tokens) for tokens in (32768, 8192, 65536, 16384) for name in TELLING]
    return wide + [(name, tokens) for tokens in (32768, 8192) for name in others]


def measure(listed: Sequence[tuple[str, int]], seconds: float, progress: Callable[[str, int, int], None]) -> Found:
    end = time.monotonic() + seconds
    peak = matmul_peak()
    rows: list[Row] = []
    for name, tokens in listed:
        if time.monotonic() > end:
            break
        rows.append(_row(name, tokens))
        progress("GPU", len(rows), len(listed))
    return Found(torch.cuda.get_device_name(), peak, rows, list(listed[len(rows) :]))


def _row(name: str, tokens: int) -> Row:
    given = mask(name, tokens).to("cuda")
    torch.manual_seed(0)

    def heads(count: int) -> torch.Tensor:
        made = torch.randn(1, tokens, count, WIDTH, device="cuda", dtype=torch.bfloat16)
        return made.transpose(1, 2).requires_grad_(True)

    q, k, v = heads(HEADS), heads(KV_HEADS), heads(KV_HEADS)
    d_out = torch.randn_like(q)
    ours, theirs = _csc(given), Flex(given).forward
    difference = float((ours(q, k, v) - theirs(q, k, v)).detach().abs().max())
    sdpa = flash = None
    if tokens <= DENSE_TOKENS:
        sdpa = _times(_sdpa(given.dense()[:, None]), q, _repeated(k), _repeated(v), d_out)
    if name == "causal":
        flash = _times(_sdpa(None), q, _repeated(k), _repeated(v), d_out)
    return Row(
        name,
        tokens,
        int(visible(given).sum()),
        _times(ours, q, k, v, d_out),
        _times(theirs, q, k, v, d_out),
        sdpa,
        flash,
        difference,
        seconds_on_gpu(lambda: _pack(given), 0.1),
    )


def _pack(given: Mask) -> torch.Tensor:
    tile = blocks("cuda", WIDTH, torch.bfloat16)
    return torch.ops.csc.pack_mask(given.ranges, given.admits, given.kinds, given.keys, *tile)


def _csc(given: Mask) -> Operator:
    """The operator with its mask packed beforehand, as a step gets it."""
    packed, tile = _pack(given), blocks("cuda", WIDTH, torch.bfloat16)
    told = (packed, given.rules, given.kinds is not None, *tile, WIDTH**-0.5, 0.0)
    return lambda q, k, v: torch.ops.csc.attention(q, k, v, *told)[0]


def _sdpa(dense: torch.Tensor | None) -> Operator:
    """With a dense mask, or causal. Its kernels for dense masks know no grouped heads: k and v come repeated."""
    run = torch.nn.functional.scaled_dot_product_attention
    if dense is None:
        return lambda q, k, v: run(q, k, v, is_causal=True)
    return lambda q, k, v: run(q, k, v, attn_mask=dense)


def _repeated(x: torch.Tensor) -> torch.Tensor:
    return x.detach().repeat_interleave(HEADS // KV_HEADS, 1).requires_grad_(True)


def _times(
    function: Operator, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor
) -> tuple[float, float]:
    with torch.no_grad():
        forward = seconds_on_gpu(lambda: function(q, k, v))
    out = function(q, k, v)
    backward = seconds_on_gpu(lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True))
    return forward, backward
