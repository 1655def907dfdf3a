"""Cross-attention: queries of one sequence, keys of another (text over the features of images or audio).

cross(ranges, keys) -> Mask                         each query its own range of keys
cross_documents(query_ids, key_ids) -> Mask         each query the keys of its document
"""

from __future__ import annotations

import torch

from csc.errors import InputError
from csc.kernels.mask import Mask
from csc.masks.checks import INTEGERS, Numbers, positive, refuse_where, same_shape
from csc.masks.documents import checked_ids
from csc.masks.equal_runs import begins, bounds
from csc.masks.plain import ranged


def cross(ranges: Numbers, keys: int) -> Mask:
    """Query q of row b sees the keys ranges[b, q] = [lo, hi).

    Args:
        ranges: Integers [B, Tq, 2] or [Tq, 2]; lo == hi: none.
        keys: How many there are.

    Raises:
        InputError: A range leaves the keys.
    """
    table = torch.as_tensor(ranges)
    table = table[None] if table.dim() == 2 else table
    if table.dtype not in INTEGERS or table.dim() != 3 or table.shape[-1] != 2 or 0 in table.shape:
        raise InputError(f"{table.dtype} {list(table.shape)} is not integers [B, Tq, 2]", "ranges of keys")
    lo, hi = table.long().unbind(-1)
    positive(keys, "keys")
    refuse_where(
        (lo < 0) | (lo > hi) | (hi > keys),
        "ranges of keys",
        lambda b, q: f"[{int(lo[b, q])}, {int(hi[b, q])}) is no range of the {keys} keys",
    )
    return ranged(lo, hi, keys)


def cross_documents(query_ids: Numbers, key_ids: Numbers) -> Mask:
    """A query sees the keys with its number.

    Args:
        query_ids: [B, Tq], in any order; a negative number, and one without keys, sees nothing.
        key_ids: [B, Tk]; the keys of a number lie together; negative ones are unseen.

    Raises:
        InputError: The keys of a number lie apart.
    """
    asked, table = torch.as_tensor(query_ids), checked_ids(key_ids, "key_ids")
    if asked.dtype not in INTEGERS or asked.dim() not in (1, 2) or 0 in asked.shape:
        raise InputError(f"{asked.dtype} {list(asked.shape)} is not integers [B, Tq]", "query_ids")
    asked = asked.long().view(-1, asked.shape[-1])
    same_shape("query_ids", asked[:, :1], "key_ids", table[:, :1])
    batch = max(len(asked), len(table))
    asked, table = asked.expand(batch, -1), table.expand(batch, -1)
    # Rows side by side: a number of row b becomes b * span + number, so one sorted table of runs serves all.
    low = min(int(asked.min()), int(table.min()))
    span = max(int(asked.max()), int(table.max())) - low + 1
    offset = torch.arange(batch, device=table.device)[:, None] * span - low
    first, behind = bounds(table)
    start = begins(table) & (table >= 0)
    numbers, order = (table + offset)[start].sort()
    lo, hi = first[start][order], behind[start][order]
    if not len(numbers):
        return ranged(torch.zeros_like(asked), torch.zeros_like(asked), table.shape[1])
    place = torch.searchsorted(numbers, asked + offset).clamp(max=len(numbers) - 1)
    found = (numbers[place] == asked + offset) & (asked >= 0)
    return ranged(torch.where(found, lo[place], 0), torch.where(found, hi[place], 0), table.shape[1])
