"""A mask and its tile lists in one tensor, so that they travel through graphs, stages and operators as one value.

A packed mask is a flat buffer of sections, each for the whole batch and dense: kinds, admits (int64, so they come
first), ranges, and the lists by query tile and by key tile.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from csc.kernels.mask import SEEN, Mask, TileLists, Tiles, tiles, written_out

UNPACKED, PACKED = "_csc_unpacked", "_csc_packed"  # the names under which a tensor keeps it


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
    mask = written_out(mask)
    tiles = _listed(mask, block_q, block_k)
    parts = [mask.ranges, tiles.of_queries.index, tiles.of_queries.counts, tiles.of_keys.index, tiles.of_keys.counts]
    wide = [tensor.reshape(-1).view(torch.int32) for tensor in (mask.kinds, mask.admits) if tensor is not None]
    packed = torch.cat([*wide, *(part.reshape(-1) for part in parts)]).view(mask.batch, -1)
    if SEEN in mask.known:  # who attends in this process need not take it apart, nor write it out again
        form = Form(mask.rules, mask.kinds is not None, mask.queries, mask.keys, block_q, block_k)
        setattr(packed, UNPACKED, ((form, packed._version), (mask.copied(), tiles)))
    return packed


def _listed(mask: Mask, block_q: int, block_k: int) -> Tiles:
    """The lists, by the kernels of a device that has some: there `tiles` would be a hundred launches, with waits."""
    if mask.ranges.is_cpu:
        return tiles(mask, block_q, block_k)
    from csc.kernels import triton_kernels  # Triton is there only where GPUs are

    return triton_kernels.tiles(mask, block_q, block_k)


def pack_once(mask: Mask, block_q: int, block_k: int) -> torch.Tensor:
    """As `pack`. Of a short mask on a CPU the ranges keep the latest one, if nobody writes to either: in most models
    they are the same tensor in every step, and samples without padding have equal kinds.
    """
    ranges = mask.ranges
    if ranges.is_inference():
        return pack(mask, block_q, block_k)
    kept: _KeptMask | None = vars(ranges).get(PACKED)
    if kept is not None and kept.holds(mask, block_q, block_k):
        return kept.packed
    packed = pack(mask, block_q, block_k)
    unpacked = vars(packed).get(UNPACKED)
    if unpacked is not None:
        setattr(ranges, PACKED, _KeptMask(packed, unpacked[1][0], block_q, block_k, (ranges._version, packed._version)))
    return packed


class _KeptMask(NamedTuple):
    """own: the mask, with values of its own. versions: of the ranges and of what was packed."""

    packed: torch.Tensor
    own: Mask
    block_q: int
    block_k: int
    versions: tuple[int, int]

    def holds(self, mask: Mask, block_q: int, block_k: int) -> bool:
        """Whether it is of the same ranges, as they were, and of equal admits and kinds."""
        key = self.own
        return (
            self.versions == (mask.ranges._version, self.packed._version)
            and (self.block_q, self.block_k, key.keys) == (block_q, block_k, mask.keys)
            and (key.kinds is None) == (mask.kinds is None)
            and (key.kinds is None or torch.equal(key.kinds, mask.kinds))
            and (key.admits is None or torch.equal(key.admits, mask.admits))
        )


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
    value: tuple[Mask, Tiles] = kept[1]
    return value
