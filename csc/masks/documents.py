"""Several documents in one row, and padding: who belongs together, and who is nobody.

Terms
  document ids     int64 [B, T]: tokens with the same number are one document, which is contiguous; negative: padding
  padding          tokens that nobody sees and that see nothing: what a model computes for them is ignored

    ids_of_lengths(lengths, tokens) -> int64 [B, T]           lengths [[500, 700], ...] that sum to `tokens`
    ids_of_positions(position_ids) -> int64 [B, T]            a new document wherever positions start again
    documents(ids, bidirectional) -> Mask                     causal or bidirectional inside each document
    padding(attention_mask, causal) -> Mask                   over the tokens that are there
    within(mask, ids) -> Mask                                 the mask, inside documents only
    padded(mask, attention_mask) -> Mask                      the mask without padding

Documents only narrow ranges, so they cost neither rules nor kinds. Padding does the same where the tokens of every row
lie together; elsewhere a key that is padding gets kind 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from csc.errors import InputError
from csc.kernels.mask import Mask
from csc.masks.checks import Numbers, positive, refuse_where, row_major, same_shape
from csc.masks.equal_runs import begins, bounds, bounds_of, returns
from csc.masks.plain import ranged


def ids_of_lengths(lengths: Sequence[Any] | torch.Tensor, tokens: int | None = None) -> torch.Tensor:
    """Document ids of lengths: 0, 0, .., 1, 1, ...

    Args:
        lengths: Of one row, or a list for every row.
        tokens: What every row sums to; None: what the first one sums to.

    Returns:
        int64 [B, T].

    Raises:
        InputError: A row sums to something else; it is named.
    """
    given = lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths
    rows = [given] if not given or isinstance(given[0], int) else given
    found = []
    for b, row in enumerate(rows):
        sizes = torch.tensor([positive(int(n), f"row {b}: length {i}") for i, n in enumerate(row)])
        if tokens is None:
            tokens = int(sizes.sum())
        if int(sizes.sum()) != tokens:
            raise InputError(
                f"the lengths of documents sum to {int(sizes.sum())}, and the row has {tokens} tokens",
                f"lengths, row {b}",
                "Name padding at the end as a document of its own, or use document ids with -1 for padding",
            )
        found.append(torch.repeat_interleave(torch.arange(len(sizes)), sizes))
    if not tokens:
        raise InputError("there is no document", "lengths")
    return torch.stack(found)


def ids_of_positions(position_ids: Numbers) -> torch.Tensor:
    """Document ids of position ids that start again at 0, as HF packs documents.

    Args:
        position_ids: [B, T] or [T]; inside a document they go up by 1.

    Returns:
        int64 [B, T].

    Raises:
        InputError: A position neither follows the one before nor starts a document.
    """
    positions = row_major(position_ids, "position_ids")
    step = positions[:, 1:] - positions[:, :-1]
    restart = torch.cat([torch.ones_like(positions[:, :1], dtype=torch.bool), step != 1], 1)
    refuse_where(
        restart & (positions != 0),
        "position_ids",
        lambda b, t: f"{int(positions[b, t])} neither follows the position before it nor starts a document",
        "Documents start at 0 and go up by 1. Positions of another kind do not say where documents end: "
        "give document ids",
    )
    return restart.cumsum(1) - 1


def checked_ids(ids: Numbers, name: str = "document ids") -> torch.Tensor:
    """int64 [B, T]. InputError where a document goes on after another one has begun. Padding may come anywhere."""
    table = row_major(ids, name)
    refuse_where(
        returns(table) & (table >= 0),
        name,
        lambda b, t: f"document {int(table[b, t])} goes on after another one",
        "The tokens of a document lie together",
    )
    return table


def documents(ids: Numbers, bidirectional: bool = False) -> Mask:
    """Every token sees its own document.

    Args:
        ids: Document ids [B, T]; a document lies together, a negative number is padding.
        bidirectional: Later tokens too.

    Raises:
        InputError: A document goes on after another one has begun.
    """
    table = checked_ids(ids)
    lo, hi = bounds(table)
    slot = torch.arange(table.shape[1], device=table.device)
    return ranged(lo, torch.where(table < 0, lo, hi if bidirectional else slot + 1), table.shape[1])


def within(mask: Mask, ids: Numbers) -> Mask:
    """The part of a mask that stays inside documents.

    Args:
        mask: Over T x T.
        ids: Document ids [B, T].

    Raises:
        InputError: The sizes differ, or a document goes on after another one.
    """
    table = checked_ids(ids)
    _fits(mask, table, "document ids")
    lo, hi = bounds(table)
    return _narrowed(mask, lo, torch.where(table < 0, lo, hi))


def padding(attention_mask: Numbers, causal: bool = False) -> Mask:
    """Every token sees every token that is there.

    Args:
        attention_mask: [B, T], 0 where padding is, else 1.
        causal: Up to itself.

    Raises:
        InputError: A value is neither 0 nor 1.
    """
    there = row_major(attention_mask, "attention_mask")
    slot = torch.arange(there.shape[1], device=there.device)[None]
    hi = slot + 1 if causal else torch.full_like(slot, there.shape[1])
    return padded(ranged(torch.zeros_like(slot), hi, there.shape[1]), there)


def padded(mask: Mask, attention_mask: Numbers) -> Mask:
    """A mask without padding, which neither sees nor is seen.

    Args:
        mask: Over T x T.
        attention_mask: [B, T] of 0 and 1.

    Raises:
        InputError: A value is neither 0 nor 1, or the sizes differ.
    """
    table = row_major(attention_mask, "attention_mask")
    refuse_where(
        (table != 0) & (table != 1),
        "attention_mask",
        lambda b, t: f"{int(table[b, t])} says neither padding (0) nor token (1)",
        "A mask of document numbers goes to csc.masks.within",
    )
    _fits(mask, table, "attention_mask")
    there = table != 0
    if not bool((begins(table) & there).sum(1).gt(1).any()):  # the tokens of every row lie together
        lo, hi = bounds_of(begins(table))
        first = torch.where(there, lo, 0).amax(1, keepdim=True)
        behind = torch.where(there, hi, 0).amax(1, keepdim=True)
        return _narrowed(mask, first.expand_as(lo), torch.where(there, behind, first))
    batch = max(mask.batch, table.shape[0])
    narrowed = _narrowed(mask, torch.zeros_like(table), table * mask.keys)
    kinds = torch.where(there, mask.all_kinds(), 0).expand(batch, -1)
    return Mask(narrowed.ranges, narrowed.all_admits(), kinds, mask.keys)


def _fits(mask: Mask, table: torch.Tensor, name: str) -> None:
    if mask.queries != mask.keys:
        raise InputError(f"the mask is {mask.queries} x {mask.keys}, and {name} are of one sequence", name)
    same_shape("the mask", mask.ranges[:, 0, :, 0], name, table)


def _narrowed(mask: Mask, lo: torch.Tensor, hi: torch.Tensor) -> Mask:
    """Every rule cut to [lo, hi) of its query, int64 [B, T] each."""
    batch = max(mask.batch, lo.shape[0])
    ranges = torch.stack(
        [
            torch.maximum(mask.ranges[..., 0], lo[:, None].to(torch.int32)),
            torch.minimum(mask.ranges[..., 1], hi[:, None].to(torch.int32)),
        ],
        -1,
    )
    admits = None if mask.admits is None else mask.admits.expand(batch, -1, -1)
    kinds = None if mask.kinds is None else mask.kinds.expand(batch, -1)
    return Mask(ranges, admits, kinds, mask.keys)
