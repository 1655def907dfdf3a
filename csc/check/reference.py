"""What eager PyTorch makes of a batch, each time with the same random numbers.

eager = Reference(model, given, trainable, rule, masks, draws)
eager.step() -> EagerStep          eager.again() -> loss of another forward          eager.moved(right, epsilon)
eager.in_half()                                                                 see csc.check.rounding
eager.masks                   those of the latest of these, None: nothing was left to chance
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from torch import nn

from csc.capture.batch import device_of
from csc.check.chance import Chance, Sparing
from csc.check.eager import EagerStep, eager_step, loss_again
from csc.check.numbers import WithoutChance
from csc.check.rounding import moved
from csc.check.same_masks import SameMasks
from csc.kernels.opaque import is_opaque


class Reference:
    """given, trainable, rule: see csc.check.eager. masks: makes those that dropout takes, from the first one on; None:
    nothing is left to chance. draws: whether the program draws anything; it says nothing of opaque modules.
    """

    def __init__(
        self,
        model: nn.Module,
        given: Any,
        trainable: Set[str],
        rule: str,
        masks: Callable[[], SameMasks] | None = None,
        draws: bool = True,
    ) -> None:
        self.masks: SameMasks | None = None
        self._asked = (model, given, trainable, rule)
        self._make_masks, self._draws = masks, draws
        self._everywhere = any(map(is_opaque, model.modules()))  # they may have generators of their own

    def step(self) -> EagerStep:
        """Loss and gradients. Where something was drawn that calls do not show, once more."""
        chance = self._chance()
        step = eager_step(*self._asked, chance)
        if isinstance(chance, Sparing) and chance.missed:
            self._everywhere = True
            return eager_step(*self._asked, self._chance())
        return step

    def less_sparing(self) -> bool:
        """Look at each operation from now on. False: that was so before."""
        before, self._everywhere = self._everywhere, True
        return not before

    def again(self) -> float:
        """The loss of another forward."""
        return loss_again(*self._asked, self._chance())

    def moved(self, right: EagerStep, epsilon: float) -> Mapping[str, float]:
        """How far rounding moves gradients and the loss."""
        return moved(*self._asked, right, epsilon, self._chance())

    def in_half(self) -> bool:
        """Whether any operation of a step has a result of 16 bits."""
        everywhere = self._without_chance()
        eager_step(*self._asked, everywhere)
        return everywhere.half

    def _without_chance(self) -> WithoutChance:
        self.masks = self._make_masks() if self._make_masks is not None else None
        return WithoutChance(self.masks)

    def _chance(self) -> Chance:
        everywhere = self._without_chance()
        return everywhere if self._everywhere else Sparing(everywhere, device_of(self._asked[0]), self._draws)
