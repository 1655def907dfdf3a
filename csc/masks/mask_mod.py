"""FlexAttention's `mask_mod(b, h, q_idx, kv_idx)` as a mask.

    from_mask_mod(mask_mod, batch, queries, keys) -> Mask

The function is called once with traced indices, which gives a formula (csc.masks.tracing, csc.masks.formula), and then
once more, under vmap, with sampled pairs: a mask that says something else is an error, never a result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from csc.errors import InputError
from csc.kernels.mask import Mask
from csc.masks.checks import positive
from csc.masks.formula import rules
from csc.masks.tracing import REMEDY, MaskMod, traced

SAMPLED = 4096


def from_mask_mod(mask_mod: MaskMod, batch: int | None, queries: int, keys: int | None = None) -> Mask:
    """The mask of a `mask_mod` as `torch.nn.attention.flex_attention` takes it (also `and_masks`, `or_masks`).

    Args:
        mask_mod: A function of batch, head, query and key; tables that it captures are on the CPU.
        batch: B; None: 1.
        queries: How many.
        keys: How many; None: as many as queries.

    Raises:
        InputError: The mask depends on the head or has no rules (the operation is named), or the mask and the function
            differ on sampled pairs.
    """
    batch = 1 if batch is None else positive(batch, "batch")
    keys = positive(queries, "queries") if keys is None else positive(keys, "keys")
    mask = rules(traced(mask_mod, batch, queries, keys), queries, keys)
    _check(mask, mask_mod, batch)
    return mask


class _Lookup(TorchFunctionMode):
    """Lets vmap index a table by a scalar, which outside of it would be a Python number."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__:
            items = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(one, torch.Tensor) for one in items):
                plain = [one if isinstance(one, torch.Tensor) else torch.tensor(one) for one in items]
                return torch.ops.aten.index.Tensor(args[0], plain)
        return function(*args, **(kwargs or {}))


def _check(mask: Mask, mask_mod: MaskMod, batch: int) -> None:
    """InputError if mask and function differ on a sample: pairs anywhere, and pairs where ranges begin and end."""
    b, q, k = _sample(mask, batch)
    with _Lookup():
        said = torch.vmap(mask_mod)(b, torch.zeros_like(b), q, k)
    said = said.bool().expand(len(b))
    row = b if mask.batch > 1 else torch.zeros_like(b)
    ranges = mask.ranges[row, :, q]
    seen = (ranges[..., 0] <= k[:, None]) & (k[:, None] < ranges[..., 1])
    if mask.admits is not None and mask.kinds is not None:
        seen &= (mask.admits[row, :, q] & mask.kinds[row, k][:, None]) != 0
    wrong = (seen.any(1) != said).nonzero().flatten()
    if len(wrong):
        i = int(wrong[0])
        raise InputError(
            f"the function says {bool(said[i])} and the mask that was read from it {not bool(said[i])}",
            f"mask_mod at batch {int(b[i])}, query {int(q[i])}, key {int(k[i])}",
            REMEDY,
        )


def _sample(mask: Mask, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int64 [n] each: batch, query and key, of all pairs where they are few, of some otherwise. Always the same."""
    if batch * mask.queries * mask.keys <= SAMPLED:
        grid = torch.meshgrid(torch.arange(batch), torch.arange(mask.queries), torch.arange(mask.keys), indexing="ij")
        return tuple(axis.flatten() for axis in grid)  # type: ignore[return-value]
    generator = torch.Generator().manual_seed(0)
    b, q, k = (torch.randint(0, size, (SAMPLED,), generator=generator) for size in (batch, mask.queries, mask.keys))
    edge_b, edge_q = b[: SAMPLED // 16], q[: SAMPLED // 16]
    row = edge_b if mask.batch > 1 else torch.zeros_like(edge_b)
    edges = mask.ranges[row, :, edge_q].flatten(1).long()  # [n, 2 R]
    near = torch.cat([edges - 1, edges, edge_q[:, None]], 1).clamp(0, mask.keys - 1)
    b = torch.cat([b, edge_b[:, None].expand_as(near).flatten()])
    q = torch.cat([q, edge_q[:, None].expand_as(near).flatten()])
    return b, q, torch.cat([k, near.flatten()])
