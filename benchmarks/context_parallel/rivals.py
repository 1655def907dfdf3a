"""How others dispatch blocks. Every one returns int64 [n], the rank of each block.

Terms: *LPT*: longest processing time first. *PTRR*: torch's processing-time based round robin, taken from torch itself.

    RIVALS: name -> (tiles int8 [n, n], ranks) -> int64 [n]
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np


def contiguous(tiles: np.ndarray, ranks: int) -> np.ndarray:
    """Equal stretches."""
    return np.arange(len(tiles)) * ranks // len(tiles)


def zigzag(tiles: np.ndarray, ranks: int) -> np.ndarray:
    """Chunk r and chunk 2P - 1 - r of 2P."""
    chunk = np.arange(len(tiles)) * 2 * ranks // len(tiles)
    return np.minimum(chunk, 2 * ranks - 1 - chunk)


def uncapped_lpt(tiles: np.ndarray, ranks: int) -> np.ndarray:
    """Heaviest block first to the lightest rank, however many blocks it has. Tokens are not equal then."""
    return _lpt(tiles, ranks, len(tiles))


def equal_lpt(tiles: np.ndarray, ranks: int) -> np.ndarray:
    """The same, to the lightest rank that has room for one more of n/P blocks."""
    return _lpt(tiles, ranks, -(-len(tiles) // ranks))


def _lpt(tiles: np.ndarray, ranks: int, most: int) -> np.ndarray:
    loads = np.count_nonzero(tiles, axis=1)
    heap = [(0, 0, rank) for rank in range(ranks)]
    result = np.empty(len(tiles), np.int64)
    for block in np.argsort(-loads, kind="stable"):
        load, count, rank = heapq.heappop(heap)
        result[block] = rank
        if count + 1 < most:
            heapq.heappush(heap, (load + int(loads[block]), count + 1, rank))
    return result


def ptrr(tiles: np.ndarray, ranks: int) -> np.ndarray:
    """torch.distributed.tensor.experimental's `_PTRRLoadBalancer` on the BlockMask of these tiles."""
    import torch
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _PTRRLoadBalancer
    from torch.nn.attention.flex_attention import BlockMask

    size = 2  # tokens of a block; the balancer only counts blocks
    counts, columns = [], []
    for kind in (1, 2):
        chosen = torch.from_numpy(tiles == kind)
        counts.append(chosen.sum(dim=1, dtype=torch.int32)[None, None])
        columns.append(torch.argsort(chosen.to(torch.int8), dim=1, descending=True, stable=True).int()[None, None])
    mask = BlockMask.from_kv_blocks(counts[0], columns[0], counts[1], columns[1], BLOCK_SIZE=size)
    order = _PTRRLoadBalancer(mask, ranks)._generate_indices()
    assert order is not None
    blocks = order[0].reshape(len(tiles), size)[:, 0].numpy() // size
    result = np.empty(len(tiles), np.int64)
    result[blocks] = np.arange(len(tiles)) * ranks // len(tiles)
    return result


RIVALS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "uncapped LPT": uncapped_lpt,
    "equal-count LPT": equal_lpt,
    "torch PTRR": ptrr,
}
