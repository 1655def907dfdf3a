"""The forward kernel: softmax(scores) V over the key tiles that a query tile sees, and the log-sum-exp of each query.

Terms: see csc.kernels.triton_parts.

    forward_kernel[B * H * query tiles * parts](...)
        out [B, H, Tq, D] in the type of q; lse float32 [B, H, Tq], natural logarithm;
        -inf and out 0 for a query that sees nothing

Online softmax (Milakov and Gimelshein 2018; FlashAttention 2) in base 2. Full tiles are walked in a loop that knows no
mask, partial ones in a second loop that evaluates the rules, so only the latter pays for them.
"""

import triton
import triton.language as tl
from csc.kernels.triton_parts import LN2, RUNTIME, capped, load_rows, place, seen, store_rows


@triton.jit
def _walk(
    acc, top, total, query, k, v, index, ranges, admits, kinds, batch, kv_head, start_q, first, last,
    k_batch, k_head, k_row, v_batch, v_head, v_row, inner, factor, queries, keys,
    RULES: tl.constexpr, KINDS: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr, TILE_K: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Entries first .. last of the tile list, BLOCK_K keys a step. `top` is the running maximum times factor."""
    STEPS: tl.constexpr = TILE_K // BLOCK_K
    rows = start_q + tl.arange(0, BLOCK_Q)[:, None]
    for step in range(first * STEPS, last * STEPS):
        if RULES > 0:
            start = tl.load(index + step // STEPS) * TILE_K + (step % STEPS) * BLOCK_K
        else:
            start = step * BLOCK_K
        key = load_rows(
            k, batch, kv_head, start, keys, k_batch, k_head, k_row, BLOCK_K, DIM, DIM_PADDED, MASKED, DESCRIPTORS
        )
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        if CAP:
            score = capped(score * inner)
        if MASKED:
            cols = start + tl.arange(0, BLOCK_K)[None, :]
            visible = seen(ranges, admits, kinds, rows, cols, queries, keys, RULES, KINDS)
            score = tl.where(visible, score, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1) * factor)
        if MASKED:  # nothing seen so far: exp2(-inf - 0) is 0, exp2(-inf - -inf) would be nan
            base = tl.where(new == float("-inf"), 0.0, new)
        else:
            base = new
        weight = tl.exp2(score * factor - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        value = load_rows(
            v, batch, kv_head, start, keys, v_batch, v_head, v_row, BLOCK_K, DIM, DIM_PADDED, MASKED, DESCRIPTORS
        )
        acc = tl.dot(weight.to(value.dtype), value, acc, input_precision="ieee")
        top = new
    return acc, top, total


@triton.jit(do_not_specialize=RUNTIME)
def forward_kernel(
    q, k, v, out, lse, order, index, counts, ranges, admits, kinds,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    inner, factor, heads, groups, section, mask_batches, queries, keys, entries,
    GROUP: tl.constexpr, RULES: tl.constexpr, KINDS: tl.constexpr, CAP: tl.constexpr, TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head. index [mask_batches, tiles, entries], counts [.., tiles, 2], order [..]."""
    PARTS: tl.constexpr = TILE_Q // BLOCK_Q
    tiles = tl.cdiv(queries, TILE_Q)
    batch, head, tile, part = place(order, heads, tiles, groups, section, mask_batches, GROUP, PARTS, RULES > 0)
    start_q = tile * TILE_Q + part * BLOCK_Q
    if start_q >= queries:
        return
    kv_head = head // GROUP
    if RULES > 0:
        line = (batch % mask_batches) * tiles + tile
        full = tl.load(counts + 2 * line)
        last = tl.load(counts + 2 * line + 1)
        index += line.to(tl.int64) * entries
        ranges += (batch % mask_batches).to(tl.int64) * RULES * queries * 2
        if KINDS:
            admits += (batch % mask_batches).to(tl.int64) * RULES * queries
            kinds += (batch % mask_batches).to(tl.int64) * keys
    else:
        full = keys // TILE_K
        last = tl.cdiv(keys, TILE_K)

    query = load_rows(
        q, batch, head, start_q, queries, q_batch, q_head, q_row, BLOCK_Q, DIM, DIM_PADDED, True, DESCRIPTORS
    )
    acc = tl.zeros([BLOCK_Q, DIM_PADDED], tl.float32)
    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc, top, total = _walk(
        acc, top, total, query, k, v, index, ranges, admits, kinds, batch, kv_head, start_q, 0, full,
        k_batch, k_head, k_row, v_batch, v_head, v_row, inner, factor, queries, keys,
        RULES, KINDS, CAP, False, TILE_K, BLOCK_Q, BLOCK_K, DIM, DIM_PADDED, DESCRIPTORS,
    )  # fmt: skip
    acc, top, total = _walk(
        acc, top, total, query, k, v, index, ranges, admits, kinds, batch, kv_head, start_q, full, last,
        k_batch, k_head, k_row, v_batch, v_head, v_row, inner, factor, queries, keys,
        RULES, KINDS, CAP, True, TILE_K, BLOCK_Q, BLOCK_K, DIM, DIM_PADDED, DESCRIPTORS,
    )  # fmt: skip

    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    store_rows(out, acc, batch, head, start_q, queries, o_batch, o_head, o_row, BLOCK_Q, DIM, DIM_PADDED)
    sums = tl.where(empty, float("-inf"), (top + tl.log2(tl.where(empty, 1.0, total))) * LN2)
    row = tl.arange(0, BLOCK_Q)
    at = lse + (batch * heads + head).to(tl.int64) * queries + start_q
    tl.store(at + row, sums, mask=row < queries - start_q)
