"""The loss of a whole batch from those of its microbatches, and what a training step returns of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn

from csc.errors import CscError, InputError
from csc.ir.groups import WEIGHTS, Group
from csc.runtime.gradients import wait_sum
from csc.runtime.rank import Rank
from csc.runtime.specs import DivisorSpec, LossSpec, Manifest, StepCounts
from csc.runtime.transport import Work

# --- The loss of a whole batch from those of its microbatches --------------------------------------------------------
#
# Terms: a microbatch's *weight* is its share in the whole loss. With `tokens` it is n / N: its counted labels over
# those of all microbatches and replicas, so that the whole loss is the mean over all tokens, as one process would
# compute it. With `mean` it is the same with its samples, with `sum` it is 1. A loss that is divided by no count but
# by n + added, or by `least` if that is more, has the weight of that of n over that of N. A loss of *terms* that are
# divided by different numbers has a weight for each; F multiplies the terms by these, so that the whole loss is the
# sum of the microbatches'.
#
# Numbers pass between ranks in float64, one small sum a step, and are added in the order of the microbatches: every
# rank has the same bits.


Batch = Mapping[str, Any]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Losses:
    """Losses of all microbatches (replica after replica) with their weights, the dtype in which the model computes
    them, and what all replicas' microbatches are. Those of a rank that is alone are still where it computes: what the
    host has to do may be done before it waits for them.
    """

    parts: tuple[tuple[float | torch.Tensor, float], ...]
    dtype: torch.dtype
    counts: StepCounts = field(default_factory=StepCounts)

    @property
    def idle(self) -> bool:
        """Whether a microbatch adds nothing to the whole loss: it has no labels, or weighs 0."""
        return any(_part(float(loss), weight) == 0 for loss, weight in self.parts)

    def total(self, microbatches: int) -> torch.Tensor:
        """The loss of the whole batch, a 0-d CPU tensor in the model's dtype, once it is computed. CscError if a part
        is not finite.
        """
        parts = [_part(float(loss), weight) for loss, weight in self.parts]
        bad = [place for place, part in enumerate(parts) if not math.isfinite(part)]
        if bad:
            several = len(self.parts) > microbatches
            names = [f"{i % microbatches} of replica {i // microbatches}" if several else str(i) for i in bad]
            raise CscError(
                f"the loss of microbatch {', '.join(names)} is not finite "
                f"({', '.join(sorted({str(parts[i]) for i in bad}))})",
                "step",
                "No gradient was touched. Look at that part of the batch (no label, no mean), "
                "or lower the learning rate",
            )
        return torch.tensor(sum(parts), dtype=torch.float64).to(self.dtype)


def _part(loss: float, weight: float) -> float:
    """What a microbatch adds to the whole loss. A mean over nothing adds nothing."""
    return 0.0 if weight == 0 and math.isnan(loss) else loss * weight


def weighed(
    ranks: Sequence[Rank], microbatches: Sequence[Batch], of_all: bool = False
) -> Work[tuple[list[Batch], dict[int, float]]]:
    """The weight of each of a rank's microbatches, and these with the weights of terms, if the loss has several. With
    one microbatch and dp = 1 each weight is exactly 1.0, and nothing is counted; so it is on ranks that neither compute
    the loss nor add terms of it, and so have no use for it.

    ranks: this rank in the program of each microbatch. of_all: these are the microbatches of all replicas, so that none
    but those that share their tokens has to be asked.
    """
    rank, loss, count = ranks[0], ranks[0].program.manifest.loss, len(microbatches)
    batches, ones = list(microbatches), dict.fromkeys(range(count), 1.0)
    alone = count * (1 if of_all else len(rank.group(Group.DATA))) == 1
    here = any(stage.weighs if loss.divisors else stage.stage == loss.stage for stage in rank.stages)
    if loss.weight == "sum" or not (here or loss.divisors):
        return batches, ones
    if alone or not here:
        weights = [[1.0] * max(1, len(loss.divisors))] * count
    else:
        weights = yield from _weights(ranks, microbatches, of_all)
    if not loss.divisors:
        return batches, {mb: row[0] for mb, row in enumerate(weights)}
    shares = torch.tensor(weights, dtype=torch.float64, device=rank.device)
    return [{**batch, WEIGHTS: row} for batch, row in zip(batches, shares)], ones


def _weights(ranks: Sequence[Rank], microbatches: Sequence[Batch], of_all: bool) -> Work[list[list[float]]]:
    """By microbatch, one for each divisor."""
    rank = ranks[0]
    manifest = rank.program.manifest
    if manifest.loss.weight == "mean":
        counted, counting, counts = "samples", Group.SAMPLES, _samples(manifest, microbatches)
    else:
        counting = Group.SAMPLES if manifest.loss.summed else Group.DATA
        counted, counts = "labels", _labels(ranks, microbatches)
    total = counts.sum(0)
    why = f"count of {counted} over {' and '.join(counting.along)}"
    if of_all and counting == Group.DATA:
        yield from wait_sum(rank.endpoint, total, rank.group(Group.CONTEXT), why)
    elif not of_all:
        yield from wait_sum(rank.endpoint, total, rank.group(counting), why)
    divisors: Sequence[LossSpec | DivisorSpec] = manifest.loss.divisors or (manifest.loss,)
    totals = [_divided(divisor, n) for divisor, n in zip(divisors, total.tolist(), strict=True)]
    # The mean over nothing is NaN as in one process, reported by name at the end of the step.
    return [
        [
            _divides(divisor, n) / all_of_it if all_of_it else math.nan
            for divisor, n, all_of_it in zip(divisors, row, totals)
        ]
        for row in counts.tolist()
    ]


def _divided(divisor: LossSpec | DivisorSpec, count: float) -> float:
    divided = count + divisor.added
    return max(divided, divisor.least) if divisor.least else divided


def _divides(divisor: LossSpec | DivisorSpec, count: float) -> float:
    """What F divides by in a microbatch."""
    return _divided(divisor, count) or (divisor.for_zero if isinstance(divisor, DivisorSpec) else 0.0)


def _samples(manifest: Manifest, microbatches: Sequence[Batch]) -> torch.Tensor:
    """Rows of the microbatches, as the loss counts them."""
    rows = manifest.loss.rows
    device = torch.device(manifest.device)
    if any(rows and rows not in batch for batch in microbatches):
        raise CscError(
            f"a microbatch has no {rows!r}, and the loss is a mean over its rows", "step",
            "give each microbatch that entry, or say how losses combine with loss_weight=",
        )  # fmt: skip
    found = [batch[rows].shape[manifest.loss.along] if rows else 1 for batch in microbatches]
    return torch.tensor(found, dtype=torch.float64, device=device).reshape(-1, 1)


def _labels(ranks: Sequence[Rank], microbatches: Sequence[Batch]) -> torch.Tensor:
    """What the microbatches' losses are divided by: a row for each, a column for each divisor."""
    counts = []
    for rank, batch in zip(ranks, microbatches, strict=True):
        counted = next(of.loss_tokens for of in rank.functions.values() if of.loss_tokens is not None)
        counts.append(counted(batch, rank.constants).reshape(-1))
    return torch.stack(counts)


def _infinite(loss: torch.Tensor) -> torch.Tensor:
    """Of a microbatch that weighs 0: its own mean is NaN, and counts 0. It is infinite where weights of both signs add
    up to 0; what they weigh counts, and cannot be told from its mean: then it stays so, and is reported.
    """
    return torch.where(loss.isinf(), loss, 0)


def weighted(loss: torch.Tensor, weight: float) -> float:
    """What a microbatch adds to the whole loss, as ranks tell each other."""
    return float(loss) * weight if weight != 0 else float(_infinite(loss))


def combine(
    rank: Rank, losses: Mapping[int, torch.Tensor], weights: Mapping[int, float], counts: StepCounts
) -> Work[Losses]:
    """Give every rank every microbatch's weighted loss. A microbatch of weight 0 counts 0, though its own
    mean is NaN. counts: of the rank's own replicas.
    """
    manifest = rank.program.manifest
    count, counts_once = manifest.microbatches, rank.group(Group.TENSOR)[0] == rank.rank
    everyone = rank.group(Group.WORLD)
    if len(everyone) == 1:
        alone = tuple(
            (losses[mb], weights[mb]) if weights[mb] != 0 else (_infinite(losses[mb]), 1.0) for mb in range(count)
        )
        return Losses(alone, losses[0].dtype, counts)
    dtype_at = manifest.mesh.dp * count
    row = [0.0] * (dtype_at + 1 + len(astuple(counts)))
    if rank.position == 0 and rank.cp_rank == 0 and counts_once:
        row[dtype_at + 1 :] = map(float, astuple(counts))
    for mb, loss in losses.items():
        if counts_once:
            replica, position = rank.served(mb)
            row[replica * count + position] = weighted(loss, weights[mb])
        if rank.group(Group.POSITION)[0] == rank.rank and mb == 0:
            row[dtype_at] = float(DTYPES.index(loss.dtype))
    total = torch.tensor(row, dtype=torch.float64, device=rank.device)
    yield from wait_sum(rank.endpoint, total, everyone, "loss over all ranks")
    row = total.tolist()
    parts, dtype, found = row[:dtype_at], int(row[dtype_at]), row[dtype_at + 1 :]
    return Losses(tuple((part, 1.0) for part in parts), DTYPES[dtype], StepCounts(*found))


# --- The loss that a training step returns: a tensor whose `backward()` says that it was done ------------------------
#
# A step has run forward and backward, so its loss has no graph, and torch would say that it "does not require grad". A
# loop that was written for eager PyTorch calls `loss.backward()`, or `(loss / steps).backward()`: both say what to do.
#
# It has no graph, so `total += loss` keeps nothing alive. It prints, formats, copies and pickles as a plain tensor.


class StepLoss(torch.Tensor):
    """The loss of a training step. What is computed from it is a plain tensor, except for its multiples. `backward`
    raises InputError.
    """

    __torch_function__ = nn.Parameter.__torch_function__  # results are plain tensors, as those of a parameter are

    @classmethod
    def of(cls, loss: torch.Tensor) -> StepLoss:
        """loss: without dimensions and without a graph."""
        return loss.as_subclass(cls)

    @property
    def plain(self) -> torch.Tensor:
        """The same number, as any tensor."""
        return self.as_subclass(torch.Tensor)

    def backward(self, *args: Any, **options: Any) -> NoReturn:
        """Says that it was done."""
        raise InputError(
            "train_step has run forward and backward, and gradients are in .grad", "loss.backward()",
            "Leave this line out: optimizer.step() comes next, then optimizer.zero_grad(). To add up the gradients of "
            "several batches, call train_step for each of them and optimizer.step() after the last",
        )  # fmt: skip

    def __mul__(self, other: Any) -> torch.Tensor:
        return _multiple(super().__mul__(other))

    def __rmul__(self, other: Any) -> torch.Tensor:
        return _multiple(super().__rmul__(other))

    def __truediv__(self, other: Any) -> torch.Tensor:
        return _multiple(super().__truediv__(other))

    def mean(self, *args: Any, **options: Any) -> torch.Tensor:
        """Of replicas, in loops written for DataParallel."""
        return _multiple(super().mean(*args, **options))

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return repr(self.plain)

    def __format__(self, spec: str) -> str:
        return self.plain.__format__(spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.plain.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)


def _multiple(loss: torch.Tensor) -> torch.Tensor:
    """A loss that was scaled is one, unless it is trained by a factor that has a graph."""
    is_loss = isinstance(loss, torch.Tensor) and not loss.dim() and not loss.requires_grad
    return StepLoss.of(loss) if is_loss else loss
