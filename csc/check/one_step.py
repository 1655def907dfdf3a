"""One step of a program, for comparison: nothing left to chance, `.grad` as it was afterwards.

step_of(trainer, microbatches) -> Step
compared_step(trainer, microbatches) -> ComparedStep         that can be kept as the training step that it is
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from csc import devices
from csc.check.eager import Step
from csc.runtime.trainer import Trainer


@dataclass(frozen=True)
class ComparedStep:
    """A step whose gradients are kept apart. loss: as `train_step` returned it."""

    step: Step
    loss: torch.Tensor

    @torch.no_grad()
    def keep(self, trainer: Trainer) -> torch.Tensor:
        """Make it a training step of this trainer: its gradients go to `.grad` as `train_step` adds them. The loss."""
        for name, parameter in trainer.named_parameters():
            gradient = self.step.gradients.get(name)
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return self.loss


def step_of(trainer: Trainer, microbatches: Sequence[Mapping[str, torch.Tensor]]) -> Step:
    """The loss and gradients of all ranks, which run in this process. microbatches: complete ones.

    What the program draws from torch's generator all the same (in modules that it calls as they are) is `unknown`.
    """
    return compared_step(trainer, microbatches).step


def compared_step(trainer: Trainer, microbatches: Sequence[Mapping[str, torch.Tensor]]) -> ComparedStep:
    """The same, with the loss as a tensor."""
    parameters = dict(trainer.named_parameters())
    before = {name: parameter.grad for name, parameter in parameters.items()}
    try:
        trainer.zero_grad()
        given = [trainer.reads(one) for one in microbatches]
        with devices.forked(trainer.device):
            state = _generator(trainer.device)
            loss = trainer.train_step(given, chance=False)
            drawn = not torch.equal(state, _generator(trainer.device))
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        unknown = frozenset({"modules that csc runs as they are"} if drawn else ())
        return ComparedStep(Step(float(loss), gradients, unknown), loss)
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]


def _generator(device: torch.device) -> torch.Tensor:
    """What it will draw next, on the CPU and on the device."""
    return torch.cat([torch.get_rng_state(), devices.generator(device)])
