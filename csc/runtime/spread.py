"""Where the tokens of one microbatch are: dispatched in blocks to the ranks of a context-parallel group.

Terms
  slot     a place in a rank's tensors; slots beyond the rank's tokens are padding
  part     keys that a rank's queries see: its own, or those that come from the other ranks (foreign)

    spread(spec, masks) -> Spread              the same on every rank of the group, from the same batch
    parts(mask, spread, number, rank, shard, blocks, device) -> (own, foreign): a Part each, or None
    part(mask, keys, width, own, shard, blocks, device) -> AttentionPart
    forward(q, k, v, part, scale, softcap), backward(d_out, q, k, v, out, lse, part, scale, softcap)
    Recent().of(spec, masks) -> Known          what was worked out for equal masks not long ago; any thread may ask

A plan is made for one mask or several (layers may differ), for all samples of the microbatch together.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from csc.kernels import packing
from csc.kernels.mask import Mask, counts
from csc.kernels.packing import Form
from csc.planning.dispatch import EMPTY, FULL, PARTIAL, Dispatch, LayerMask, Rates, Workload, plan
from csc.runtime.specs import ContextSpec


@dataclass(frozen=True, eq=False)
class Spread:
    """tokens[r]: int64, the tokens of rank r, ascending. needs[m][r]: bool [blocks], the key blocks it needs of mask m.

    dispatch: which rank each block is on, and what that takes by the model.
    """

    block: int
    tokens: tuple[torch.Tensor, ...]
    needs: tuple[np.ndarray, ...]
    dispatch: Dispatch

    def blocks(self, rank: int) -> torch.Tensor:
        """int64: the blocks of a rank, ascending. They fill its slots from the first on, each `block` of them."""
        return torch.from_numpy(np.flatnonzero(self.dispatch.ranks_of_blocks == rank))

    def held(self, mask: int | None, rank: int, owner: int) -> torch.Tensor:
        """int64: the blocks of `owner` whose keys `rank` needs under a mask, ascending; all of them without one."""
        if mask is None:
            return self.blocks(owner)
        needed = self.needs[mask][rank] & (self.dispatch.ranks_of_blocks == owner)
        return torch.from_numpy(np.flatnonzero(needed))

    def collective(self, heads: int, kv_heads: int) -> str:
        """The cheapest way by the model to bring queries and keys of so many heads together."""
        prepared = self.dispatch.prepared
        work = replace(prepared.workload, heads=heads, kv_heads=kv_heads)
        return replace(self.dispatch, prepared=replace(prepared, workload=work)).collective


def spread(spec: ContextSpec, masks: Sequence[Mask]) -> Spread:
    """Dispatch the blocks of a sequence so that the ranks' attention takes least time by the model."""
    tables = [_tiles(mask, spec) for mask in masks]
    layers = tuple(
        LayerMask(tile, layers=kind.layers / len(table)) for kind, table in zip(spec.masks, tables) for tile in table
    )
    rates = Rates(spec.tile_seconds, spec.block_seconds)
    dispatch = plan(Workload(layers, spec.tokens, spec.block, spec.ranks, rates))
    owner = dispatch.ranks_of_blocks
    tokens = torch.arange(spec.tokens)
    of_token = torch.from_numpy(owner)[tokens // spec.block]
    seen = [(table != EMPTY).any(0) for table in tables]
    needs = tuple(np.stack([one[owner == rank].any(0) for rank in range(spec.ranks)]) for one in seen)
    return Spread(spec.block, tuple(tokens[of_token == rank] for rank in range(spec.ranks)), needs, dispatch)


def _tiles(mask: Mask, spec: ContextSpec) -> np.ndarray:
    """int8 [B, blocks, blocks]: EMPTY, PARTIAL or FULL."""
    visible = counts(mask, spec.block, spec.block)
    sizes = torch.full((visible.shape[1],), spec.block)
    sizes[-1] = spec.tokens - spec.block * (len(sizes) - 1)
    full = visible == sizes[:, None] * sizes[None, :]
    kinds = torch.where(full, FULL, torch.where(visible > 0, PARTIAL, EMPTY))
    return kinds.to(torch.int8).numpy()


@dataclass(frozen=True, eq=False)
class Known:
    """Masks, how their tokens are spread, and what each rank has planned for them (csc.runtime.context_group)."""

    spec: ContextSpec
    masks: tuple[Mask, ...]
    spread: Spread
    plans: dict[int, Any] = field(default_factory=dict)


@dataclass
class Recent:
    """The last few spreads: microbatches and steps often have equal masks. The ranks of a process share them.

    asked: of each spec, the ways of attention that plans were asked for: what the next plan will be asked for too.
    """

    most: int = 8
    known: list[Known] = field(default_factory=list)
    asked: dict[ContextSpec, set[Any]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, spec: ContextSpec, masks: Sequence[Mask]) -> Known:
        """How these masks' tokens are spread. Masks are compared element by element."""
        with self.lock:
            found = self._latest(spec, masks)
        if found is None:  # planned without the lock: another thread may plan the next batch meanwhile
            kept = tuple(_copy(mask) for mask in masks)  # a caller may write the next batch into the same memory
            made = Known(spec, kept, spread(spec, kept))
            with self.lock:
                found = self._latest(spec, masks) or made
                if found is made:
                    del self.known[: max(0, len(self.known) + 1 - self.most)]
                    self.known.append(made)
        return found

    def keep(self, most: int) -> None:
        """Keep at least so many from now on."""
        self.most = max(self.most, most)

    def _latest(self, spec: ContextSpec, masks: Sequence[Mask]) -> Known | None:
        """What is known of equal masks, which thereby are the latest that were asked for."""
        found = next((one for one in self.known if one.spec == spec and _equal(one.masks, masks)), None)
        if found is not None:
            self.known.remove(found)
            self.known.append(found)
        return found


def _tensors(mask: Mask) -> list[torch.Tensor]:
    return [one for one in (mask.ranges, mask.admits, mask.kinds) if one is not None]


def _equal(some: Sequence[Mask], others: Sequence[Mask]) -> bool:
    pairs = [(_tensors(one), _tensors(other)) for one, other in zip(some, others, strict=True)]
    return all(len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in pairs)


def _copy(mask: Mask) -> Mask:
    admits, kinds = (None if one is None else one.clone() for one in (mask.admits, mask.kinds))
    return Mask(mask.ranges.clone(), admits, kinds, mask.keys)


@dataclass(frozen=True)
class AttentionPart:
    """One part of a rank's attention. keys: the tokens of its first slots of keys; packed, form: its mask."""

    keys: torch.Tensor
    packed: torch.Tensor
    form: Form

    @property
    def numbers(self) -> tuple[int, bool, int, int]:
        """What csc::attention takes behind a packed mask."""
        return self.form.rules, self.form.kinds, self.form.block_q, self.form.block_k


def parts(
    mask: Mask, where: Spread, number: int, rank: int, shard: int, blocks: tuple[int, int], device: torch.device,
    everything: bool = False,
) -> tuple[AttentionPart | None, AttentionPart | None]:  # fmt: skip
    """A rank's attention under the mask of this number, to its own keys as they are and to whole foreign blocks in
    ascending order; None for a part that none of its queries sees, unless `everything` is brought to all.

    mask: of the whole sequence, on the CPU. shard: slots of a rank. blocks: see csc.kernels.attention.blocks.
    """
    own, others = where.tokens[rank], [owner for owner in range(len(where.tokens)) if owner != rank]
    lent = [where.held(None if everything else number, rank, owner) for owner in others]
    blocks_of = torch.cat(lent).sort().values
    foreign = (blocks_of[:, None] * where.block + torch.arange(where.block)).flatten()
    width = len(foreign)
    foreign = foreign[foreign < mask.keys]
    sees_own = len(where.held(number, rank, rank)) > 0
    return (
        part(mask, own, shard, own, shard, blocks, device) if sees_own else None,
        part(mask, foreign, width, own, shard, blocks, device) if width else None,
    )


def part(
    mask: Mask, keys: torch.Tensor, width: int, own: torch.Tensor, shard: int, blocks: tuple[int, int],
    device: torch.device,
) -> AttentionPart:  # fmt: skip
    """The mask between tokens `own`, then padding up to `shard`, and tokens `keys`, then padding up to `width`."""
    rows = mask.ranges[:, :, own].long()
    ranges = torch.zeros(mask.batch, mask.rules, shard, 2, dtype=torch.int32)
    ranges[:, :, : len(own)] = torch.searchsorted(keys, rows.contiguous())
    admits = kinds = None
    if mask.admits is not None and mask.kinds is not None:
        admits = torch.zeros(mask.batch, mask.rules, shard, dtype=torch.int64)
        admits[:, :, : len(own)] = mask.admits[:, :, own]
        kinds = torch.zeros(mask.batch, width, dtype=torch.int64)
        kinds[:, : len(keys)] = mask.kinds[:, keys]
    local = Mask(ranges, admits, kinds, width)
    form = Form(mask.rules, kinds is not None, shard, width, *blocks)
    return AttentionPart(keys, packing.pack(local, *blocks).to(device), form)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, one: AttentionPart, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """csc::attention of a part."""
    return torch.ops.csc.attention(q, k, v, one.packed, *one.numbers, scale, softcap)


def backward(
    d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    one: AttentionPart, scale: float, softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """csc::attention_backward of a part; out and lse may be those of all parts together."""
    return torch.ops.csc.attention_backward(d_out, q, k, v, out, lse, one.packed, *one.numbers, scale, softcap)
