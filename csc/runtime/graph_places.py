"""Tensors at lasting addresses, which recorded work reads and writes, and nested values as it is given them.

Terms: a *place* is a tensor that is filled from others of its layout. A *nested* value is a tensor, or a tuple, list or
dict of nested values, None among them.

    FixedPlaces(like)                    of these layouts    .fits(tensors)    .fill(tensors)
    tensors_in(nested) -> [tensor]              UnfitError for anything else in it
    fresh(nested) -> nested                     new lists, and new views of each tensor
    NestedCopy(nested).take() -> nested         copies of its tensors
    same_bits(one, other)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


class UnfitError(Exception):
    """Why something is not recorded, in a clause."""


class FixedPlaces:
    """like: what they are filled from first; its values are not read."""

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self.tensors = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in like]

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether they are laid out alike."""
        return len(tensors) == len(self.tensors) and all(map(_alike, tensors, self.tensors))

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy them here. ValueError if there are more, fewer, or others."""
        for place, tensor in zip(self.tensors, tensors, strict=True):
            if place.shape != tensor.shape or place.dtype != tensor.dtype:
                came, was = ([one.dtype, list(one.shape)] for one in (tensor, place))
                raise ValueError(f"{came} came where {was} was recorded")
            thin(place).copy_(thin(tensor))


class NestedCopy:
    """A nested value once more, for a function that may write over it."""

    def __init__(self, nested: Any) -> None:
        self._nested, self._places = nested, FixedPlaces(tensors_in(nested))

    def take(self) -> Any:
        """As the value is now."""
        self._places.fill(tensors_in(self._nested))
        return _rebuilt(self._nested, iter(self._places.tensors))


def _rebuilt(nested: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Each tensor in its turn, as a new view."""
    if isinstance(nested, torch.Tensor):
        return next(tensors).detach()
    if isinstance(nested, dict):
        return {name: _rebuilt(one, tensors) for name, one in nested.items()}
    if isinstance(nested, (tuple, list)):
        return type(nested)(_rebuilt(one, tensors) for one in nested)
    return nested


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The stride of a dimension with one place means nothing."""
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device and all(
        a == b or size == 1 for a, b, size in zip(one.stride(), other.stride(), one.shape)
    )  # fmt: skip


def thin(tensor: torch.Tensor) -> torch.Tensor:
    """Each entry of an expanded tensor once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def tensors_in(nested: Any) -> list[torch.Tensor]:
    """In order."""
    if isinstance(nested, torch.Tensor):
        return [nested]
    if nested is None:
        return []
    if isinstance(nested, (tuple, list, dict)):
        several = nested.values() if isinstance(nested, dict) else nested
        return [tensor for one in several for tensor in tensors_in(one)]
    raise UnfitError(f"it keeps a {type(nested).__name__}, which is no tensor")


def fresh(nested: Any) -> Any:
    """Whoever takes something out of a list leaves the other one as it was. Operators keep on a tensor what they have
    made of it (csc.kernels.packing); of a new view they make it again, within the recording.
    """
    return _fresh(nested, {})


def _fresh(nested: Any, views: dict[int, torch.Tensor]) -> Any:
    if isinstance(nested, torch.Tensor):
        return views.setdefault(id(nested), nested.detach())
    if isinstance(nested, dict):
        return {name: _fresh(one, views) for name, one in nested.items()}
    if isinstance(nested, (tuple, list)):
        return type(nested)(_fresh(one, views) for one in nested)
    return nested


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Also of what is no number."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*flat)
