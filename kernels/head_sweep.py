"""One walk over the tokens of a head, chunk by chunk: the loss and its gradients without logits that are whole.

Terms
  tokens     rows of x, in order: prod(x.shape[:-1]) of them, one label each
  labelled   tokens with labels: the others (images, questions, padding) have no loss, and give nothing to a gradient
  logits     scale * (x @ weight.T + bias), bent to softcap * tanh(logits / softcap) if softcap > 0
  wide       the dtype of logits, losses and sums: float32, of float64 operands float64
  sweep      the walk over the labelled tokens: of each chunk its logits, its losses and what it gives to the gradients.
             While a device records what it launches, over all tokens: their number is then the same

    swept(head, labels, losses) -> (loss, d_x, d_weight, d_bias)      whatever makes the losses of a chunk
    like_results(head, labels) -> the same, of their sizes alone
    rows_of(weight, ranks) -> tokens of a chunk       room_on(device) -> bytes of their logits

x: [.., D]; weight: [V, D]; bias: [V] or None; labels: int64 [tokens], `ignored` where a token has none.

The gradients are those of the loss itself: a chunk's logits are there then, and made again they would cost a third
more. What comes in from behind, one number, is multiplied in later (`multiplied`). `output_mask` says which results are
wanted; what is not wanted is an empty tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from csc.kernels.onednn import is_worth, product

from csc import devices

# Bytes that the logits of one chunk may take; half of what the weight takes if that is more, as its gradient is there,
# too. Fewer tokens in a chunk read the weight and its gradient more often (docs/memory.md has seconds).
ROOM_ON_CPU, ROOM = 128 * 2**20, 2**30
FEWEST = 16  # tokens of a chunk
IN_CACHE = 2**22  # bytes of logits that a CPU goes over several times while they are at hand
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
# Losses of some tokens [tokens], of: their logits [tokens, classes], labels and shares of the losses in the result
# [tokens, 1], how many rows of logits fit into a cache, and whether their gradients are to be written over the logits.
Losses = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, bool], torch.Tensor]


class Head(NamedTuple):
    """What is given besides the labels. rows: tokens of a chunk; output_mask: see the module."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: float
    softcap: float
    ignored: int
    mean: bool
    rows: int
    output_mask: Sequence[bool]


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which logits of operands of this dtype are computed with."""
    return torch.promote_types(dtype, torch.float32)


def room_on(device: torch.device) -> int:
    """Bytes for the logits of one chunk, whatever the weight takes."""
    return ROOM_ON_CPU if device.type == "cpu" else ROOM


def rows_of(weight: torch.Tensor, ranks: int = 1) -> int:
    """Tokens of a chunk: as many as fill the room for their logits, in multiples of FEWEST. ranks: that divide the
    classes.
    """
    classes, width = weight.shape
    most = max(room_on(weight.device) // (classes // ranks * wide(weight.dtype).itemsize), width // 2)
    return max(FEWEST, most // FEWEST * FEWEST)


def swept(head: Head, labels: torch.Tensor, losses: Losses) -> Results:
    """The loss, and those gradients of it that are wanted. ValueError if sizes do not fit."""
    _check(head, labels)
    x, flat = head.x, head.x.reshape(-1, head.x.shape[-1])
    counts = labels != head.ignored
    places = _labelled(counts)
    if places is not None:
        flat, labels, counts = flat[places], labels[places], counts[places]
    each = counts.to(wide(x.dtype))
    share = each / each.sum().clamp(min=1) if head.mean else each  # of each token's loss in the result
    sweep = _Sweep(head._replace(x=flat), losses)
    found = torch.zeros_like(each)
    classes = labels.masked_fill(~counts, 0)
    for start in range(0, len(flat), head.rows):
        part = slice(start, min(start + head.rows, len(flat)))
        found[part] = sweep.chunk(part, classes[part, None], share[part, None])
    total = found.masked_fill(~counts, 0).sum()
    loss = total / each.sum() if head.mean else total
    d_x, d_weight, d_bias = sweep.gradients()
    if places is not None and sweep.to_x:
        d_x = x.new_zeros(x.shape).view(-1, x.shape[-1]).index_copy_(0, places, d_x)
    return loss, d_x.view(x.shape) if sweep.to_x else d_x, d_weight, d_bias


def _labelled(counts: torch.Tensor) -> torch.Tensor | None:
    """Places of the tokens that the sweep walks over; None: all are. counts: bool [tokens]."""
    if devices.is_recording(counts.device):
        return None
    places = counts.nonzero()[:, 0]
    return None if len(places) == len(counts) else places


def like_results(head: Head, labels: torch.Tensor) -> Results:
    """Of the sizes and dtypes of what `swept` returns."""
    _check(head, labels)
    loss = head.x.new_empty((), dtype=wide(head.x.dtype))
    like = zip((head.x, head.weight, head.bias), head.output_mask[1:], strict=True)
    made = [t.new_empty(t.shape) if wanted and t is not None else head.x.new_empty(0) for t, wanted in like]
    return loss, made[0], made[1], made[2]


def remember(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    """For `multiplied`. inputs: x, weight, bias and others."""
    ctx.biased = inputs[2] is not None
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def multiplied(ctx: Any, d_loss: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    """The gradients of all inputs: of x, weight and bias."""
    made: tuple[torch.Tensor, ...] = ctx.saved_tensors
    there = [*ctx.needs_input_grad[:2], ctx.biased and ctx.needs_input_grad[2]]
    found = [one * d_loss if wanted else None for one, wanted in zip(made, there, strict=True)]
    return (*found, *[None] * (len(ctx.needs_input_grad) - len(found)))


def _check(head: Head, labels: torch.Tensor) -> None:
    """ValueError if sizes do not fit."""
    x, weight, bias = head.x, head.weight, head.bias
    tokens = x.shape[:-1].numel()
    fits = weight.dim() == 2 and x.shape[-1] == weight.shape[1] and labels.shape == (tokens,) and head.rows > 0
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"cross entropy of x {list(x.shape)} over weight {list(weight.shape)} with {list(labels.shape)} labels in "
            f"chunks of {head.rows}: sizes do not fit"
        )


class _Sweep:
    """The chunks one after the other. Sums over chunks are wide: gradients of narrow operands are rounded once."""

    def __init__(self, head: Head, losses: Losses) -> None:
        """head: with the x of the tokens to walk over."""
        x, weight = head.x, head.weight
        self.head, self.losses = head, losses
        self.wide = wide(x.dtype)
        self.sums_in_product = x.device.type != "cpu" and x.dtype is not self.wide
        _, self.to_x, self.to_weight, self.to_bias = head.output_mask
        rows = min(head.rows, len(x))
        self.by_onednn = x.device.type == "cpu" and x.dtype is torch.float32 and is_worth(rows, *weight.t().shape)
        own = 0 if self.by_onednn else rows
        self.logits = x.new_empty((own, len(weight)), dtype=self.wide)  # of every chunk in turn
        row = len(weight) * self.wide.itemsize
        self.at_once = max(1, IN_CACHE // row if x.device.type == "cpu" else head.rows)
        self.d_x = torch.empty_like(x, memory_format=torch.contiguous_format) if self.to_x else x.new_empty(0)
        self.d_weight = weight.new_zeros(weight.shape if self.to_weight else 0, dtype=self.wide)
        self.d_bias = weight.new_zeros(weight.shape[:1] if self.to_bias else 0, dtype=self.wide)

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of x, weight and bias, in their dtypes; empty where none is wanted."""
        dtype = self.head.weight.dtype
        return self.d_x, self.d_weight.to(dtype), self.d_bias.to(dtype)

    def chunk(self, part: slice, classes: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """The losses of these tokens, their gradients added. classes, share: [tokens, 1]."""
        x = self.head.x[part]
        logits, bent = self._logits(x)
        wanted = self.to_x or self.to_weight or self.to_bias
        losses = self.losses(logits, classes, share, self.at_once, wanted)
        if wanted:
            if bent is not None:
                logits.mul_(bent.square_().neg_().add_(1))
            if self.head.scale != 1:
                logits.mul_(self.head.scale)
            self._add(part, x, logits)
        return losses

    def _logits(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(logits, tanh of those under a soft cap), wide; both may be written over, and the next chunk's will be."""
        _, weight, bias, scale, softcap, *_ = self.head
        logits = product(x, weight.t()) if self.by_onednn else self.logits[: len(x)]
        if x.dtype is not self.wide:
            logits.copy_(torch.mm(x, weight.t()))
        elif not self.by_onednn:
            torch.mm(x, weight.t(), out=logits)
        if bias is not None:
            logits.add_(bias)
        if scale != 1:
            logits.mul_(scale)
        if not softcap:
            return logits, None
        bent = logits.div_(softcap).tanh_()
        return bent * softcap, bent

    def _add(self, part: slice, x: torch.Tensor, d_logits: torch.Tensor) -> None:
        narrow = d_logits.to(x.dtype)
        if self.to_x and self.by_onednn:
            self.d_x[part] = product(narrow, self.head.weight)
        elif self.to_x:
            torch.mm(narrow, self.head.weight, out=self.d_x[part])
        if self.to_bias:
            self.d_bias.add_(d_logits.sum(0))
        if not self.to_weight:
            return
        if self.sums_in_product:  # narrow operands, a wide product
            self.d_weight.add_(torch.mm(narrow.t(), x, out_dtype=self.wide))
        elif self.by_onednn:
            self._add_blocks(part, x, d_logits)
        else:
            self.d_weight.addmm_(d_logits.t(), x.to(self.wide))

    def _add_blocks(self, part: slice, x: torch.Tensor, d_logits: torch.Tensor) -> None:
        """To the gradient of the weight, in which oneDNN does not add: some classes at a time, so that what is added,
        and the copy of transposed gradients that it makes, take little room.
        """
        several = max(1, IN_CACHE // (max(x.shape) * self.wide.itemsize))
        if not part.start and several >= len(self.d_weight):
            self.d_weight = product(d_logits.t(), x)
            return
        for total, some in zip(self.d_weight.split(several), d_logits.split(several, 1), strict=True):
            total.add_(product(some.t(), x))
