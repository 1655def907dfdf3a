"""Facts of a mask that planners ask for: area, loads, and the keys that a set of queries needs.

Terms
  area      visible pairs; its share is of all pairs of the batch
  load      visible keys of a query: what a token costs
  owner     the rank of every query, int [Tq] or [B, Tq], 0 .. ranks - 1; -1: nobody's
  needed    the keys that some query of a rank sees

    area(mask) -> int                                        share(mask) -> float
    loads(mask) -> int64 [B, Tq]                             block_loads(mask, block) -> int64 [B, nQ]
    needed_keys(mask, owner, ranks) -> bool [B, ranks, Tk]   token by token
    needed_blocks(pairs, owner, ranks) -> bool [B, ranks, nK]    in tiles, from `csc.kernels.mask.counts`

None of it looks at pairs one by one: a rule of a query is a range, so what a rank needs is a difference array over
keys. Exact, in integers. Counts of tiles and tile lists: `csc.kernels.mask`.
"""

from __future__ import annotations

import torch

from csc.errors import InputError
from csc.kernels.mask import Mask, visible
from csc.masks.equal_runs import few


def area(mask: Mask) -> int:
    """Visible pairs, of all rows of the batch (of one row where the mask holds for the whole batch)."""
    return int(visible(mask).sum())


def share(mask: Mask) -> float:
    """Visible pairs over all pairs."""
    return area(mask) / (mask.batch * mask.queries * mask.keys)


def loads(mask: Mask) -> torch.Tensor:
    """int64 [B, Tq]: the keys that each query sees."""
    return visible(mask)


def block_loads(mask: Mask, block: int) -> torch.Tensor:
    """Visible pairs of every block of queries.

    Args:
        mask: Any.
        block: Queries of a block; the last one may be short.

    Returns:
        int64 [B, nQ].
    """
    seen = visible(mask)
    blocks = -(-mask.queries // block)
    padded = torch.nn.functional.pad(seen, (0, blocks * block - mask.queries))
    return padded.view(len(seen), blocks, block).sum(-1)


def needed_keys(mask: Mask, owner: torch.Tensor, ranks: int) -> torch.Tensor:
    """The keys that some query of a rank sees, exact to the token.

    Args:
        mask: Any.
        owner: int [Tq] or [B, Tq]: the rank of every query, -1 for none.
        ranks: How many there are.

    Returns:
        bool [B, ranks, Tk].
    """
    device, keys = mask.ranges.device, mask.keys
    owner = _owners(owner, (mask.batch, mask.queries), ranks).to(device)
    lo, hi = mask.ranges[..., 0].clamp(0, keys).long(), mask.ranges[..., 1].clamp(0, keys).long()
    there = (lo < hi) & (owner >= 0)[:, None]
    found = torch.zeros(mask.batch, ranks, keys, dtype=torch.bool, device=device)
    values = [None] if mask.admits is None else few(mask.admits.flatten(0, -2)).tolist()
    line = owner.clamp(min=0)[:, None] * (keys + 1)
    for value in values:
        applies = there if value is None or mask.admits is None else there & (mask.admits == value)
        step = applies.to(torch.int32).flatten(1)
        open_ranges = torch.zeros(mask.batch, ranks * (keys + 1), dtype=torch.int32, device=device)
        open_ranges.scatter_add_(1, (line + lo).flatten(1), step)
        open_ranges.scatter_add_(1, (line + hi).flatten(1), -step)
        covered = open_ranges.view(mask.batch, ranks, keys + 1)[..., :-1].cumsum(-1) > 0
        found |= covered if value is None or mask.kinds is None else covered & ((mask.kinds & value) != 0)[:, None]
    return found


def needed_blocks(pairs: torch.Tensor, owner: torch.Tensor, ranks: int) -> torch.Tensor:
    """The blocks of keys of which a rank computes some tile.

    Args:
        pairs: int [B, nQ, nK]: visible pairs of tiles, as csc.kernels.mask.counts has them.
        owner: int [nQ] or [B, nQ]: the rank of every block of queries.
        ranks: How many there are.

    Returns:
        bool [B, ranks, nK].
    """
    owner = _owners(owner, (pairs.shape[0], pairs.shape[1]), ranks).to(pairs.device)
    mine = owner[:, None] == torch.arange(ranks, device=pairs.device)[:, None]  # [B, ranks, nQ]
    return torch.bmm(mine.to(torch.float32), (pairs > 0).to(torch.float32)) > 0


def _owners(owner: torch.Tensor, shape: tuple[int, int], ranks: int) -> torch.Tensor:
    table = owner[None] if owner.dim() == 1 else owner
    if (
        table.dim() != 2
        or table.shape[0] not in (1, shape[0])
        or table.shape[1] != shape[1]
        or table.is_floating_point()
    ):
        raise InputError(
            f"owner is {table.dtype} {list(owner.shape)}, not integers [{shape[1]}] or {list(shape)}", "owner"
        )
    if bool(((table < -1) | (table >= ranks)).any()):
        raise InputError(f"a rank outside of 0 .. {ranks - 1}", "owner", "Queries that no rank computes have -1")
    return table.long().expand(shape)
