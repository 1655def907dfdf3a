"""Attention whose keys are spread over context-parallel ranks, as operators that a graph can hold.

    csc::context_attention(q, k, v, plan, mask, keys, scale, softcap) -> (out, lse)
    csc::context_attention_backward(d_out, q, k, v, out, lse, plan, mask, keys, scale, softcap) -> (dq, dk, dv)

q: [B, H, t, D]; k, v: [B, Hkv, t, D]: the t tokens of this rank. mask: which of the plan's masks; keys: tokens of the
whole sequence. plan stands for the plan of the batch at hand, which no tensor holds: these operators are traced and
differentiated but never run. An emitted program calls `plan.attention(...)` in their place (csc.runtime.context).
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from csc.kernels.layout import heads_last, statistics

_ELSEWHERE = "context-parallel attention runs on the ranks of a compiled program only"


def _refuse() -> NoReturn:
    raise RuntimeError(_ELSEWHERE)


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
    _refuse()


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
    _refuse()


@_backward.register_fake
def _(d_out: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    return heads_last(q), heads_last(k), heads_last(v)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, plan, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, plan)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, d_out: torch.Tensor, _: Any) -> tuple[Any, ...]:
    found = torch.ops.csc.context_attention_backward(d_out, *ctx.saved_tensors, *ctx.rest)
    return (*found, None, *(None for _ in ctx.rest))


_attention.register_autograd(_gradients, setup_context=_remember)

ATTENTION = torch.ops.csc.context_attention.default
