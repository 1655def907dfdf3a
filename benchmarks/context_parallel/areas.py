"""Visible pairs of every tile, exactly, without a dense mask.

Terms: a *tile* is the pairs of one block of queries and one block of keys. `C(x)` counts the keys before x that a
rule's admitted kinds name. A row with the range [lo, hi) then sees `C(min(hi, end)) - C(max(lo, start))` keys of the
tile [start, end): its first and its last tile are added one by one, those between them by a difference array over the
tiles times what the whole tile holds. Rules that overlap are counted by inclusion and exclusion.

    visible(rules, block) -> int64 [nQ, nK]
    classes(counts, tokens, block) -> int8 [nQ, nK]: 0 empty, 1 partial, 2 full
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from benchmarks.context_parallel.masks import Rules


def visible(rules: Rules, block: int) -> np.ndarray:
    """int64 [nQ, nK]: how many pairs of every tile are visible. The last block may be short."""
    count = len(rules.lo)
    queries = rules.lo.shape[1]
    total = np.zeros((-(-queries // block), -(-len(rules.kinds) // block)), np.int64)
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            subset = list(chosen)
            _add(total, rules, subset, rules.lo[subset].max(axis=0), rules.hi[subset].min(axis=0), block)
    return total


def _add(total: np.ndarray, rules: Rules, subset: list[int], lo: np.ndarray, hi: np.ndarray, block: int) -> None:
    """Add (odd subsets) or take away (even ones) what all rules of the subset admit at once."""
    sign = 1 if len(subset) % 2 else -1
    rows = np.flatnonzero(lo < hi)
    if len(rows) == 0:
        return
    admits = rules.admits[subset][:, rows]
    if len(subset) == 1:
        combos, which = np.unique(admits[0], return_inverse=True)
        combos = combos[:, None]
    else:
        combos, which = np.unique(admits.T, axis=0, return_inverse=True)
    for number, combo in enumerate(combos):
        named = np.all((combo[:, None] & rules.kinds) != 0, axis=0)
        mine = rows[which.ravel() == number] if len(combos) > 1 else rows
        _add_rows(total, sign, mine // block, lo[mine].astype(np.int64), hi[mine].astype(np.int64), named, block)


def _add_rows(
    total: np.ndarray, sign: int, row: np.ndarray, lo: np.ndarray, hi: np.ndarray, named: np.ndarray, block: int
) -> None:
    blocks, tiles = total.shape
    before = np.concatenate([[0], np.cumsum(named, dtype=np.int64)])  # C(x), x = 0..Tk
    starts = np.minimum(np.arange(tiles + 1) * block, len(named))
    first, last = lo // block, (hi - 1) // block
    head = before[np.minimum(hi, starts[first + 1])] - before[lo]
    tail = np.where(first == last, 0, before[hi] - before[starts[last]])
    edges = np.bincount(row * tiles + first, weights=head, minlength=blocks * tiles)
    edges += np.bincount(row * tiles + last, weights=tail, minlength=blocks * tiles)
    wide = last > first + 1
    step = np.bincount((row * (tiles + 1) + first + 1)[wide], minlength=blocks * (tiles + 1))
    step -= np.bincount((row * (tiles + 1) + last)[wide], minlength=blocks * (tiles + 1))
    inside = np.cumsum(step.reshape(blocks, tiles + 1), axis=1)[:, :tiles]
    total += sign * (edges.reshape(blocks, tiles).astype(np.int64) + inside * np.diff(before[starts]))


def classes(counts: np.ndarray, queries: int, keys: int, block: int) -> np.ndarray:
    """int8 [nQ, nK]: 0 nothing visible, 1 some, 2 every pair that exists (the last block may be short)."""
    rows = np.minimum(block, queries - np.arange(counts.shape[0]) * block)
    columns = np.minimum(block, keys - np.arange(counts.shape[1]) * block)
    return (counts > 0).astype(np.int8) + (counts == rows[:, None] * columns)
