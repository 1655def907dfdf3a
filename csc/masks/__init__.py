"""Attention masks as users say them. Every builder returns a `csc.kernels.mask.Mask`; docs/masks.md shows each.

Sizes: `causal`, `bidirectional`, `prefix`, `window`. Batches: `documents`, `padding`, `spans`, `cross`,
`cross_documents`, `bitfields`. From others: `from_mask_mod`, `union`,
`intersection`, `within`, `padded`.
Facts: `area`, `share`, `loads`, `block_loads`, `needed_keys`, `needed_blocks`.
"""

from csc.kernels.mask import Mask
from csc.masks.builders import (
    TEXT,
    Sees,
    bidirectional,
    bitfields,
    causal,
    cross,
    cross_documents,
    documents,
    ids_of_lengths,
    ids_of_positions,
    padded,
    padding,
    prefix,
    spans,
    tokens_of,
    window,
    within,
)
from csc.masks.combine import area, block_loads, intersection, loads, needed_blocks, needed_keys, share, union
from csc.masks.mask_mod import from_mask_mod

__all__ = [
    "TEXT",
    "Mask",
    "Sees",
    "area",
    "bidirectional",
    "bitfields",
    "block_loads",
    "causal",
    "cross",
    "cross_documents",
    "documents",
    "from_mask_mod",
    "ids_of_lengths",
    "ids_of_positions",
    "intersection",
    "loads",
    "needed_blocks",
    "needed_keys",
    "padded",
    "padding",
    "prefix",
    "share",
    "spans",
    "tokens_of",
    "union",
    "window",
    "within",
]
