"""Attention on CPUs: ATen's flash kernel on blocks of queries against the keys that they see.

A block of queries (a row of tiles) is run against the key tiles of its list, gathered where they do not follow each
other, with the mask as a bias where a tile is partial. What no query of the block sees is neither read nor computed.
The backward gives the kernel the block's output and log-sum-exp, so each block yields its exact share of dK and dV;
they are added in float32 (float64 for float64) in ascending order of blocks: deterministic. Sequences that share a row
and do not see each other are blocks of their own.

    forward(q, k, v, mask, tiles, scale, softcap) -> (out, lse)
    backward(d_out, q, k, v, out, lse, mask, tiles, scale, softcap) -> (dq, dk, dv)      laid out as out is

q: [B, H, Tq, D]; k, v: [B, Hkv, Tk, D], H a multiple of Hkv; mask and tiles both None: every query sees every key.
out: (B, Tq, H, D) transposed to [B, H, Tq, D]; lse: float32 (float64 for float64) [B, H, Tq], -inf where nothing is
seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from csc.kernels import capped
from csc.kernels.mask import Mask
from csc.kernels.memory_layout import exact, heads_last, statistics
from csc.kernels.tiles import Tiles

SHORTEST = 8  # queries of a sequence in a row, on the average; of shorter ones many are one block
ROWS = 256  # queries of a block where there is no mask and scores have to be written out (soft cap)
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class _Block:
    """Queries `rows` of the samples `samples` against `keys` (a slice or slots).

    bias: 0 or -inf, [b, 1, rows, keys], or None where all see all. blind: bool [b, 1, rows], queries that see nothing.
    """

    samples: slice
    rows: slice
    keys: slice | torch.Tensor
    bias: torch.Tensor | None
    blind: torch.Tensor | None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | None, tiles: Tiles | None,
    scale: float, softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See the module's text."""
    out = heads_last(q).zero_()
    lse = statistics(q).fill_(-float("inf"))
    for block in _blocks(q, mask, tiles, softcap):
        q_block, k_block, v_block = _cut(block, q, k, v)
        if softcap:
            found, found_lse = capped.forward(q_block, k_block, v_block, block.bias, scale, softcap)
        else:
            found, found_lse = _flash(q_block, k_block, v_block, 0.0, False, attn_mask=block.bias, scale=scale)
        if block.blind is not None:  # the kernel says 0.0 for a row without keys
            found_lse = found_lse.masked_fill(block.blind, -float("inf"))
            found = found.masked_fill(block.blind[..., None], 0.0)
        out[block.samples, :, block.rows] = found
        lse[block.samples, :, block.rows] = found_lse
    return out, lse


def backward(
    d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    mask: Mask | None, tiles: Tiles | None, scale: float, softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """See the module's text."""
    dq = heads_last(q).zero_()
    dk, dv = (heads_last(x, exact(x.dtype)).zero_() for x in (k, v))
    for block in _blocks(q, mask, tiles, softcap):
        q_block, k_block, v_block = _cut(block, q, k, v)
        d_block, out_block = d_out[block.samples, :, block.rows], out[block.samples, :, block.rows]
        lse_block = lse[block.samples, :, block.rows]
        if block.blind is not None:
            lse_block = lse_block.masked_fill(block.blind, 0.0)
        if softcap:
            shares = capped.backward(
                d_block, q_block, k_block, v_block, out_block, lse_block, block.bias, scale, softcap
            )
        else:
            shares = _flash_backward(
                d_block, q_block, k_block, v_block, out_block, lse_block, 0.0, False, attn_mask=block.bias, scale=scale
            )
        dq[block.samples, :, block.rows] = shares[0]
        for total, by_head in ((dk, shares[1]), (dv, shares[2])):
            share = by_head.unflatten(1, (k.shape[1], -1)).sum(2)
            if isinstance(block.keys, slice):
                total[block.samples, :, block.keys] += share
            else:
                total[block.samples].index_add_(2, block.keys, share.to(total.dtype))
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _cut(block: _Block, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Its part of q, and of k and v, whose heads are repeated: the kernel's own grouping rounds unlike a model's."""
    group = q.shape[1] // k.shape[1]

    def chosen(x: torch.Tensor) -> torch.Tensor:
        if isinstance(block.keys, slice):
            part = x[block.samples, :, block.keys]
        else:
            part = x[block.samples].index_select(2, block.keys)
        return part if group == 1 else part.repeat_interleave(group, 1)

    return q[block.samples, :, block.rows], chosen(k), chosen(v)


def _blocks(q: torch.Tensor, mask: Mask | None, tiles: Tiles | None, softcap: float) -> Iterator[_Block]:
    batch, _, queries, _ = q.shape
    if mask is None or tiles is None:
        height = ROWS if softcap else max(queries, 1)
        for start in range(0, queries, height):
            yield _Block(slice(0, batch), slice(start, min(start + height, queries)), slice(None), None, None)
        return
    sequences = _sequences(mask)
    if sequences is not None:
        yield from sequences
        return
    index, counts = tiles.of_queries.index, tiles.of_queries.counts.tolist()
    for i in range(index.shape[1]):
        rows = slice(i * tiles.block_q, min((i + 1) * tiles.block_q, queries))
        visits = [sorted(index[one, i, : counts[one][i][1]].tolist()) for one in range(mask.batch)]
        # Neighbouring samples that look at the same tiles go together: a short batch is one call.
        for listed, alike in groupby(range(mask.batch), key=visits.__getitem__):
            if not listed:
                continue
            run = list(alike)
            samples = slice(run[0], run[-1] + 1) if mask.batch > 1 else slice(0, 1)
            keys = _slots(listed, tiles.block_k, mask.keys)
            bias = blind = None
            if any(counts[one][i][0] < counts[one][i][1] for one in run):
                seen = _seen(mask, samples, rows, keys)
                bias = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -float("inf"))
                blind = ~seen.any(-1)
            yield _Block(samples if mask.batch > 1 else slice(0, batch), rows, keys, bias, blind)


def _sequences(mask: Mask) -> list[_Block] | None:
    """A block for each run of queries that see the same range of keys, if the mask is made of long ones: sequences in
    one row, each as if it were alone, to the bit. None for any other mask.
    """
    if mask.rules > 1 or mask.batch > 1 or mask.kinds is not None or not mask.queries:
        return None
    ranges, lengths = torch.unique_consecutive(mask.ranges[0, 0], dim=0, return_counts=True)
    if mask.queries < len(lengths) * SHORTEST:
        return None
    blocks, start = [], 0
    for (low, high), length in zip(ranges.tolist(), lengths.tolist()):
        if low < high:
            blocks.append(_Block(slice(None), slice(start, start + length), slice(low, high), None, None))
        start += length
    return blocks


def _slots(listed: list[int], block_k: int, keys: int) -> slice | torch.Tensor:
    if listed[-1] - listed[0] == len(listed) - 1:
        return slice(listed[0] * block_k, min((listed[-1] + 1) * block_k, keys))
    slots = (torch.tensor(listed)[:, None] * block_k + torch.arange(block_k)).flatten()
    return slots[slots < keys]


def _seen(mask: Mask, samples: slice, rows: slice, keys: slice | torch.Tensor) -> torch.Tensor:
    """bool [b, 1, rows, keys]: the mask of one block, written out."""
    slot = torch.arange(mask.keys)[keys]
    ranges = mask.ranges[samples, :, rows]
    seen = (ranges[..., :1] <= slot) & (slot < ranges[..., 1:])
    if mask.admits is not None and mask.kinds is not None:
        seen &= (mask.admits[samples, :, rows, None] & mask.kinds[samples, None, None, keys]) != 0
    return seen.any(1, keepdim=True)
