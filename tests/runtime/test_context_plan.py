"""Attention over the ranks of a group equals dense attention over the whole sequence, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from context_cases import on_ranks, ranks_of, spec_of, spreads
from csc.kernels import attention as kernels
from csc.kernels.mask import Mask
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from csc.errors import InputError
from csc.ir.groups import CONTEXT
from csc.runtime.context import ContextPlan, attach
from csc.runtime.specs import ContextSpec
from csc.runtime.transport import spread
from tests.kernels import dense

SCALE = 0.3
NAMES = ("out", "lse", "dq", "dk", "dv")
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> object:
    """Short sequences have several tiles, some of them empty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "CPU_BLOCKS", (8, 4))
        yield


def inputs(batch: int, heads: tuple[int, int], tokens: int, seed: int = 0, width: int = 8) -> Tensors:
    """q, k, v, d_out of a whole sequence as head-transposed views, as models have them."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(batch, tokens, count, width, generator=generator, dtype=torch.float64).transpose(1, 2)
        for count in (heads[0], heads[1], heads[1], heads[0])
    )


def shards(plan: ContextPlan, whole: torch.Tensor) -> torch.Tensor:
    """What a rank holds: its tokens; something else in the slots without one."""
    shard = whole.index_select(2, plan.tokens).transpose(1, 2).contiguous().transpose(1, 2)
    shard[:, :, ~plan.real] = 7.0
    return shard


def check(
    spec: ContextSpec, masks: Sequence[Mask], heads: tuple[int, int], batch: int, softcap: float,
    collective: str | None = None,
) -> None:  # fmt: skip
    """Both passes of every mask, on all ranks; a second layer of the same mask finds what the first has planned."""
    ranks, transport = ranks_of(spec)
    where = spread(spec, masks)
    plans = [ContextPlan(spec, masks, where, rank, collective) for rank in ranks]
    layers = [(number, seed) for seed in range(2) for number in range(len(masks))]
    wholes = {layer: inputs(batch, heads, spec.tokens, seed=layer[1]) for layer in layers}

    def work(rank: int) -> list[Tensors]:
        plan, done = plans[rank], []
        for layer in layers:
            q, k, v, d_out = (shards(plan, whole) for whole in wholes[layer])
            done.append((layer, q, k, v, d_out, *plan.attention(q, k, v, layer[0], SCALE, softcap)))
        results: list[Tensors] = []
        for layer, q, k, v, d_out, out, lse in reversed(done):
            gradients = plan.attention_backward(d_out, q, k, v, out, lse, layer[0], SCALE, softcap)
            results.append((out, lse, *gradients))
        return results[::-1]

    found = on_ranks(transport, work)
    for place, layer in enumerate(layers):
        q, k, v, d_out = wholes[layer]
        expected = dense.results(q, k, v, masks[layer[0]], SCALE, softcap, d_out)
        whole = [torch.full_like(one, float("nan")) for one in expected]
        for plan, results in zip(plans, found):
            own, real = plan.tokens[plan.real], plan.real
            for total, shard in zip(whole, results[place]):
                total[:, :, own] = shard[:, :, real]
            out, lse, *gradients = (shard[:, :, ~real] for shard in results[place])
            assert not out.any() and bool((lse == -float("inf")).all())
            assert not any(one.any() for one in gradients)
        for name, one, other in zip(NAMES, whole, expected):
            assert torch.equal(one.isinf(), other.isinf()), name
            error = float((one.nan_to_num(nan=1e9, neginf=0) - other.nan_to_num(neginf=0)).abs().max())
            assert error <= 1e-10, f"{name} of {layer}: {error:.1e}"


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(spreads(), st.sampled_from([(2, 2), (4, 2), (4, 1)]), st.sampled_from([0.0, 5.0]), st.integers(1, 2), st.data())
def test_any_mask_on_any_ranks(
    drawn: tuple[ContextSpec, list[Mask]], heads: tuple[int, int], softcap: float, samples: int, data: st.DataObject
) -> None:
    spec, masks = drawn
    collective = data.draw(st.sampled_from([None, "exact", "all-gather"]))
    check(spec, masks, heads, max(samples, *(mask.batch for mask in masks)), softcap, collective)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(spreads(), st.sampled_from(["each", "two", "one", "shared"]), st.sampled_from([0.0, 5.0]), st.integers(1, 2))
def test_heads_are_divided(drawn: tuple[ContextSpec, list[Mask]], keys: str, softcap: float, samples: int) -> None:
    """With as many key heads as ranks, twice as many, one for all, or one for some of the ranks."""
    spec, masks = drawn
    ranks = spec.ranks
    kv_heads = {"each": ranks, "two": 2 * ranks, "one": 1, "shared": ranks // 2 if ranks % 2 == 0 else 1}[keys]
    check(spec, masks, (2 * ranks, kv_heads), max(samples, *(mask.batch for mask in masks)), softcap, "heads")


def test_the_model_chooses() -> None:
    """Heads where links are slow and everybody needs everything; what is needed where that is little."""
    slow = spec_of(64, 4, 4, block_seconds=1.0)
    everything = spread(slow, [causal(64)])
    assert everything.collective(8, 8) == "heads"
    assert everything.collective(6, 2) in ("exact", "all-gather")  # six heads cannot be divided by four
    start = torch.arange(64) // 4 * 4
    documents = Mask(torch.stack([start, start + 4], -1).to(torch.int32)[None, None], None, None, 64)
    assert spread(slow, [documents]).collective(8, 8) == "exact"
    ranks, _ = ranks_of(slow)
    with pytest.raises(InputError, match="6 heads cannot be divided over 4 ranks"):
        q, k, v, _ = inputs(1, (6, 6), slow.shard)
        ContextPlan(slow, [causal(64)], everything, ranks[0], "heads").attention(q, k, v, 0, SCALE, 0.0)


def causal(tokens: int) -> Mask:
    hi = torch.arange(1, tokens + 1)
    return Mask(torch.stack([torch.zeros_like(hi), hi], -1).to(torch.int32)[None, None], None, None, tokens)


def test_rows_that_see_nothing_and_keys_that_nobody_sees() -> None:
    ranges = causal(30).ranges.clone()
    ranges[:, :, 5:17] = 0
    kinds = torch.ones(1, 30, dtype=torch.int64)
    kinds[:, :7] = 0
    mask = Mask(ranges, torch.ones(1, 1, 30, dtype=torch.int64), kinds, 30)
    check(spec_of(30, 3, 2), [mask, causal(30)], (4, 2), 2, 0.0)


def test_ranks_that_need_nothing_from_others() -> None:
    start = torch.arange(36) // 12 * 12
    mask = Mask(torch.stack([start, start + 12], -1).to(torch.int32)[None, None], None, None, 36)
    check(spec_of(36, 3, 3, block_seconds=1e-3), [mask], (4, 2), 1, 0.0)


def test_a_mask_that_hides_everything() -> None:
    check(spec_of(12, 2, 1), [Mask(torch.zeros(1, 1, 12, 2, dtype=torch.int32), None, None, 12)], (2, 2), 1, 0.0)


def test_microbatches_and_steps_with_equal_masks_shard_a_plan() -> None:
    spec = spec_of(24, 2, 3)
    ranks, transport = ranks_of(spec)
    whole, narrow = ({"ranges": ranges} for ranges in (causal(24).ranges, causal(24).ranges.clamp(max=9)))
    batches = [whole, narrow, {**whole}, {}]
    name = spec.component
    first, second = ([[attach(rank, one)[CONTEXT][name] for one in batches] for rank in ranks] for _ in range(2))
    assert first == second
    assert all(mine[0] is mine[2] and len(set(map(id, mine))) == 3 for mine in first)
    assert len(transport.endpoint(0).recent.known) == 3  # planned once for all ranks
    assert torch.cat([mine[0].tokens[mine[0].real] for mine in first]).sort().values.tolist() == list(range(24))
