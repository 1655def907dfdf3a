"""Notices gradients that something else than csc has scaled, where this process has a part of the model alone.

torch.nn.utils.clip_grad_norm_ over the parameters of a rank clips by the norm of that rank's part: another factor on
each rank, and no error anywhere.

    scaled = ScaledGradients()      .given(trainer) after a step, and after csc has clipped      .look() before the next
"""

from __future__ import annotations

import logging

import torch

from csc.runtime.trainer import Trainer

log = logging.getLogger("csc")


class ScaledGradients:
    """Of one model. It holds the smallest gradient of the last step until the next one begins: that it was written to
    shows in its version counter, also if the loop has set `.grad` to None since. It says so once.
    """

    def __init__(self) -> None:
        self._given: tuple[torch.Tensor, int] | None = None
        self._has_said = False

    def given(self, trainer: Trainer) -> None:
        """These are the gradients, as they should stay."""
        if self._has_said or not _has_a_part(trainer):
            return
        gradients = [parameter.grad for parameter in trainer.parameters() if parameter.grad is not None]
        least = min(gradients, key=lambda one: one.untyped_storage().nbytes(), default=None)  # no memory to speak of
        self._given = None if least is None else (least, least._version)

    def look(self) -> None:
        """Warn if it was written to in place, and not set to zeros."""
        if self._given is not None and self._given[0]._version != self._given[1] and bool(self._given[0].any()):
            self._has_said = True
            log.warning(
                "the gradients of the last step were changed in place. Each process here has a part of the model: "
                "torch.nn.utils.clip_grad_norm_ clips each part by its own norm, by another factor on each rank; call "
                "compiled.clip_grad_norm_(max_norm) in its place. A factor that is the same on all ranks does no harm."
            )
        self._given = None


def _has_a_part(trainer: Trainer) -> bool:
    """Whether other processes have parameters, or entries of some, that this one has not."""
    mesh, zero = trainer.program.manifest.mesh, trainer.program.manifest.zero
    divided = mesh.pp > 1 or mesh.tp > 1 or (zero > 0 and mesh.size > 1)
    return divided and len(trainer.transport.ranks) < mesh.size
