"""Tables of words that tensor-parallel ranks divide by rows: look-ups in them, and the loss over logits that they make.

    csc::rows(table, ids, group, padding) -> part                       [V / ranks, H], int64 [..] -> [.., H]
    csc::rows_backward(d, ids, group, rows, padding) -> d_table
    csc::divided_loss(logits, labels, group, ignored, mean) -> (loss, lse)      [N, V / ranks], int64 [N] -> [], [N]
    csc::divided_loss_backward(d, logits, lse, labels, group, ignored, mean) -> d_logits
    csc::divided_linear_cross_entropy(x, weight, bias, labels, group, scale, softcap, ignored, mean, rows, output_mask)
        -> (loss, d_x, d_weight, d_bias)                                    see csc.kernels.head_sweep; d_x is a part

Rank r of a group has the rows from r * V / ranks on. `part` is zero where another rank has the row: the parts' sum is
what the whole table gives. padding: the row that has no gradient; -1: none. The loss is cross entropy, its sum or its
mean over labels that are not `ignored`; ranks tell each other three numbers a label (largest logit, sum of
exponentials, the label's logit) and never a row of logits; its backward needs nothing of others. Numbers that no row
has give NaN, which ends a step with an error. The last operator makes logits a chunk of tokens at a time, of those with
labels alone. group: see csc.kernels.collectives.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from csc.kernels.collectives import GroupExchange, meeting_of
from csc.kernels.head_sweep import Head, Results, like_results, multiplied, remember, swept

csc = torch.ops.csc


def _here(numbers: torch.Tensor, meeting: GroupExchange, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(places in this rank's rows, whether the row is one of them, whether it is anyone's)"""
    places = numbers - meeting.index * rows
    mine = (places >= 0) & (places < rows)
    return places.masked_fill(~mine, 0), mine, (numbers >= 0) & (numbers < meeting.ranks * rows)


@torch.library.custom_op("csc::rows", mutates_args=())
def _rows(table: torch.Tensor, ids: torch.Tensor, group: torch.Tensor, padding: int) -> torch.Tensor:
    places, mine, there = _here(ids, meeting_of(group), table.shape[0])
    found = torch.nn.functional.embedding(places, table)
    return found.mul_(mine.unsqueeze(-1)).masked_fill_(~there.unsqueeze(-1), float("nan"))


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
    places, mine, there = _here(labels, meeting, logits.shape[1])
    lse, own = _met(meeting, _told(wide, places, mine))
    each = (lse - own).masked_fill(~there, float("nan")).masked_fill(labels == ignored, 0.0)
    total = each.sum() / (labels != ignored).sum() if mean else each.sum()
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
    told = torch.stack(list(meeting.exchange([own] * meeting.ranks)))
    largest = told[:, 0].amax(0)
    lse = ((told[:, 0] - largest).exp_() * told[:, 1]).sum(0).log_().add_(largest)
    return lse, told[:, 2].sum(0)


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
    found = (logits.to(lse.dtype) - lse.unsqueeze(1)).exp_()
    _less(found, places, (mine & counted).to(lse.dtype))
    each = d.to(lse.dtype) / counted.sum() if mean else d.to(lse.dtype)
    weight = torch.where(counted, each, 0.0)  # where no label counts the mean is NaN, and has no gradient
    return found.mul_(weight.unsqueeze(1)).to(logits.dtype)


@_divided_loss_backward.register_fake
def _(d: Any, logits: Any, *rest: Any) -> Any:
    return logits.new_empty(logits.shape)


def _remember_logits(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, labels, group, ctx.ignored, ctx.mean = inputs
    ctx.save_for_backward(logits, output[1], labels, group)
    ctx.mark_non_differentiable(output[1])


def _of_logits(ctx: Any, d: torch.Tensor, _: Any) -> tuple[Any, ...]:
    found = csc.divided_loss_backward(d, *ctx.saved_tensors, ctx.ignored, ctx.mean)
    return found, None, None, None, None


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
    return swept(head, labels, partial(_losses, meeting_of(group)))


def _losses(
    meeting: GroupExchange, logits: torch.Tensor, labels: torch.Tensor, share: torch.Tensor, at_once: int, wanted: bool
) -> torch.Tensor:
    """See csc.kernels.head_sweep.Losses: of logits of which each rank has those of its words."""
    places, mine, there = _here(labels[:, 0], meeting, logits.shape[1])
    several = [*zip(logits.split(at_once), places.split(at_once), mine.split(at_once), strict=True)]
    lse, own = _met(meeting, torch.cat([_told(*some) for some in several], 1))
    if wanted:
        for (some, at, here), behind, shares in zip(several, lse.split(at_once), share.split(at_once), strict=True):
            some.sub_(behind.unsqueeze(1)).exp_().mul_(shares)
            _less(some, at, shares[:, 0] * here)
    return (lse - own).masked_fill(~there, float("nan"))


@_divided_head.register_fake
def _(x: Any, weight: Any, bias: Any, labels: Any, group: Any, *rest: Any) -> Results:
    return like_results(Head(x, weight, bias, *rest), labels)


_divided_head.register_autograd(multiplied, setup_context=remember)

ROWS = torch.ops.csc.rows.default
DIVIDED_LOSS = torch.ops.csc.divided_loss.default
DIVIDED_HEAD = torch.ops.csc.divided_linear_cross_entropy.default
