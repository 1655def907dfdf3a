"""The Triton kernels in Triton's interpreter; test_triton_interpreter.py runs this file in a process of its own.

float32 and float16 only: the interpreter computes bfloat16 wrongly and says nothing.
"""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from csc.kernels import triton_kernels, triton_launch
from csc.kernels.mask import Mask, tiles
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels import triton_cases as t
from tests.kernels.masks import masks
from tests.kernels.triton_cases import Sizes
from tests.tiers import long

assert os.environ.get("TRITON_INTERPRET") == "1", "see test_triton_interpreter.py"

MASKS = {
    "none": lambda length: None,
    "causal": t.causal,
    "window": lambda length: t.window(length, 40),
    "documents": lambda length: t.documents(length, 37),
    "generation": lambda length: t.generation(length, 11),
    "modality": lambda length: t.modality(length, 9),
}


@pytest.mark.parametrize("softcap", [0.0, long(2.0)])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, softcap: float) -> None:
    length = 57 if softcap else 71
    t.check(*t.inputs(Sizes(1, 2, 1, length, length, 16), torch.float32, "cpu"), MASKS[name](length), softcap)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(masks(most=80), st.sampled_from([(1, 1), (2, 2), (3, 1)]), st.sampled_from([0.0, 1.5]), st.integers(0, 99))
def test_any_mask(mask: Mask, heads: tuple[int, int], softcap: float, seed: int) -> None:
    sizes = Sizes(mask.batch, *heads, mask.queries, mask.keys, 16)
    t.check(*t.inputs(sizes, torch.float32, "cpu", seed), mask, softcap)


@pytest.mark.parametrize("width", [17, long(32), long(40), 64, long(72), 80, long(96), 128, long(192), 256])
def test_head_dims(width: int) -> None:
    """Powers of two or not; widths that no descriptor describes; wide ones, whose dK and dV are made apart."""
    t.check(*t.inputs(Sizes(1, 2, 1, 57, 57, width), torch.float32, "cpu"), t.causal(57))


@pytest.mark.parametrize("name", ["causal", "generation"])
def test_half_precision(name: str) -> None:
    t.check(*t.inputs(Sizes(1, 2, 1, 60, 60, 32), torch.float16, "cpu"), MASKS[name](60))


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 70), (33, 5), (64, 32), (5, 96)])
def test_lengths(queries: int, keys: int) -> None:
    """Cross attention with and without a mask; lengths that are tiles and that are not."""
    many = t.inputs(Sizes(1, 2, 2, queries, keys, 16), torch.float32, "cpu")
    t.check(*many, None)
    position = torch.arange(queries)
    t.check(*many, Mask(t.ranges(position % 7, (position + 20).clamp(max=keys)), None, None, keys))


def test_one_mask_for_the_batch_equals_one_each() -> None:
    one, many = t.generation(50, 7), t.inputs(Sizes(2, 2, 1, 50, 50, 16), torch.float32, "cpu")
    assert one.admits is not None and one.kinds is not None
    every = Mask(one.ranges.repeat(2, 1, 1, 1), one.admits.repeat(2, 1, 1), one.kinds.repeat(2, 1), 50)
    for first, second in zip(t.run(*many, one), t.run(*many, every), strict=True):
        assert torch.equal(first, second)


def test_a_batch_of_different_masks() -> None:
    masks = [t.causal(50), t.documents(50, 9), t.window(50, 5)]
    together = Mask(torch.cat([mask.ranges for mask in masks]), None, None, 50)
    t.check(*t.inputs(Sizes(3, 2, 1, 50, 50, 16), torch.float32, "cpu"), together)


def test_permuted_queries() -> None:
    """A query's row of the mask goes where the query goes, and so do its results; dK and dV stay."""
    q, k, v, d_out = t.inputs(Sizes(1, 2, 1, 70, 70, 16), torch.float32, "cpu")
    mask = t.generation(70, 11)
    assert mask.admits is not None
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    moved = Mask(mask.ranges[:, :, order], mask.admits[:, :, order], mask.kinds, 70)
    out, lse, dq, dk, dv = t.run(q, k, v, d_out, mask)
    again = t.run(q[:, :, order], k, v, d_out[:, :, order], moved)
    t.assert_close(again, [x.double() for x in (out[:, :, order], lse[:, :, order], dq[:, :, order], dk, dv)], q.dtype)


def test_nobody_sees_anything() -> None:
    mask = Mask(torch.zeros(1, 1, 40, 2, dtype=torch.int32), None, None, 40)
    out, lse, *gradients = t.run(*t.inputs(Sizes(1, 1, 1, 40, 40, 16), torch.float32, "cpu"), mask)
    assert bool((lse == -float("inf")).all())
    assert all(not bool(x.any()) for x in (out, *gradients))


def test_no_keys_or_no_queries() -> None:
    for queries, keys in ((0, 5), (5, 0)):
        found = t.run(*t.inputs(Sizes(1, 2, 1, queries, keys, 16), torch.float32, "cpu"), None)
        assert all(not bool(x.nan_to_num(neginf=0).any()) for x in found)


def test_strides_of_all_kinds() -> None:
    """Slices of a fused projection, expanded heads, an unaligned start and a gradient that is one number."""
    fused = torch.randn(2, 45, 3, 2, 20, generator=torch.Generator().manual_seed(3))
    q, k, v = (fused[:, :, i].transpose(1, 2)[..., 1:17] for i in range(3))
    d_out = torch.ones(()).expand(q.shape)
    t.check(q, k[:, :1].expand(-1, 2, -1, -1), v, d_out, t.causal(45))


def test_extreme_scores() -> None:
    """Sums that would overflow without the running maximum. A score adds up 16 products of some 500 in all, so half a
    unit in float32's last place of that, 3e-5, is how far a probability may be off, and keys of 40 carry 40 times as
    much into dq: a bound that no processor's order of adding exceeds.
    """
    q, k, v, d_out = t.inputs(Sizes(1, 1, 1, 50, 50, 16), torch.float32, "cpu")
    t.check(q, k + 40.0, v, d_out, t.window(50, 9), scale=1.0, slack=400.0)


def test_a_part_with_the_whole_log_sum_exp_gives_its_share() -> None:
    q, k, v, d_out = t.inputs(Sizes(1, 2, 1, 60, 60, 16), torch.float32, "cpu")
    mask = t.causal(60)
    out, lse, dq, dk, dv = t.run(q, k, v, d_out, mask)
    parts = []
    for keys in (slice(0, 25), slice(25, 60)):
        lo, hi = mask.ranges[..., 0], mask.ranges[..., 1]
        size = keys.stop - keys.start
        part = Mask(torch.stack([lo, (hi - keys.start).clamp(0, size)], -1).to(torch.int32), None, None, size)
        lists = tiles(part, *triton_launch.blocks(16, q.dtype, "cpu"))
        parts.append(triton_launch.backward(d_out, q, k[:, :, keys], v[:, :, keys], out, lse, part, lists, 0.25, 0.0))
    joined = (parts[0][0] + parts[1][0], torch.cat([p[1] for p in parts], 2), torch.cat([p[2] for p in parts], 2))
    t.assert_close((out, lse, *joined), [x.double() for x in (out, lse, dq, dk, dv)], q.dtype)


def test_results_are_laid_out_by_token() -> None:
    out, _, *gradients = t.run(*t.inputs(Sizes(2, 2, 1, 20, 20, 16), torch.float32, "cpu"), None)
    assert all(x.transpose(1, 2).is_contiguous() for x in (out, *gradients))


def test_what_is_refused() -> None:
    q, k, v, _ = t.inputs(Sizes(1, 2, 1, 40, 40, 16), torch.float32, "cpu")
    mask = t.causal(40)
    lists = tiles(mask, *triton_launch.blocks(16, q.dtype, "cpu"))
    for wrong, arguments in {
        "positive": (q, k, v, None, None, -1.0, 0.0),
        "comes with its tiles": (q, k, v, mask, None, 1.0, 0.0),
        "kernels walk": (q, k, v, mask, tiles(mask, 64, 64), 1.0, 0.0),
        "does not fit": (q, k[:, :, 1:], v[:, :, 1:], mask, lists, 1.0, 0.0),
        "one type": (q, k.half(), v, None, None, 1.0, 0.0),
        "float64": (q.double(), k.double(), v.double(), None, None, 1.0, 0.0),
        "last stride": (q.mT.contiguous().mT, k, v, None, None, 1.0, 0.0),
    }.items():
        with pytest.raises(ValueError, match=wrong):
            triton_launch.forward(*arguments)
    with pytest.raises(ValueError, match="not 300"):
        triton_launch.blocks(300, torch.float32, "cpu")


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(masks(most=70), st.sampled_from([4, 16]), st.sampled_from([8, 16]), st.sampled_from([4, 256]))
def test_tile_lists(mask: Mask, block_q: int, block_k: int, chunk: int) -> None:
    """Those of csc.kernels.mask, whichever part of a row is listed at once."""
    with mock.patch.object(triton_kernels, "CHUNK", chunk):
        found = triton_kernels.tiles(mask, block_q, block_k)
    wanted = tiles(mask, block_q, block_k)
    for one, other in ((found.of_queries, wanted.of_queries), (found.of_keys, wanted.of_keys)):
        assert torch.equal(one.counts, other.counts) and torch.equal(one.index, other.index)
        assert (one.counts.dtype, one.index.dtype) == (other.counts.dtype, other.index.dtype)
