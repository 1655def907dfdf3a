"""The attention kernels in Triton: forward, backward, and tile lists of a mask."""

import torch
import triton
import triton.language as tl
from csc.kernels.mask import Mask, TileLists, Tiles

from csc import devices

# --- What the attention kernels share: where a program works, how it loads rows, whom a query sees -------------------
#
# Terms
#   tile     block of queries x keys of the tile lists; a kernel's own blocks divide it, so it walks a tile in steps
#   group    the GROUP query heads that share one head of K and V
#   section  heads whose K and V fit into the L2 cache together; the programs of a section run one after the other
#   factor   scores in base 2 are factor * score; with a soft cap, score = tanh(inner * q.k), without, score = q.k
#
# Offsets that grow with batch x heads x length x head dim are 64 bits wide; those inside a block are 32.


LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# What changes from batch to batch: Triton must not compile again because a length has become divisible by 16.
RUNTIME = ["order", "index", "counts", "ranges", "admits", "kinds", "levels", "deltas", "lse"]
RUNTIME += ["heads", "groups", "section", "mask_batches", "queries", "keys", "entries"]


@triton.jit
def place(
    order,
    heads,
    tiles,
    groups,
    section,
    mask_batches,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    LISTS: tl.constexpr,
):
    """Program number to work. `groups` counts heads of K and V over the whole batch; `heads` those of one sequence."""
    pid = tl.program_id(0)
    row = pid // (section * GROUP * tiles * PARTS)
    rest = pid - row * section * GROUP * tiles * PARTS
    width = tl.minimum(section, groups - row * section) * GROUP
    rank = rest // width
    flat = row * section * GROUP + rest % width
    batch = flat // heads
    tile = rank // PARTS
    if LISTS:
        tile = tl.load(order + (batch % mask_batches) * tiles + tile).to(tl.int32)  # made by argsort: int64
    return batch, flat % heads, tile, rank % PARTS


@triton.jit
def load_rows(
    tensor, batch, head, start, length, batch_stride, head_stride, row_stride,
    BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BOUNDED: tl.constexpr, DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    """Rows start .. start + BLOCK of a head, zeros beyond DIM and (BOUNDED; descriptors always) beyond `length`."""
    if DESCRIPTOR:
        found = tl.reshape(tensor.load([batch, head, start, 0]), [BLOCK, DIM_PADDED])
    else:
        row = tl.arange(0, BLOCK)[:, None]
        column = tl.arange(0, DIM_PADDED)[None, :]
        base = batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride + start.to(tl.int64) * row_stride
        at = tensor + base + (row * row_stride + column)
        if BOUNDED and DIM != DIM_PADDED:
            found = tl.load(at, mask=(row < length - start) & (column < DIM), other=0.0)
        elif BOUNDED:
            found = tl.load(at, mask=row < length - start, other=0.0)
        elif DIM != DIM_PADDED:
            found = tl.load(at, mask=column < DIM, other=0.0)
        else:
            found = tl.load(at)
    return found


@triton.jit
def store_rows(
    tensor, value, batch, head, start, length, batch_stride, head_stride, row_stride,
    BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_rows`: rows beyond `length` and columns beyond DIM are left alone."""
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, DIM_PADDED)[None, :]
    base = batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride + start.to(tl.int64) * row_stride
    there = (row < length - start) & (column < DIM)
    tl.store(tensor + base + (row * row_stride + column), value.to(tensor.dtype.element_ty), mask=there)


@triton.jit
def seen(ranges, admits, kinds, rows, cols, queries, keys, RULES: tl.constexpr, KINDS: tl.constexpr):
    """Whether queries `rows` see keys `cols`: [M, 1] with [1, N] gives [M, N], [1, M] with [N, 1] gives [N, M].

    The pointers are those of the sequence: ranges [RULES, queries, 2], admits [RULES, queries], kinds [keys].
    Queries and keys that do not exist see nothing and are not seen. RULES 0: every key that exists.
    """
    there = rows < queries
    found = (cols < keys) & there
    if RULES > 0:
        if KINDS:
            kind = tl.load(kinds + cols, mask=cols < keys, other=0)
        for rule in tl.static_range(RULES):
            at = rule * queries + rows
            lo = tl.load(ranges + 2 * at, mask=there, other=0)
            hi = tl.minimum(tl.load(ranges + 2 * at + 1, mask=there, other=0), keys)
            one = (cols >= lo) & (cols < hi)
            if KINDS:
                one = one & ((tl.load(admits + at, mask=there, other=0) & kind) != 0)
            if rule == 0:
                found = one
            else:
                found = found | one
    return found


@triton.jit
def capped(x):
    """tanh from exp2 alone: every back end and the interpreter have it. Absolute error about 1e-7."""
    small = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


# --- The forward kernel ----------------------------------------------------------------------------------------------
#
# It computes softmax(scores) V over the key tiles that a query tile sees, and the log-sum-exp of each query.
#
# Terms: see csc.kernels.triton_kernels.
#
# Online softmax (Milakov and Gimelshein 2018; FlashAttention 2) in base 2. Full tiles are walked in a loop that knows
# no mask, partial ones in a second loop that evaluates the rules, so only the latter pays for them.


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


# --- The backward kernels --------------------------------------------------------------------------------------------
#
# They compute statistics of rows, dQ over the key tiles of queries, dK and dV over the query tiles of keys.
#
# Terms: see csc.kernels.triton_kernels, and
#   level    lse in base 2, +inf for a query that sees nothing or does not exist: its weights exp2(score - level) are 0
#   delta    sum of out * d_out over the head dim; d_score = weight * (d_weight - delta)
#
# Every gradient is written by one program, which adds in a fixed order: no atomics, equal bits from run to run.
# `padded` is a whole number of query tiles, so levels and deltas are read without bounds. Scores are not kept but
# computed again.


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


# --- Tile lists of a mask in two launches, on the device of the mask: what csc.kernels.mask computes, for GPUs ------
#
# The blocks are powers of two. A tile that no rule's range touches costs a look at the ranges of its queries; any
# other is written out pair by pair in registers: once a batch what attention does in each layer and head. Nothing
# waits for the device.


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
    """Returns the tile lists of a mask, counted and listed by kernels on the mask's device. block_q, block_k: queries
    and keys of a tile.
    """
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
