"""Shares made whole on every rank of a group, and the gradients of wholes brought back to the tokens' owners."""

from __future__ import annotations

import gc

import pytest
import torch
from context_cases import on_ranks, ranks_of, spreads
from csc.kernels.context import ATTENTION, GATHER, OWN, WHOLE
from csc.kernels.mask import Mask
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from csc.runtime.context import ContextPlan
from csc.runtime.specs import ContextMaskSpec, ContextSpec
from csc.runtime.transport import spread
from csc.torch_private.traces import FakeTensorMode


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(spreads(), st.integers(0, 2), st.integers(1, 2))
def test_every_token_once_and_back(drawn: tuple[ContextSpec, list[Mask]], dim: int, groups: int) -> None:
    """Each group has a value of its own. Whatever a padding slot holds goes nowhere, and its gradient is zero."""
    spec, masks = drawn
    ranks, transport = ranks_of(spec, groups)
    where = spread(spec, masks)
    plans = [ContextPlan(spec, masks, where, rank) for rank in ranks]
    shape = [2, 3, 2]
    shape[dim] = spec.tokens
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(shape, generator=generator) for _ in range(groups)]
    parts = [torch.randn(shape, generator=generator) for _ in ranks]

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        plan = plans[rank]
        shard = wholes[rank // spec.ranks].index_select(dim, plan.tokens)
        shard.transpose(0, dim)[~plan.real] = float("nan")
        return plan.gather(shard, dim), plan.gather_backward(parts[rank], dim)

    for rank, (whole, gradient) in enumerate(on_ranks(transport, work)):
        assert torch.equal(whole, wholes[rank // spec.ranks]) and whole.is_contiguous()
        first = rank // spec.ranks * spec.ranks
        total = parts[first].clone()
        for other in parts[first + 1 : first + spec.ranks]:
            total += other
        plan = plans[rank]
        expected = total.index_select(dim, plan.tokens)
        expected.transpose(0, dim)[~plan.real] = 0
        assert torch.equal(gradient, expected) and gradient.is_contiguous()


def test_half_precision_is_summed_in_single() -> None:
    """1 and three times half of what bfloat16 can add to it: rounded once, not three times."""
    spec = ContextSpec("encoder", 4, 4, 1, 1, 1e-6, 1e-6, (ContextMaskSpec(1),))
    ranks, transport = ranks_of(spec)
    everything = Mask(torch.tensor([0, 4], dtype=torch.int32).expand(1, 1, 4, 2), None, None, 4)
    plans = [ContextPlan(spec, [everything], spread(spec, [everything]), rank) for rank in ranks]
    small = torch.full((4,), 2.0**-8, dtype=torch.bfloat16)
    parts = [torch.ones(4, dtype=torch.bfloat16), small, small, small]
    for gradient in on_ranks(transport, lambda rank: plans[rank].gather_backward(parts[rank], 0)):
        assert gradient.dtype == torch.bfloat16 and gradient.tolist() == [1 + 2.0**-6]


def test_the_operators_meet_the_other_ranks_in_forward_and_backward() -> None:
    """On two ranks that take turns: autograd through the operators, against autograd through the whole in one."""
    tokens, scale = 7, 0.5
    spec = ContextSpec("encoder", 2, tokens, 2, 4, 1e-6, 1e-6, (ContextMaskSpec(1),))
    ranks, transport = ranks_of(spec)
    seen = torch.tensor([[0, q + 1] for q in range(tokens)], dtype=torch.int32)[None, None]
    masks = [Mask(seen, None, None, tokens)]
    plans = [ContextPlan(spec, masks, spread(spec, masks), rank) for rank in ranks]
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 2, tokens, 16, generator=generator) for _ in range(3)]
    weights = [torch.randn(1, 2, tokens, 16, generator=generator) for _ in ranks]

    def work(rank: int) -> list[torch.Tensor]:
        plan = plans[rank]
        with torch.enable_grad():
            shards = [x.index_select(2, plan.tokens).requires_grad_() for x in given]
            out, _ = ATTENTION(*shards, plan.plan, 0, tokens, scale, 0.0)
            whole = GATHER(out, plan.plan, 2, tokens)
            return [whole, *torch.autograd.grad((whole * weights[rank]).sum(), shards)]

    q, k, v = (x.clone().requires_grad_() for x in given)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    gradients = torch.autograd.grad((expected * sum(weights)).sum(), (q, k, v))
    for plan, (whole, *found) in zip(plans, on_ranks(transport, work), strict=True):
        torch.testing.assert_close(whole, expected)
        for gradient, one in zip(found, gradients, strict=True):
            torch.testing.assert_close(gradient[:, :, plan.real], one.index_select(2, plan.tokens)[:, :, plan.real])


def test_what_is_equal_on_all_ranks_has_equal_gradients() -> None:
    """A shard of a whole, and the whole again: each rank's gradient is what one alone would have, added up by none."""
    tokens = 7
    spec = ContextSpec("encoder", 2, tokens, 2, 4, 1e-6, 1e-6, (ContextMaskSpec(1),), axis="cp")
    ranks, transport = ranks_of(spec)
    everything = Mask(torch.tensor([0, tokens], dtype=torch.int32).expand(1, 1, tokens, 2), None, None, tokens)
    plans = [ContextPlan(spec, [everything], spread(spec, [everything]), rank) for rank in ranks]
    x, weights = torch.randn(2, tokens, 3), torch.randn(2, tokens, 3)

    def work(rank: int) -> list[torch.Tensor]:
        plan = plans[rank]
        with torch.enable_grad():
            given = x.clone().requires_grad_()
            own = OWN(given, plan.plan, 1, spec.shard, True)
            assert torch.equal(own, given[:, plan.tokens])
            whole = WHOLE(own.exp(), plan.plan, 1, tokens)
            return [whole, *torch.autograd.grad((whole * weights).sum(), given)]

    for whole, gradient in on_ranks(transport, work):
        assert torch.equal(whole, x.exp())
        torch.testing.assert_close(gradient, weights * x.exp())


def test_a_plan_is_found_as_long_as_it_lives() -> None:
    spec = ContextSpec("encoder", 1, 4, 1, 4, 1e-6, 1e-6, (ContextMaskSpec(1),))
    (rank,), _ = ranks_of(spec)
    everything = Mask(torch.tensor([0, 4], dtype=torch.int32).expand(1, 1, 4, 2), None, None, 4)
    one, other = (ContextPlan(spec, [everything], spread(spec, [everything]), rank) for _ in range(2))
    assert int(one.plan) != int(other.plan)
    x = torch.arange(4.0)
    assert torch.equal(GATHER(x, one.plan, 0, 4), x)
    number = one.plan
    del one
    gc.collect()
    for stranger in (number, torch.zeros(3, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match="runs on the ranks of a compiled program only"):
            GATHER(x, stranger, 0, 4)
    assert torch.equal(GATHER(x, other.plan, 0, 4), x)


def test_the_operator_says_what_the_runtime_gives() -> None:
    with FakeTensorMode():
        x, plan = torch.empty(2, 5, 4, requires_grad=True), torch.empty(5, dtype=torch.int64)
        whole = GATHER(x, plan, 1, 17)
        assert whole.shape == (2, 17, 4) and whole.is_contiguous()
        (dx,) = torch.autograd.grad(whole, x, torch.empty_like(whole))
        assert dx.shape == x.shape and dx.is_contiguous()
