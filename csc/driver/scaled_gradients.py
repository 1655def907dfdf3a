"""Notices gradients that something else than csc has scaled, where this process has a part of the model alone.

torch.nn.utils.clip_grad_norm_ over the parameters of a rank clips by the norm of that rank's part: another factor on
each rank, and no error anywhere.

    scaled = ScaledGradients()      .given(trainer) after a step, and after csc has clipped      .look() before the next
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from csc.runtime.trainer import Trainer

log = logging.getLogger("csc")
MOST = 64  # gradients that are looked at, spread over all


class ScaledGradients:
    """Of one model. It remembers counters of writes of some gradients of the last step, without their memory: they show
    a write in place also if the loop has set `.grad` to None since. It says so once.
    """

    def __init__(self) -> None:
        self._given: list[tuple[nn.Parameter, torch.Tensor, int]] = []
        self._has_said = False

    def given(self, trainer: Trainer) -> None:
        """These are the gradients, as they should stay."""
        if self._has_said or not _has_a_part(trainer):
            return
        having = [parameter for parameter in trainer.parameters() if parameter.grad is not None]
        self._given = [_remembered(parameter) for parameter in having[:: len(having) // MOST + 1]]

    def look(self) -> None:
        """Warn if one was written to in place, and not set to zeros."""
        written = [one for one, counter, before in self._given if counter._version != before]
        least = min(written, key=torch.Tensor.numel, default=None)  # who sets gradients to zeros writes to all
        if least is not None and (least.grad is None or bool(least.grad.any())):
            self._has_said = True
            log.warning(
                "the gradients of the last step were changed in place. Each process here has a part of the model: "
                "torch.nn.utils.clip_grad_norm_ clips each part by its own norm, by another factor on each rank; call "
                "compiled.clip_grad_norm_(max_norm) in its place. A factor that is the same on all ranks does no harm."
            )
        self._given = []


def _remembered(parameter: nn.Parameter) -> tuple[nn.Parameter, torch.Tensor, int]:
    """With a tensor that has no entries, and the gradient's counter of writes."""
    assert parameter.grad is not None
    counter = parameter.grad.detach()  # shares the counter, and the memory until it is given another
    counter.data = torch.empty(0, dtype=counter.dtype, device=counter.device)
    return parameter, counter, counter._version


def _has_a_part(trainer: Trainer) -> bool:
    """Whether other processes have parameters, or entries of some, that this one has not."""
    mesh, zero = trainer.program.manifest.mesh, trainer.program.manifest.zero
    divided = mesh.pp > 1 or mesh.tp > 1 or (zero > 0 and mesh.size > 1)
    return divided and len(trainer.transport.ranks) < mesh.size
