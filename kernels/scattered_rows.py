"""The gradient of what `masked_scatter` puts in place, without asking the device how much that was.

d: the gradient of the result; mask: bool, broadcast to it; sizes: of the source. The source's i-th entry went to the
i-th place of the mask, row by row; entries beyond have no place, and gradients of 0.

ATen selects with the mask, so the host waits for a GPU to count, in the middle of the backward, and a stage that does
cannot be recorded. The number is in `sizes` already.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from csc.kernels.operators import light_operator


@light_operator("masked_scatter_backward")
def _masked_scatter_backward(d: torch.Tensor, mask: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    if d.is_cpu:
        return torch.ops.aten.masked_scatter_backward.default(d, mask, sizes)
    return taken_rows(d, mask, sizes)


@torch.library.register_fake("csc::masked_scatter_backward")
def _(d: Any, mask: Any, sizes: Any) -> torch.Tensor:
    return d.new_empty(sizes)


def taken_rows(d: torch.Tensor, mask: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Returns what csc::masked_scatter_backward gives, on any device, of the shape `sizes`. Dimensions at the end along
    which the mask does not change are moved whole.
    """
    count = math.prod(sizes)
    if not d.numel() or not count:
        return d.new_zeros(sizes)
    spread = mask.expand(d.shape)
    while spread.dim() and spread.stride(-1) == 0:
        spread = spread[..., 0]
    chosen = spread.reshape(-1)
    rows, width = len(chosen), d.numel() // len(chosen)
    wanted = -(-count // width)
    number = chosen.cumsum(0) - 1
    slot = torch.where(chosen & (number < wanted), number, wanted)  # the last one takes what is not asked for
    here = torch.arange(rows, device=d.device)
    origin = here.new_full((wanted + 1,), rows).scatter_(0, slot, here)[:wanted]
    rows_taken = d.reshape(rows, width).index_select(0, origin.clamp(max=rows - 1))
    return rows_taken.masked_fill_((origin == rows)[:, None], 0).reshape(-1)[:count].view(sizes)
