"""Small workloads for the tests of the dispatch planner, and their brute force.

random_workload(rng, ...) -> Workload
assignments(n, ranks) -> all dispatches with equal counts, up to the names of ranks
seconds_by_hand(workload, ranks_of_blocks) -> float, from the definitions alone
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from csc.planning.dispatch import LayerMask, Rates, Workload

BLOCK = 16


def causal_tiles(n: int) -> np.ndarray:
    """Full below the diagonal, partial on it."""
    return (2 * np.tri(n, n, -1) + np.eye(n)).astype(np.int8)


def document_tiles(n: int, starts: list[int]) -> np.ndarray:
    """Causal documents that start at these blocks."""
    document = np.searchsorted(starts, np.arange(n), side="right")
    return np.where(document[:, None] == document, causal_tiles(n), 0).astype(np.int8)


def random_tiles(rng: np.random.Generator, n: int, keys: int | None = None) -> np.ndarray:
    """Documents, a dense triangle, or noise."""
    kind = rng.integers(3) if keys is None else 2
    if kind == 0:
        return document_tiles(n, [0, *sorted(rng.integers(0, n, 2).tolist())])
    if kind == 1:
        return causal_tiles(n)
    shape = (n, n if keys is None else keys)
    return (rng.integers(1, 3, shape) * (rng.random(shape) < rng.random())).astype(np.int8)


def random_workload(
    rng: np.random.Generator, n: int, ranks: int, masks: int = 1, short: bool = False, cross: bool = False
) -> Workload:
    """`masks` masks of n blocks; `short`: the last block is not whole; `cross`: the last mask has keys elsewhere."""
    layers = []
    for number in range(masks):
        weight = float(rng.integers(1, 5)) if masks > 1 else 1.0
        if cross and number == masks - 1:
            keys = int(rng.integers(1, 2 * n))
            owners = rng.integers(0, ranks, keys)
            layers.append(LayerMask(random_tiles(rng, n, keys), weight, owners, keys * BLOCK - (5 if short else 0)))
        else:
            layers.append(LayerMask(random_tiles(rng, n), weight))
    rates = Rates(1.0, float(rng.choice([0.0, 0.1, 0.5, 1.0, 3.0])), partial=float(rng.choice([1.0, 1.25])))
    return Workload(tuple(layers), n * BLOCK - (3 if short else 0), BLOCK, ranks, rates)


def assignments(n: int, ranks: int) -> Iterator[np.ndarray]:
    """Every dispatch in which counts differ by at most one; rank names matter only where masks name owners."""
    low, more = divmod(n, ranks)
    for larger in combinations(range(ranks), more):
        yield from _fill(np.full(n, -1), [low + (rank in larger) for rank in range(ranks)], 0)


def _fill(given: np.ndarray, quotas: list[int], rank: int) -> Iterator[np.ndarray]:
    if rank == len(quotas):
        yield given.copy()
        return
    for chosen in combinations(np.flatnonzero(given < 0).tolist(), quotas[rank]):
        given[list(chosen)] = rank
        yield from _fill(given, quotas, rank + 1)
        given[list(chosen)] = -1


def seconds_by_hand(workload: Workload, ranks_of_blocks: np.ndarray) -> float:
    """Loops over ranks, blocks and keys, as the model is described."""
    rates, total = workload.rates, 0.0
    for mask in workload.masks:
        tokens = workload.tokens if mask.key_tokens is None else mask.key_tokens
        owners = ranks_of_blocks if mask.owners is None else mask.owners
        loads, received, sent = ([0.0] * workload.ranks for _ in range(3))
        for rank in range(workload.ranks):
            mine = [q for q in range(workload.blocks) if ranks_of_blocks[q] == rank]
            for q in mine:
                loads[rank] += sum({0: 0.0, 1: rates.partial, 2: 1.0}[int(tile)] for tile in mask.tiles[q])
            for key, owner in enumerate(owners):
                if owner != rank and any(mask.tiles[q, key] for q in mine):
                    share = min(workload.block, tokens - key * workload.block) / workload.block
                    received[rank] += share
                    sent[owner] += share
        compute, moved = max(loads) * rates.tile_seconds, max(received + sent) * rates.block_seconds
        total += mask.layers * max(compute, moved)
        total += mask.layers * max(compute * rates.backward_compute, moved * rates.backward_communication)
    return total
