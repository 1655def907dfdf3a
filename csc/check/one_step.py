"""One step of a program, for comparison: `.grad` as it was afterwards.

step_of(trainer, microbatches, drawn) -> EagerStep             drawn: its seed; by default nothing is left to chance
compared_step(trainer, microbatches, drawn) -> ComparedStep      that can be kept as the training step that it is
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from csc import devices
from csc.check.chance import generators
from csc.check.eager import EagerStep
from csc.runtime import executor
from csc.runtime.trainer import Trainer


@dataclass(frozen=True)
class ComparedStep:
    """A step whose gradients are kept apart. loss: as `train_step` returned it."""

    step: EagerStep
    loss: torch.Tensor

    @torch.no_grad()
    def keep(self, trainer: Trainer) -> torch.Tensor:
        """Make it a training step of this trainer: its gradients go to `.grad` as `train_step` adds them. The loss."""
        for name, parameter in trainer.named_parameters():
            gradient = self.step.gradients.get(name)
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return self.loss


def step_of(
    trainer: Trainer, microbatches: Sequence[Mapping[str, torch.Tensor]], drawn: int = executor.NO_CHANCE
) -> EagerStep:
    """The loss and gradients of all ranks, which run in this process. microbatches: complete ones.

    What the program draws from torch's generator all the same (in modules that it calls as they are) is `unknown`.
    """
    return compared_step(trainer, microbatches, drawn).step


def compared_step(
    trainer: Trainer, microbatches: Sequence[Mapping[str, torch.Tensor]], drawn: int | None = executor.NO_CHANCE
) -> ComparedStep:
    """The same, with the loss as a tensor. drawn: None for a seed that is drawn as in training; torch's generator goes
    on as it does there.
    """
    parameters = dict(trainer.named_parameters())
    before = {name: parameter.grad for name, parameter in parameters.items()}
    try:
        trainer.zero_grad()
        given = [trainer.reads(one) for one in microbatches]
        with nullcontext() if drawn is None else devices.forked(trainer.device):
            expected = _after_draw(trainer.device) if drawn is None else generators(trainer.device)
            loss = trainer.train_step(given, drawn=drawn)
            more = not torch.equal(expected, generators(trainer.device))
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        unknown = frozenset({"modules that csc runs as they are"} if more else ())
        return ComparedStep(EagerStep(float(loss), gradients, unknown), loss)
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]


def _after_draw(device: torch.device) -> torch.Tensor:
    """What a step leaves of the generators if it draws its seed and no more."""
    with devices.forked(device):
        executor.draw()
        return generators(device)
