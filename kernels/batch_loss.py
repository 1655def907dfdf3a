"""Values of microbatches that go to a loss over the whole batch, and the gradients that come back.

place: the number of a `HandedOver`, one for each microbatch of a step, as an int64 scalar on the CPU. index: which of
the values that the loss takes. `csc::to_batch_loss` hands a value over in F; `csc::from_batch_loss` gives its gradient
in B. F of all microbatches hands values over before B of any asks for a gradient. Between the two the runtime computes
the loss. What F adds to its microbatch's loss is 0: the loss is known once all are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from csc.kernels.operators import Numbered, light_operator


@dataclass(eq=False)
class HandedOver:
    """Of one microbatch. values: by index. gradients: of these, once the loss is computed; None for one without.

    timed: it stands for those of a step where a region runs alone, to be timed or looked at: gradients are zeros.
    """

    values: dict[int, torch.Tensor] = field(default_factory=dict)
    gradients: Sequence[torch.Tensor | None] | None = None
    timed: bool = False

    def gradient(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """RuntimeError if the loss has not been computed."""
        gradient = None
        if not self.timed:
            if self.gradients is None:
                raise RuntimeError("B comes before the loss over the whole batch: F of all microbatches comes first")
            gradient = self.gradients[index]
        return torch.zeros_like(value) if gradient is None else gradient.to(value.dtype)


_HANDED_OVER: Numbered[HandedOver] = Numbered(
    "a loss over the whole batch is computed in steps of a compiled program only"
)
numbered = _HANDED_OVER.number
STANDING_IN = HandedOver(timed=True)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    value, ctx.index, _, place = inputs
    ctx.save_for_backward(value, place)


def _gradient(ctx: Any, d: torch.Tensor) -> tuple[Any, ...]:
    value, place = ctx.saved_tensors
    return torch.ops.csc.from_batch_loss.default(d, value, ctx.index, place), None, None, None


@light_operator("to_batch_loss", _gradient, _remember)
def to_batch_loss(value: torch.Tensor, index: int, dtype: torch.dtype, place: torch.Tensor) -> torch.Tensor:
    """See the head of the file."""
    handed_over = _HANDED_OVER.find(place)
    if not handed_over.timed:
        handed_over.values[index] = value.clone()  # its memory may be written over before the loss is computed
    return value.new_zeros((), dtype=dtype)


@light_operator("from_batch_loss")
def from_batch_loss(d: torch.Tensor, value: torch.Tensor, index: int, place: torch.Tensor) -> torch.Tensor:
    """See the head of the file."""
    return _HANDED_OVER.find(place).gradient(index, value) * d.to(value.dtype)


@torch.library.register_fake("csc::to_batch_loss")
def _(value: Any, index: int, dtype: torch.dtype, place: Any) -> Any:
    return value.new_empty((), dtype=dtype)


@torch.library.register_fake("csc::from_batch_loss")
def _(d: Any, value: Any, index: int, place: Any) -> Any:
    return torch.empty_like(value)


TO_BATCH_LOSS = torch.ops.csc.to_batch_loss.default
