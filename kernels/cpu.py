"""Attention on CPUs: ATen's flash kernel on blocks of queries against the keys that they see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from csc.kernels.mask import SEEN, Mask, Tiles
from csc.kernels.operators import as_heads_last, exact, heads_last, statistics

# --- Attention with a soft cap on its scores, written out for one block: what ATen's flash kernel has no form of -----
#
#     score = softcap * tanh(scale * q.k / softcap);  p = softmax(score + bias);  out = p v
#
# q: [b, H, rows, D]; k, v: [b, H, keys, D]; bias: [b, 1, rows, keys] of 0 and -inf, or None; lse: [b, H, rows], finite
# in backward. Products are taken in float32 (float64 for float64). Holds rows x keys scores, so blocks are kept short.


def _scores(
    q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(masked scores, tanh), both [b, H, rows, keys]."""
    bent = torch.tanh(q @ k.transpose(-1, -2) * (scale / softcap))
    scores = bent * softcap
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    return scores, bent


def capped_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output [b, H, rows, D] and its lse [b, H, rows] of attention with a soft cap, for one block."""
    wide = exact(q.dtype)
    scores, _ = _scores(q.to(wide), k.to(wide), bias, scale, softcap)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
    return (weights @ v.to(wide)).to(q.dtype), lse


def capped_backward(
    d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    bias: torch.Tensor | None, scale: float, softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns the gradients of q, k and v of such a block, in the dtypes of these. d_out, out: [b, H, rows, D]; lse: as
    `capped_forward` returns it.
    """
    q_, k_, v_, o_, d_ = (x.to(lse.dtype) for x in (q, k, v, out, d_out))
    scores, bent = _scores(q_, k_, bias, scale, softcap)
    weights = torch.exp(scores - lse[..., None])
    dv = weights.transpose(-1, -2) @ d_
    d_weights = d_ @ v_.transpose(-1, -2)
    d_scores = weights * (d_weights - (d_ * o_).sum(-1, keepdim=True))
    d_products = d_scores * (1 - bent * bent) * scale
    dq, dk = d_products @ k_, d_products.transpose(-1, -2) @ q_
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


# --- Which queries the CPU's attention runs against which keys, block after block ------------------------------------
#
# A mask is looked at once for all layers that share it, forward and backward: what is made of it stays with it, if its
# biases take no more than KEPT bytes together.


SHORTEST = 8  # queries of a sequence in a row, on the average; of shorter ones many are one block
ONE_CALL = 2**18  # pairs of queries and keys, of all heads and samples, that take least time in one call of the kernel
ROWS = 256  # queries of a block where there is no mask and scores have to be written out (soft cap)
FEW = 4096  # pairs of queries and keys that cost less than another call of the kernel, and results put together
KEPT = 16 * 2**20


@dataclass(frozen=True)
class Block:
    """Queries `rows` of the samples `samples` against `keys` (a slice or slots).

    bias: 0 or -inf, [b, 1, rows, keys], or None where all see all. blind: bool [b, 1, rows], queries that see nothing;
    None: there are none. causal: query i sees the keys up to i, and there is no bias. whole: there is no other block,
    and it has every query and key. grouped: the kernel is given the key heads as they are, as PyTorch's attention does
    without a mask; it then adds gradients of a group's heads in an order of its own.
    """

    samples: slice
    rows: slice
    keys: slice | torch.Tensor
    bias: torch.Tensor | None = None
    blind: torch.Tensor | None = None
    causal: bool = False
    whole: bool = False
    grouped: bool = False


def blocks(
    q: torch.Tensor, keys: int, mask: Mask | None, tiles: Tiles | None, softcap: float, reordered: bool = False
) -> Sequence[Block]:
    """The blocks that every visible pair is in, each in one. keys: how many there are. reordered: they need not be as
    PyTorch calls its kernel.
    """
    batch, heads, queries, _ = q.shape
    if not (queries and keys):  # ATen's kernel divides by their number, which ends the process
        return []
    if mask is None or tiles is None:
        height = ROWS if softcap else max(queries, 1)
        starts = range(0, queries, height)
        rows = [slice(start, min(start + height, queries)) for start in starts]
        return [Block(slice(0, batch), one, slice(None), whole=len(rows) == 1, grouped=not softcap) for one in rows]
    few = batch * heads * queries * keys <= ONE_CALL
    key = (batch, q.dtype, bool(softcap), few, reordered and not few)
    known = mask.known.get(key)
    if known is None:
        found_blocks = list(_of_mask(mask, tiles, *key))
        known = (
            [replace(found_blocks[0], whole=True)]
            if len(found_blocks) == 1 and _is_all(found_blocks[0], mask, batch)
            else found_blocks
        )
        if sum(block.bias.nbytes for block in found_blocks if block.bias is not None) <= KEPT:
            mask.known[key] = known
    return known


def _of_mask(
    mask: Mask, tiles: Tiles, batch: int, dtype: torch.dtype, written_out: bool, few: bool, reordered: bool
) -> Iterator[Block]:
    """few: one call of the kernel is to have all pairs in it."""
    everyone = slice(0, batch)
    if not written_out and not reordered and _is_causal(mask):
        yield Block(everyone, slice(0, mask.queries), slice(0, mask.keys), causal=True, grouped=True)
        return
    sequences = _sequences(mask, grouped=not written_out)
    if sequences is not None:
        yield from sequences
        return
    index, counts = tiles.of_queries.index, tiles.of_queries.counts.tolist()
    slots = [min(tiles.block_k, mask.keys - start) for start in range(0, mask.keys, tiles.block_k)]
    every = range(index.shape[1])
    for of_block in [every] if few else [range(i, i + 1) for i in every]:
        rows = slice(of_block.start * tiles.block_q, min(of_block.stop * tiles.block_q, mask.queries))
        looked_at = [
            {tile for i in of_block for tile in index[sample, i, : counts[sample][i][1]].tolist()}
            for sample in range(mask.batch)
        ]
        for run, listed in _together(
            [sorted(tiles_seen) for tiles_seen in looked_at], slots, rows.stop - rows.start, ONE_CALL if few else FEW
        ):
            samples = slice(run[0], run[-1] + 1) if mask.batch > 1 else slice(0, 1)
            keys = _slots(listed, tiles.block_k, mask.keys)
            bias = blind = None
            if any(counts[sample][i][0] < len(listed) for sample in run for i in of_block):
                seen = _seen(mask, samples, rows, keys)
                bias = torch.where(seen, torch.tensor(0.0, dtype=dtype), torch.tensor(-float("inf"), dtype=dtype))
                sees = seen.numpy().any(-1)
                blind = None if sees.all() else torch.from_numpy(~sees)
            yield Block(samples if mask.batch > 1 else everyone, rows, keys, bias, blind)


def _together(
    visits: Sequence[list[int]], slots: Sequence[int], rows: int, most: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Runs of neighbouring samples that look at the same tiles, or nearly, and these tiles: a short batch is one call.
    visits: of each sample; one that looks at none is in no run. slots: of each tile. rows: of queries. most: pairs that
    are looked at for nothing, of a run.
    """
    run, listed, looked = list[int](), list[int](), 0  # looked: slots that the run's samples look at, each its own
    for sample, seen in enumerate(visits):
        both, width = sorted({*listed, *seen}), sum(slots[tile] for tile in seen)
        unseen = (len(run) + 1) * sum(slots[tile] for tile in both) - looked - width
        if run and (not seen or rows * unseen > most):
            yield run, listed
            run, both, looked = [], seen, 0
        run, listed, looked = ([*run, sample], both, looked + width) if seen else ([], [], 0)
    if run:
        yield run, listed


def _is_all(block: Block, mask: Mask, batch: int) -> bool:
    sides = ((block.samples, batch), (block.rows, mask.queries), (block.keys, mask.keys))
    return all(isinstance(side, slice) and side.indices(size) == (0, size, 1) for side, size in sides)


def _is_causal(mask: Mask) -> bool:
    """Whether each query sees the keys up to its own place, in every sample."""
    if mask.rules > 1 or mask.kinds is not None or mask.queries != mask.keys:
        return False
    ranges = mask.ranges.numpy()
    return bool((ranges[..., 0] <= 0).all() and (ranges[..., 1] == np.arange(1, mask.keys + 1)).all())


def _sequences(mask: Mask, grouped: bool) -> list[Block] | None:
    """A block for each run of queries that see the same range of keys, if the mask is made of long ones: sequences in
    one row, each as if it were alone, to the bit. None for any other mask.
    """
    if mask.rules > 1 or mask.batch > 1 or mask.kinds is not None or not mask.queries:
        return None
    ranges = mask.ranges[0, 0].numpy()
    starts = [0, *(np.flatnonzero((ranges[1:] != ranges[:-1]).any(1)) + 1).tolist(), mask.queries]
    if mask.queries < (len(starts) - 1) * SHORTEST:
        return None
    return [
        Block(slice(None), slice(start, stop), slice(low, high), grouped=grouped)
        for start, stop, (low, high) in zip(starts, starts[1:], ranges[starts[:-1]].tolist(), strict=False)
        if low < high
    ]


def _slots(listed: list[int], block_k: int, keys: int) -> slice | torch.Tensor:
    if listed[-1] - listed[0] == len(listed) - 1:
        return slice(listed[0] * block_k, min((listed[-1] + 1) * block_k, keys))
    slots = (torch.tensor(listed)[:, None] * block_k + torch.arange(block_k)).flatten()
    return slots[slots < keys]


def _seen(mask: Mask, samples: slice, rows: slice, keys: slice | torch.Tensor) -> torch.Tensor:
    """bool [b, 1, rows, keys]: the mask of one block, written out."""
    known = mask.known.get(SEEN)
    if known is not None:
        return known[samples, rows, keys][:, None]
    slot = torch.arange(mask.keys)[keys]
    ranges = mask.ranges[samples, :, rows]
    seen = (ranges[..., :1] <= slot) & (slot < ranges[..., 1:])
    if mask.admits is not None and mask.kinds is not None:
        seen &= (mask.admits[samples, :, rows, None] & mask.kinds[samples, None, None, keys]) != 0
    return seen.any(1, keepdim=True)


# --- Attention on CPUs: ATen's flash kernel on blocks of queries against the keys that they see ----------------------
#
# A block of queries (a row of tiles) is run against the key tiles of its list, gathered where they do not follow each
# other, with the mask as a bias where a tile is partial. What no query of the block sees is neither read nor computed.
# The backward gives the kernel the block's output and log-sum-exp, so each block yields its exact share of dK and dV;
# they are added in float32 (float64 for float64) in ascending order of blocks: deterministic. Sequences that share a
# row and do not see each other are blocks of their own. A block that is all there is (few pairs) is the kernel's own
# call, and a mask that is exactly causal is the kernel's own causal one. There, and without a mask, the kernel groups
# heads itself, as it does for PyTorch's attention without a mask. With another mask models repeat heads, and so does
# csc, to the same bits. Where sums may be `reordered`, and the dtype is WIDE, a causal mask over many pairs is blocks
# as well, and heads are grouped.
#
# q: [B, H, Tq, D]; k, v: [B, Hkv, Tk, D], H a multiple of Hkv; mask and tiles both None: every query sees every key.
# out: (B, Tq, H, D) transposed to [B, H, Tq, D]; lse: float32 (float64 for float64) [B, H, Tq], -inf where nothing is
# seen.


WIDE = (torch.float32, torch.float64)
"""Where the kernel adds the gradients of a group's heads as exactly as csc does; in others it rounds each sum,
and they are twice as far from the truth."""
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | None, tiles: Tiles | None,
    scale: float, softcap: float, reordered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns the output of attention, laid out with heads last, and its lse [B, H, rows], which is -inf for a query
    that sees nothing. tiles: the tiles of `mask` that are visited.
    """
    walk = blocks(q, k.shape[2], mask, tiles, softcap, reordered and q.dtype in WIDE)
    if walk and walk[0].whole:
        block_out, found_lse = _forward(walk[0], q, k, v, scale, softcap)
        return as_heads_last(block_out), found_lse.contiguous()
    along = _along(walk, q)
    if along is not None:
        parts = [_forward(block, q, k, v, scale, softcap) for block in walk]
        lse = torch.cat([part for _, part in parts], along).to(exact(q.dtype))
        return _joined([part for part, _ in parts], along, q), lse
    out = heads_last(q).zero_()
    lse = statistics(q).fill_(-float("inf"))
    for block in walk:
        block_out, found_lse = _forward(block, q, k, v, scale, softcap)
        out[block.samples, :, block.rows] = block_out
        lse[block.samples, :, block.rows] = found_lse
    return out, lse


def _along(walk: Sequence[Block], q: torch.Tensor) -> int | None:
    """The dimension of q along which the blocks follow each other and are all of it: samples, or queries of all
    samples; None: neither.
    """
    samples = [block.samples.indices(q.shape[0]) for block in walk]
    rows = [block.rows.indices(q.shape[2]) for block in walk]
    for along, these, extents in ((2, rows, samples), (0, samples, rows)):
        ends = [0, *(stop for _, stop, _ in these)]
        full = (0, q.shape[2 - along], 1)
        if walk and ends[-1] == q.shape[along] and all(part[0] == end for part, end in zip(these, ends)):
            return along if all(other == full for other in extents) else None
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
        out, lse = capped_forward(q_block, k_block, v_block, block.bias, scale, softcap)
    else:
        out, lse = _flash(q_block, k_block, v_block, 0.0, block.causal, attn_mask=block.bias, scale=scale)
    if block.blind is not None:  # the kernel says 0.0 for a row without keys
        lse = lse.masked_fill(block.blind, -float("inf"))
        out = out.masked_fill(block.blind[..., None], 0.0)
    return out, lse


def backward(
    d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    mask: Mask | None, tiles: Tiles | None, scale: float, softcap: float, reordered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns the gradients of q, k and v, laid out with heads last and in the dtypes of these. out, lse: what
    `forward` returned for the same arguments.
    """
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
        d_q, *by_head = capped_backward(
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
