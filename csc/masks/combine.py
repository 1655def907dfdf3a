"""Unions and intersections of masks, a mask with as few rules as it needs, and facts that planners ask for."""

from __future__ import annotations

from itertools import combinations

import torch

from csc.errors import InputError
from csc.kernels.mask import EVERYTHING, MOST_RULES, Mask, visible

# --- Runs of equal numbers along rows: where each begins and ends, and whether a number comes back -------------------
#
# Terms: a *run* is a longest stretch of equal numbers in a row; a number is *whole* in a row if it has one run there.
#
# All of it is O(B T) without a loop over positions.


def begins(values: torch.Tensor) -> torch.Tensor:
    """bool [B, T]: the number differs from the one before it, or is the first."""
    first = torch.ones_like(values[:, :1], dtype=torch.bool)
    return torch.cat([first, values[:, 1:] != values[:, :-1]], 1)


def bounds(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [B, T] each: the first position of the run that a position is in, and the one behind its last."""
    return bounds_of(begins(values))


def bounds_of(start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from bool [B, T], True where a run begins (position 0 always is one)."""
    length = start.shape[1]
    slot = torch.arange(length, device=start.device)
    lo = torch.where(start, slot, 0).cummax(1).values
    # The end of a run is the next beginning: look from the back.
    end = torch.where(start, slot, length).roll(-1, 1)
    end[:, -1] = length
    hi = end.flip(1).cummin(1).values.flip(1)
    return lo, hi


def returns(values: torch.Tensor) -> torch.Tensor:
    """bool [B, T]: True at the beginning of every run whose number already had a run in this row."""
    returning = torch.zeros_like(values, dtype=torch.bool)
    row, position = begins(values).nonzero(as_tuple=True)  # as many as there are runs
    pairs = torch.stack([row, values[row, position]], 1)
    _, which = pairs.unique(dim=0, return_inverse=True)
    first = torch.full((int(which.max()) + 1,), len(which), device=values.device)
    first.scatter_reduce_(0, which, torch.arange(len(which), device=values.device), "amin")
    again = first[which] != torch.arange(len(which), device=values.device)
    returning[row[again], position[again]] = True
    return returning


def few(values: torch.Tensor) -> torch.Tensor:
    """int64 [n]: the different numbers of [B, T], ascending. Neighbours are mostly equal, so few are left to sort."""
    return values[begins(values)].unique()


# --- Unions and intersections of masks, and a mask with as few rules as it needs -------------------------------------
#
# Terms
#   class    keys that every mask of a combination takes for the same kind; each key has exactly one, so that sets of
#            classes can be cut as well as joined
#   compact  rules that touch and admit the same are one rule, covered rules are gone, kinds that decide nothing too
#
# Up to 63 classes and, after compaction, 8 rules; more is an InputError.


MOST_CLASSES = 63
LOOKED_THROUGH = 8  # different sets of kinds, in the search for kinds that decide nothing


def union(*masks: Mask) -> Mask:
    """What any of the masks lets through.

    Args:
        *masks: Of the same sizes.

    Raises:
        InputError: Sizes differ, or it takes more than 63 kinds of keys or 8 ranges a query.
    """
    kinds, admits = _joined(masks)
    batch = max(mask.batch for mask in masks)
    ranges = torch.cat([mask.ranges.expand(batch, -1, -1, -1) for mask in masks], 1)
    return compact(ranges, None if admits is None else torch.cat(admits, 1), kinds, masks[0].keys)


def intersection(*masks: Mask) -> Mask:
    """What all masks let through: every rule of one with every rule of the other.

    Args:
        *masks: Of the same sizes.

    Raises:
        InputError: As for `union`.
    """
    kinds, admits = _joined(masks)
    batch = max(mask.batch for mask in masks)
    combined, ranges = masks[0], masks[0].ranges.expand(batch, -1, -1, -1)
    let = None if admits is None else admits[0]
    for i, mask in enumerate(masks[1:], 1):
        other = mask.ranges.expand(batch, -1, -1, -1)
        lo = torch.maximum(ranges[:, :, None, :, 0], other[:, None, :, :, 0]).flatten(1, 2)
        hi = torch.minimum(ranges[:, :, None, :, 1], other[:, None, :, :, 1]).flatten(1, 2)
        if let is not None and admits is not None:
            let = (let[:, :, None] & admits[i][:, None]).flatten(1, 2)
        combined = compact(torch.stack([lo, hi], -1), let, kinds, mask.keys, keep_kinds=True)
        ranges, let = combined.ranges, combined.admits
    return compact(combined.ranges, combined.admits, combined.kinds, combined.keys)


def _joined(masks: tuple[Mask, ...]) -> tuple[torch.Tensor | None, list[torch.Tensor] | None]:
    """Kinds that hold for all masks, int64 [B, Tk], and the admits of each in terms of them, int64 [B, R, Tq]."""
    if not masks:
        raise InputError("no mask was given")
    sizes = {(mask.queries, mask.keys) for mask in masks}
    if len(sizes) > 1 or len({mask.batch for mask in masks} - {1}) > 1:
        shapes = " and ".join(f"{mask.batch} x {mask.queries} x {mask.keys}" for mask in masks)
        raise InputError(f"the masks are {shapes} (batch, queries, keys)", remedy="Give masks over the same tokens")
    batch = max(mask.batch for mask in masks)
    columns = [mask.kinds for mask in masks if mask.kinds is not None]
    if not columns:
        return None, None
    columns = list(torch.broadcast_tensors(*columns))
    values, index = classes(*columns)
    if len(values) > MOST_CLASSES:
        raise InputError(
            f"the masks tell {len(values)} classes of keys apart together, and {MOST_CLASSES} is the limit",
            remedy="Contiguous groups of keys (documents, spans) need no kinds: give them as document ids or spans",
        )
    admits, column = [], iter(range(len(columns)))
    for mask in masks:
        if mask.admits is None:
            let = torch.full(mask.ranges.shape[:-1], EVERYTHING, device=mask.ranges.device)
        else:
            of = values[:, next(column)]
            different = few(mask.admits.flatten(0, -2))
            let = bits((different[:, None] & of) != 0)[torch.searchsorted(different, mask.admits.contiguous())]
        admits.append(let.expand(batch, -1, -1))
    return (torch.ones_like(index) << index).expand(batch, -1), admits


def bits(chosen: torch.Tensor) -> torch.Tensor:
    """int64 [n] with bit c set where bool [n, c] holds; at most 63 columns."""
    return (chosen.long() << torch.arange(chosen.shape[1], device=chosen.device)).sum(1)


def classes(*columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The different tuples over int64 [B, T] columns, and which of them every position is."""
    index = torch.zeros_like(columns[0])
    for column in columns:
        values = few(column)
        index = index * len(values) + torch.searchsorted(values, column.contiguous())
        index = torch.searchsorted(few(index), index)
    count = int(index.max()) + 1
    place = torch.zeros(count, dtype=torch.int64, device=index.device)
    flat = index.flatten()
    place.scatter_(0, flat, torch.arange(len(flat), device=index.device))  # any position of the class will do
    return torch.stack([column.flatten()[place] for column in columns], 1), index


def compact(
    ranges: torch.Tensor, admits: torch.Tensor | None, kinds: torch.Tensor | None, keys: int, keep_kinds: bool = False
) -> Mask:
    """The same mask with few rules. ranges: integers [B, R, Tq, 2] with any R, values of any size; admits int64
    [B, R, Tq] and kinds int64 [B, Tk], or None. keep_kinds: even if they decide nothing. InputError over 8 rules.
    """
    lo, hi = ranges[..., 0].clamp(0, keys).to(torch.int32), ranges[..., 1].clamp(0, keys).to(torch.int32)
    los, his = list(lo.unbind(1)), list(hi.unbind(1))
    lets = [None] * len(los) if admits is None else list(admits.unbind(1))
    for i, (low, high, let) in enumerate(zip(los, his, lets)):
        gone = low >= high if let is None else (low >= high) | (let == 0)
        los[i], his[i] = low.masked_fill(gone, 0), high.masked_fill(gone, 0)
    for _ in range(len(los) - 1):  # a merged rule may touch one that was looked at before
        changed = False
        for i, j in combinations(range(len(los)), 2):
            changed |= _merge(los, his, lets, i, j)
        if not changed:
            break
    lo, hi = torch.stack(los, 1), torch.stack(his, 1)
    admits = None if admits is None else torch.stack([let for let in lets if let is not None], 1)
    lo, hi, admits = _packed(lo, hi, admits)
    if lo.shape[1] > MOST_RULES:
        raise InputError(
            f"a query of the mask needs {lo.shape[1]} ranges of keys, and {MOST_RULES} is the limit",
            remedy="Say the mask with kinds of keys (csc.masks.spans, csc.masks.bitfields) where ranges are many",
        )
    if admits is not None and kinds is not None and not keep_kinds and _idle(lo, hi, admits, kinds):
        return compact(torch.stack([lo, hi], -1), None, None, keys)
    return Mask(
        torch.stack([lo, hi], -1),
        None if admits is None else admits.contiguous(),
        None if kinds is None else kinds.expand(lo.shape[0], -1).contiguous(),
        keys,
    )


def _merge(los: list, his: list, lets: list, i: int, j: int) -> bool:
    """Rule j goes into rule i wherever one rule can say both. True if it did anywhere."""
    low, high, low_j, high_j = los[i], his[i], los[j], his[j]
    both = (low < high) & (low_j < high_j)
    if not bool(both.any()):
        return False
    touch = (low <= high_j) & (low_j <= high)
    if lets[i] is None:
        merged = both & touch
    else:
        one, two = lets[i], lets[j]
        shared = one & two
        inside = (low <= low_j) & (high_j <= high) & (shared == two)  # j is covered by i
        around = (low_j <= low) & (high <= high_j) & (shared == one)
        equal = (low == low_j) & (high == high_j)
        merged = both & (inside | around | equal | (touch & (one == two)))
        lets[i] = torch.where(merged, one | two, one)
    if not bool(merged.any()):
        return False
    los[i] = torch.where(merged, torch.minimum(low, low_j), low)
    his[i] = torch.where(merged, torch.maximum(high, high_j), high)
    los[j], his[j] = low_j.masked_fill(merged, 0), high_j.masked_fill(merged, 0)
    return True


def _packed(
    lo: torch.Tensor, hi: torch.Tensor, admits: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rules that are not empty first, and as many rules as the query with the most has (one at least)."""
    nonempty = [low < high for low, high in zip(lo.unbind(1), hi.unbind(1))]
    before = [torch.zeros_like(nonempty[0], dtype=torch.int8)]  # rules in front that are not empty
    for flag in nonempty:
        before.append(before[-1] + flag)
    rules = max(int(before[-1].max()), 1)
    if rules == len(nonempty):
        return lo, hi, admits
    columns = [lo, hi] if admits is None else [lo, hi, admits]
    packed = [torch.zeros_like(column[:, :rules]) for column in columns]
    for i, flag in enumerate(nonempty):
        for j in range(min(i + 1, rules)):
            here = flag & (before[i] == j)
            for column, target in zip(columns, packed):
                target[:, j] = torch.where(here, column[:, i], target[:, j])
    return packed[0], packed[1], None if admits is None else packed[2]


def _idle(lo: torch.Tensor, hi: torch.Tensor, admits: torch.Tensor, kinds: torch.Tensor) -> bool:
    """True if every rule admits all keys of its range. Masks with many sets of kinds are not looked through."""
    nonempty = (lo < hi).flatten(1)
    let = admits.flatten(1)
    used = few(let.masked_fill(~nonempty, EVERYTHING))
    if len(used) > LOOKED_THROUGH:
        return False
    low, high = lo.flatten(1).long(), hi.flatten(1).long()
    for value in used:
        unseen = torch.nn.functional.pad(((kinds & value) == 0).cumsum(1), (1, 0)).expand(len(low), -1)
        if bool(((unseen.gather(1, low) != unseen.gather(1, high)) & nonempty & (let == value)).any()):
            return False
    return True


# --- Facts of a mask that planners ask for: area, loads, and the keys that a set of queries needs --------------------
#
# Terms
#   area      visible pairs; its share is of all pairs of the batch
#   load      visible keys of a query: what a token costs
#   owner     the rank of every query, int [Tq] or [B, Tq], 0 .. ranks - 1; -1: nobody's
#   needed    the keys that some query of a rank sees
#
# None of it looks at pairs one by one: a rule of a query is a range, so what a rank needs is a difference array over
# keys. Exact, in integers. Counts of tiles and tile lists: `csc.kernels.mask`.


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
    nonempty = (lo < hi) & (owner >= 0)[:, None]
    needed = torch.zeros(mask.batch, ranks, keys, dtype=torch.bool, device=device)
    values = [None] if mask.admits is None else few(mask.admits.flatten(0, -2)).tolist()
    line = owner.clamp(min=0)[:, None] * (keys + 1)
    for value in values:
        applies = nonempty if value is None or mask.admits is None else nonempty & (mask.admits == value)
        step = applies.to(torch.int32).flatten(1)
        open_ranges = torch.zeros(mask.batch, ranks * (keys + 1), dtype=torch.int32, device=device)
        open_ranges.scatter_add_(1, (line + lo).flatten(1), step)
        open_ranges.scatter_add_(1, (line + hi).flatten(1), -step)
        covered = open_ranges.view(mask.batch, ranks, keys + 1)[..., :-1].cumsum(-1) > 0
        needed |= covered if value is None or mask.kinds is None else covered & ((mask.kinds & value) != 0)[:, None]
    return needed


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
