"""The judge: a step of a program beside one of eager PyTorch.

judge(right, loss, gradients, tolerances, rounding) -> Judgement
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from csc.check.differences import relative
from csc.check.eager import EagerStep
from csc.check.rounding import LOSS

# A difference of at most this many times what a changed last bit makes of eager's own gradients is rounding: programs
# add up in another order everywhere, the probe changes one bit of each weight.
ROUNDING = 16.0


@dataclass(frozen=True)
class Judgement:
    """loss_rel: relative difference of the loss. grad_rel: per parameter (see csc.check.differences). missing:
    parameters to which eager alone gives a gradient; unexpected: to which the program alone does.
    wrong: names of the parameters whose gradients are not eager's; loss_wrong: the loss is not. allowed: what is put
    down to rounding for the gradient that differs most.
    """

    loss: float
    loss_eager: float
    loss_rel: float
    grad_rel: Mapping[str, float]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    wrong: tuple[str, ...]
    loss_wrong: bool
    allowed: float = 0.0

    @property
    def good(self) -> bool:
        return not (self.missing or self.unexpected or self.wrong or self.loss_wrong)

    @property
    def largest(self) -> float:
        """The largest entry of grad_rel; NaN if one is."""
        values = list(self.grad_rel.values())
        return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def judge(
    right: EagerStep,
    loss: float,
    gradients: Mapping[str, torch.Tensor],
    tolerances: Iterable[float],
    rounding: Callable[[], Mapping[str, float]],
) -> Judgement:
    """right: eager's step; loss, gradients: the program's. tolerances: that pass, each larger than the one before, the
    next one asked for only if something differs by more. rounding: how far a last bit moves eager's, asked for last.
    """
    differences = relative(right.gradients, gradients)
    loss_rel = abs(loss - right.loss) / max(abs(right.loss), torch.finfo(torch.float32).tiny)
    most = max(differences, key=lambda name: differences[name], default="")
    allowed: Mapping[str, float] = {}
    for tolerance in tolerances:
        apart = {name: value for name, value in differences.items() if not value <= tolerance}
        loss_apart = not loss_rel <= tolerance
        if not apart and not loss_apart:
            break
    else:
        allowed = rounding()
        apart = {name: value for name, value in apart.items() if not value <= ROUNDING * allowed[name]}
        loss_apart = loss_apart and not loss_rel <= ROUNDING * allowed[LOSS]
    return Judgement(
        loss=loss,
        loss_eager=right.loss,
        loss_rel=loss_rel,
        grad_rel=dict(sorted(differences.items())),
        missing=tuple(sorted(right.gradients.keys() - gradients.keys())),
        unexpected=tuple(sorted(gradients.keys() - right.gradients.keys())),
        wrong=tuple(sorted(apart)),
        loss_wrong=loss_apart,
        allowed=max(tolerance, ROUNDING * allowed.get(most, 0.0)),
    )
