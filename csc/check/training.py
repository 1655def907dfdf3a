"""Where several steps of an optimizer lead: what a wrong state between steps would show in.

The optimizer is SGD with momentum: it is linear in the gradients, so that rounding stays what it is. (Adam makes whole
steps of gradients that are nothing but rounding.)

    trained_by_eager(model, batch, trainable, steps) -> {parameter: how far it has moved}
    trained_by_program(trainer, microbatches, steps) -> {parameter: how far it has moved}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from csc.check.eager import eager_step
from csc.check.one_step import step_of
from csc.runtime.trainer import Trainer

RATE, MOMENTUM = 1e-2, 0.9

Parameters = Mapping[str, torch.Tensor]


def trained_by_eager(model: nn.Module, batch: Any, trainable: Set[str], steps: int) -> dict[str, torch.Tensor]:
    """By eager PyTorch; the model is as before afterwards."""
    own = {name: p for name, p in model.named_parameters() if name in trainable}
    with _put_back(own) as start:
        optimizer = torch.optim.SGD(own.values(), RATE, MOMENTUM)
        for _ in range(steps):
            _step(optimizer, own, eager_step(model, batch, trainable).gradients)
        return _moved(own, start)


def trained_by_program(
    trainer: Trainer, microbatches: Sequence[Mapping[str, torch.Tensor]], steps: int
) -> dict[str, torch.Tensor]:
    """By a program; its parameters are as before afterwards. microbatches: complete ones."""
    own = dict(trainer.named_parameters())
    with _put_back(own) as start:
        optimizer = torch.optim.SGD(own.values(), RATE, MOMENTUM)
        for _ in range(steps):
            _step(optimizer, own, step_of(trainer, microbatches).gradients)
        return _moved(own, start)


def _step(optimizer: torch.optim.Optimizer, own: Mapping[str, nn.Parameter], gradients: Parameters) -> None:
    before = {name: parameter.grad for name, parameter in own.items()}
    for name, parameter in own.items():
        parameter.grad = gradients.get(name)
    optimizer.step()
    for name, parameter in own.items():
        parameter.grad = before[name]


def _moved(own: Parameters, start: Parameters) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() - start[name] for name, parameter in own.items()}


@contextmanager
@torch.no_grad()
def _put_back(own: Parameters) -> Iterator[Parameters]:
    start = {name: parameter.detach().clone() for name, parameter in own.items()}
    try:
        yield start
    finally:
        for name, parameter in own.items():
            parameter.copy_(start[name])
