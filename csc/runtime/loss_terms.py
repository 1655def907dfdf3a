"""The loss of a whole batch from those of its microbatches.

Terms: a microbatch's *weight* is its share in the whole loss. With `tokens` it is n / N: its counted labels
over those of all microbatches and replicas, so that the whole loss is the mean over all tokens, as one
process would compute it. With `mean` it is the same with its samples, with `sum` it is 1. A loss that is divided by
no count but by max(n + added, least) has the weight max(n + added, least) / max(N + added, least).

    weights(ranks, microbatches) -> generator -> {microbatch: weight}    loss stage only, before the first F
    combine(rank, losses, weights, counts) -> generator -> Losses       every rank, after the last action

Numbers pass between ranks in float64, one small sum a step, and are added in the order of the microbatches:
every rank has the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import astuple, dataclass, field

import torch

from csc.errors import CscError
from csc.ir.groups import Group
from csc.runtime.gradients import wait_sum
from csc.runtime.rank import Rank
from csc.runtime.specs import Manifest
from csc.runtime.step_counts import StepCounts

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Losses:
    """Losses of all microbatches (replica after replica) with their weights, the dtype in which the model computes
    them, and what all replicas' microbatches are. Those of a rank that is alone are still where it computes: what the
    host has to do may be done before it waits for them.
    """

    parts: tuple[tuple[float | torch.Tensor, float], ...]
    dtype: torch.dtype
    counts: StepCounts = field(default_factory=StepCounts)

    def total(self, microbatches: int) -> torch.Tensor:
        """The loss of the whole batch, a 0-d CPU tensor in the model's dtype, once it is computed. CscError if a part
        is not finite.
        """
        parts = [float(loss) * weight for loss, weight in self.parts]
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


def weights(
    ranks: Sequence[Rank], microbatches: Sequence[Mapping[str, torch.Tensor]]
) -> Generator[str, None, dict[int, float]]:
    """The weight of each of a rank's microbatches. With one microbatch and dp = 1 it is exactly 1.0, and nothing
    is counted.

    ranks: this rank in the program of each microbatch.
    """
    rank = ranks[0]
    manifest = rank.program.manifest
    count = len(microbatches)
    alone = count * len(rank.group(Group.DATA)) == 1
    if manifest.loss.weight == "sum" or alone:
        return dict.fromkeys(range(count), 1.0)
    if manifest.loss.weight == "mean":
        what, counting, counts = "samples", Group.SAMPLES, _samples(manifest, microbatches)
    else:
        what, counting, counts = "labels", Group.DATA, _labels(ranks, microbatches)
    total = counts.sum().reshape(1)
    why = f"count of {what} over {' and '.join(counting.along)}"
    yield from wait_sum(rank.endpoint, total, rank.group(counting), why)
    whole = _divisor(manifest, float(total))
    if whole == 0:  # the mean over nothing: NaN as in one process, reported by name at the end of the step
        return dict.fromkeys(range(count), float("nan"))
    return {mb: _divisor(manifest, float(n)) / whole for mb, n in enumerate(counts.tolist())}


def _divisor(manifest: Manifest, count: float) -> float:
    return max(count + manifest.loss.added, manifest.loss.least)


def _samples(manifest: Manifest, microbatches: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """Rows of the microbatches, as the loss counts them."""
    rows = manifest.loss.rows
    device = torch.device(manifest.device)
    found = [batch[rows].shape[0] if rows in batch else 1 for batch in microbatches]
    return torch.tensor(found, dtype=torch.float64, device=device)


def _labels(ranks: Sequence[Rank], microbatches: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """What the microbatches' losses are divided by."""
    counts = []
    for one, batch in zip(ranks, microbatches, strict=True):
        counted = one.functions[one.program.manifest.loss.stage].loss_tokens
        assert counted is not None
        counts.append(counted(batch, one.constants).reshape(()))
    return torch.stack(counts)


def combine(
    rank: Rank, losses: Mapping[int, torch.Tensor], weights: Mapping[int, float], counts: StepCounts
) -> Generator[str, None, Losses]:
    """Give every rank every microbatch's weighted loss. A microbatch of weight 0 counts 0, though its own
    mean is NaN. counts: of the rank's own replicas.
    """
    manifest = rank.program.manifest
    count, counts_once = manifest.microbatches, rank.group(Group.TENSOR)[0] == rank.rank
    everyone = rank.group(Group.WORLD)
    if len(everyone) == 1:
        alone = tuple((losses[mb], weights[mb]) if weights[mb] != 0 else (0.0, 1.0) for mb in range(count))
        return Losses(alone, losses[0].dtype, counts)
    dtype_at = manifest.mesh.dp * count
    row = [0.0] * (dtype_at + 1 + len(astuple(counts)))
    if rank.position == 0 and rank.cp_rank == 0 and counts_once:
        row[dtype_at + 1 :] = map(float, astuple(counts))
    for mb, loss in losses.items():
        if weights[mb] != 0 and counts_once:
            replica, own = rank.served(mb)
            row[replica * count + own] = float(loss) * weights[mb]
        if rank.group(Group.POSITION)[0] == rank.rank and mb == 0:
            row[dtype_at] = float(_DTYPES.index(loss.dtype))
    whole = torch.tensor(row, dtype=torch.float64, device=rank.device)
    yield from wait_sum(rank.endpoint, whole, everyone, "loss over all ranks")
    row = whole.tolist()
    parts, dtype, found = row[:dtype_at], int(row[dtype_at]), row[dtype_at + 1 :]
    return Losses(tuple((part, 1.0) for part in parts), _DTYPES[dtype], StepCounts(*found))
