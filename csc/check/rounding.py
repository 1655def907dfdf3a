"""How far rounding alone moves gradients: eager PyTorch again, with weights that are another in their last bit.

moved(model, batch, trainable, rule, right, epsilon) -> {parameter: relative difference}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from csc.check.differences import relative
from csc.check.eager import Step, eager_step

LOSS = ""  # under this name stands how far the loss moves


def moved(
    model: nn.Module, batch: Any | Sequence[Any], trainable: Set[str], rule: str, right: Step, epsilon: float
) -> Mapping[str, float]:
    """By parameter, and under LOSS. epsilon: the relative size of the change, that of a bit."""
    with _nudged(model, epsilon):
        other = eager_step(model, batch, trainable, rule)
    loss = abs(other.loss - right.loss) / max(abs(right.loss), torch.finfo(torch.float32).tiny)
    return {LOSS: loss, **relative(right.gradients, other.gradients)}


@contextmanager
@torch.no_grad()
def _nudged(model: nn.Module, epsilon: float) -> Iterator[None]:
    """Each floating-point parameter times 1 + epsilon or 1 - epsilon, at random; afterwards as before, to the bit."""
    generator = torch.Generator().manual_seed(0)
    before = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            before[name] = parameter.detach().clone()
            signs = torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.int8)
            change = signs.to(parameter.device, parameter.dtype).mul_(2).sub_(1).mul_(epsilon).add_(1)
            parameter.mul_(change)
    try:
        yield
    finally:
        for name, parameter in model.named_parameters():
            if name in before:
                parameter.copy_(before[name])
