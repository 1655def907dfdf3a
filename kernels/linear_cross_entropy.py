"""A head and its cross entropy in chunks of tokens: the logits are never whole, nor are their gradients.

    linear_cross_entropy(x, weight, labels, bias, ...) -> loss         what a model calls
    csc::linear_cross_entropy(..., rows, output_mask) -> (loss, d_x, d_weight, d_bias)

Terms, and what is given: see csc.kernels.head_sweep. Pass `prune` narrows `output_mask`, so a frozen head has no
d_weight.
"""

from __future__ import annotations

from typing import Any

import torch
from csc.kernels.head_sweep import Head, Results, like_results, multiplied, remember, rows_of, swept


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignored: int = -100,
    mean: bool = True,
    scale: float = 1.0,
    softcap: float = 0.0,
    rows: int | None = None,
) -> torch.Tensor:
    """The mean over labels, or the sum; a number in the wide dtype. rows: tokens of a chunk. ValueError if sizes do not
    fit; what PyTorch raises for labels that are no classes.
    """
    wanted = [True, *(one is not None and one.requires_grad for one in (x, weight, bias))]
    if not torch.is_grad_enabled():
        wanted = [True, False, False, False]
    chunk = rows or rows_of(weight)
    given = (x, weight, bias, labels.reshape(-1), scale, softcap, ignored, mean, chunk, wanted)
    return torch.ops.csc.linear_cross_entropy(*given)[0]


@torch.library.custom_op("csc::linear_cross_entropy", mutates_args=())
def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    scale: float,
    softcap: float,
    ignored: int,
    mean: bool,
    rows: int,
    output_mask: list[bool],
) -> Results:
    return swept(Head(x, weight, bias, scale, softcap, ignored, mean, rows, output_mask), labels, _in_cache)


@_forward.register_fake
def _(x: Any, weight: Any, bias: Any, labels: Any, *rest: Any) -> Results:
    return like_results(Head(x, weight, bias, *rest), labels)


_forward.register_autograd(multiplied, setup_context=remember)


def _in_cache(
    logits: torch.Tensor, classes: torch.Tensor, share: torch.Tensor, at_once: int, wanted: bool
) -> torch.Tensor:
    several = zip(*(t.split(at_once) for t in (logits, classes, share)), strict=True)
    return torch.cat([_losses(some, own, shares, wanted) for some, own, shares in several])[:, 0]


def _losses(logits: torch.Tensor, classes: torch.Tensor, share: torch.Tensor, wanted: bool) -> torch.Tensor:
    """Of some tokens [tokens, 1]. The gradients of the logits are written over these if they are wanted."""
    own = logits.gather(1, classes)
    most = logits.amax(1, keepdim=True)
    chances = torch.softmax(logits, 1, out=logits)
    losses = (most - own) - chances.amax(1, keepdim=True).log()  # a label's own chance may be too small for a number
    if wanted:
        chances.mul_(share)[torch.arange(len(classes), device=classes.device), classes[:, 0]] -= share[:, 0]
    return losses


HEAD = torch.ops.csc.linear_cross_entropy.default
