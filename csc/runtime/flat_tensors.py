"""Nested tuples and dicts of tensors as flat lists, and back.

Terms: the *structure* of one is None for a tensor, a list for a tuple, a dict for a dict: what JSON can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Layout = list[Any]
IMAGES = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}  # dimensions of what torch knows channels_last of, the closest first


def tensors_of(nested: Any) -> list[torch.Tensor]:
    """In order. TypeError for what is no tensor, tuple or dict."""
    tensors: list[torch.Tensor] = []
    _collect((nested,), tensors)
    return tensors


def _collect(several: tuple[Any, ...] | dict[str, Any], tensors: list[torch.Tensor]) -> None:
    """A call for each tuple and dict, not for each tensor: every call of a compiled function asks."""
    for item in several.values() if isinstance(several, dict) else several:
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        elif isinstance(item, (tuple, dict)):
            _collect(item, tensors)
        else:
            raise TypeError(f"a {type(item).__name__} is no tensor, tuple or dict")


def structure_of(nested: Any) -> Any:
    if isinstance(nested, dict):
        return {name: structure_of(item) for name, item in nested.items()}
    return [structure_of(item) for item in nested] if isinstance(nested, tuple) else None


def layouts_of(tensors: Sequence[torch.Tensor]) -> list[Layout]:
    """Of each. The stride of a dimension with one place means nothing, and is given as one that says nothing; but where
    it tells whether the channels of images come last.
    """
    return [
        [
            str(tensor.dtype).removeprefix("torch."),
            str(tensor.device),
            [*tensor.shape],
            _strides([*tensor.shape], [*tensor.stride()]),
        ]
        for tensor in tensors
    ]


def _strides(sizes: list[int], strides: list[int]) -> list[int]:
    """As kernels and compilers may give a dimension with one place any stride, so that which one is chance."""
    result = list(strides)
    for place in reversed(range(len(sizes))):
        if sizes[place] == 1:
            result[place] = sizes[place + 1] * result[place + 1] if place + 1 < len(sizes) else 1
    return result if _have_channels_last(sizes, result) == _have_channels_last(sizes, strides) else strides


def _have_channels_last(sizes: list[int], strides: list[int]) -> bool:
    """Whether torch takes a tensor for images whose channels come last (c10's `is_channels_last_strides`), and makes
    others of it in this format.
    """
    order = IMAGES.get(len(sizes))
    if order is None or strides[1] == 0:
        return False
    least = 0
    for place in order:
        if sizes[place] == 0 or strides[place] < least or (place == 0 and least == strides[1]):
            return False
        least = strides[place] * max(sizes[place], 1)
    return True


def empty_as(layouts: Sequence[Layout]) -> list[torch.Tensor]:
    """Tensors of these."""
    return [
        torch.empty_strided(sizes, strides, dtype=getattr(torch, dtype), device=device)
        for dtype, device, sizes, strides in layouts
    ]


def nesting(structure: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
    """From a list of tensors, for many calls: the structure is looked at once."""
    return _nesting(structure, 0)[0]


def _nesting(structure: Any, start: int) -> tuple[Callable[[Sequence[torch.Tensor]], Any], int]:
    """Of the tensors from `start` on; and where they end."""
    if structure is None:
        return lambda tensors: tensors[start], start + 1
    parts, stop = [], start
    members = list(structure.values() if isinstance(structure, dict) else structure)
    for member in members:
        part, stop = _nesting(member, stop)
        parts.append(part)
    flat = all(member is None for member in members)
    if isinstance(structure, dict):
        names = tuple(structure)
        if flat:
            return lambda tensors: dict(zip(names, tensors[start:stop])), stop
        return lambda tensors: {name: part(tensors) for name, part in zip(names, parts)}, stop
    if flat:
        return lambda tensors: tuple(tensors[start:stop]), stop
    return lambda tensors: tuple([part(tensors) for part in parts]), stop
