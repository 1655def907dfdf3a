"""The compiled kernels on a GPU: the interpreter's comparisons at real sizes, bfloat16, and equal bits every run."""

from __future__ import annotations

import pytest
import torch
from csc.kernels.mask import Mask

if not torch.cuda.is_available():
    pytest.skip("needs a GPU: compiled kernels are compared with dense attention on one", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is for Linux")

from csc.kernels import scattered_rows, triton_kernels  # noqa: F401  the first registers an operator
from csc.kernels.attention import attention_with_lse
from csc.kernels.mask import tiles

from tests.kernels import dense
from tests.kernels import triton_cases as t
from tests.kernels.triton_cases import Sizes

HALF = (torch.bfloat16, torch.float16)
MASKS = {
    "none": lambda length: None,
    "causal": t.causal,
    "window": lambda length: t.window(length, 300),
    "documents": lambda length: t.documents(length, 371),
    "generation": lambda length: t.generation(length, 210),
    "modality": lambda length: t.modality(length, 170),
}


def on_gpu(mask: Mask | None) -> Mask | None:
    return None if mask is None else mask.to("cuda")


@pytest.mark.parametrize("length", [57, 600, 1000, 2048])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_masks(name: str, length: int, dtype: torch.dtype) -> None:
    many = t.inputs(Sizes(2, 4, 2, length, length, 64), dtype, "cuda")
    t.check(*many, on_gpu(MASKS[name](length)))


@pytest.mark.parametrize("width", [16, 32, 36, 64, 72, 80, 96, 128, 160, 256])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_head_dims(width: int, dtype: torch.dtype, softcap: float) -> None:
    many = t.inputs(Sizes(1, 4, 1, 777, 777, width), dtype, "cuda")
    t.check(*many, on_gpu(t.generation(777, 100)), softcap)
    t.check(*many, None, softcap)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_long(dtype: torch.dtype) -> None:
    many = t.inputs(Sizes(1, 8, 2, 4096, 4096, 128), dtype, "cuda")
    t.check(*many, on_gpu(t.causal(4096)))
    t.check(*many, on_gpu(t.generation(4096, 700)))


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 3000), (300, 5), (128, 256), (1000, 130)])
def test_cross_attention(queries: int, keys: int) -> None:
    many = t.inputs(Sizes(2, 4, 4, queries, keys, 128), torch.bfloat16, "cuda")
    t.check(*many, None)
    position = torch.arange(queries)
    t.check(*many, on_gpu(Mask(t.ranges(position % 7, (position + 200).clamp(max=keys)), None, None, keys)))


@pytest.mark.parametrize("length", [57, 1000, 5000, 40000])
@pytest.mark.parametrize("name", [name for name in MASKS if name != "none"])
def test_tile_lists(name: str, length: int) -> None:
    """Those that are computed without the kernels."""
    mask = MASKS[name](length)
    found, wanted = triton_kernels.tiles(mask.to("cuda"), 128, 128), tiles(mask, 128, 128)
    for one, other in ((found.of_queries, wanted.of_queries), (found.of_keys, wanted.of_keys)):
        assert torch.equal(one.counts.cpu(), other.counts) and torch.equal(one.index.cpu(), other.index)


@pytest.mark.parametrize("shape", [(2, 700, 1), (2, 700, 64), (2, 1, 1)])
@pytest.mark.parametrize("more", [0, 5])
def test_rows_that_masked_scatter_took(shape: tuple[int, ...], more: int) -> None:
    """Bits of torch's, which waits for the device."""
    torch.manual_seed(0)
    d, mask = torch.randn(2, 700, 64, device="cuda"), torch.rand(shape, device="cuda") < 0.3
    sizes = [int(mask.expand_as(d).sum()) + more]
    wanted = torch.ops.aten.masked_scatter_backward.default(d, mask, sizes)
    assert torch.equal(torch.ops.csc.masked_scatter_backward.default(d, mask, sizes), wanted)


def test_strides_of_all_kinds() -> None:
    """Slices of a fused projection, expanded heads, an unaligned start and a gradient that is one number."""
    fused = torch.randn(2, 450, 3, 2, 72, device="cuda", dtype=torch.bfloat16)
    for start in (0, 1, 8):
        q, k, v = (fused[:, :, i].transpose(1, 2)[..., start : start + 64] for i in range(3))
        d_out = torch.ones((), device="cuda", dtype=q.dtype).expand(q.shape)
        t.check(q, k[:, :1].expand(-1, 2, -1, -1), v, d_out, on_gpu(t.causal(450)))


@pytest.mark.parametrize("name", ["causal", "generation"])
def test_equal_bits_from_run_to_run(name: str) -> None:
    many = t.inputs(Sizes(2, 8, 2, 2000, 2000, 128), torch.bfloat16, "cuda")
    mask = on_gpu(MASKS[name](2000))
    first = t.run(*many, mask)
    for _ in range(5):
        assert all(torch.equal(one, other) for one, other in zip(first, t.run(*many, mask), strict=True))


def test_the_operator_uses_the_kernels() -> None:
    """csc::attention on CUDA tensors, packed mask and autograd included."""
    q, k, v, d_out = t.inputs(Sizes(2, 4, 2, 700, 700, 64), torch.float32, "cuda")
    mask = on_gpu(t.generation(700, 90))
    leaves = [x.detach().requires_grad_(True) for x in (q, k, v)]
    out, lse = attention_with_lse(*leaves, mask)
    gradients = torch.autograd.grad(out, leaves, d_out)
    t.assert_close((out.detach(), lse, *gradients), dense.results(q, k, v, mask, 0.125, 0.0, d_out), q.dtype)


def test_positions_beyond_32_bits() -> None:
    """More than 2^31 elements in q, k, v: the last head of the last sequence is right."""
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB of free GPU memory")
    many = t.inputs(Sizes(1, 1, 1, 512, 512, 128), torch.bfloat16, "cuda")
    batch = (1 << 31) // (8 * 512 * 128) + 1
    big = [x.expand(batch, 8, -1, -1).contiguous() for x in many]
    mask = on_gpu(t.causal(512))
    small, found = t.run(*many, mask), t.run(*big, mask)
    assert all(torch.equal(one[0, 0], other[-1, -1]) for one, other in zip(small, found, strict=True))
