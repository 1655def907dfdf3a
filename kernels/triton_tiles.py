"""Tile lists of a mask in two launches, on the device of the mask: what csc.kernels.tiles computes, for GPUs.

    tiles(mask, block_q, block_k) -> Tiles             the same ones as csc.kernels.tiles.tiles, bit for bit

    count_kernel[B * query tiles * key tiles]          visible pairs of each tile
    list_kernel[B * (query tiles + key tiles)]         one row of the lists of either side

The blocks are powers of two. A tile that no rule's range touches costs a look at the ranges of its queries; any other
is written out pair by pair in registers: once a batch what attention does in each layer and head. Nothing waits for
the device.
"""

import torch
import triton
import triton.language as tl
from csc.kernels.mask import Mask
from csc.kernels.tiles import TileLists, Tiles
from csc.kernels.triton_parts import seen

from csc import devices

CHUNK = 256  # tiles of a row that are listed at once

# What changes from batch to batch: Triton must not compile again because a length has become divisible by 16.
COUNTED = ["ranges", "admits", "kinds", "pairs", "queries", "keys", "rows", "columns"]
LISTED = ["pairs", "q_index", "q_counts", "k_index", "k_counts", "queries", "rows", "columns"]


@triton.jit
def _touches(ranges, positions, first, last, queries, keys, RULES: tl.constexpr):
    """Whether a range of one of the queries has a key of first .. last."""
    there = positions < queries
    found = there & False
    for rule in tl.static_range(RULES):
        at = rule * queries + positions
        lo = tl.load(ranges + 2 * at, mask=there, other=0)
        hi = tl.load(ranges + 2 * at + 1, mask=there, other=0)
        found = found | (tl.maximum(lo, first) < tl.minimum(tl.minimum(hi, last), keys))
    return tl.max(found.to(tl.int32), 0) > 0


@triton.jit(do_not_specialize=COUNTED)
def count_kernel(
    ranges, admits, kinds, pairs, queries, keys, rows, columns,
    RULES: tl.constexpr, KINDS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """pairs: int32 [B, rows, columns]."""
    tile = tl.program_id(0)
    batch = (tile // (rows * columns)).to(tl.int64)
    start_q = (tile // columns % rows) * BLOCK_Q
    start_k = (tile % columns) * BLOCK_K
    ranges += batch * RULES * queries * 2
    positions = start_q + tl.arange(0, BLOCK_Q)
    count = tl.zeros([1], tl.int32)
    if _touches(ranges, positions, start_k, start_k + BLOCK_K, queries, keys, RULES):
        if KINDS:
            admits += batch * RULES * queries
            kinds += batch * keys
        slots = start_k + tl.arange(0, BLOCK_K)
        visible = seen(ranges, admits, kinds, positions[:, None], slots[None, :], queries, keys, RULES, KINDS)
        count += tl.sum(tl.sum(visible.to(tl.int32), 1), 0)
    tl.store(pairs + tile + tl.arange(0, 1), count)


@triton.jit(do_not_specialize=LISTED)
def list_kernel(
    pairs, q_index, q_counts, k_index, k_counts, queries, rows, columns,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """index: int32 [B, n, m], full tiles first, zeros behind those that are listed; counts: int32 [B, n, 2]."""
    line = tl.program_id(0)
    batch = (line // (rows + columns)).to(tl.int64)
    own = line % (rows + columns)
    of_queries = own < rows
    own = tl.where(of_queries, own, own - rows)
    others = tl.where(of_queries, columns, rows)
    step = tl.where(of_queries, 1, columns)  # from one tile of the line to the next
    pairs += batch * rows * columns + own.to(tl.int64) * tl.where(of_queries, columns, 1)
    if of_queries:
        index = q_index + batch * rows * columns + own.to(tl.int64) * columns
        counts = q_counts + (batch * rows + own) * 2
    else:
        index = k_index + batch * rows * columns + own.to(tl.int64) * rows
        counts = k_counts + (batch * columns + own) * 2
    wholes = 0
    for start in range(0, others, CHUNK):
        full, _ = _kinds_of(pairs, start, own, others, step, of_queries, queries, BLOCK_Q, BLOCK_K, CHUNK)
        wholes += tl.sum(full, 0)
    seen_full, seen_partial = 0, wholes
    for start in range(0, others, CHUNK):
        full, partial = _kinds_of(pairs, start, own, others, step, of_queries, queries, BLOCK_Q, BLOCK_K, CHUNK)
        at = tl.where(full > 0, seen_full + tl.cumsum(full, 0), seen_partial + tl.cumsum(partial, 0)) - 1
        tl.store(index + at, start + tl.arange(0, CHUNK), mask=full + partial > 0)
        seen_full += tl.sum(full, 0)
        seen_partial += tl.sum(partial, 0)
    for start in range(seen_partial, others, CHUNK):
        at = start + tl.arange(0, CHUNK)
        tl.store(index + at, tl.zeros([CHUNK], tl.int32), mask=at < others)
    tl.store(counts, wholes)
    tl.store(counts + 1, seen_partial)


@triton.jit
def _kinds_of(
    pairs, start, own, others, step, of_queries, queries,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(full, partial), 0 or 1 each, of CHUNK tiles of a line from `start` on."""
    at = start + tl.arange(0, CHUNK)
    count = tl.load(pairs + at.to(tl.int64) * step, mask=at < others, other=0)
    row = tl.where(of_queries, own, at)
    full = (count == tl.minimum(queries - row * BLOCK_Q, BLOCK_Q) * BLOCK_K) & (count > 0)
    return full.to(tl.int32), ((count > 0) & ~full).to(tl.int32)


def tiles(mask: Mask, block_q: int, block_k: int) -> Tiles:
    """See the module."""
    device, batch = mask.ranges.device, mask.batch
    rows, columns = triton.cdiv(mask.queries, block_q), triton.cdiv(mask.keys, block_k)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    pairs = empty(batch, rows, columns)
    of_queries = TileLists(empty(batch, rows, columns), empty(batch, rows, 2))
    of_keys = TileLists(empty(batch, columns, rows), empty(batch, columns, 2))
    if not pairs.numel():
        return Tiles(block_q, block_k, _nothing(of_queries), _nothing(of_keys))
    ranges = mask.ranges.contiguous()
    has_kinds = mask.admits is not None and mask.kinds is not None
    admits = mask.admits.contiguous() if mask.admits is not None else ranges  # not read
    kinds = mask.kinds.contiguous() if mask.kinds is not None else ranges
    with devices.at(device):
        count_kernel[(pairs.numel(),)](
            ranges, admits, kinds, pairs, mask.queries, mask.keys, rows, columns,
            RULES=mask.rules, KINDS=has_kinds, BLOCK_Q=block_q, BLOCK_K=block_k, num_warps=8,
        )  # fmt: skip
        list_kernel[(batch * (rows + columns),)](
            pairs, of_queries.index, of_queries.counts, of_keys.index, of_keys.counts, mask.queries, rows, columns,
            BLOCK_Q=block_q, BLOCK_K=block_k, CHUNK=CHUNK,
        )  # fmt: skip
    return Tiles(block_q, block_k, of_queries, of_keys)


def _nothing(lists: TileLists) -> TileLists:
    """Where there are no queries or no keys."""
    return TileLists(lists.index.zero_(), lists.counts.zero_())
