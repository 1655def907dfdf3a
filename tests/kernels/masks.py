"""Random masks for property tests, and the plain ways to compute what the fast ones must equal."""

from __future__ import annotations

import torch
from csc.kernels.mask import Mask
from hypothesis import strategies as st


@st.composite
def masks(draw: st.DrawFn, most: int = 40, rules: int = 3) -> Mask:
    """Any mask: ranges that overlap, are empty or cover all; kinds or none; several of a batch."""
    batch, count = draw(st.integers(1, 2)), draw(st.integers(1, rules))
    queries, keys = draw(st.integers(1, most)), draw(st.integers(1, most))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = (batch, count, queries)
    style = draw(st.sampled_from(["random", "causal", "wide"]))
    lo = torch.randint(0, keys + 1, shape, generator=generator)
    hi = torch.randint(0, keys + 1, shape, generator=generator)
    if style == "causal":
        lo, hi = lo * (lo < 4), (torch.arange(queries) + 1).clamp(max=keys).expand(shape)
    elif style == "wide":
        lo, hi = lo // 8, keys - hi // 8
    ranges = torch.stack([lo, hi], -1).to(torch.int32)
    if not draw(st.booleans()):
        return Mask(ranges, None, None, keys)
    values = torch.tensor([0, 1, 2, 3, 6, 1 << 62])
    admits = values[torch.randint(0, len(values), shape, generator=generator)]
    kinds = values[torch.randint(0, len(values), (batch, keys), generator=generator)]
    return Mask(ranges, admits, kinds, keys)
