"""The loss of a whole batch from those of its microbatches.

Terms: a microbatch's *weight* is its share in the whole loss. With `tokens` it is n / N: its counted labels
over those of all microbatches and replicas, so that the whole loss is the mean over all tokens, as one
process would compute it. With `mean` it is 1 / (microbatches * dp), with `sum` it is 1.

    weights(ranks, microbatches) -> generator -> {microbatch: weight}    loss stage only, before the first F
    combine(rank, losses, weights) -> generator -> Losses               every rank, after the last action

Numbers pass between ranks in float64, one small sum a step, and are added in the order of the microbatches:
every rank has the same bits.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import torch

from csc.errors import CscError
from csc.runtime.gradients import wait_sum
from csc.runtime.rank import Rank

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Losses:
    """Weighted losses of all microbatches (replica after replica) and the dtype in which the model computes
    them.
    """

    parts: tuple[float, ...]
    dtype: torch.dtype

    def total(self, microbatches: int) -> torch.Tensor:
        """The loss of the whole batch, a 0-d CPU tensor in the model's dtype. CscError if a part is not
        finite.
        """
        whole = torch.tensor(self.parts, dtype=torch.float64)
        bad = (~whole.isfinite()).nonzero().flatten().tolist()
        if bad:
            several = len(self.parts) > microbatches
            names = [f"{i % microbatches} of replica {i // microbatches}" if several else str(i) for i in bad]
            raise CscError(
                f"the loss of microbatch {', '.join(names)} is not finite "
                f"({', '.join(sorted({str(self.parts[i]) for i in bad}))})",
                "train_step",
                "No gradient was touched. Look at that part of the batch (no label, no mean), "
                "or lower the learning rate",
            )
        return torch.tensor(sum(self.parts), dtype=torch.float64).to(self.dtype)


def weights(
    ranks: Sequence[Rank], microbatches: Sequence[Mapping[str, torch.Tensor]]
) -> Generator[str, None, dict[int, float]]:
    """The weight of each of this replica's microbatches. With one microbatch and dp = 1 it is exactly 1.0.

    ranks: this rank in the program of each microbatch.
    """
    rank = ranks[0]
    manifest = rank.program.manifest
    mesh, count = manifest.mesh, len(microbatches)
    if manifest.loss.weight == "sum":
        return dict.fromkeys(range(count), 1.0)
    if manifest.loss.weight == "mean":
        return dict.fromkeys(range(count), 1.0 / (count * mesh.dp))
    counts = []
    for one, batch in zip(ranks, microbatches, strict=True):
        counted = one.functions[manifest.loss.stage].loss_tokens
        assert counted is not None
        counts.append(counted(batch, one.constants).reshape(()))
    tokens = torch.stack(counts)
    total = tokens.sum().reshape(1)
    yield from wait_sum(rank.endpoint, total, mesh.sharing(manifest.loss_rank), "count of labels over dp and cp")
    whole = int(total)
    if whole == 0:  # the mean over nothing: NaN as in one process, reported by name at the end of the step
        return dict.fromkeys(range(count), 1.0 if count * mesh.dp * mesh.cp == 1 else float("nan"))
    return {mb: n / whole for mb, n in enumerate(tokens.tolist())}


def combine(
    rank: Rank, losses: Mapping[int, torch.Tensor], weights: Mapping[int, float]
) -> Generator[str, None, Losses]:
    """Give every rank every microbatch's weighted loss. A microbatch of weight 0 counts 0, though its own
    mean is NaN.
    """
    manifest = rank.program.manifest
    mesh, count = manifest.mesh, manifest.microbatches
    row = torch.zeros(mesh.dp * count + 1, dtype=torch.float64)
    for mb, loss in losses.items():
        if weights[mb] != 0:
            row[rank.replica * count + mb] = loss.double().cpu() * weights[mb]
        if rank.replica == rank.piece == 0 and mb == 0:
            row[-1] = _DTYPES.index(loss.dtype)
    row = row.to(rank.device)
    yield from wait_sum(rank.endpoint, row, tuple(range(mesh.size)), "loss over all ranks")
    *parts, dtype = row.tolist()
    return Losses(tuple(parts), _DTYPES[int(dtype)])
