"""Containers as they were, and whether they still are: the same things in them, or plain ones that are equal.

copied(value) -> a copy of a container, else the value      same(value, before)      alike(one, other)
"""

from __future__ import annotations

from typing import Any

import torch

CONTAINERS = (list, dict, set, tuple)


def copied(value: Any) -> Any:
    """A shallow copy of a container; else the value itself."""
    return type(value)(value) if type(value) in CONTAINERS else value


def same(value: Any, before: Any) -> bool:
    """Whether a container has the things that it had: the same ones, or plain ones that are equal."""
    if len(value) != len(before):
        return False
    if isinstance(value, dict):
        return all(map(alike, value.values(), before.values()))
    return all(map(alike, value, before)) if not isinstance(value, set) else value == before


def alike(one: Any, other: Any) -> bool:
    """Whether two values are one, or plain ones that are equal."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # comparing is the user's code
        return False
