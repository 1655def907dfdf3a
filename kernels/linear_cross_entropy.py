"""A head and its cross entropy in chunks of tokens, of words that ranks divide too: the logits are never whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from csc.kernels.collectives import GroupExchange, meeting_of
from csc.kernels.onednn import is_worth, product

from csc import devices

# --- One walk over the tokens of a head, chunk by chunk: the loss and its gradients without logits that are whole ----
#
# Terms
#   tokens     rows of x, in order: prod(x.shape[:-1]) of them, one label each
#   labelled   tokens with labels: the others (images, questions, padding) have no loss, and give nothing to a gradient
#   logits     scale * (x @ weight.T + bias), bent to softcap * tanh(logits / softcap) if softcap > 0
#   wide       the dtype of logits, losses and sums: float32, of float64 operands float64
#   sweep      the walk over the labelled tokens: of each chunk its logits, its losses and what it gives to the
#              gradients. While a device records what it launches, over all tokens: their number is then the same
#
# x: [.., D]; weight: [V, D]; bias: [V] or None; labels: int64 [tokens], `ignored` where a token has none.
#
# The gradients are those of the loss itself: a chunk's logits are there then, and made again they would cost a third
# more. What comes in from behind, one number, is multiplied in later (`multiplied`). `output_mask` says which results
# are wanted; what is not wanted is an empty tensor.


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
    counted = counts.to(wide(x.dtype))
    share = counted / counted.sum().clamp(min=1) if head.mean else counted  # of each token's loss in the result
    sweep = _Sweep(head._replace(x=flat), losses)
    found = torch.zeros_like(counted)
    classes = labels.masked_fill(~counts, 0)
    for start in range(0, len(flat), head.rows):
        part = slice(start, min(start + head.rows, len(flat)))
        found[part] = sweep.chunk(part, classes[part, None], share[part, None])
    total = found.masked_fill(~counts, 0).sum()
    loss = total / counted.sum() if head.mean else total
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
    gradients = [t.new_empty(t.shape) if wanted and t is not None else head.x.new_empty(0) for t, wanted in like]
    return loss, gradients[0], gradients[1], gradients[2]


def remember(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    """For `multiplied`. inputs: x, weight, bias and others."""
    ctx.biased = inputs[2] is not None
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def multiplied(ctx: Any, d_loss: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    """The gradients of all inputs: of x, weight and bias."""
    stored: tuple[torch.Tensor, ...] = ctx.saved_tensors
    needed = [*ctx.needs_input_grad[:2], ctx.biased and ctx.needs_input_grad[2]]
    gradients = [gradient * d_loss if wanted else None for gradient, wanted in zip(stored, needed, strict=True)]
    return (*gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients)))


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
        buffer_rows = 0 if self.by_onednn else rows
        self.logits = x.new_empty((buffer_rows, len(weight)), dtype=self.wide)  # of every chunk in turn
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


# --- A head and its cross entropy in chunks of tokens: the logits are never whole, nor are their gradients -----------
#
# Terms, and what is given: see csc.kernels.linear_cross_entropy. Pass `prune` narrows `output_mask`, so a frozen head
# has no d_weight.


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
    wanted = [True, *(tensor is not None and tensor.requires_grad for tensor in (x, weight, bias))]
    if not torch.is_grad_enabled():
        wanted = [True, False, False, False]
    chunk = rows or rows_of(weight)
    arguments = (x, weight, bias, labels.reshape(-1), scale, softcap, ignored, mean, chunk, wanted)
    return torch.ops.csc.linear_cross_entropy(*arguments)[0]


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
    return torch.cat([_losses(some, own_logits, shares, wanted) for some, own_logits, shares in several])[:, 0]


def _losses(logits: torch.Tensor, classes: torch.Tensor, share: torch.Tensor, wanted: bool) -> torch.Tensor:
    """Of some tokens [tokens, 1]. The gradients of the logits are written over these if they are wanted."""
    label_logits = logits.gather(1, classes)
    most = logits.amax(1, keepdim=True)
    chances = torch.softmax(logits, 1, out=logits)
    losses = (most - label_logits) - chances.amax(
        1, keepdim=True
    ).log()  # a label's own chance may be too small for a number
    if wanted:
        chances.mul_(share)[torch.arange(len(classes), device=classes.device), classes[:, 0]] -= share[:, 0]
    return losses


HEAD = torch.ops.csc.linear_cross_entropy.default


# --- Tables of words that tensor-parallel ranks divide by rows -------------------------------------------------------
#
# Here are look-ups in them, and the loss over logits that they make.
#
# Rank r of a group has the rows from r * V / ranks on. `part` is zero where another rank has the row: the parts' sum
# is what the whole table gives. padding: the row that has no gradient; -1: none. The loss is cross entropy, its sum or
# its mean over labels that are not `ignored`; ranks tell each other three numbers a label (largest logit, sum of
# exponentials, the label's logit) and never a row of logits; its backward needs nothing of others. Numbers that no row
# has give NaN, which ends a step with an error. The last operator makes logits a chunk of tokens at a time, of those
# with labels alone. group: see csc.kernels.collectives.


csc = torch.ops.csc


def _here(numbers: torch.Tensor, meeting: GroupExchange, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(places in this rank's rows, whether the row is one of them, whether it is anyone's)"""
    places = numbers - meeting.index * rows
    mine = (places >= 0) & (places < rows)
    return places.masked_fill(~mine, 0), mine, (numbers >= 0) & (numbers < meeting.ranks * rows)


@torch.library.custom_op("csc::rows", mutates_args=())
def _rows(table: torch.Tensor, ids: torch.Tensor, group: torch.Tensor, padding: int) -> torch.Tensor:
    places, mine, present = _here(ids, meeting_of(group), table.shape[0])
    rows_found = torch.nn.functional.embedding(places, table)
    return rows_found.mul_(mine.unsqueeze(-1)).masked_fill_(~present.unsqueeze(-1), float("nan"))


@_rows.register_fake
def _(table: Any, ids: Any, group: Any, padding: int) -> Any:
    return table.new_empty((*ids.shape, table.shape[1]))


@torch.library.custom_op("csc::rows_backward", mutates_args=())
def _rows_backward(
    d: torch.Tensor, ids: torch.Tensor, group: torch.Tensor, rows: int, padding: int
) -> torch.Tensor:  # fmt: skip
    places, mine, _ = _here(ids, meeting_of(group), rows)
    counted = mine & (ids != padding) if padding >= 0 else mine
    return torch.ops.aten.embedding_dense_backward(d * counted.unsqueeze(-1), places, rows, -1, False)


@_rows_backward.register_fake
def _(d: Any, ids: Any, group: Any, rows: int, padding: int) -> Any:
    return d.new_empty((rows, d.shape[-1]))


def _remember_ids(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    table, ids, group, ctx.padding = inputs
    ctx.rows = table.shape[0]
    ctx.save_for_backward(ids, group)


def _of_table(ctx: Any, d: torch.Tensor) -> tuple[Any, ...]:
    ids, group = ctx.saved_tensors
    return csc.rows_backward(d, ids, group, ctx.rows, ctx.padding), None, None, None


_rows.register_autograd(_of_table, setup_context=_remember_ids)


@torch.library.custom_op("csc::divided_loss", mutates_args=())
def _divided_loss(
    logits: torch.Tensor, labels: torch.Tensor, group: torch.Tensor, ignored: int, mean: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    meeting = meeting_of(group)
    places, mine, present = _here(labels, meeting, logits.shape[1])
    lse, label_logits = _met(meeting, _told(wide, places, mine))
    token_losses = (lse - label_logits).masked_fill(~present, float("nan")).masked_fill(labels == ignored, 0.0)
    total = token_losses.sum() / (labels != ignored).sum() if mean else token_losses.sum()
    return total.to(logits.dtype), lse


def _told(logits: torch.Tensor, places: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """[3, tokens]: the largest of a rank's logits, the sum of their exponentials over it, the label's logit or 0."""
    most = logits.amax(1).clamp_(min=torch.finfo(logits.dtype).min)  # of words that are -inf, all of them even
    sums = (logits - most.unsqueeze(1)).exp_().sum(1)
    return torch.stack([most, sums, logits.gather(1, places.unsqueeze(1)).squeeze(1).masked_fill_(~mine, 0)])


def _less(logits: torch.Tensor, places: torch.Tensor, by: torch.Tensor) -> None:
    """In each row one entry, so that a device adds nothing in an order of its own."""
    logits[torch.arange(len(places), device=places.device), places] -= by


def _met(meeting: GroupExchange, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of what each rank tells: the logarithm of the sum of all exponentials, and the label's logit."""
    parts = torch.stack(list(meeting.exchange([own] * meeting.ranks)))
    largest = parts[:, 0].amax(0)
    lse = ((parts[:, 0] - largest).exp_() * parts[:, 1]).sum(0).log_().add_(largest)
    return lse, parts[:, 2].sum(0)


@_divided_loss.register_fake
def _(logits: Any, labels: Any, group: Any, ignored: int, mean: bool) -> Any:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(()), logits.new_empty(labels.shape, dtype=wide)


@torch.library.custom_op("csc::divided_loss_backward", mutates_args=())
def _divided_loss_backward(
    d: torch.Tensor, logits: torch.Tensor, lse: torch.Tensor, labels: torch.Tensor, group: torch.Tensor, ignored: int,
    mean: bool,
) -> torch.Tensor:  # fmt: skip
    places, mine, _ = _here(labels, meeting_of(group), logits.shape[1])
    counted = labels != ignored
    d_logits = (logits.to(lse.dtype) - lse.unsqueeze(1)).exp_()
    _less(d_logits, places, (mine & counted).to(lse.dtype))
    token_gradients = d.to(lse.dtype) / counted.sum() if mean else d.to(lse.dtype)
    weight = torch.where(counted, token_gradients, 0.0)  # where no label counts the mean is NaN, and has no gradient
    return d_logits.mul_(weight.unsqueeze(1)).to(logits.dtype)


@_divided_loss_backward.register_fake
def _(d: Any, logits: Any, *rest: Any) -> Any:
    return logits.new_empty(logits.shape)


def _remember_logits(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, labels, group, ctx.ignored, ctx.mean = inputs
    ctx.save_for_backward(logits, output[1], labels, group)
    ctx.mark_non_differentiable(output[1])


def _of_logits(ctx: Any, d: torch.Tensor, _: Any) -> tuple[Any, ...]:
    d_logits = csc.divided_loss_backward(d, *ctx.saved_tensors, ctx.ignored, ctx.mean)
    return d_logits, None, None, None, None


_divided_loss.register_autograd(_of_logits, setup_context=_remember_logits)


@torch.library.custom_op("csc::divided_linear_cross_entropy", mutates_args=())
def _divided_head(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    group: torch.Tensor,
    scale: float,
    softcap: float,
    ignored: int,
    mean: bool,
    rows: int,
    output_mask: list[bool],
) -> Results:
    head = Head(x, weight, bias, scale, softcap, ignored, mean, rows, output_mask)
    return swept(head, labels, partial(_divided_losses, meeting_of(group)))


def _divided_losses(
    meeting: GroupExchange, logits: torch.Tensor, labels: torch.Tensor, share: torch.Tensor, at_once: int, wanted: bool
) -> torch.Tensor:
    """See csc.kernels.linear_cross_entropy.Losses: of logits of which each rank has those of its words."""
    places, mine, present = _here(labels[:, 0], meeting, logits.shape[1])
    several = [*zip(logits.split(at_once), places.split(at_once), mine.split(at_once), strict=True)]
    lse, label_logits = _met(meeting, torch.cat([_told(*some) for some in several], 1))
    if wanted:
        for (some, places_here, here), behind, shares in zip(
            several, lse.split(at_once), share.split(at_once), strict=True
        ):
            some.sub_(behind.unsqueeze(1)).exp_().mul_(shares)
            _less(some, places_here, shares[:, 0] * here)
    return (lse - label_logits).masked_fill(~present, float("nan"))


@_divided_head.register_fake
def _(x: Any, weight: Any, bias: Any, labels: Any, group: Any, *rest: Any) -> Results:
    return like_results(Head(x, weight, bias, *rest), labels)


_divided_head.register_autograd(multiplied, setup_context=remember)

ROWS = torch.ops.csc.rows.default
DIVIDED_LOSS = torch.ops.csc.divided_loss.default
DIVIDED_HEAD = torch.ops.csc.divided_linear_cross_entropy.default
