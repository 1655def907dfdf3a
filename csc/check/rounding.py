"""How far rounding alone moves gradients: eager PyTorch again, with weights, and whatever is added up, another in the
last bit. Programs add up in another order; what a model makes of that (differences of nearly equal sums) is its own.

moved(model, batch, trainable, rule, right, epsilon) -> {parameter: relative difference}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from csc.check.chance import Chance
from csc.check.differences import relative
from csc.check.eager import EagerStep, eager_step
from csc.torch_private.traces import TorchDispatchMode, pytree

LOSS = ""  # under this name stands how far the loss moves
# Operations that add up, by parts of their names. Others round too, but are the same operations in a program.
ADDING = ("mm", "convolution", "scaled_dot_product", "attention", "sum", "mean", "var", "norm", "softmax", "nll_loss")


def moved(
    model: nn.Module,
    batch: Any | Sequence[Any],
    trainable: Set[str],
    rule: str,
    right: EagerStep,
    epsilon: float,
    chance: Chance | None = None,
) -> Mapping[str, float]:
    """By parameter, and under LOSS. epsilon: the relative size of the change, that of a bit. right: made with such a
    `chance` (see eager_step), too.
    """
    with _nudged(model, epsilon), _Perturbed(epsilon):
        other = eager_step(model, batch, trainable, rule, chance)
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
            parameter.mul_(_last_bits(parameter.shape, epsilon, parameter.dtype, generator).to(parameter.device))
    try:
        yield
    finally:
        for name, parameter in model.named_parameters():
            if name in before:
                parameter.copy_(before[name])


class _Perturbed(TorchDispatchMode):
    """What operations in it add up is multiplied by 1 + epsilon or 1 - epsilon, at random: Monte Carlo arithmetic
    (Parker, 1997).
    """

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self._epsilon = epsilon
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(part in func._schema.name for part in ADDING):
            for one in pytree.tree_leaves(result):
                if isinstance(one, torch.Tensor) and one.is_floating_point():
                    self._perturb(one)
        return result

    def _perturb(self, one: torch.Tensor) -> None:
        if one.device not in self._generators:
            self._generators[one.device] = torch.Generator(one.device).manual_seed(0)
        one.mul_(_last_bits(one.shape, self._epsilon, one.dtype, self._generators[one.device]))


def _last_bits(shape: Sequence[int], epsilon: float, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """1 + epsilon and 1 - epsilon, at random."""
    signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8, device=generator.device)
    return signs.to(dtype).mul_(2).sub_(1).mul_(epsilon).add_(1)
