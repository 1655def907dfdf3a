"""What is planned: masks, lengths, ranks, and the numbers of the model.

Terms: *tile* cost is what a kernel pays, *area* the visible pairs. A *case* is one mask of one seed at one length and
one number of ranks.

    HARDWARE: name -> Hardware;   Shape: heads and their size
    cases(quick) -> list[Case]
    Tiles: classes and areas of a mask; tiles(mask, tokens, seed) -> Tiles, counted once
    workload(case, tiles, hardware, partial) -> Workload
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from benchmarks.context_parallel.areas import classes, visible
from benchmarks.context_parallel.masks import MASKS, build
from csc.planning.dispatch import LayerMask, Rates, Workload

BLOCK = 128
LENGTHS = (8192, 32768, 131072)
RANKS = (2, 4, 8, 16, 32)
SEEDS = (0, 1, 2)
SPARSE = 0.2  # a mask is sparse if less than this share of all pairs is visible


@dataclass(frozen=True)
class Shape:
    """One attention layer: grouped queries in bf16."""

    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    bytes: int = 2


@dataclass(frozen=True)
class Hardware:
    """flops: that attention reaches forward, per second. link: bytes per second of one rank in one direction."""

    flops: float
    link: float


HARDWARE = {
    "h100-400g": Hardware(430e12, 50e9),  # 400 Gb/s a GPU between nodes
    "h100-nvlink": Hardware(430e12, 450e9),  # inside a node
    "h100-100g": Hardware(430e12, 12.5e9),
}
DEFAULT = "h100-400g"


@dataclass(frozen=True)
class Case:
    mask: str
    tokens: int
    ranks: int
    seed: int


@dataclass(frozen=True, eq=False)
class Tiles:
    """classes: int8 [n, n]. areas: int64 [n], visible pairs by block of queries. share: visible pairs over all."""

    classes: np.ndarray
    areas: np.ndarray
    share: float


def cases(quick: bool) -> list[Case]:
    """Masks in the order of the tables; `quick`: one seed, the least and the greatest length, 8 and 32 ranks."""
    lengths, ranks, seeds = ((LENGTHS[0], LENGTHS[-1]), (8, 32), SEEDS[:1]) if quick else (LENGTHS, RANKS, SEEDS)
    return [Case(m, t, p, s) for t in lengths for m in MASKS for s in seeds for p in ranks]


@lru_cache(maxsize=2)
def tiles(mask: str, tokens: int, seed: int) -> Tiles:
    """Counted exactly, without a dense mask. Cases that differ in ranks alone follow each other and share it."""
    counts = visible(build(mask, tokens, seed), BLOCK)
    return Tiles(classes(counts, tokens, tokens, BLOCK), counts.sum(axis=1), float(counts.sum()) / tokens**2)


def rates(hardware: Hardware, shape: Shape, partial: float) -> Rates:
    """4 FLOPs for each pair, head and element of a head: two matrix products."""
    return Rates(
        tile_seconds=4 * BLOCK * BLOCK * shape.heads * shape.size / hardware.flops,
        block_seconds=2 * shape.kv_heads * shape.size * shape.bytes * BLOCK / hardware.link,
        partial=partial,
    )


def workload(case: Case, counted: Tiles, hardware: Hardware, partial: float) -> Workload:
    """One layer."""
    shape = Shape()
    mask = LayerMask(counted.classes)
    numbers = rates(hardware, shape, partial)
    return Workload((mask,), case.tokens, BLOCK, case.ranks, numbers, shape.heads, shape.kv_heads)
