"""The attention operator on the CPU equals dense attention in float64, and behaves as an operator has to."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from csc.kernels import cpu, packing
from csc.kernels.attention import CPU_BLOCKS, attention, attention_with_lse
from csc.kernels.mask import Mask, tiles
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import dense
from tests.kernels.masks import masks

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def inputs(batch: int, heads: tuple[int, int], sizes: tuple[int, int], width: int, dtype: torch.dtype, seed: int = 0):
    """q, k, v, d_out as head-transposed views, as models have them."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(batch, tokens, heads, width, generator=generator).to(dtype).transpose(1, 2)

    return (
        tensor(heads[0], sizes[0]),
        tensor(heads[1], sizes[1]),
        tensor(heads[1], sizes[1]),
        tensor(heads[0], sizes[0]),
    )


NAMES = ("out", "lse", "dq", "dk", "dv")


def assert_close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    """Against the largest entry of all five: a gradient that cancels to nothing has no size of its own."""
    size = max(1.0, *(float(x.nan_to_num(neginf=0).abs().max()) for x in expected))
    for name, one, other in zip(NAMES, found, expected, strict=True):
        assert torch.equal(one.isinf(), other.isinf()), name
        one, other = one.double().nan_to_num(nan=1e9, neginf=0), other.nan_to_num(neginf=0)
        error = float((one - other).abs().max()) / size
        assert error <= TOLERANCE[dtype], f"{name}: {error:.2e}"


def check(q, k, v, d_out, mask: Mask | None, softcap: float = 0.0) -> None:
    leaves = [x.detach().requires_grad_(True) for x in (q, k, v)]
    out, lse = attention_with_lse(*leaves, mask, softcap=softcap)
    gradients = torch.autograd.grad(out, leaves, d_out)
    wanted = dense.results(q, k, v, mask, q.shape[-1] ** -0.5, softcap, d_out)
    assert_close((out.detach(), lse, *gradients), wanted, q.dtype)


@settings(max_examples=100, deadline=None)
@given(masks(most=300), st.sampled_from([(2, 2), (4, 2), (3, 1)]), st.sampled_from([0.0, 5.0]), st.data())
def test_any_mask(mask: Mask, heads: tuple[int, int], softcap: float, data: st.DataObject) -> None:
    batch = mask.batch if mask.batch > 1 else data.draw(st.integers(1, 2))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    q, k, v, d_out = inputs(batch, heads, (mask.queries, mask.keys), 8, dtype)
    check(q, k, v, d_out, mask, softcap)


@settings(max_examples=60, deadline=None)
@given(masks(), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.sampled_from([0, cpu.ONE_CALL]))
def test_small_tiles(mask: Mask, block_q: int, block_k: int, reordered: bool, one_call: int) -> None:
    q, k, v, d_out = inputs(mask.batch, (4, 2), (mask.queries, mask.keys), 8, torch.float64)
    lists = tiles(mask, block_q, block_k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "ONE_CALL", one_call)
        out, lse = cpu.forward(q, k, v, mask, lists, 0.3, 0.0, reordered)
        gradients = cpu.backward(d_out, q, k, v, out, lse, mask, lists, 0.3, 0.0, reordered)
    wanted = dense.results(q, k, v, mask, 0.3, 0.0, d_out)
    assert_close((out, lse, *gradients), wanted, torch.float64)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_grouped_heads(dtype: torch.dtype, softcap: float) -> None:
    """The same numbers; to the bit where the kernel would round what it adds, or does not add."""
    q, k, v, d_out = inputs(2, (8, 2), (150, 150), 16, dtype)
    slot = torch.arange(1, 151, dtype=torch.int32)
    stops = torch.stack([slot, slot.clamp(max=90)])
    mask = Mask(torch.stack([stops * 0, stops], -1)[:, None], None, None, 150)
    rest = packing.pack(mask, 64, 64), 1, False, 64, 64, 0.25, softcap
    out, lse = torch.ops.csc.attention(q, k, v, *rest)
    found = torch.ops.csc.attention_backward(d_out, q, k, v, out, lse, *rest, True)
    assert_close((out, lse, *found), dense.results(q, k, v, mask, 0.25, softcap, d_out), dtype)
    others = torch.ops.csc.attention_backward(d_out, q, k, v, out, lse, *rest)
    alike = all(map(torch.equal, found, others))
    assert alike == (softcap > 0 or dtype not in cpu.WIDE)


@settings(max_examples=100, deadline=None)
@given(
    masks(most=40),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([4, 8]),
    st.sampled_from([0, 30, 10**9]),
    st.booleans(),
    st.sampled_from([0, cpu.ONE_CALL]),
)
def test_each_visible_pair_is_in_one_block(
    mask: Mask, block_q: int, block_k: int, few: int, reordered: bool, one_call: int
) -> None:
    """However few pairs samples may look at for nothing, to go together."""
    q = torch.zeros(mask.batch, 1, mask.queries, 4)
    met = torch.zeros(mask.batch, mask.queries, mask.keys, dtype=torch.int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "FEW", few)
        patch.setattr(cpu, "ONE_CALL", one_call)
        walk = cpu.blocks(q, mask.keys, replace(mask, known={}), tiles(mask, block_q, block_k), 1.0, reordered)
    for block in walk:
        keys = torch.arange(mask.keys)[block.keys]
        seen = torch.ones(mask.batch, mask.queries, len(keys), dtype=torch.bool)[block.samples, block.rows]
        seen = seen if block.bias is None else seen & (block.bias[:, 0] == 0)
        met[block.samples, block.rows] = met[block.samples, block.rows].index_add(2, keys, seen.int())
        blind = torch.zeros_like(seen[..., 0]) if block.blind is None else block.blind[:, 0]
        assert torch.equal(blind, ~seen.any(-1))
    assert torch.equal(met, mask.dense().int())


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_no_queries_or_no_keys(sizes: tuple[int, int], masked: bool, softcap: float) -> None:
    """As a batch without tokens or images has; ATen's kernel would end the process."""
    stops = torch.arange(1, sizes[0] + 1).clamp(max=sizes[1]).int()
    mask = Mask(torch.stack([torch.zeros_like(stops), stops], -1)[None, None], None, None, sizes[1])
    q, k, v, d_out = (x.requires_grad_() for x in inputs(2, (4, 2), sizes, 8, torch.float32))
    out, lse = attention_with_lse(q, k, v, mask if masked else None, softcap=softcap)
    gradients = torch.autograd.grad(out, (q, k, v), d_out)
    assert all(torch.equal(one, torch.zeros_like(other)) for one, other in zip((out, *gradients), (q, q, k, v)))
    assert torch.equal(lse, torch.full((2, 4, sizes[0]), -float("inf")))


def test_samples_that_see_nearly_the_same_go_together() -> None:
    for length, padding, calls in ((120, 36, 1), (144, 36, 1), (1100, 36, 5), (1100, 600, 8)):
        padded = torch.tensor([[length, length - padding]])
        slots = torch.arange(1, length + 1)
        stops = torch.minimum(slots[None], padded.T).int()
        mask = Mask(torch.stack([torch.zeros_like(stops), stops], -1)[:, None], None, None, length)
        walk = cpu.blocks(torch.zeros(2, 1, length, 4), length, mask, tiles(mask, 256, 128), 0.0)
        assert len(walk) == calls, walk


@pytest.mark.parametrize(
    ("length", "padding", "reordered", "calls"),
    [
        (128, 70, False, 1),
        (256, 9, True, 1),
        (512, 9, False, 8),
        (512, 9, True, 8),
        (512, 0, True, 8),
        (512, 0, False, 1),
    ],
)
def test_few_pairs_are_one_call(length: int, padding: int, reordered: bool, calls: int) -> None:
    """Of two samples, causal; without padding it is the kernel's own causal call unless sums may be reordered. Keys
    that no query of a block sees are left out of it.
    """
    slots = torch.arange(1, length + 1)
    stops = torch.stack([slots, slots.clamp(max=length - padding)]).int()
    mask = Mask(torch.stack([torch.zeros_like(stops), stops], -1)[:, None], None, None, length)
    lists = tiles(mask, *CPU_BLOCKS)
    walk = cpu.blocks(torch.zeros(2, 1, length, 4), length, mask, lists, 0.0, reordered)
    assert len(walk) == calls and walk[0].whole == (calls == 1)
    assert [block.keys.indices(length)[1] for block in walk if isinstance(block.keys, slice)] == [
        (i + 1) * length // calls for i in range(calls)
    ]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("length", [40, 200, 300])
def test_reordered_sums_are_right(length: int, masked: bool, dtype: torch.dtype) -> None:
    """Of a mask that is exactly causal as of a padded one; on the way through autograd as well."""
    q, k, v, d_out = inputs(2, (4, 2), (length, length), 16, dtype)
    mask = causal(length)
    if masked:
        ends = mask.ranges.expand(2, -1, -1, -1).clone()
        ends[1, ..., 1].clamp_(max=length - 7)
        mask = Mask(ends, None, None, length)
    leaves = [x.detach().requires_grad_(True) for x in (q, k, v)]
    rest = packing.pack(mask, *CPU_BLOCKS), 1, False, *CPU_BLOCKS, 0.25, 0.0
    out, lse = torch.ops.csc.attention(*leaves, *rest, reordered=True)
    found = torch.autograd.grad(out, leaves, d_out)
    out = out.detach()
    assert_close((out, lse, *found), dense.results(q, k, v, mask, 0.25, 0.0, d_out), dtype)
    direct = torch.ops.csc.attention_backward(d_out, q, k, v, out, lse, *rest, reordered=True)
    assert all(map(torch.equal, found, direct)), "its backward is reordered, too"


@pytest.mark.parametrize("lengths", [[24, 16], [9, 40, 11], [300, 8, 200], [3, 60]])
def test_sequences_in_one_row_are_as_if_alone(lengths: list[int]) -> None:
    """To the bit, gradients too: images in a row, whatever their lengths and where tiles begin."""
    ends = torch.tensor(lengths).cumsum(0)
    begins = ends - torch.tensor(lengths)
    bounds = torch.stack([begins, ends], 1).repeat_interleave(torch.tensor(lengths), 0)
    mask = Mask(bounds.int()[None, None], None, None, int(ends[-1]))
    q, k, v, d_out = inputs(1, (4, 2), (mask.queries, mask.keys), 8, torch.float32)
    leaves = [x.detach().requires_grad_(True) for x in (q, k, v)]
    out, lse = attention_with_lse(*leaves, mask)
    found = (out, lse, *torch.autograd.grad(out, leaves, d_out))
    for low, high in zip(begins.tolist(), ends.tolist()):
        alone = [x[:, :, low:high].detach().requires_grad_(True) for x in (q, k, v)]
        expected, expected_lse = attention_with_lse(*alone, None)
        wanted = (expected, expected_lse, *torch.autograd.grad(expected, alone, d_out[:, :, low:high]))
        for name, one, other in zip(NAMES, found, wanted, strict=True):
            assert torch.equal(one[:, :, low:high], other), name


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_without_a_mask(dtype: torch.dtype, softcap: float) -> None:
    check(*inputs(2, (4, 2), (300, 70), 16, dtype), None, softcap)


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, with tokens side by side in memory, as attention over channels has them."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "d_out"])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_any_order_in_memory(which: int, softcap: float) -> None:
    given = list(inputs(2, (4, 2), (30, 70), 16, torch.float32))
    given[which] = turned(given[which])
    assert given[which].stride(-1) != 1
    check(*given, None, softcap)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_causal_in_every_precision(dtype: torch.dtype) -> None:
    q, k, v, d_out = inputs(2, (4, 2), (600, 600), 32, dtype)
    check(q, k, v, d_out, causal(600))


def causal(tokens: int) -> Mask:
    slot = torch.arange(tokens, dtype=torch.int32)
    return Mask(torch.stack([slot * 0, slot + 1], -1)[None, None], None, None, tokens)


@settings(max_examples=100, deadline=None)
@given(masks(), st.integers(1, 9), st.integers(1, 9))
def test_packing_keeps_everything(mask: Mask, block_q: int, block_k: int) -> None:
    packed = packing.pack(mask, block_q, block_k)
    form = packing.Form(mask.rules, mask.kinds is not None, mask.queries, mask.keys, block_q, block_k)
    assert packed.shape == (mask.batch, packing.words(form))
    again, lists = packing.unpack(packed, form)
    wanted = tiles(mask, block_q, block_k)
    assert torch.equal(again.dense(), mask.dense())
    for one, other in ((lists.of_queries, wanted.of_queries), (lists.of_keys, wanted.of_keys)):
        assert torch.equal(one.index, other.index) and torch.equal(one.counts, other.counts)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dense_heads", [True, False])
def test_is_a_sound_operator(masked: bool, dense_heads: bool) -> None:
    """torch's own checks: schema, autograd registration, fake kernels (strides too), tracing."""
    made = inputs(2, (4, 2), (20, 20), 8, torch.float32)
    q, k, v, _ = ((x.contiguous() if dense_heads else x).requires_grad_(True) for x in made)
    packed = packing.pack(causal(20), 16, 8) if masked else None
    rest = (packed, 1 if masked else 0, False, 16, 8, 0.5, 0.0)
    torch.library.opcheck(torch.ops.csc.attention.default, (q, k, v, *rest))
    mask = causal(20)
    torch.library.opcheck(torch.ops.csc.pack_mask.default, (mask.ranges, None, None, 20, 16, 8))
    out, lse = torch.ops.csc.attention(q, k, v, *rest)
    given = [x.detach() for x in (out, q, k, v, out, lse)]
    torch.library.opcheck(torch.ops.csc.attention_backward.default, (*given, *rest))
    torch.library.opcheck(torch.ops.csc.attention_backward.default, (*given, *rest, True))


def test_survives_export() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
            return attention(q, q, q, Mask(ranges, None, None, q.shape[2]))

    q, ranges = torch.randn(2, 4, 20, 8), causal(20).ranges
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(
        Model(), (q, ranges), dynamic_shapes=({2: tokens}, {2: tokens}), strict=False
    ).run_decompositions({})
    names = [str(node.target) for node in program.graph.nodes]
    assert "csc.attention.default" in names and "csc.pack_mask.default" in names
    longer = torch.randn(2, 4, 33, 8)
    assert torch.equal(program.module()(longer, causal(33).ranges), attention(longer, longer, longer, causal(33)))


def test_sizes_that_do_not_fit_are_refused() -> None:
    q, k, v, _ = inputs(1, (3, 2), (8, 8), 8, torch.float32)
    with pytest.raises(ValueError, match="3 query heads cannot share 2 key heads"):
        attention(q, k, v)
    q, k, v, _ = inputs(3, (2, 2), (8, 8), 8, torch.float32)
    with pytest.raises(ValueError, match="sizes do not fit"):
        attention(q, k[:, :, :, :4], v)
    wrong = Mask(torch.zeros(2, 1, 8, 2, dtype=torch.int32), None, None, 8)
    with pytest.raises(ValueError, match="does not fit 3 samples"):
        attention(q, k, v, wrong)


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_without_padding_it_is_the_kernel_s_own(heads: int, causal: bool) -> None:
    """Bit for bit what a model without padding calls, heads grouped or not."""
    draws = [torch.Generator().manual_seed(i) for i in range(4)]
    q, d_out = (torch.randn(2, 4, 300, 16, generator=draw) for draw in draws[:2])
    k, v = (torch.randn(2, heads, 300, 16, generator=draw) for draw in draws[2:])
    places = torch.arange(300, dtype=torch.int32)
    mask = Mask(torch.stack([0 * places, places + 1], -1).expand(1, 1, -1, -1), None, None, 300) if causal else None
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, mask)
    found = torch.autograd.grad(out, leaves, d_out)
    expected = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=heads < 4)
    assert torch.equal(out, expected)
    for own, other in zip(found, torch.autograd.grad(expected, leaves, d_out), strict=True):
        assert torch.equal(own, other)


def test_what_is_kept_of_a_mask_is_not_used_once_it_changes() -> None:
    places = torch.arange(20, dtype=torch.int32)
    causal, everything = (
        Mask(torch.stack([0 * places, behind], -1).expand(1, 1, -1, -1).contiguous(), None, None, 20)
        for behind in (places + 1, 0 * places + 20)
    )
    packed, other = (packing.pack(mask, 256, 128) for mask in (causal, everything))
    form = packing.Form(1, False, 20, 20, 256, 128)
    first, _ = packing.unpack_once(packed, form)
    assert packing.unpack_once(packed, form)[0] is first
    packed.copy_(other)
    assert torch.equal(packing.unpack_once(packed, form)[0].dense(), everything.dense())
    gone = weakref.ref(packed)
    del packed
    assert gone() is None, "what it keeps does not keep it"
