"""The backward kernels: statistics of rows, dQ over the key tiles of queries, dK and dV over the query tiles of keys.

Terms: see csc.kernels.triton_parts, and
  level    lse in base 2, +inf for a query that sees nothing or does not exist: its weights exp2(score - level) are 0
  delta    sum of out * d_out over the head dim; d_score = weight * (d_weight - delta)

    rows_kernel[(padded / BLOCK, B * H)](...)                     levels, deltas: float32 [B, H, padded]
    dq_kernel[B * H * query tiles * parts](...)                   dq
    dkv_kernel[B * Hkv * key tiles * parts](...)                  dk, dv: sums over the query heads of a group too

Every gradient is written by one program, which adds in a fixed order: no atomics, equal bits from run to run. `padded`
is a whole number of query tiles, so levels and deltas are read without bounds. Scores are not kept but computed again.
"""

import triton
import triton.language as tl
from csc.kernels.triton_parts import LOG2E, RUNTIME, capped, load_rows, place, seen, store_rows


@triton.jit(do_not_specialize=["heads", "queries", "padded"])
def rows_kernel(
    out, d_out, lse, levels, deltas,
    o_batch, o_head, o_row, d_batch, d_head, d_row, heads, queries, padded,
    BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """Statistics of BLOCK queries of one head."""
    start = tl.program_id(0) * BLOCK
    flat = tl.program_id(1)
    batch, head = flat // heads, flat % heads
    one = load_rows(out, batch, head, start, queries, o_batch, o_head, o_row, BLOCK, DIM, DIM_PADDED, True, False)
    two = load_rows(d_out, batch, head, start, queries, d_batch, d_head, d_row, BLOCK, DIM, DIM_PADDED, True, False)
    row = start + tl.arange(0, BLOCK)
    level = tl.load(lse + flat.to(tl.int64) * queries + row, mask=row < queries, other=float("-inf")) * LOG2E
    level = tl.where(level == float("-inf"), float("inf"), level)
    at = flat.to(tl.int64) * padded + row
    tl.store(levels + at, level, mask=row < padded)
    tl.store(deltas + at, tl.sum(one.to(tl.float32) * two.to(tl.float32), 1), mask=row < padded)


@triton.jit
def _dq_walk(
    acc, query, d_rows, level, delta, k, v, index, ranges, admits, kinds, batch, kv_head, start_q, first, last,
    k_batch, k_head, k_row, v_batch, v_head, v_row, inner, factor, queries, keys,
    RULES: tl.constexpr, KINDS: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr, TILE_K: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
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
        value = load_rows(
            v, batch, kv_head, start, keys, v_batch, v_head, v_row, BLOCK_K, DIM, DIM_PADDED, MASKED, DESCRIPTORS
        )
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        if CAP:
            score = capped(score * inner)
        exponent = score * factor - level[:, None]
        if MASKED:
            cols = start + tl.arange(0, BLOCK_K)[None, :]
            visible = seen(ranges, admits, kinds, rows, cols, queries, keys, RULES, KINDS)
            exponent = tl.where(visible, exponent, float("-inf"))
        weight = tl.exp2(exponent)
        d_weight = tl.dot(d_rows, tl.trans(value), input_precision="ieee")
        d_score = weight * (d_weight - delta[:, None])
        if CAP:
            d_score = d_score * (1.0 - score * score)
        acc = tl.dot(d_score.to(key.dtype), key, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=RUNTIME)
def dq_kernel(
    q, k, v, d_out, dq, levels, deltas, order, index, counts, ranges, admits, kinds,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, d_batch, d_head, d_row,
    dq_batch, dq_head, dq_row,
    inner, factor, scale, heads, groups, section, mask_batches, queries, keys, entries,
    GROUP: tl.constexpr, RULES: tl.constexpr, KINDS: tl.constexpr, CAP: tl.constexpr, TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries of one head; the tile lists are those of the forward kernel."""
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
    d_rows = load_rows(
        d_out, batch, head, start_q, queries, d_batch, d_head, d_row, BLOCK_Q, DIM, DIM_PADDED, True, DESCRIPTORS
    )
    at = (batch * heads + head).to(tl.int64) * tiles * TILE_Q + start_q + tl.arange(0, BLOCK_Q)
    level = tl.load(levels + at)
    delta = tl.load(deltas + at)
    acc = tl.zeros([BLOCK_Q, DIM_PADDED], tl.float32)
    acc = _dq_walk(
        acc, query, d_rows, level, delta, k, v, index, ranges, admits, kinds, batch, kv_head, start_q, 0, full,
        k_batch, k_head, k_row, v_batch, v_head, v_row, inner, factor, queries, keys,
        RULES, KINDS, CAP, False, TILE_K, BLOCK_Q, BLOCK_K, DIM, DIM_PADDED, DESCRIPTORS,
    )  # fmt: skip
    acc = _dq_walk(
        acc, query, d_rows, level, delta, k, v, index, ranges, admits, kinds, batch, kv_head, start_q, full, last,
        k_batch, k_head, k_row, v_batch, v_head, v_row, inner, factor, queries, keys,
        RULES, KINDS, CAP, True, TILE_K, BLOCK_Q, BLOCK_K, DIM, DIM_PADDED, DESCRIPTORS,
    )  # fmt: skip
    store_rows(dq, acc * scale, batch, head, start_q, queries, dq_batch, dq_head, dq_row, BLOCK_Q, DIM, DIM_PADDED)


@triton.jit
def _dkv_walk(
    dk_acc, dv_acc, key, value, q, d_out, levels, deltas, index, ranges, admits, kinds, batch, kv_head, start_k,
    first, last, q_batch, q_head, q_row, d_batch, d_head, d_row, inner, factor, heads, queries, keys,
    DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, RULES: tl.constexpr, KINDS: tl.constexpr,
    CAP: tl.constexpr, MASKED: tl.constexpr, TILE_Q: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, DESCRIPTORS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Entries first .. last of the list, the heads of the group inside each block: one loop, so that loads run ahead.

    Keys x queries: weights and their gradients are then left operands, which tensor cores take from registers. The loop
    with the mask has no registers for more than two stages.
    """
    STEPS: tl.constexpr = TILE_Q // BLOCK_Q
    cols = start_k + tl.arange(0, BLOCK_K)[:, None]
    padded = tl.cdiv(queries, TILE_Q) * TILE_Q
    tile = first
    if RULES > 0:
        tile = tl.load(index + first)
    RUN_AHEAD: tl.constexpr = 2 if MASKED and STAGES > 2 else STAGES
    for turn in tl.range(first * STEPS * GROUP, last * STEPS * GROUP, num_stages=RUN_AHEAD):
        step = turn // GROUP
        head = kv_head * GROUP + turn % GROUP
        start = tile * TILE_Q + (step % STEPS) * BLOCK_Q
        following = tl.minimum((turn + 1) // (GROUP * STEPS), last - 1)
        if RULES > 0:  # a turn ahead: blocks whose place is not waited for can be loaded several turns ahead
            tile = tl.load(index + following)
        else:
            tile = following
        # Only the last query tile is short, and a full tile may be it: its rows are always bounded.
        query = load_rows(
            q, batch, head, start, queries, q_batch, q_head, q_row, BLOCK_Q, DIM, DIM_PADDED, True, DESCRIPTORS
        )
        at = (batch * heads + head).to(tl.int64) * padded + start + tl.arange(0, BLOCK_Q)
        level = tl.load(levels + at)
        score = tl.dot(key, tl.trans(query), input_precision="ieee")
        if CAP:
            score = capped(score * inner)
        exponent = score * factor - level[None, :]
        if MASKED:
            rows = start + tl.arange(0, BLOCK_Q)[None, :]
            visible = seen(ranges, admits, kinds, rows, cols, queries, keys, RULES, KINDS)
            exponent = tl.where(visible, exponent, float("-inf"))
        weight = tl.exp2(exponent)
        d_rows = load_rows(
            d_out, batch, head, start, queries, d_batch, d_head, d_row, BLOCK_Q, DIM, DIM_PADDED, True, DESCRIPTORS
        )
        if DV:
            dv_acc = tl.dot(weight.to(d_rows.dtype), d_rows, dv_acc, input_precision="ieee")
        if DK:
            delta = tl.load(deltas + at)
            d_weight = tl.dot(value, tl.trans(d_rows), input_precision="ieee")
            d_score = weight * (d_weight - delta[None, :])
            if CAP:
                d_score = d_score * (1.0 - score * score)
            dk_acc = tl.dot(d_score.to(query.dtype), query, dk_acc, input_precision="ieee")
    return dk_acc, dv_acc


@triton.jit(do_not_specialize=RUNTIME)
def dkv_kernel(
    q, k, v, d_out, dk, dv, levels, deltas, order, index, counts, ranges, admits, kinds,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, d_batch, d_head, d_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    inner, factor, scale, heads, groups, section, mask_batches, queries, keys, entries,
    DK: tl.constexpr, DV: tl.constexpr, GROUP: tl.constexpr, RULES: tl.constexpr, KINDS: tl.constexpr,
    CAP: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, DESCRIPTORS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys of one head of K and V. The lists are those of key tiles.

    DK or DV alone makes one of the two: wide heads have no registers for both sums, and computing scores twice is
    cheaper than spilling. Keys beyond the end have rows of their own in the sums, never stored: they need no bounds.
    """
    PARTS: tl.constexpr = TILE_K // BLOCK_K
    tiles = tl.cdiv(keys, TILE_K)
    batch, kv_head, tile, part = place(order, heads // GROUP, tiles, groups, section, mask_batches, 1, PARTS, RULES > 0)
    start_k = tile * TILE_K + part * BLOCK_K
    if start_k >= keys:
        return
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
        full = tl.cdiv(queries, TILE_Q)
        last = full

    key = load_rows(
        k, batch, kv_head, start_k, keys, k_batch, k_head, k_row, BLOCK_K, DIM, DIM_PADDED, True, DESCRIPTORS
    )
    value = key
    if DK:
        value = load_rows(
            v, batch, kv_head, start_k, keys, v_batch, v_head, v_row, BLOCK_K, DIM, DIM_PADDED, True, DESCRIPTORS
        )
    dk_acc = tl.zeros([BLOCK_K, DIM_PADDED], tl.float32)
    dv_acc = tl.zeros([BLOCK_K, DIM_PADDED], tl.float32)
    dk_acc, dv_acc = _dkv_walk(
        dk_acc, dv_acc, key, value, q, d_out, levels, deltas, index, ranges, admits, kinds, batch, kv_head, start_k,
        0, full, q_batch, q_head, q_row, d_batch, d_head, d_row, inner, factor, heads, queries, keys,
        DK, DV, GROUP, RULES, KINDS, CAP, False, TILE_Q, BLOCK_Q, BLOCK_K, DIM, DIM_PADDED, DESCRIPTORS, STAGES,
    )  # fmt: skip
    if RULES > 0:
        dk_acc, dv_acc = _dkv_walk(
            dk_acc, dv_acc, key, value, q, d_out, levels, deltas, index, ranges, admits, kinds, batch, kv_head, start_k,
            full, last, q_batch, q_head, q_row, d_batch, d_head, d_row, inner, factor, heads, queries, keys,
            DK, DV, GROUP, RULES, KINDS, CAP, True, TILE_Q, BLOCK_Q, BLOCK_K, DIM, DIM_PADDED, DESCRIPTORS, STAGES,
        )  # fmt: skip
    if DK:
        store_rows(
            dk, dk_acc * scale, batch, kv_head, start_k, keys, dk_batch, dk_head, dk_row, BLOCK_K, DIM, DIM_PADDED
        )
    if DV:
        store_rows(dv, dv_acc, batch, kv_head, start_k, keys, dv_batch, dv_head, dv_row, BLOCK_K, DIM, DIM_PADDED)
