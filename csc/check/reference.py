"""What eager PyTorch makes of a batch, each time with the same random numbers.

eager = Reference(model, given, trainable, rule, masks, draws)
eager.step() -> EagerStep     eager.again() -> loss of another forward          eager.moved(right, epsilon)
eager.in_half()                                                                 see csc.check.rounding
eager.masks                   those of the latest of these, None: nothing was left to chance
eager.look_again()            the model may be another from now on, as a training step leaves it
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from torch import nn

from csc.check.chance import Chance, Sparing, listening
from csc.check.eager import EagerStep, eager_step, loss_again
from csc.check.numbers import WithoutChance
from csc.check.rounding import moved
from csc.check.same_masks import SameMasks
from csc.check.undisturbed import Snapshot
from csc.kernels.opaque import is_opaque


class Reference:
    """given, trainable, rule: see csc.check.eager. masks: of dropout, if it is to drop something; None: nothing is left
    to chance. draws: whether the program draws anything; it says nothing of opaque modules.
    """

    def __init__(
        self,
        model: nn.Module,
        given: Any,
        trainable: Set[str],
        rule: str,
        masks: SameMasks | None = None,
        draws: bool = True,
    ) -> None:
        self.masks = masks
        self._model, self._given = model, (given, trainable, rule)
        self._standing: Snapshot | None = None
        self._draws = draws
        self._everywhere = any(map(is_opaque, self._stands.modules))  # they may have generators of their own

    def step(self) -> EagerStep:
        """Loss and gradients. Where something was drawn that calls do not show, once more."""
        chance = self._chance()
        step = eager_step(self._stands, *self._given, chance)
        if isinstance(chance, Sparing) and chance.missed:
            self._everywhere = True
            return eager_step(self._stands, *self._given, self._chance())
        return step

    def less_sparing(self) -> bool:
        """Look at each operation from now on. False: that was so before."""
        before, self._everywhere = self._everywhere, True
        return not before

    def again(self) -> float:
        """The loss of another forward."""
        return loss_again(self._stands, *self._given, self._chance())

    def look_again(self) -> None:
        """Put back, after each step, what is there now."""
        self._standing = None

    def moved(self, right: EagerStep, epsilon: float) -> Mapping[str, float]:
        """How far rounding moves gradients and the loss."""
        return moved(self._model, *self._given, right, epsilon, self._chance())

    def in_half(self) -> bool:
        """Whether any operation of a step has a result of 16 bits."""
        everywhere = self._without_chance()
        eager_step(self._stands, *self._given, everywhere)
        return everywhere.half

    @property
    def _stands(self) -> Snapshot:
        if self._standing is None:
            self._standing = Snapshot(self._model)
        return self._standing

    def _without_chance(self) -> WithoutChance:
        self.masks = None if self.masks is None else self.masks.once_more()
        return WithoutChance(self.masks)

    def _chance(self) -> Chance:
        everywhere = self._without_chance()
        if self._everywhere:
            return everywhere
        return Sparing(everywhere, self._stands.device, listening(everywhere, self._draws, self._model))
