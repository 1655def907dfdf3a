"""The eleven masks as csc.kernels.mask.Mask.

NAMES: tuple[str, ...]
mask(name, tokens, seed) -> Mask, on the CPU, batch 1
"""

from __future__ import annotations

import numpy as np
import torch
from csc.kernels.mask import Mask

from benchmarks.context_parallel.masks import MASKS, build

NAMES = tuple(MASKS)


def mask(name: str, tokens: int, seed: int = 0) -> Mask:
    """Without kinds where they decide nothing: every rule of every query admits every kind that there is."""
    rules = build(name, tokens, seed)
    ranges = torch.from_numpy(np.stack([rules.lo, rules.hi], -1))[None].contiguous()
    kinds, admits = torch.from_numpy(rules.kinds)[None], torch.from_numpy(rules.admits)[None]
    present = int(np.bitwise_or.reduce(rules.kinds))
    if bool((kinds != 0).all()) and bool(((admits & present) == present).all()):
        return Mask(ranges, None, None, tokens)
    return Mask(ranges, admits, kinds, tokens)
