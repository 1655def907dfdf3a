"""Objects that operators need and no tensor holds, by numbers that stand for them in a graph.

Numbered(absent)        .number(what) -> int64 without dimensions        .find(number) -> what
"""

from __future__ import annotations

import itertools
import weakref
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Numbered(Generic[T]):
    """A table that keeps nothing alive. absent: what to say where a number has no object here."""

    def __init__(self, absent: str) -> None:
        self._absent, self._numbers = absent, itertools.count()
        self._known: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def number(self, what: T) -> torch.Tensor:
        """A number on the CPU that stands for it as long as it lives."""
        found = next(self._numbers)
        self._known[found] = what
        return torch.tensor(found)

    def find(self, number: torch.Tensor) -> T:
        """What the number stands for. RuntimeError if it is none of this table, or what it stood for is gone."""
        found = None if number.dim() else self._known.get(int(number))
        if found is None:
            raise RuntimeError(self._absent)
        return found
