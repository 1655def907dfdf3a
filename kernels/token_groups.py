"""Groups of tokens (documents, images) as ranges of keys: what `group[q] == group[k]` means if groups are contiguous.

ranges(queries, keys, counting_queries, counting_keys) -> int64 [B, Tq, 2]
"""

from __future__ import annotations

import torch

from csc.errors import InputError


def ranges(
    queries: torch.Tensor, keys: torch.Tensor, counting_queries: torch.Tensor, counting_keys: torch.Tensor
) -> torch.Tensor:
    """(first, last + 1) slot of the keys of each query's group; (0, 0) for a query that does not count or has no keys.

    queries: [B, Tq], keys: [B, Tk]: group numbers of any integer type. counting_*: bool of the same shapes; keys that
    do not count may lie anywhere (the mask hides them in another way). InputError if the keys that count of some group
    do not stand together, since then no range says who sees whom.
    """
    batch, tokens = keys.shape
    _, numbered = torch.cat([keys, queries], 1).unique(return_inverse=True)
    of_keys, of_queries = numbered[:, :tokens], numbered[:, tokens:]
    groups = int(numbered.max()) + 1 if numbered.numel() else 0
    slot = torch.arange(tokens, device=keys.device).expand(batch, -1)
    first = torch.full((batch, groups), tokens, dtype=torch.int64, device=keys.device)
    first.scatter_reduce_(1, of_keys, torch.where(counting_keys, slot, tokens), "amin")
    last = torch.zeros_like(first)
    last.scatter_reduce_(1, of_keys, torch.where(counting_keys, slot + 1, 0), "amax")
    members = torch.zeros_like(first).scatter_add_(1, of_keys, counting_keys.long())
    before = torch.nn.functional.pad(counting_keys.long().cumsum(1), (1, 0))
    between = before.gather(1, last) - before.gather(1, torch.minimum(first, last))
    asked = torch.zeros_like(first).scatter_add_(1, of_queries, counting_queries.long()) > 0
    torn = asked & (members != between)
    if bool(torn.any()):
        sample, group = (int(x) for x in torn.nonzero()[0])
        start, stop = int(first[sample, group]), int(last[sample, group])
        number = int(keys[sample, start])
        raise InputError(
            f"group {number} of sample {sample} does not stand together: its keys lie between {start} and {stop} with "
            "others among them, so no range of keys describes what its tokens see",
            "attention mask",
            "order the tokens so that those of a group stand together, or number each stretch of them as a group of "
            "its own if it need not see the others",
        )
    low, high = first.gather(1, of_queries), last.gather(1, of_queries)
    there = counting_queries & (low < high)
    return torch.stack([torch.where(there, low, 0), torch.where(there, high, 0)], -1)
