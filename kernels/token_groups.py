"""Groups of tokens (documents, images) as ranges of keys: what `group[q] == group[k]` means if groups are contiguous.

ranges(queries, keys, counting_queries, counting_keys) -> int64 [B, Tq, 2]

With numpy, on the host, where the numbers are in almost every model: a step asks it of hundreds of tokens, which two
dozen small calls of torch take ten times as long for.
"""

from __future__ import annotations

import numpy as np
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
    sides = (one.detach().cpu().numpy() for one in torch.broadcast_tensors(queries, counting_queries))
    of_keys = (one.detach().cpu().numpy() for one in torch.broadcast_tensors(keys, counting_keys))
    found = np.zeros((*queries.shape, 2), dtype=np.int64)
    for sample, (asked, asks, held, counts) in enumerate(zip(*sides, *of_keys, strict=True)):
        found[sample] = _of_sample(sample, asked, asks, held, counts)
    return torch.from_numpy(found).to(queries.device)


def _of_sample(sample: int, asked: np.ndarray, asks: np.ndarray, held: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64 [Tq, 2]. asked, held: the groups of queries and of keys; asks, counts: which of them count."""
    places = np.flatnonzero(counts)
    if not len(places):
        return np.zeros((len(asked), 2), dtype=np.int64)
    numbers = held[places]
    order = np.argsort(numbers, kind="stable")  # places of the keys that count, group after group, each ascending
    numbers = numbers[order]
    starts = np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1]]))
    ends = np.concatenate([starts[1:], [len(numbers)]])
    groups, first, last = numbers[starts], order[starts], order[ends - 1]
    of_query = np.minimum(np.searchsorted(groups, asked), len(groups) - 1)
    there = asks & (groups[of_query] == asked)
    torn = np.flatnonzero(last - first + 1 != ends - starts)
    met = torn[np.isin(torn, of_query[there])] if len(torn) else torn
    if len(met):
        raise _torn(sample, int(groups[met[0]]), int(places[first[met[0]]]), int(places[last[met[0]]]) + 1)
    low, high = places[first][of_query], places[last][of_query] + 1
    return np.stack([low, high], -1) * there[:, None]


def _torn(sample: int, group: int, start: int, stop: int) -> InputError:
    return InputError(
        f"group {group} of sample {sample} does not stand together: its keys lie between {start} and {stop} with "
        "others among them, so no range of keys describes what its tokens see",
        "attention mask",
        "order the tokens so that those of a group stand together, or number each stretch of them as a group of "
        "its own if it need not see the others",
    )
