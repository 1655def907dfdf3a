"""The ways to give a mask's blocks of queries to ranks, and what each takes: for `csc mask`.

Terms: a *way* is balanced (csc's planner), contiguous, or zigzag (a rank has one chunk from the front and its mirror
image from the back). A way's seconds are those of attention forward and backward in one layer of `LAYER`: in each
direction ranks wait for the heaviest of them, or for the busiest link, whichever takes longer.

    owners(mask, pairs, block, ranks, way, bandwidth) -> int64 [nQ]          the rank of every block of queries
    compared(mask, pairs, block, ranks, bandwidth) -> [DispatchTimes]             fastest first
    why(compared) -> str                                                     why the fastest is, in a sentence
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from csc.errors import InputError
from csc.simulation.page import seconds_text


class Dispatcher(StrEnum):
    """How blocks are dispatched to ranks."""

    balanced = "balanced"
    contiguous = "contiguous"
    zigzag = "zigzag"


@dataclass(frozen=True)
class TypicalLayer:
    """What is planned for: a layer of a usual size on one GPU of each rank."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    flops: float = 400e12  # a second, in attention


LAYER = TypicalLayer()
UNEVEN = 1.05  # tiles of the heaviest rank over the mean that call for a reason


@dataclass(frozen=True)
class DispatchTimes:
    """seconds: forward and backward. attention, keys: of the forward alone, on the heaviest rank and the busiest link.
    tiles_over_mean: load of the heaviest rank over the mean.
    """

    way: str
    seconds: float
    attention: float
    keys: float
    tiles_over_mean: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def owners(mask: Any, pairs: Any, block: int, ranks: int, way: Dispatcher, bandwidth: float) -> Any:
    """int64 [nQ]. InputError for fewer blocks than ranks, and for a balanced dispatch of cross-attention."""
    import torch

    blocks = len(pairs)
    if blocks < ranks:
        raise InputError(
            f"{blocks} blocks of {block} queries cannot be shared by {ranks} ranks", "--ranks",
            "Use smaller blocks or fewer ranks",
        )  # fmt: skip
    at = torch.arange(blocks)
    if way is Dispatcher.contiguous:
        return at * ranks // blocks
    if way is Dispatcher.zigzag:
        chunk = at * 2 * ranks // blocks
        return torch.minimum(chunk, 2 * ranks - 1 - chunk)
    from csc.planning.dispatch import plan

    return torch.as_tensor(plan(_workload(mask, pairs, block, ranks, bandwidth)).ranks_of_blocks)


def compared(mask: Any, pairs: Any, block: int, ranks: int, bandwidth: float) -> list[DispatchTimes]:
    """All ways, fastest first; none for cross-attention, whose keys no dispatch of queries places."""
    from csc.planning.dispatch import evaluate

    if mask.queries != mask.keys:
        return []
    workload = _workload(mask, pairs, block, ranks, bandwidth)
    found = []
    for way in Dispatcher:
        one = evaluate(workload, owners(mask, pairs, block, ranks, way, bandwidth).numpy())
        (measured,) = one.measured
        rates = workload.rates
        attention, keys = measured.load * rates.tile_seconds, measured.volume * rates.block_seconds
        found.append(DispatchTimes(way.value, one.seconds, attention, keys, one.imbalance))
    return sorted(found, key=lambda one: one.seconds)


def why(ways: Sequence[DispatchTimes]) -> str:
    """What the fastest way has more even tiles for, or why there are none; empty where its tiles are even."""
    best = ways[0]
    even = min(ways, key=lambda one: one.tiles_over_mean)
    if best.tiles_over_mean < UNEVEN:
        return ""
    heaviest = f"the heaviest rank of {best.way} has {best.tiles_over_mean:.2f} times the mean of tiles"
    if best.keys > best.attention:
        return (
            f"{heaviest}, yet what limits the step is the link: sending keys takes {seconds_text(best.keys)}, "
            f"attention on that rank {seconds_text(best.attention)}. Even tiles would send more keys; they pay "
            "on a faster link (--link)"
        )
    if even.way != best.way:
        return (
            f"{heaviest}; {even.way} has {even.tiles_over_mean:.2f}, but takes "
            f"{even.seconds / best.seconds:.2f} times as long for the keys that it sends"
        )
    return f"{heaviest}; no way has less: every rank has as many blocks, and some blocks see more"


def _workload(mask: Any, pairs: Any, block: int, ranks: int, bandwidth: float) -> Any:
    import numpy as np
    import torch

    from csc.planning.dispatch import EMPTY, FULL, PARTIAL, LayerMask, Rates, Workload

    if mask.queries != mask.keys:
        raise InputError("the queries are not the keys", "--dispatch balanced", "Use contiguous or zigzag")
    heights = (mask.queries - torch.arange(len(pairs)) * block).clamp(max=block)
    full = (pairs == heights[:, None] * heights).numpy()
    tiles = np.where(full, FULL, np.where((pairs > 0).numpy(), PARTIAL, EMPTY)).astype(np.int8)
    rates = Rates(
        tile_seconds=4 * block * block * LAYER.head_dim * LAYER.heads / LAYER.flops,
        block_seconds=2 * 2 * block * LAYER.kv_heads * LAYER.head_dim / bandwidth,
    )
    return Workload((LayerMask(tiles),), mask.queries, block, ranks, rates)
