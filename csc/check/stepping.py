"""One step of a program, for comparison: nothing left to chance, `.grad` as it was afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from csc.check.eager import Step
from csc.runtime.trainer import Trainer


def step_of(trainer: Trainer, microbatches: Sequence[Mapping[str, torch.Tensor]]) -> Step:
    """The loss and gradients of all ranks, which run in this process. microbatches: complete ones."""
    manifest = trainer.program.manifest
    used = {item.name for item in manifest.inputs} | manifest.fixed.keys()
    parameters = dict(trainer.named_parameters())
    before = {name: parameter.grad for name, parameter in parameters.items()}
    try:
        trainer.zero_grad()
        given = [{name: value for name, value in one.items() if name in used} for one in microbatches]
        loss = trainer.train_step(given, chance=False)
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        return Step(float(loss), gradients)
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]
