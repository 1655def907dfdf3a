"""What meets the tokens of other context-parallel ranks, as operators that a graph can hold.

q: [B, H, t, D]; k, v: [B, Hkv, t, D]: the t tokens of this rank. mask: which of the plan's masks; keys: tokens of the
whole sequence. x: a rank's shard, t slots in `dim`; whole: the same value with all tokens, on every rank. d_whole is a
rank's part of the gradient of the whole; dx, this rank's shard of the sum over ranks (an all-gather and its
reduce-scatter). The last two are for wholes that are equal on all ranks, gradients included: see
csc.kernels.collectives. Slots without a token repeat token 0, or are zeros without `repeat`. All meet the other ranks'
through a `TokenPlan` of the batch at hand (csc.runtime.context), which no tensor holds: plan is its number, int64
without dimensions. `context_own` (equal to shard) and `context_whole` (shard to equal) are each other's backward.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from csc.kernels.operators import Numbered, heads_last, statistics

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class TokenPlan(Protocol):
    """One rank's side of the exchanges of a microbatch, over whatever its transport is."""

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: int, scale: float, softcap: float
    ) -> Pair:
        """(out, lse) of this rank's queries."""

    def attention_backward(
        self, d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, mask: int, scale: float, softcap: float,
    ) -> Triple:  # fmt: skip
        """The gradients of this rank's q, k and v."""

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """All tokens of a value."""

    def gather_backward(self, d_whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's shard of the sum of the ranks' parts."""

    def own(self, x: torch.Tensor, dim: int, repeat: bool) -> torch.Tensor:
        """This rank's shard of a value that has all tokens."""


_PLANS: Numbered[TokenPlan] = Numbered(
    "what meets the tokens of other ranks runs on the ranks of a compiled program only"
)
numbered = _PLANS.number


@torch.library.custom_op("csc::context_attention", mutates_args=())
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: torch.Tensor,
    mask: int,
    keys: int,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _PLANS.find(plan).attention(q, k, v, mask, scale, softcap)


@_attention.register_fake
def _(q: Any, k: Any, v: Any, plan: Any, mask: int, keys: int, scale: float, softcap: float) -> Any:
    return heads_last(q), statistics(q)


@torch.library.custom_op("csc::context_attention_backward", mutates_args=())
def _backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    plan: torch.Tensor,
    mask: int,
    keys: int,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _PLANS.find(plan).attention_backward(d_out, q, k, v, out, lse, mask, scale, softcap)


@_backward.register_fake
def _(d_out: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    return heads_last(q), heads_last(k), heads_last(v)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, plan, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, plan)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, d_out: torch.Tensor, _: Any) -> tuple[Any, ...]:
    gradients = torch.ops.csc.context_attention_backward(d_out, *ctx.saved_tensors, *ctx.rest)
    return (*gradients, None, *(None for _ in ctx.rest))


_attention.register_autograd(_gradients, setup_context=_remember)


@torch.library.custom_op("csc::context_gather", mutates_args=())
def _gather(x: torch.Tensor, plan: torch.Tensor, dim: int, tokens: int) -> torch.Tensor:
    return _PLANS.find(plan).gather(x, dim)


@_gather.register_fake
def _(x: Any, plan: Any, dim: int, tokens: int) -> Any:
    return _resized(x, dim, tokens)


@torch.library.custom_op("csc::context_gather_backward", mutates_args=())
def _gather_backward(d_whole: torch.Tensor, plan: torch.Tensor, dim: int, shard: int) -> torch.Tensor:
    return _PLANS.find(plan).gather_backward(d_whole, dim)


@_gather_backward.register_fake
def _(d_whole: Any, plan: Any, dim: int, shard: int) -> Any:
    return _resized(d_whole, dim, shard)


def _resized(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:dim], size, *x.shape[dim + 1 :]))


def _remember_shard(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, plan, ctx.dim, _ = inputs
    ctx.shard = x.shape[ctx.dim]
    ctx.save_for_backward(plan)


def _gather_gradients(ctx: Any, d_whole: torch.Tensor) -> tuple[Any, ...]:
    (plan,) = ctx.saved_tensors
    return torch.ops.csc.context_gather_backward(d_whole, plan, ctx.dim, ctx.shard), None, None, None


_gather.register_autograd(_gather_gradients, setup_context=_remember_shard)


@torch.library.custom_op("csc::context_own", mutates_args=())
def _own(x: torch.Tensor, plan: torch.Tensor, dim: int, shard: int, repeat: bool) -> torch.Tensor:
    return _PLANS.find(plan).own(x, dim, repeat)


@_own.register_fake
def _(x: Any, plan: Any, dim: int, shard: int, repeat: bool) -> Any:
    return _resized(x, dim, shard)


@torch.library.custom_op("csc::context_whole", mutates_args=())
def _whole(x: torch.Tensor, plan: torch.Tensor, dim: int, tokens: int) -> torch.Tensor:
    return _PLANS.find(plan).gather(x, dim)


@_whole.register_fake
def _(x: Any, plan: Any, dim: int, tokens: int) -> Any:
    return _resized(x, dim, tokens)


def _remember_tokens(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, plan, ctx.dim, *_ = inputs
    ctx.slots = x.shape[ctx.dim]
    ctx.save_for_backward(plan)


def _own_gradients(ctx: Any, d_own: torch.Tensor) -> tuple[Any, ...]:
    (plan,) = ctx.saved_tensors
    return torch.ops.csc.context_whole(d_own, plan, ctx.dim, ctx.slots), None, None, None, None


def _whole_gradients(ctx: Any, d_whole: torch.Tensor) -> tuple[Any, ...]:
    (plan,) = ctx.saved_tensors
    return torch.ops.csc.context_own(d_whole, plan, ctx.dim, ctx.slots, False), None, None, None


_own.register_autograd(_own_gradients, setup_context=_remember_tokens)
_whole.register_autograd(_whole_gradients, setup_context=_remember_tokens)

ATTENTION = torch.ops.csc.context_attention.default
GATHER = torch.ops.csc.context_gather.default
OWN = torch.ops.csc.context_own.default
WHOLE = torch.ops.csc.context_whole.default
