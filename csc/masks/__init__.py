"""Attention masks as users say them. Every builder returns a `csc.kernels.mask.Mask`; docs/masks.md shows each.

Sizes: `causal`, `bidirectional`, `prefix`, `window`. Batches: `documents`, `padding`, `spans`, `cross`,
`cross_documents`, `bitfields`. From others: `from_mask_mod`, `union`,
`intersection`, `within`, `padded`.
Facts: `area`, `share`, `loads`, `block_loads`, `needed_keys`, `needed_blocks`.
"""

from csc.kernels.mask import Mask
from csc.masks.bitfields import bitfields
from csc.masks.combine import intersection, union
from csc.masks.cross import cross, cross_documents
from csc.masks.documents import documents, ids_of_lengths, ids_of_positions, padded, padding, within
from csc.masks.facts import area, block_loads, loads, needed_blocks, needed_keys, share
from csc.masks.mask_mod import from_mask_mod
from csc.masks.plain import bidirectional, causal, prefix, window
from csc.masks.spans import TEXT, Sees, spans, tokens_of

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
