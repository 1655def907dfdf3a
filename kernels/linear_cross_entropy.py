"""A head and its cross entropy in chunks of tokens: the logits are never whole, nor are their gradients.

Terms
  tokens     rows of x, in order: prod(x.shape[:-1]) of them, one label each
  logits     scale * (x @ weight.T + bias), bent to softcap * tanh(logits / softcap) if softcap > 0
  wide       the dtype of logits, losses and sums: float32, of float64 operands float64
  labelled   tokens with labels: the others (images, questions, padding) have no loss, and give nothing to a gradient
  sweep      one walk over the labelled tokens, chunk by chunk: of each chunk its logits, its losses and what it gives to
             the gradients. While a device records what it launches, over all tokens: their number is then the same

    linear_cross_entropy(x, weight, labels, bias, ...) -> loss         what a model calls
    csc::linear_cross_entropy(..., rows, output_mask) -> (loss, d_x, d_weight, d_bias)
    rows_of(weight) -> tokens of a chunk       room_on(device) -> bytes of their logits

x: [.., D]; weight: [V, D]; bias: [V] or None; labels: int64 [tokens], `ignored` where a token has none.

The gradients are those of the loss itself, made in the same sweep: a chunk's logits are there then, and made again they
would cost a third more. What comes in from behind, one number, is multiplied in later. `output_mask` says which results
are wanted; pass `prune` narrows it, so a frozen head has no d_weight; what is not wanted is an empty tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# Bytes that the logits of one chunk may take; half of what the weight takes if that is more, as its gradient is there,
# too. Fewer tokens in a chunk read the weight and its gradient more often (docs/memory.md has seconds).
ROOM_ON_CPU, ROOM = 128 * 2**20, 2**30
FEWEST = 16  # tokens of a chunk
IN_CACHE = 2**22  # bytes of logits that a CPU goes over several times while they are at hand
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which logits of operands of this dtype are computed with."""
    return torch.promote_types(dtype, torch.float32)


def room_on(device: torch.device) -> int:
    """Bytes for the logits of one chunk, whatever the weight takes."""
    return ROOM_ON_CPU if device.type == "cpu" else ROOM


def rows_of(weight: torch.Tensor) -> int:
    """Tokens of a chunk: as many as fill the room for their logits, in multiples of FEWEST."""
    classes, width = weight.shape
    most = max(room_on(weight.device) // (classes * wide(weight.dtype).itemsize), width // 2)
    return max(FEWEST, most // FEWEST * FEWEST)


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
    _check(x, weight, bias, labels, rows)
    flat = x.reshape(-1, x.shape[-1])
    counts = labels != ignored
    places = _labelled(counts)
    if places is not None:
        flat, labels, counts = flat[places], labels[places], counts[places]
    each = counts.to(wide(x.dtype))
    share = each / each.sum().clamp(min=1) if mean else each  # of each token's loss in the result
    sweep = _Sweep(flat, weight, bias, softcap, scale, rows, output_mask)
    losses = torch.zeros_like(each)
    classes = labels.masked_fill(~counts, 0)
    for start in range(0, len(flat), rows):
        part = slice(start, min(start + rows, len(flat)))
        losses[part] = sweep.chunk(part, classes[part, None], share[part, None])
    total = losses.masked_fill(~counts, 0).sum()
    loss = total / each.sum() if mean else total
    d_x, d_weight, d_bias = sweep.gradients()
    if places is not None and output_mask[1]:
        d_x = x.new_zeros(x.shape).view(-1, x.shape[-1]).index_copy_(0, places, d_x)
    return loss, d_x.view(x.shape) if output_mask[1] else d_x, d_weight, d_bias


def _labelled(counts: torch.Tensor) -> torch.Tensor | None:
    """Places of the tokens that the sweep walks over; None: all are. counts: bool [tokens]."""
    if counts.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    places = counts.nonzero()[:, 0]
    return None if len(places) == len(counts) else places


@_forward.register_fake
def _(
    x: Any, weight: Any, bias: Any, labels: Any, scale: float, softcap: float, ignored: int, mean: bool, rows: int,
    output_mask: Sequence[bool],
) -> Results:  # fmt: skip
    _check(x, weight, bias, labels, rows)
    loss = x.new_empty((), dtype=wide(x.dtype))
    like = zip((x, weight, bias), output_mask[1:], strict=True)
    gradients = [t.new_empty(t.shape) if wanted and t is not None else x.new_empty(0) for t, wanted in like]
    return (loss, *gradients)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    ctx.biased = inputs[2] is not None
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, d_loss: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    made: tuple[torch.Tensor, ...] = ctx.saved_tensors
    there = [*ctx.needs_input_grad[:2], ctx.biased and ctx.needs_input_grad[2]]
    found = [one * d_loss if wanted else None for one, wanted in zip(made, there, strict=True)]
    return (*found, *(None for _ in range(7)))


_forward.register_autograd(_gradients, setup_context=_remember)


def _check(x: Any, weight: Any, bias: Any, labels: Any, rows: int) -> None:
    tokens = x.shape[:-1].numel()
    fits = weight.dim() == 2 and x.shape[-1] == weight.shape[1] and labels.shape == (tokens,) and rows > 0
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"cross entropy of x {list(x.shape)} over weight {list(weight.shape)} with {list(labels.shape)} labels in "
            f"chunks of {rows}: sizes do not fit"
        )


def _losses(logits: torch.Tensor, classes: torch.Tensor, share: torch.Tensor, wanted: bool) -> torch.Tensor:
    """Of some tokens [tokens, 1]. The gradients of the logits are written over these if they are wanted."""
    own = logits.gather(1, classes)
    most = logits.amax(1, keepdim=True)
    chances = torch.softmax(logits, 1, out=logits)
    losses = (most - own) - chances.amax(1, keepdim=True).log()  # a label's own chance may be too small for a number
    if wanted:
        chances.mul_(share)[torch.arange(len(classes), device=classes.device), classes[:, 0]] -= share[:, 0]
    return losses


class _Sweep:
    """The chunks one after the other. Sums over chunks are wide: gradients of narrow operands are rounded once."""

    def __init__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, softcap: float, scale: float,
        rows: int, output_mask: Sequence[bool],
    ) -> None:  # fmt: skip
        self.x, self.weight, self.bias = x, weight, bias
        self.softcap, self.scale = softcap, scale
        self.wide = wide(x.dtype)
        self.sums_in_product = x.device.type != "cpu" and x.dtype is not self.wide
        _, self.to_x, self.to_weight, self.to_bias = output_mask
        self.logits = x.new_empty((min(rows, len(x)), len(weight)), dtype=self.wide)  # of every chunk in turn
        row = len(weight) * self.wide.itemsize
        self.at_once = max(1, IN_CACHE // row if x.device.type == "cpu" else rows)
        self.d_x = torch.empty_like(x, memory_format=torch.contiguous_format) if self.to_x else x.new_empty(0)
        self.d_weight = weight.new_zeros(weight.shape if self.to_weight else 0, dtype=self.wide)
        self.d_bias = weight.new_zeros(weight.shape[:1] if self.to_bias else 0, dtype=self.wide)

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of x, weight and bias, in their dtypes; empty where none is wanted."""
        dtype = self.weight.dtype
        return self.d_x, self.d_weight.to(dtype), self.d_bias.to(dtype)

    def chunk(self, part: slice, classes: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """The losses of these tokens, their gradients added. classes, share: [tokens, 1]."""
        x = self.x[part]
        logits, bent = self._logits(x)
        wanted = self.to_x or self.to_weight or self.to_bias
        several = zip(*(t.split(self.at_once) for t in (logits, classes, share)), strict=True)
        losses = torch.cat([_losses(some, own, shares, wanted) for some, own, shares in several])
        if wanted:
            if bent is not None:
                logits.mul_(bent.square_().neg_().add_(1))
            if self.scale != 1:
                logits.mul_(self.scale)
            self._add(part, x, logits)
        return losses[:, 0]

    def _logits(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(logits, tanh of those under a soft cap), wide; both may be written over, and the next chunk's will be."""
        logits = self.logits[: len(x)]
        if x.dtype is self.wide:
            torch.mm(x, self.weight.t(), out=logits)
        else:
            logits.copy_(torch.mm(x, self.weight.t()))
        if self.bias is not None:
            logits.add_(self.bias)
        if self.scale != 1:
            logits.mul_(self.scale)
        if not self.softcap:
            return logits, None
        bent = logits.div_(self.softcap).tanh_()
        return bent * self.softcap, bent

    def _add(self, part: slice, x: torch.Tensor, d_logits: torch.Tensor) -> None:
        narrow = d_logits.to(x.dtype)
        if self.to_x:
            torch.mm(narrow, self.weight, out=self.d_x[part])
        if self.to_bias:
            self.d_bias.add_(d_logits.sum(0))
        if not self.to_weight:
            return
        if self.sums_in_product:  # narrow operands, a wide product
            self.d_weight.add_(torch.mm(narrow.t(), x, out_dtype=self.wide))
        else:
            self.d_weight.addmm_(d_logits.t(), x.to(self.wide))
