"""Attention on CPUs: ATen's flash kernel on blocks of queries against the keys that they see.

A block of queries (a row of tiles) is run against the key tiles of its list, gathered where they do not follow each
other, with the mask as a bias where a tile is partial. What no query of the block sees is neither read nor computed.
The backward gives the kernel the block's output and log-sum-exp, so each block yields its exact share of dK and dV;
they are added in float32 (float64 for float64) in ascending order of blocks: deterministic. Sequences that share a row
and do not see each other are blocks of their own. A block that is all there is (few pairs) is the kernel's own call,
and a mask that is exactly causal is the kernel's own causal one. There, and without a mask, the kernel groups heads
itself, as it does for PyTorch's attention without a mask. With another mask models repeat heads, and so does csc, to
the same bits. Where sums may be `reordered`, and the dtype is WIDE, a causal mask over many pairs is blocks as well,
and heads are grouped.

    forward(q, k, v, mask, tiles, scale, softcap, reordered) -> (out, lse)
    backward(d_out, q, k, v, out, lse, mask, tiles, scale, softcap, reordered) -> (dq, dk, dv)   laid out as out is

q: [B, H, Tq, D]; k, v: [B, Hkv, Tk, D], H a multiple of Hkv; mask and tiles both None: every query sees every key.
out: (B, Tq, H, D) transposed to [B, H, Tq, D]; lse: float32 (float64 for float64) [B, H, Tq], -inf where nothing is
seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from csc.kernels import capped
from csc.kernels.cpu_blocks import Block, blocks
from csc.kernels.mask import Mask
from csc.kernels.memory_layout import as_heads_last, exact, heads_last, statistics
from csc.kernels.tiles import Tiles

WIDE = (torch.float32, torch.float64)
"""Where the kernel adds the gradients of a group's heads as exactly as csc does; in others it rounds each sum,
and they are twice as far from the truth."""
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | None, tiles: Tiles | None,
    scale: float, softcap: float, reordered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See the module's text."""
    walk = blocks(q, k.shape[2], mask, tiles, softcap, reordered and q.dtype in WIDE)
    if walk and walk[0].whole:
        found, found_lse = _forward(walk[0], q, k, v, scale, softcap)
        return as_heads_last(found), found_lse.contiguous()
    along = _along(walk, q)
    if along is not None:
        parts = [_forward(block, q, k, v, scale, softcap) for block in walk]
        lse = torch.cat([part for _, part in parts], along).to(exact(q.dtype))
        return _joined([part for part, _ in parts], along, q), lse
    out = heads_last(q).zero_()
    lse = statistics(q).fill_(-float("inf"))
    for block in walk:
        found, found_lse = _forward(block, q, k, v, scale, softcap)
        out[block.samples, :, block.rows] = found
        lse[block.samples, :, block.rows] = found_lse
    return out, lse


def _along(walk: Sequence[Block], q: torch.Tensor) -> int | None:
    """The dimension of q along which the blocks follow each other and are all of it: samples, or queries of all
    samples; None: neither.
    """
    samples = [block.samples.indices(q.shape[0]) for block in walk]
    rows = [block.rows.indices(q.shape[2]) for block in walk]
    for along, these, others in ((2, rows, samples), (0, samples, rows)):
        ends = [0, *(stop for _, stop, _ in these)]
        whole = (0, q.shape[2 - along], 1)
        if walk and ends[-1] == q.shape[along] and all(one[0] == end for one, end in zip(these, ends)):
            return along if all(other == whole for other in others) else None
    return None


def _joined(parts: Sequence[torch.Tensor], along: int, q: torch.Tensor) -> torch.Tensor:
    """Parts along a dimension of what is like q, laid out as out is."""
    return torch.cat([part.transpose(1, 2) for part in parts], along // 2).to(q.dtype).transpose(1, 2)


def _forward(
    block: Block, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a block's queries."""
    q_block, k_block, v_block = _cut(block, q, k, v)
    if softcap:
        k_block, v_block = _by_head(q_block, k_block, v_block)
        found, lse = capped.forward(q_block, k_block, v_block, block.bias, scale, softcap)
    else:
        found, lse = _flash(q_block, k_block, v_block, 0.0, block.causal, attn_mask=block.bias, scale=scale)
    if block.blind is not None:  # the kernel says 0.0 for a row without keys
        lse = lse.masked_fill(block.blind, -float("inf"))
        found = found.masked_fill(block.blind[..., None], 0.0)
    return found, lse


def backward(
    d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    mask: Mask | None, tiles: Tiles | None, scale: float, softcap: float, reordered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """See the module's text."""
    grouped = reordered and q.dtype in WIDE
    walk = blocks(q, k.shape[2], mask, tiles, softcap, grouped)
    if walk and walk[0].whole:
        d_q, d_k, d_v = _backward(walk[0], d_out, q, k, v, out, lse, scale, softcap, grouped)
        return as_heads_last(d_q), as_heads_last(d_k.to(k.dtype)), as_heads_last(d_v.to(v.dtype))
    along = _along(walk, q)
    of_queries: list[torch.Tensor] = []
    dq = heads_last(q).zero_() if along is None else None
    dk, dv = (heads_last(x, exact(x.dtype)).zero_() for x in (k, v))
    for block in walk:
        share_q, *shares = _backward(block, d_out, q, k, v, out, lse, scale, softcap, grouped)
        if dq is not None:
            dq[block.samples, :, block.rows] = share_q
        else:
            of_queries.append(share_q)
        for total, share in zip((dk, dv), shares, strict=True):
            if isinstance(block.keys, slice):
                total[block.samples, :, block.keys].add_(share)
            else:
                total[block.samples].index_add_(2, block.keys, share.to(total.dtype))
    if along is not None:
        dq = _joined(of_queries, along, q)
    assert dq is not None
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _backward(
    block: Block, d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, scale: float, softcap: float, grouped: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradient of a block's queries, and its shares of those of the keys and values that it sees."""
    q_block, k_block, v_block = _cut(block, q, k, v)
    if not block.grouped and (softcap or not grouped):
        k_block, v_block = _by_head(q_block, k_block, v_block)
    d_block, out_block, lse_block = (x if block.whole else x[block.samples, :, block.rows] for x in (d_out, out, lse))
    if block.blind is not None:
        lse_block = lse_block.masked_fill(block.blind, 0.0)
    if softcap:
        d_q, *by_head = capped.backward(
            d_block, q_block, k_block, v_block, out_block, lse_block, block.bias, scale, softcap
        )
    else:
        d_q, *by_head = _flash_backward(
            d_block, q_block, k_block, v_block, out_block, lse_block, 0.0, block.causal,
            attn_mask=block.bias, scale=scale,
        )  # fmt: skip
    if by_head[0].shape[1] == k.shape[1]:
        return d_q, by_head[0], by_head[1]
    return d_q, _of_group(by_head[0], k.shape[1]), _of_group(by_head[1], k.shape[1])


def _of_group(by_head: torch.Tensor, heads: int) -> torch.Tensor:
    """Sums over the query heads that share one of so many key heads. Of two it is their sum to the bit, in half the
    time that a reduction takes.
    """
    apart = by_head.unflatten(1, (heads, -1))
    return apart.sum(2) if apart.shape[2] != 2 else torch.add(*apart.unbind(2))


def _cut(block: Block, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Its part of q, and of k and v."""
    if block.whole:
        return q, k, v
    if isinstance(block.keys, slice):
        return (q[block.samples, :, block.rows], *(x[block.samples, :, block.keys] for x in (k, v)))
    return (q[block.samples, :, block.rows], *(x[block.samples].index_select(2, block.keys) for x in (k, v)))


def _by_head(q: torch.Tensor, *of_keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Heads of k and v repeated, as models with a mask do. In a forward the kernel reads a head that others share as it
    is, to the same bits.
    """
    batch, heads, keys, width = of_keys[0].shape
    group = q.shape[1] // heads
    if group == 1:
        return of_keys
    apart = (batch, heads, group, keys, width)
    return tuple(x[:, :, None].expand(apart).reshape(batch, heads * group, keys, width) for x in of_keys)
