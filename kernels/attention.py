"""Attention as one operator that knows its mask: `csc::attention`, on CPUs and GPUs, in graphs and outside them.

q: [B, H, Tq, D]; k, v: [B, Hkv, Tk, D], H a multiple of Hkv: query head h reads key head h // (H / Hkv).
scores = scale * q.k, bent to softcap * tanh(scores / softcap) if softcap > 0; softmax over the visible keys.
out: (B, Tq, H, D) transposed to [B, H, Tq, D], zero where nothing is seen; lse: float32 [B, H, Tq], there -inf.
It may be `reordered`: sums are then taken in whatever order is fastest on a CPU, not in that of eager PyTorch's kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from csc.kernels import cpu, mask, operators, packing
from csc.kernels.mask import Mask, Tiles
from csc.kernels.operators import light_operator
from csc.kernels.packing import Form

from csc.errors import InputError

CPU_BLOCKS = (64, 64)
NARROW_CPU_BLOCKS = (256, 128)  # of float16 and bfloat16, whose keys ATen's backward casts anew in each call


def blocks(device: torch.device | str, width: int, dtype: torch.dtype) -> tuple[int, int]:
    """(queries, keys) of the tiles that a device's attention for heads of this width walks through."""
    if torch.device(device).type == "cpu":
        return CPU_BLOCKS if dtype in cpu.WIDE else NARROW_CPU_BLOCKS
    from csc.kernels import triton_launch  # Triton is there only where GPUs are

    return triton_launch.blocks(width, dtype, torch.device(device))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Attention under a mask that is data; csc reads the mask from the graph and can spread it over ranks.

    Args:
        q: [B, H, Tq, D].
        k: [B, Hkv, Tk, D], H a multiple of Hkv.
        v: [B, Hkv, Tk, D].
        mask: Which keys each query sees (csc.masks makes them); None: every key.
        scale: Of the scores; None: 1 / sqrt(D).
        softcap: Scores are bent to softcap * tanh(scores / softcap); 0: they are not.

    Returns:
        [B, H, Tq, D]; zero where a query sees nothing.

    Raises:
        ValueError: The sizes do not fit together.
    """
    return attention_with_lse(q, k, v, mask, scale, softcap)[0]


def attention_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, logarithm of the sum of the exponentials of each query's scores); no gradient flows through the latter."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if mask is None:
        return torch.ops.csc.attention(q, k, v, None, 0, False, 0, 0, scale, softcap)
    block_q, block_k = blocks(q.device, q.shape[-1], q.dtype)
    packed = torch.ops.csc.pack_mask(mask.ranges, mask.admits, mask.kinds, mask.keys, block_q, block_k)
    return torch.ops.csc.attention(
        q, k, v, packed, mask.rules, mask.kinds is not None, block_q, block_k, scale, softcap
    )


@light_operator("pack_mask")
def _pack_mask(
    ranges: torch.Tensor,
    admits: torch.Tensor | None,
    kinds: torch.Tensor | None,
    keys: int,
    block_q: int,
    block_k: int,
) -> torch.Tensor:
    return packing.pack_once(Mask(ranges, admits, kinds, keys), block_q, block_k)


@torch.library.register_fake("csc::pack_mask")
def _(ranges: Any, admits: Any, kinds: Any, keys: int, block_q: int, block_k: int) -> torch.Tensor:
    mask = Mask(ranges, admits, kinds, keys)
    form = Form(mask.rules, kinds is not None, mask.queries, keys, block_q, block_k)
    return ranges.new_empty((mask.batch, packing.words(form)), dtype=torch.int32)


@torch.library.custom_op("csc::seeing_ranges", mutates_args=())
def _seeing_ranges(
    ranges: torch.Tensor, admits: torch.Tensor | None, kinds: torch.Tensor | None, keys: int
) -> torch.Tensor:
    """The ranges, if every query sees a key by them; InputError if not."""
    hidden = Mask(ranges, admits, kinds, keys).hidden()
    if bool(hidden.any()):
        sample, query = (int(place) for place in hidden.nonzero()[0])
        raise InputError(
            f"token {query} of sample {sample} sees no key, and the model's mask hides keys by a finite number, with "
            "which such a token attends to all of them; csc's attention under cp has no form for that",
            "attention mask",
            'pad on the right, build the model with attn_implementation="sdpa", or leave cp at 1',
        )
    return ranges.clone()


@_seeing_ranges.register_fake
def _(ranges: Any, admits: Any, kinds: Any, keys: int) -> torch.Tensor:
    return torch.empty_like(ranges)


@light_operator("group_ranges")
def _group_ranges(
    queries: torch.Tensor, keys: torch.Tensor, counting_queries: torch.Tensor, counting_keys: torch.Tensor
) -> torch.Tensor:
    return mask.ranges(queries, keys, counting_queries, counting_keys)


@torch.library.register_fake("csc::group_ranges")
def _(queries: Any, keys: Any, counting_queries: Any, counting_keys: Any) -> torch.Tensor:
    return queries.new_empty((*queries.shape, 2), dtype=torch.int64)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, mask, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, mask)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, d_out: torch.Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, mask = ctx.saved_tensors
    gradients = torch.ops.csc.attention_backward(d_out, q, k, v, out, lse, mask, *ctx.rest)
    return (*gradients, None, *(None for _ in ctx.rest))


@light_operator("attention", _gradients, _remember)
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    rules: int,
    kinds: bool,
    block_q: int,
    block_k: int,
    scale: float,
    softcap: float,
    reordered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    form = _form(q, k, v, mask, rules, kinds, block_q, block_k)
    known, lists = _unpacked(mask, form)
    q, k, v = map(operators.dense, (q, k, v))
    if q.is_cpu:
        return cpu.forward(q, k, v, known, lists, scale, softcap, reordered)
    return _on_gpu().forward(q, k, v, known, lists, scale, softcap)


@torch.library.register_fake("csc::attention")
def _(
    q: Any, k: Any, v: Any, mask: Any, rules: int, kinds: bool, block_q: int, block_k: int, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    _form(q, k, v, mask, rules, kinds, block_q, block_k, packing.words)
    return operators.heads_last(q), operators.statistics(q)


@light_operator("attention_backward")
def _attention_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    rules: int,
    kinds: bool,
    block_q: int,
    block_k: int,
    scale: float,
    softcap: float,
    reordered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    form = _form(q, k, v, mask, rules, kinds, block_q, block_k)
    known, lists = _unpacked(mask, form)
    d_out, q, k, v = map(operators.dense, (d_out, q, k, v))
    if q.is_cpu:
        return cpu.backward(d_out, q, k, v, out, lse, known, lists, scale, softcap, reordered)
    return _on_gpu().backward(d_out, q, k, v, out, lse, known, lists, scale, softcap)


@torch.library.register_fake("csc::attention_backward")
def _(d_out: Any, q: Any, k: Any, v: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return operators.heads_last(q), operators.heads_last(k), operators.heads_last(v)


def _on_gpu() -> Any:
    from csc.kernels import triton_launch

    return triton_launch


def _unpacked(mask: torch.Tensor | None, form: Form | None) -> tuple[Mask | None, Tiles | None]:
    return (None, None) if mask is None or form is None else packing.unpack_once(mask, form)


def _form(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, rules: int, kinds: bool,
    block_q: int, block_k: int, words: Callable[[Form], int] = packing.counted_words,
) -> Form | None:  # fmt: skip
    """What the packed mask holds; None without one. ValueError, before anything runs, if sizes do not fit. words: of a
    form; sizes of fake tensors may be symbols.
    """
    if q.dim() != 4 or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(
            f"attention of q {list(q.shape)} over k {list(k.shape)} and v {list(v.shape)}: sizes do not fit"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads evenly")
    if mask is None:
        return None
    form = Form(rules, kinds, q.shape[2], k.shape[2], block_q, block_k)
    if mask.shape[0] not in (1, q.shape[0]) or mask.shape[1] != words(form):
        raise ValueError(f"a packed mask of {list(mask.shape)} does not fit {q.shape[0]} samples in the form {form}")
    return form
