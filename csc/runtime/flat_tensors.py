"""Nested tuples and dicts of tensors as flat lists, and back.

Terms: the *structure* of one is None for a tensor, a list for a tuple, a dict for a dict: what JSON can hold.

    tensors_of(nested) -> [tensor, ...]         TypeError for anything else in it
    structure_of(nested) -> structure           nested_as(structure, tensors) -> nested
    layouts_of(tensors) -> [layout, ...]        dtype, device, sizes, strides: as JSON holds them too
    empty_as(layouts) -> [tensor, ...]          with memory, without values
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

Layout = list[Any]
OF_IMAGES = (4, 5)  # dimensions of what torch knows channels_last of


def tensors_of(nested: Any) -> list[torch.Tensor]:
    """In order. TypeError for what is no tensor, tuple or dict."""
    found: list[torch.Tensor] = []
    _collect((nested,), found)
    return found


def _collect(several: tuple[Any, ...] | dict[str, Any], found: list[torch.Tensor]) -> None:
    """A call for each tuple and dict, not for each tensor: every call of a compiled function asks."""
    for one in several.values() if isinstance(several, dict) else several:
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, (tuple, dict)):
            _collect(one, found)
        else:
            raise TypeError(f"a {type(one).__name__} is no tensor, tuple or dict")


def structure_of(nested: Any) -> Any:
    if isinstance(nested, dict):
        return {name: structure_of(one) for name, one in nested.items()}
    return [structure_of(one) for one in nested] if isinstance(nested, tuple) else None


def layouts_of(tensors: Sequence[torch.Tensor]) -> list[Layout]:
    """Of each. The stride of a dimension with one place means nothing, and is given as 1; but of images, in which it
    tells whether channels come last.
    """
    return [[str(one.dtype).removeprefix("torch."), str(one.device), [*one.shape], [*_strides(one)]] for one in tensors]


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    if tensor.dim() in OF_IMAGES:
        return tensor.stride()
    return tuple([1 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)])


def empty_as(layouts: Sequence[Layout]) -> list[torch.Tensor]:
    """Tensors of these."""
    return [
        torch.empty_strided(sizes, strides, dtype=getattr(torch, dtype), device=device)
        for dtype, device, sizes, strides in layouts
    ]


def nested_as(structure: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if structure is None:
        return next(tensors)
    if isinstance(structure, dict):
        return {n: next(tensors) if one is None else nested_as(one, tensors) for n, one in structure.items()}
    return tuple([next(tensors) if one is None else nested_as(one, tensors) for one in structure])
