"""One step of a program, for comparison: nothing left to chance, `.grad` as it was afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from csc import devices
from csc.check.eager import Step
from csc.runtime.trainer import Trainer


def step_of(trainer: Trainer, microbatches: Sequence[Mapping[str, torch.Tensor]]) -> Step:
    """The loss and gradients of all ranks, which run in this process. microbatches: complete ones.

    What the program draws from torch's generator all the same (in modules that it calls as they are) is `unknown`.
    """
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
        return Step(float(loss), gradients, frozenset({"modules that csc runs as they are"} if drawn else ()))
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]


def _generator(device: torch.device) -> torch.Tensor:
    """What it will draw next, on the CPU and on the device."""
    return torch.cat([torch.get_rng_state(), devices.generator(device)])
