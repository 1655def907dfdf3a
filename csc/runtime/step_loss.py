"""The loss that a training step returns: a tensor whose `backward()` says that it was done.

A step has run forward and backward, so its loss has no graph, and torch would say that it "does not require grad". A
loop that was written for eager PyTorch calls `loss.backward()`, or `(loss / steps).backward()`: both say what to do.

    StepLoss.of(loss) -> StepLoss      the same number; what is made of it is a plain tensor, but for its multiples

It has no graph, so `total += loss` keeps nothing alive. It prints, formats, copies and pickles as a plain tensor.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from csc.errors import InputError


class StepLoss(torch.Tensor):
    """See the module."""

    __torch_function__ = nn.Parameter.__torch_function__  # results are plain tensors, as those of a parameter are

    @classmethod
    def of(cls, loss: torch.Tensor) -> StepLoss:
        """loss: without dimensions and without a graph."""
        return loss.as_subclass(cls)

    @property
    def plain(self) -> torch.Tensor:
        """The same number, as any tensor."""
        return self.as_subclass(torch.Tensor)

    def backward(self, *args: Any, **options: Any) -> NoReturn:
        """Says that it was done."""
        raise InputError(
            "train_step has run forward and backward, and gradients are in .grad", "loss.backward()",
            "Leave this line out: optimizer.step() comes next, then optimizer.zero_grad(). To add up the gradients of "
            "several batches, call train_step for each of them and optimizer.step() after the last",
        )  # fmt: skip

    def __mul__(self, other: Any) -> torch.Tensor:
        return _multiple(super().__mul__(other))

    def __rmul__(self, other: Any) -> torch.Tensor:
        return _multiple(super().__rmul__(other))

    def __truediv__(self, other: Any) -> torch.Tensor:
        return _multiple(super().__truediv__(other))

    def mean(self, *args: Any, **options: Any) -> torch.Tensor:
        """Of replicas, in loops written for DataParallel."""
        return _multiple(super().mean(*args, **options))

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return repr(self.plain)

    def __format__(self, spec: str) -> str:
        return self.plain.__format__(spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.plain.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)


def _multiple(found: torch.Tensor) -> torch.Tensor:
    """A loss that was scaled is one, unless it is trained by a factor that has a graph."""
    is_loss = isinstance(found, torch.Tensor) and not found.dim() and not found.requires_grad
    return StepLoss.of(found) if is_loss else found
