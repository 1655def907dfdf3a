"""A mask and its tile lists in one tensor, so that they travel through graphs, stages and operators as one value.

    pack(mask, block_q, block_k) -> int32 [B, words]
    unpack(packed, form) -> (Mask, Tiles)        views, nothing is copied or looked at
    unpack_once(packed, form) -> (Mask, Tiles)   the same ones for each call with a tensor that nothing has written to
    words(form) -> int                           per sample; counted_words: of sizes that are numbers, counted once

A packed mask is a flat buffer of sections, each for the whole batch and dense: kinds, admits (int64, so they come
first), ranges, and the lists by query tile and by key tile.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from csc.kernels.mask import Mask
from csc.kernels.tiles import TileLists, Tiles, tiles

UNPACKED = "_csc_unpacked"  # the name under which a tensor keeps it


class Form(NamedTuple):
    """The sizes that say where the sections are. kinds: whether the mask tells kinds of keys apart."""

    rules: int
    kinds: bool
    queries: int
    keys: int
    block_q: int
    block_k: int

    def sections(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """(dtype, shape of one sample) of each section."""
        rows, columns = -(-self.queries // self.block_q), -(-self.keys // self.block_k)
        wide: list[tuple[torch.dtype, tuple[int, ...]]] = [
            (torch.int64, (self.keys,)),
            (torch.int64, (self.rules, self.queries)),
        ]
        return [
            *(wide if self.kinds else []),
            (torch.int32, (self.rules, self.queries, 2)),
            (torch.int32, (rows, columns)),
            (torch.int32, (rows, 2)),
            (torch.int32, (columns, rows)),
            (torch.int32, (columns, 2)),
        ]


def words(form: Form) -> int:
    """int32 words of one sample."""
    return sum(math.prod(shape) * dtype.itemsize // 4 for dtype, shape in form.sections())


counted_words = cache(words)


def pack(mask: Mask, block_q: int, block_k: int) -> torch.Tensor:
    """int32 [B, words]: the mask and its lists for tiles of block_q queries x block_k keys."""
    found = tiles(mask, block_q, block_k)
    parts = [mask.ranges, found.of_queries.index, found.of_queries.counts, found.of_keys.index, found.of_keys.counts]
    if mask.kinds is not None and mask.admits is not None:
        parts = [mask.kinds, mask.admits, *parts]
    return torch.cat([part.contiguous().flatten().view(torch.int32) for part in parts]).view(mask.batch, -1)


def unpack(packed: torch.Tensor, form: Form) -> tuple[Mask, Tiles]:
    """The mask and its lists, as views of the buffer."""
    flat, batch, start = packed.reshape(-1), packed.shape[0], 0
    parts: list[torch.Tensor] = []
    for dtype, shape in form.sections():
        stop = start + batch * math.prod(shape) * dtype.itemsize // 4
        parts.append(flat[start:stop].view(dtype).view(batch, *shape))
        start = stop
    kinds, admits = (parts.pop(0), parts.pop(0)) if form.kinds else (None, None)
    ranges, q_index, q_counts, k_index, k_counts = parts
    lists = Tiles(form.block_q, form.block_k, TileLists(q_index, q_counts), TileLists(k_index, k_counts))
    return Mask(ranges, admits, kinds, form.keys), lists


def unpack_once(packed: torch.Tensor, form: Form) -> tuple[Mask, Tiles]:
    """As `unpack`, of a copy that stays with the tensor: layers that share a mask share what a kernel has made of it.
    A copy, since views hold what they are views of: the tensor would hold itself.
    """
    if packed.is_inference():  # these do not count what is written to them
        return unpack(packed, form)
    kept = vars(packed).get(UNPACKED)
    if kept is None or kept[0] != (form, packed._version):
        kept = ((form, packed._version), unpack(packed.detach().clone(), form))
        setattr(packed, UNPACKED, kept)
    found: tuple[Mask, Tiles] = kept[1]
    return found
