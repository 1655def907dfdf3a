"""What the attention kernels share: where a program works, how it loads rows, whom a query sees.

Terms
  tile     block of queries x keys of the tile lists; a kernel's own blocks divide it, so it walks a tile in steps
  group    the GROUP query heads that share one head of K and V
  section  heads whose K and V fit into the L2 cache together; the programs of a section run one after the other
  factor   scores in base 2 are factor * score; with a soft cap, score = tanh(inner * q.k), without, score = q.k

    place(...) -> (batch, head, tile, part)            of this program: long tiles first, heads of a group adjacent
    load_rows(...) -> [BLOCK, DIM_PADDED]              rows of one head, from a pointer or a tensor descriptor
    seen(...) -> bool, rows x cols                     the rules of the mask, for any pair of broadcastable positions
    capped(x) -> tanh(x)

Offsets that grow with batch x heads x length x head dim are 64 bits wide; those inside a block are 32.
"""

import triton
import triton.language as tl

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
