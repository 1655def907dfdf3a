"""Nested tuples and dicts of tensors as flat lists, and back.

Terms: the *structure* of one is None for a tensor, a list for a tuple, a dict for a dict: what JSON can hold.

    tensors_of(nested) -> [tensor, ...]         TypeError for anything else in it
    structure_of(nested) -> structure           nested_as(structure, tensors) -> nested
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def tensors_of(nested: Any) -> list[torch.Tensor]:
    """In order. TypeError for what is no tensor, tuple or dict."""
    found: list[torch.Tensor] = []
    _collect(nested, found)
    return found


def _collect(nested: Any, found: list[torch.Tensor]) -> None:
    if isinstance(nested, torch.Tensor):
        found.append(nested)
    elif isinstance(nested, (tuple, dict)):
        for one in nested.values() if isinstance(nested, dict) else nested:
            _collect(one, found)
    else:
        raise TypeError(f"a {type(nested).__name__} is no tensor, tuple or dict")


def structure_of(nested: Any) -> Any:
    if isinstance(nested, dict):
        return {name: structure_of(one) for name, one in nested.items()}
    return [structure_of(one) for one in nested] if isinstance(nested, tuple) else None


def nested_as(structure: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if structure is None:
        return next(tensors)
    if isinstance(structure, dict):
        return {name: nested_as(one, tensors) for name, one in structure.items()}
    return tuple([nested_as(one, tensors) for one in structure])
