"""torch's schedules behind a frozen prefix, for real: a small model's gradients against those of one process.

The model is a chain of linear layers with tanh, one for each stage; the first two stages are frozen. Run by every rank
of a process group, on the same weights and data.

    check(name, rank, ranks) -> {"missing": [stage], "wrong": [stage], "error": largest relative error}
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from benchmarks.pipeline.torch_schedules import TORCH, placement

WIDTH, MICROBATCHES, FROZEN = 16, 8, 2
EQUAL = 1e-5  # relative errors of float32 up to this are rounding


def _layers(count: int) -> list[nn.Sequential]:
    torch.manual_seed(0)
    found = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
    for layer in found[:FROZEN]:
        layer.requires_grad_(False)
    return found


def check(name: str, rank: int, ranks: int) -> dict[str, Any]:
    """What each trainable stage's gradients are after one step of the schedule. Every rank returns the whole answer."""
    kind, where = TORCH[name], placement(name, ranks)
    layers, alone = _layers(len(where)), _layers(len(where))
    x, target = torch.randn(2 * MICROBATCHES, WIDTH), torch.randn(2 * MICROBATCHES, WIDTH)
    stages = [
        pipelining.PipelineStage(layers[s], s, len(where), torch.device("cpu"))
        for s in range(len(where))
        if where[s] == rank
    ]
    cls = getattr(pipelining, kind.cls)
    schedule = cls(stages if kind.chunks > 1 else stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)
    arguments = (x,) if any(stage.is_first for stage in stages) else ()
    schedule.step(*arguments, target=target if any(stage.is_last for stage in stages) else None)

    nn.functional.mse_loss(nn.Sequential(*alone)(x), target).backward()
    own = {stage.stage_index: _error(layers[stage.stage_index], alone[stage.stage_index]) for stage in stages}
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, own)
    errors = {s: error for part in gathered for s, error in part.items() if s >= FROZEN}
    present = [error for error in errors.values() if error is not None]
    return {
        "name": name,
        "missing": sorted(s for s, error in errors.items() if error is None),
        "wrong": sorted(s for s, error in errors.items() if error is not None and error > EQUAL),
        "error": max(present, default=0.0),
    }


def _error(layer: nn.Module, reference: nn.Module) -> float | None:
    """The largest error of a gradient relative to the reference's norm; None if there is no gradient."""
    worst = 0.0
    for own, other in zip(layer.parameters(), reference.parameters()):
        if other.grad is None:
            continue
        if own.grad is None:
            return None
        worst = max(worst, float((own.grad - other.grad).norm() / other.grad.norm()))
    return worst
