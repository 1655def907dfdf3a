"""Which queries the CPU's attention runs against which keys, block after block.

    blocks(q, keys, mask, tiles, softcap, reordered) -> Block, Block, ...
        q: [B, H, Tq, D]; mask and tiles both None: all see all

A mask is looked at once for all layers that share it, forward and backward: what is made of it stays with it, if its
biases take no more than KEPT bytes together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from csc.kernels.mask import Mask
from csc.kernels.tiles import SEEN, Tiles

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
        found = list(_of_mask(mask, tiles, *key))
        known = [replace(found[0], whole=True)] if len(found) == 1 and _is_all(found[0], mask, batch) else found
        if sum(block.bias.nbytes for block in found if block.bias is not None) <= KEPT:
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
            {tile for i in of_block for tile in index[one, i, : counts[one][i][1]].tolist()}
            for one in range(mask.batch)
        ]
        for run, listed in _together(
            [sorted(one) for one in looked_at], slots, rows.stop - rows.start, ONE_CALL if few else FEW
        ):
            samples = slice(run[0], run[-1] + 1) if mask.batch > 1 else slice(0, 1)
            keys = _slots(listed, tiles.block_k, mask.keys)
            bias = blind = None
            if any(counts[one][i][0] < len(listed) for one in run for i in of_block):
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
    for sample, own in enumerate(visits):
        both, width = sorted({*listed, *own}), sum(slots[tile] for tile in own)
        unseen = (len(run) + 1) * sum(slots[tile] for tile in both) - looked - width
        if run and (not own or rows * unseen > most):
            yield run, listed
            run, both, looked = [], own, 0
        run, listed, looked = ([*run, sample], both, looked + width) if own else ([], [], 0)
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
