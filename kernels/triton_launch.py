"""Attention on GPUs: chooses configurations, allocates results and launches the Triton kernels.

    blocks(head_dim, dtype, device) -> (block_q, block_k)      of the tile lists that `forward` and `backward` want
    forward(q, k, v, mask, tiles, scale, softcap) -> (out, lse)
    backward(d_out, q, k, v, out, lse, mask, tiles, scale, softcap) -> (dq, dk, dv)

q: [B, H, Tq, D]; k, v: [B, Hkv, Tk, D], H a multiple of Hkv, last stride 1; float16, bfloat16 or true float32.
mask and tiles both None: every query sees every key. Their batch may be 1 for any B.
out and the gradients are allocated as (B, T, H, D), transposed. lse: float32 [B, H, Tq], natural logarithm; -inf, and
out 0, for a query that sees nothing.

Nothing here waits for the device. `choice` replaces the configurations of the tables, for tuning.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from csc.kernels.mask import Mask
from csc.kernels.tiles import TileLists, Tiles
from csc.kernels.triton_backward import dkv_kernel, dq_kernel, rows_kernel
from csc.kernels.triton_configs import DESCRIBED_BYTES, Config, HeadDimConfigs, architecture, choose, padded
from csc.kernels.triton_forward import forward_kernel
from triton.tools.tensor_descriptor import TensorDescriptor

from csc import devices

LOG2E = 1.4426950408889634
CACHED_BYTES = 24 << 20  # of the L2 cache, for what the running programs read again and again
STATISTICS_BLOCK = 128


def blocks(head_dim: int, dtype: torch.dtype, device: torch.device | str) -> tuple[int, int]:
    """(queries, keys) of a tile. One granularity serves forward and backward. ValueError for what has no kernel."""
    return choose(architecture(torch.device(device)), head_dim, dtype).tile


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | None, tiles: Tiles | None,
    scale: float, softcap: float, choice: HeadDimConfigs | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out [B, H, Tq, D], lse float32 [B, H, Tq]). ValueError for sizes, types or scales that have no kernel."""
    choice = choice or choose(architecture(q.device), q.shape[-1], q.dtype)
    _check(q, k, v, mask, tiles, scale, choice)
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    out = _empty_like(q)
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    if not out.numel() or not keys:
        return out.zero_(), lse.fill_(-float("inf"))
    rules, kinds = (0, False) if mask is None else (mask.rules, mask.kinds is not None)
    config = choice.of_forward(rules, kinds, softcap > 0)
    q, k, v = (_aligned(x, config) for x in (q, k, v))
    with _on(q):
        grid = (batch * heads * _programs(queries, choice.tile[0], config.block_q),)
        forward_kernel[grid](
            _rows(q, config, config.block_q), _rows(k, config, config.block_k), _rows(v, config, config.block_k),
            out, lse, *_lists(tiles.of_queries if tiles else None, q), *_rules(mask, q),
            *_strides(q, k, v, out), *_factors(scale, softcap), heads, batch * k.shape[1], _section(k), _batches(mask),
            queries, keys, _entries(tiles.of_queries if tiles else None),
            **_constants(q, k, mask, softcap, choice, config),
        )  # fmt: skip
    return out, lse


def backward(
    d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    mask: Mask | None, tiles: Tiles | None, scale: float, softcap: float, choice: HeadDimConfigs | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv), of the shapes of q, k, v.

    With the out and lse of more keys than k holds (those of other ranks too) it gives this part's exact share.
    """
    choice = choice or choose(architecture(q.device), q.shape[-1], q.dtype)
    _check(q, k, v, mask, tiles, scale, choice)
    batch, heads, queries, head_dim = q.shape
    keys, kv_heads, device = k.shape[2], k.shape[1], q.device
    dq, dk, dv = _empty_like(q), _empty_like(k), _empty_like(v)
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    d_out = d_out.to(q.dtype)
    out, d_out = (x if x.stride(-1) == 1 else x.contiguous() for x in (out, d_out))
    lse = lse.contiguous()
    padded_rows = -(-queries // choice.tile[0]) * choice.tile[0]
    levels, deltas = torch.empty((2, batch, heads, padded_rows), dtype=torch.float32, device=device)
    of_queries, of_keys = (tiles.of_queries, tiles.of_keys) if tiles else (None, None)
    with _on(q):
        rows_kernel[(-(-padded_rows // STATISTICS_BLOCK), batch * heads)](
            out, d_out, lse, levels, deltas, *_strides(out, d_out), heads, queries, padded_rows,
            BLOCK=STATISTICS_BLOCK, DIM=head_dim, DIM_PADDED=padded(head_dim), num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip

        config = choice.dq
        q, k, v, d_out = (_aligned(x, config) for x in (q, k, v, d_out))
        grid = (batch * heads * _programs(queries, choice.tile[0], config.block_q),)
        dq_kernel[grid](
            _rows(q, config, config.block_q), _rows(k, config, config.block_k), _rows(v, config, config.block_k),
            _rows(d_out, config, config.block_q), dq, levels, deltas, *_lists(of_queries, q), *_rules(mask, q),
            *_strides(q, k, v, d_out, dq), *_factors(scale, softcap), scale, heads, batch * kv_heads, _section(k),
            _batches(mask), queries, keys, _entries(of_queries), **_constants(q, k, mask, softcap, choice, config),
        )  # fmt: skip

        for which, config in choice.dkv_capped if softcap else choice.dkv:
            q, k, v, d_out = (_aligned(x, config) for x in (q, k, v, d_out))
            grid = (batch * kv_heads * _programs(keys, choice.tile[1], config.block_k),)
            dkv_kernel[grid](
                _rows(q, config, config.block_q), _rows(k, config, config.block_k), _rows(v, config, config.block_k),
                _rows(d_out, config, config.block_q), dk, dv, levels, deltas, *_lists(of_keys, q), *_rules(mask, q),
                *_strides(q, k, v, d_out, dk, dv), *_factors(scale, softcap), scale, heads, batch * kv_heads,
                _section(q, heads // kv_heads), _batches(mask), queries, keys, _entries(of_keys),
                DK="k" in which, DV="v" in which,
                STAGES=config.stages,
                **_constants(q, k, mask, softcap, choice, config),
            )  # fmt: skip
    return dq, dk, dv


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | None, tiles: Tiles | None, scale: float,
    choice: HeadDimConfigs,
) -> None:  # fmt: skip
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}, not of one type")
    if any(x.stride(-1) != 1 and x.shape[-1] > 1 for x in (q, k, v)):
        raise ValueError("the head dim of q, k and v must be dense: their last stride is 1")
    if scale <= 0:
        raise ValueError(f"attention's scale is {scale}; the kernels take positive ones")
    if (mask is None) != (tiles is None):
        raise ValueError("a mask comes with its tiles, and tiles with their mask")
    if mask is not None and tiles is not None:
        if (mask.queries, mask.keys) != (q.shape[2], k.shape[2]) or mask.batch not in (1, q.shape[0]):
            sizes = f"{mask.batch} x {mask.queries} x {mask.keys}"
            raise ValueError(f"a mask of {sizes} does not fit q {list(q.shape)} and k {list(k.shape)}")
        if (tiles.block_q, tiles.block_k) != choice.tile:
            raise ValueError(f"tiles of {tiles.block_q} x {tiles.block_k}; this device's kernels walk {choice.tile}")


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    batch, heads, tokens, width = x.shape
    return x.new_empty((batch, tokens, heads, width)).transpose(1, 2)


def _programs(length: int, tile: int, block: int) -> int:
    """Blocks of a length, those of its last tile that are empty included."""
    return -(-length // tile) * (tile // block)


def _section(x: torch.Tensor, group: int = 1) -> int:
    """Heads of K and V whose programs run together, so that what they read, two tensors like x, stays cached."""
    each = 2 * group * x.shape[2] * x.shape[3] * x.element_size()
    return max(1, min(CACHED_BYTES // each, x.shape[0] * x.shape[1] // group))


def _lists(lists: TileLists | None, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(order, index, counts)."""
    if lists is None:
        return q, q, q  # not read
    return lists.order, lists.index.contiguous(), lists.counts.contiguous()


def _rules(mask: Mask | None, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ranges, admits, kinds), dense."""
    if mask is None:
        return q, q, q  # not read
    ranges = mask.ranges.contiguous()
    if mask.admits is None or mask.kinds is None:
        return ranges, ranges, ranges
    return ranges, mask.admits.contiguous(), mask.kinds.contiguous()


def _entries(lists: TileLists | None) -> int:
    return 0 if lists is None else lists.index.shape[-1]


def _batches(mask: Mask | None) -> int:
    return 1 if mask is None else mask.batch


def _strides(*tensors: torch.Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _factors(scale: float, softcap: float) -> tuple[float, float]:
    """(inner, factor), see csc.kernels.triton_parts."""
    return (scale / softcap, softcap * LOG2E) if softcap else (1.0, scale * LOG2E)


def _constants(
    q: torch.Tensor, k: torch.Tensor, mask: Mask | None, softcap: float, choice: HeadDimConfigs, config: Config
) -> dict[str, Any]:
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "RULES": 0 if mask is None else mask.rules,
        "KINDS": mask is not None and mask.kinds is not None,
        "CAP": softcap > 0,
        "TILE_Q": choice.tile[0],
        "TILE_K": choice.tile[1],
        "BLOCK_Q": config.block_q,
        "BLOCK_K": config.block_k,
        "DIM": q.shape[3],
        "DIM_PADDED": padded(q.shape[3]),
        "DESCRIPTORS": config.descriptors,
        "num_warps": config.warps,
        "num_stages": config.stages,
        "enable_fp_fusion": True,  # the scaling of scores and the subtraction of their maximum are one instruction
    }


def _aligned(x: torch.Tensor, config: Config) -> torch.Tensor:
    """x, copied where a tensor descriptor could not describe it: odd strides, or a dimension that was expanded."""
    if x.stride(-1) != 1:
        return x.contiguous()
    if not config.descriptors:
        return x
    strides = [stride * x.element_size() for size, stride in zip(x.shape[:3], x.stride()) if size > 1]
    fits = x.data_ptr() % DESCRIBED_BYTES == 0 and all(
        stride > 0 and stride % DESCRIBED_BYTES == 0 for stride in strides
    )
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _rows(x: torch.Tensor, config: Config, block: int) -> Any:
    """What `load_rows` takes: the tensor, or a descriptor of blocks of its rows."""
    if not config.descriptors:
        return x
    # The stride of a dimension of size 1 means nothing, but has to look like one.
    strides: Sequence[int] = [stride if size > 1 else x.shape[3] for size, stride in zip(x.shape[:3], x.stride())]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, block, padded(x.shape[3])])


def _on(x: torch.Tensor) -> AbstractContextManager[Any]:
    return devices.at(x.device)
