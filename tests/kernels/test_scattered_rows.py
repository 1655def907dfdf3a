"""The gradient of masked_scatter without waiting: the bits of torch's."""

from __future__ import annotations

import torch
from csc.kernels.scattered_rows import taken_rows
from hypothesis import given, settings
from hypothesis import strategies as st

SHAPES = {"rows": (0, 1), "elements": (0, 1, 2), "samples": (0,), "tokens": (1,), "none": ()}


@settings(max_examples=200, deadline=None)
@given(
    st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(1, 5)), st.sampled_from(sorted(SHAPES)),
    st.integers(0, 7), st.integers(0, 2**31),
)  # fmt: skip
def test_bits_of_torch(sizes: tuple[int, int, int], kind: str, more: int, seed: int) -> None:
    """Masks of whole rows, samples and single entries; sources that are longer than what was taken of them."""
    generator = torch.Generator().manual_seed(seed)
    d = torch.randn(sizes, generator=generator)
    mask = torch.rand([n if i in SHAPES[kind] else 1 for i, n in enumerate(sizes)], generator=generator) < 0.5
    count = int(mask.expand_as(d).sum()) + more
    wanted = torch.ops.aten.masked_scatter_backward.default(d, mask, [count])
    assert torch.equal(taken_rows(d, mask, [count]), wanted)
    assert torch.equal(torch.ops.csc.masked_scatter_backward.default(d, mask, [count]), wanted)


def test_the_shape_is_the_source_s() -> None:
    d, mask = torch.randn(2, 5, 4), torch.tensor([[0, 1, 1, 0, 1], [1, 0, 0, 0, 0]]).bool()[..., None]
    assert torch.equal(taken_rows(d, mask, [4, 1, 4]), d[mask[..., 0]][:, None])
