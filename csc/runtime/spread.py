"""Where the tokens of one microbatch are: dispatched in blocks to the ranks of a context-parallel group.

Terms
  slot     a place in a rank's tensors; slots beyond the rank's tokens are padding
  part     keys that a rank's queries see: its own, or those that come from the other ranks (foreign)

    spread(spec, masks) -> Spread              the same on every rank of the group, from the same batch
    parts(mask, spread, number, rank, share, blocks, device) -> (own, foreign): a Part each, or None

A plan is made for one mask or several (layers may differ), for all samples of the microbatch together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from csc.kernels import packing
from csc.kernels.mask import Mask
from csc.kernels.packing import Form
from csc.kernels.tiles import counts
from csc.planning.dispatch import EMPTY, FULL, PARTIAL, LayerMask, Rates, Workload, plan
from csc.runtime.specs import ContextSpec


@dataclass(frozen=True)
class Spread:
    """tokens[r]: int64, the tokens of rank r, ascending. needs[m][r]: bool [blocks], the key blocks it needs of mask m.

    owner: int [blocks], the rank of each block.
    """

    block: int
    tokens: tuple[torch.Tensor, ...]
    needs: tuple[np.ndarray, ...]
    owner: np.ndarray

    def held(self, mask: int, rank: int, owner: int) -> torch.Tensor:
        """int64: the tokens of `owner` whose keys `rank` needs under a mask, ascending."""
        wanted = torch.from_numpy(self.needs[mask][rank] & (self.owner == owner))
        own = self.tokens[owner]
        return own[wanted[own // self.block]]


def spread(spec: ContextSpec, masks: Sequence[Mask]) -> Spread:
    """Dispatch the blocks of a sequence so that the ranks' attention takes least time by the model."""
    tables = [_tiles(mask, spec) for mask in masks]
    layers = tuple(
        LayerMask(tile, layers=float(kind.layers)) for kind, table in zip(spec.masks, tables) for tile in table
    )
    rates = Rates(spec.tile_seconds, spec.block_seconds)
    owner = plan(Workload(layers, spec.tokens, spec.block, spec.ranks, rates)).ranks_of_blocks
    tokens = torch.arange(spec.tokens)
    of_token = torch.from_numpy(owner)[tokens // spec.block]
    seen = [(table != EMPTY).any(0) for table in tables]
    needs = tuple(np.stack([one[owner == rank].any(0) for rank in range(spec.ranks)]) for one in seen)
    return Spread(spec.block, tuple(tokens[of_token == rank] for rank in range(spec.ranks)), needs, owner)


def _tiles(mask: Mask, spec: ContextSpec) -> np.ndarray:
    """int8 [B, blocks, blocks]: EMPTY, PARTIAL or FULL."""
    visible = counts(mask, spec.block, spec.block)
    sizes = torch.full((visible.shape[1],), spec.block)
    sizes[-1] = spec.tokens - spec.block * (len(sizes) - 1)
    full = visible == sizes[:, None] * sizes[None, :]
    kinds = torch.where(full, FULL, torch.where(visible > 0, PARTIAL, EMPTY))
    return kinds.to(torch.int8).numpy()


@dataclass(frozen=True)
class Part:
    """One part of a rank's attention. packed: its mask over keys in ascending order; form: how it is packed."""

    keys: torch.Tensor
    packed: torch.Tensor
    form: Form


def parts(
    mask: Mask, where: Spread, number: int, rank: int, share: int, blocks: tuple[int, int], device: torch.device
) -> tuple[Part | None, Part | None]:
    """(own, foreign) keys of a rank's queries under the mask of this number; None for a part that none of them sees.

    mask: of the whole sequence, on the CPU. share: slots of a rank. blocks: see csc.kernels.attention.blocks.
    """
    own = where.tokens[rank]
    lent = [where.held(number, rank, owner) for owner in range(len(where.tokens)) if owner != rank]
    foreign = torch.cat(lent).sort().values
    return tuple(  # type: ignore[return-value]
        _part(mask, keys, own, share, blocks, device) for keys in (where.held(number, rank, rank), foreign)
    )


def _part(
    mask: Mask, keys: torch.Tensor, own: torch.Tensor, share: int, blocks: tuple[int, int], device: torch.device
) -> Part | None:
    """The mask between a rank's tokens `own` (then padding up to `share`) and some keys; None if there are none.

    mask: of the whole sequence, on the CPU. keys: their tokens, ascending, int64.
    """
    if not len(keys):
        return None
    rows = mask.ranges[:, :, own].long()
    mapped = torch.searchsorted(keys, rows.contiguous()).to(torch.int32)
    ranges = torch.zeros(mask.batch, mask.rules, share, 2, dtype=torch.int32)
    ranges[:, :, : len(own)] = mapped
    admits = kinds = None
    if mask.admits is not None and mask.kinds is not None:
        admits = torch.zeros(mask.batch, mask.rules, share, dtype=torch.int64)
        admits[:, :, : len(own)] = mask.admits[:, :, own]
        kinds = mask.kinds[:, keys].contiguous()
    local = Mask(ranges, admits, kinds, len(keys))
    form = Form(mask.rules, kinds is not None, share, len(keys), *blocks)
    return Part(keys, packing.pack(local, *blocks).to(device), form)
