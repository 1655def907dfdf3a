"""Three ways to bring keys to queries, and which is cheapest by the model.

Terms: volumes are in blocks of K and V, as everywhere.

    exact       every rank receives the blocks that its queries see, and no other
    all-gather  every rank receives everything
    heads       all-to-all before and after attention: a rank has all tokens and its share of the heads (Ulysses)

    compare(prepared, measured) -> dict[str, float]: seconds of each that is possible
    cheapest(...) -> str
"""

from __future__ import annotations

from csc.planning.dispatch.evaluate import Measured, Prepared, seconds

ALL_GATHER, EXACT, HEADS = "all-gather", "exact", "heads"


def heads_volume(prepared: Prepared) -> float | None:
    """Blocks that a rank moves for the all-to-all over heads, one direction, forward; None where it is not possible.

    (2H + 2Hkv) D bytes of T/P tokens to the P - 1 others, over the 2 Hkv D bytes of K and V. With more ranks than key
    heads, each rank gets a copy of one.
    """
    work = prepared.workload
    heads, groups, ranks = work.heads, work.kv_heads, work.ranks
    if heads == 0 or groups == 0 or heads % ranks or (groups % ranks and ranks % groups):
        return None
    if any(mask.owners is not None for mask in prepared.masks):
        return None
    copies = max(groups, ranks)
    return (heads + copies) / groups * work.tokens / work.block / ranks * (ranks - 1) / ranks


def compare(prepared: Prepared, measured: list[Measured]) -> dict[str, float]:
    """Seconds of all layers, forward and backward.

    Exact sets and the all-gather overlap with the tiles of a rank's own keys; attention over heads cannot start before
    its heads are there nor end before its output leaves, so there both add up.
    """
    work, rates = prepared.workload, prepared.workload.rates
    result = {ALL_GATHER: 0.0, EXACT: seconds(prepared, measured)}
    for mask, m in zip(prepared.masks, measured):
        everything = float(mask.shares.sum() - (m.needed.shape[1] // work.ranks if mask.owners is None else 0))
        result[ALL_GATHER] += mask.layers * rates.seconds(m.load, max(everything, m.volume))
    volume = heads_volume(prepared)
    if volume is not None:
        result[HEADS] = sum(
            mask.layers * (rates.seconds(mask.loads.sum() / work.ranks, 0.0) + rates.seconds(0.0, volume))
            for mask in prepared.masks
        )
    return result


def cheapest(compared: dict[str, float], measured: list[Measured]) -> str:
    """The fastest; where times are equal, exact sets if they move less than everything, else the all-gather."""
    best = min(compared.values())
    saved = any(not m.needed.all() for m in measured)
    order = (EXACT, ALL_GATHER, HEADS) if saved else (ALL_GATHER, EXACT, HEADS)
    return next(name for name in order if compared.get(name) == best)
